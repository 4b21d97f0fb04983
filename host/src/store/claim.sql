-- Claims jobs. rouse.claim (migrations/functions/claim.sql) documents what it does, why two hosts never get the same
-- job, and which index serves it.
SELECT id, lane, turn, attempt, uncounted, max_attempts, tenant, source, requested_at, available_at, claimed_at, payload, memory_bytes, grants,
    lease_ms, timeout_ms, trace, unread, closed_by
FROM rouse.claim($1, $2, $3, $4, $5, $6, $7)
