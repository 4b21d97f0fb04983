-- Ends jobs whose deadline has passed; see rouse.enforce_deadlines (migrations/functions/deadlines.sql).
SELECT handled, next_ms, looked_at, ended FROM rouse.enforce_deadlines($1, $2, $3, $4)
