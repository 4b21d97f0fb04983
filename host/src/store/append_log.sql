-- Keeps what attempts have said, and returns how many lines were taken; see rouse.append_log (migrations/functions/steps.sql).
SELECT rouse.append_log($1, $2, $3)
