-- Admin actions that no host has logged yet; see rouse.take_audit_outbox (migrations/functions/admin.sql).
SELECT to_char(at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'), event, job, handler, queue, attempt, who, detail::text
FROM rouse.take_audit_outbox($1, $2, $3)
