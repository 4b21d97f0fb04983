-- Takes over orphans; see rouse.adopt (migrations/functions/adopt.sql).
SELECT id FROM rouse.adopt($1, $2, $3, $4) AS adopted(id)
