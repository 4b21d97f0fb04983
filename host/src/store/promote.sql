-- Promotes due jobs, and returns the time until the next one is due; see rouse.promote (migrations/functions/look.sql).
SELECT promoted, next_due_ms, ids, left_at FROM rouse.promote($1, $2, $3, $4, $5)
