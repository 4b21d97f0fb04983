-- Stores log lines of attempts, and returns how many are stored; see rouse.append_log (migrations/functions/steps.sql).
SELECT rouse.append_log($1, $2, $3, $4)
