-- Reads the jobs of a claim; see rouse.claimed (migrations/functions/claim.sql).
SELECT id, lane, turn, attempt, uncounted, max_attempts, tenant, source, requested_at, available_at, claimed_at, payload, memory_bytes, grants,
    lease_ms, timeout_ms, trace
FROM rouse.claimed($1, $2, $3, $4, $5)
