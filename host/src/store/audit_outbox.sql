-- Admin actions that this worker has to log; $3 are the ids of those that it has logged. See rouse.take_audit_outbox
-- (migrations/functions/admin.sql).
SELECT id, to_char(at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'), event, job, handler, queue, attempt, who,
       detail::text
FROM rouse.take_audit_outbox($1, $2, $3, $4)
