-- The events since a time, newest first; see rouse.audit (migrations/functions/history.sql).
SELECT jsonb_strip_nulls(jsonb_build_object(
    'at', a.at, 'key', a.key, 'event', a.event, 'job', a.job, 'queue', a.queue_name, 'handler', a.handler_name,
    'attempt', a.attempt, 'worker', a.worker, 'by', a.by, 'detail', a.detail))
FROM rouse.audit(coalesce($2::text::timestamptz, clock_timestamp()) - $1 * interval '1 millisecond',
                 $2::text::timestamptz, $3, $4, $5, $6, $7) AS a
