-- Takes over jobs whose lease has run out; see rouse.adopt (migrations/0007_looking.sql).
SELECT id, lane, turn, attempt, lost, max_attempts, tenant, source, requested_at, claimed_at, payload
FROM rouse.adopt($1, $2, $3, $4, $5, $6, $7)
