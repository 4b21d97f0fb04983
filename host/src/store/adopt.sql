-- Takes over jobs whose lease has run out; see rouse.adopt (migrations/functions/adopt.sql).
SELECT id, lane, turn, attempt, lost, max_attempts, tenant, source, requested_at, claimed_at, payload, memory_bytes, grants,
       became::text, lost_after_ms
FROM rouse.adopt($1, $2, $3, $4, $5, $6, $7, $8, $9)
