-- The due schedules and the unfinished backfills; see rouse.due_schedules (migrations/functions/fire.sql).
SELECT now_us, wait_ms, due, backfills FROM rouse.due_schedules($1, $2, $3, $4, $5, $6, $7)
