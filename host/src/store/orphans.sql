-- Jobs whose lease has ended; see rouse.orphans (migrations/functions/adopt.sql).
SELECT id, fence, lane, attempt, uncounted, crashes, lost_after_ms, source
FROM rouse.orphans($1, $2, $3, $4, $5, $6, $7, $8)
