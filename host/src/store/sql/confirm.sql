-- The state of an attempt whose settlement got no response; see rouse.confirm (migrations/functions/effects.sql).
SELECT rouse.confirm($1, $2, $3, $4, $5)
