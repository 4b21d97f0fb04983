-- The log lines of a job's attempts; see rouse.job_log (migrations/functions/views.sql).
SELECT attempt, line, to_char(at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'), level, text
FROM rouse.job_log($1, $2, $3)
