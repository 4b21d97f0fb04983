-- The events of one job, oldest first; see rouse.history (migrations/functions/views.sql). The `requested` event
-- includes the size of the payload.
SELECT jsonb_strip_nulls(jsonb_build_object(
    'at', h.at, 'event', h.event, 'job', $1::bigint, 'queue', j.queue, 'handler', coalesce(h.detail ->> 'handler', j.handler),
    'attempt', h.attempt, 'worker', h.worker, 'by', h.detail ->> 'by',
    'detail', nullif(h.detail - 'by' || CASE WHEN h.event = 'requested'
        THEN jsonb_build_object('payload_bytes', octet_length(j.payload::text)) ELSE '{}' END, '{}')))
FROM rouse.job($1) AS j, rouse.history($1) WITH ORDINALITY AS h
ORDER BY h.ordinality
