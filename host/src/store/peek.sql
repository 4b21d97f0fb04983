-- Whether there is anything to do; see rouse.peek (migrations/functions/look.sql).
SELECT ready, catalog_changed, orphans, due, next_due_ms, looked_at, turn, writers, releases, deadlines, paused FROM rouse.peek($1, $2, $3, $4, $5, $6, $7)
