-- Admin actions in the $1 milliseconds before $2 (null: now), newest first: by the login or the user of the dashboard
-- $3, or by all (null); on queue $5, without those on its jobs, or on all (null). $7: the id of the last action of the
-- page before, whose time is $2. For a purge and for an action on a flow, only the record of the whole action, as in
-- rouse.audit_outbox. Returns up to $4 of the $6 newest actions, each with the time and the id of the last action that
-- was examined, if $6 were examined. Without actions, one row with nulls.
--
-- Served by record_of_people; the jobs of the rows by their ids. Only that index serves comparisons of rows: the plan
-- cannot read all records of the period through record_at, and sort them.
WITH examined AS MATERIALIZED (
    SELECT r.* FROM rouse.record AS r
    WHERE (r.at, r.id) < (coalesce($2::text::timestamptz, now()), coalesce($7::bigint, 0))
      AND (r.at, r.id) > (coalesce($2::text::timestamptz, now()) - $1 * interval '1 millisecond', 0)
      AND r.who IS NOT NULL AND (r.job IS NULL OR r.event <> 'purged' AND NOT coalesce(r.detail ? 'flow', false))
    ORDER BY r.at DESC, r.id DESC LIMIT $6)
SELECT shown.action, (
    SELECT jsonb_build_object('at', e.at, 'id', e.id) FROM examined AS e ORDER BY e.at DESC, e.id DESC OFFSET $6 - 1 LIMIT 1)
FROM (SELECT) AS one
LEFT JOIN (
    SELECT r.at, r.id, jsonb_strip_nulls(jsonb_build_object(
        'at', r.at, 'id', r.id, 'event', r.event, 'job', r.job, 'queue', coalesce(r.queue, l.queue), 'handler', l.handler,
        'by', rouse._by(r.who, r.reader), 'detail', r.detail)) AS action
    FROM (SELECT * FROM examined AS e
          WHERE ($3::text IS NULL OR $3 IN (e.who, e.reader)) AND ($5::text IS NULL OR e.queue = $5)
          ORDER BY e.at DESC, e.id DESC LIMIT $4) AS r
    LEFT JOIN LATERAL (
        SELECT j.lane FROM rouse.job AS j WHERE j.id = r.job
        UNION ALL
        SELECT f.lane FROM rouse.finished AS f WHERE f.id = r.job LIMIT 1) AS j ON true
    LEFT JOIN LATERAL (SELECT l.queue, l.handler FROM rouse.lane AS l WHERE l.id = j.lane LIMIT 1) AS l ON true) AS shown ON true
ORDER BY shown.at DESC, shown.id DESC
