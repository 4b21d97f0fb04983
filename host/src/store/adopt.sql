-- Takes over jobs whose lease has ended; see rouse.adopt (migrations/functions/adopt.sql).
SELECT id, lane, attempt, lost, became::text, lost_after_ms
FROM rouse.adopt($1, $2, $3, $4, $5, $6, $7, $8, $9)
