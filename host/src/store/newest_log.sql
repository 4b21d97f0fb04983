-- The newest log lines of a job's attempts ($2 at most), in order. Served by log_job.
SELECT l.attempt, l.line, to_char(l.at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'), l.level, l.text
FROM (SELECT * FROM rouse.log AS l WHERE l.job = $1 ORDER BY l.attempt DESC, l.line DESC LIMIT $2) AS l
ORDER BY l.attempt, l.line
