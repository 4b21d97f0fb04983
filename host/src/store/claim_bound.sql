-- Claims jobs by their source; see rouse.claim_bound (migrations/functions/claim.sql).
SELECT id, lane, turn, attempt, lost, max_attempts, tenant, source, requested_at, claimed_at, payload, memory_bytes, grants
FROM rouse.claim_bound($1, $2, $3, $4, $5, $6, $7)
