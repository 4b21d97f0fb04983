-- What was done from outside and nobody has told; see rouse.tell (migrations/functions/admin.sql).
SELECT to_char(at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'), event, job, handler, queue, attempt, who, detail::text
FROM rouse.tell($1, $2, $3)
