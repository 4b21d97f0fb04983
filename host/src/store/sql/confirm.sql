-- The state of an attempt whose settlement was not answered; see rouse.confirm (migrations/functions/effects.sql).
SELECT rouse.confirm($1, $2, $3, $4, $5)
