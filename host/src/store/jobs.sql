-- The listing of these jobs ($1), newest first: live and finished ones, each looked up in the primary key of rouse.job
-- and in finished_id of each partition. `error` has the beginning of the message; `wait` is what a suspended job waits
-- for. For a job that is running or waits for a retry, `attempts_max` is the maximum number of attempts, if an earlier
-- attempt has recorded it. `retried_as` is the newest retry of a job that did not succeed.
SELECT to_jsonb(j) || CASE WHEN j.finished_at IS NULL AND j.attempt > 0
       THEN jsonb_build_object('attempts_max', coalesce(
           to_jsonb(j.max_attempts),
           (SELECT a.error->'max_attempts' FROM rouse.attempt AS a WHERE a.job = j.id AND a.error ? 'max_attempts'
            ORDER BY a.attempt DESC LIMIT 1))) ELSE '{}' END
    || CASE WHEN j.finished_at IS NOT NULL AND j.state <> 'succeeded'
       THEN jsonb_build_object('retried_as', (
           SELECT r.detail -> 'as' FROM rouse.record AS r WHERE r.job = j.id AND r.event = 'retried' AND r.at >= j.finished_at - interval '1 minute' ORDER BY r.at DESC LIMIT 1)) ELSE '{}' END
FROM (
    SELECT w.id, w.state, l.handler, l.queue, l.priority, l.tags, w.tenant, w.source, w.attempt, w.uncounted, w.max_attempts,
           w.requested_at, w.available_at, w.claimed_at, w.finished_at, w.wait,
           CASE WHEN w.error IS NOT NULL THEN jsonb_build_object('kind', w.error -> 'kind', 'message', left(w.error ->> 'message', 500)) END AS error,
           CASE WHEN w.lease_until < clock_timestamp() THEN w.lease_until END AS orphaned_at
    FROM unnest($1) AS requested(id)
    CROSS JOIN LATERAL (
        SELECT j.id, j.lane, j.state, j.tenant, j.source, j.attempt, j.uncounted, j.max_attempts,
               j.requested_at, j.available_at, j.claimed_at, NULL::timestamptz AS finished_at, j.lease_until, NULL::jsonb AS error,
               CASE WHEN j.turn IS NULL AND j.state = 'queued' THEN j.wait END AS wait
        FROM rouse.job AS j WHERE j.id = requested.id
        UNION ALL
        SELECT f.id, f.lane, f.state, f.tenant, f.source, f.attempt, f.uncounted, f.max_attempts,
               f.requested_at, f.available_at, f.claimed_at, f.finished_at, NULL, f.error, NULL
        FROM rouse.finished AS f WHERE f.id = requested.id) AS w
    CROSS JOIN LATERAL (SELECT * FROM rouse.lane AS l WHERE l.id = w.lane LIMIT 1) AS l) AS j
ORDER BY j.id DESC
