-- Admin actions in the $1 milliseconds before $2 (null: now), newest first: by the login or reader $3, or by all
-- (null); on queue $5, or on all (null), without those on its jobs. For a purge and for an action on a flow, only the
-- record of the whole action, as in rouse.audit_outbox. Returns $4 rows, and those with the same time as the last one.
-- Served by record_of_people; the jobs of the rows by their ids.
SELECT jsonb_strip_nulls(jsonb_build_object(
    'at', r.at, 'event', r.event, 'job', r.job, 'queue', coalesce(r.queue, l.queue), 'handler', l.handler,
    'by', rouse._by(r.who, r.reader), 'detail', r.detail))
FROM (SELECT * FROM rouse.record AS r
      WHERE r.at < coalesce($2::text::timestamptz, clock_timestamp())
        AND r.at >= coalesce($2::text::timestamptz, clock_timestamp()) - $1 * interval '1 millisecond'
        AND r.who IS NOT NULL AND (r.job IS NULL OR r.event <> 'purged' AND NOT coalesce(r.detail ? 'flow', false))
        AND ($3::text IS NULL OR $3 IN (r.who, r.reader)) AND ($5::text IS NULL OR r.queue = $5)
      ORDER BY r.at DESC FETCH FIRST ($4) ROWS WITH TIES) AS r
LEFT JOIN LATERAL (
    SELECT j.lane FROM rouse.job AS j WHERE j.id = r.job
    UNION ALL
    SELECT f.lane FROM rouse.finished AS f WHERE f.id = r.job LIMIT 1) AS j ON true
LEFT JOIN LATERAL (SELECT l.queue, l.handler FROM rouse.lane AS l WHERE l.id = j.lane LIMIT 1) AS l ON true
ORDER BY r.at DESC, r.job DESC
