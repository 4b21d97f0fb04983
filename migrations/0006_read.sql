-- What people read: the views rouse.jobs and rouse.queues, and one job by its id.

-- Every job that is kept, live or finished. `error` is the last failed attempt's.
CREATE VIEW rouse.jobs AS
SELECT j.id, l.handler, l.queue, l.priority, l.tags, j.state, j.tenant, j.source, substr(j.unique_key, strpos(j.unique_key, '/') + 1) AS unique_key,
       j.attempt, j.lost, j.max_attempts, j.retried_from, j.worker,
       j.requested_at, j.available_at, j.claimed_at, NULL::timestamptz AS started_at, NULL::timestamptz AS finished_at,
       j.payload, NULL::jsonb AS result,
       (SELECT a.error FROM rouse.attempt AS a WHERE a.job = j.id ORDER BY a.attempt DESC LIMIT 1) AS error
FROM rouse.job AS j
CROSS JOIN LATERAL (SELECT * FROM rouse.lane AS l WHERE l.id = j.lane LIMIT 1) AS l
UNION ALL
SELECT f.id, l.handler, l.queue, l.priority, l.tags, f.state, f.tenant, f.source, substr(f.unique_key, strpos(f.unique_key, '/') + 1),
       f.attempt, f.lost, f.max_attempts, f.retried_from, f.worker,
       f.requested_at, f.available_at, f.claimed_at, f.started_at, f.finished_at,
       f.payload, f.result, f.error
FROM rouse.finished AS f
CROSS JOIN LATERAL (SELECT * FROM rouse.lane AS l WHERE l.id = f.lane LIMIT 1) AS l;

-- Every queue that has settings or has ever been used.
CREATE VIEW rouse.queues AS
SELECT coalesce(q.name, l.queue) AS name, coalesce(q.payload_bytes_max, 262144) AS payload_bytes_max, q.created_at
FROM rouse.queue AS q
FULL JOIN (SELECT DISTINCT l.queue FROM rouse.lane AS l) AS l ON l.queue = q.name;

-- One job; no row where there is none (any more).
CREATE FUNCTION rouse.job(id bigint) RETURNS SETOF rouse.jobs
LANGUAGE sql STABLE SECURITY DEFINER ROWS 1 SET search_path = pg_catalog, pg_temp AS $$
    SELECT * FROM rouse.jobs AS j WHERE j.id = job.id
$$;

-- The result of a job that has succeeded; null as long as it has not.
CREATE FUNCTION rouse.result(id bigint) RETURNS jsonb
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT f.result FROM rouse.finished AS f WHERE f.id = result.id
$$;

-- What has happened to one job, oldest first. Nothing of it is rewritten once it has ended.
CREATE FUNCTION rouse.history(id bigint)
RETURNS TABLE (at timestamptz, event text, attempt integer, worker text, detail jsonb)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT e.at, e.event, e.attempt, w.worker_id, e.detail
    FROM (
        SELECT 0 AS place, j.requested_at AS at, 'requested' AS event, NULL::integer AS attempt, NULL::bigint AS worker,
               jsonb_strip_nulls(jsonb_build_object('handler', j.handler, 'queue', j.queue, 'tenant', j.tenant, 'source', j.source)) AS detail
        FROM rouse.jobs AS j WHERE j.id = history.id
        UNION ALL
        SELECT 2 * a.attempt, coalesce(a.started_at, a.claimed_at), CASE WHEN a.lost THEN 'claimed' ELSE 'started' END, a.attempt, a.worker, NULL
        FROM rouse.attempt AS a WHERE a.job = history.id
        UNION ALL
        SELECT 2 * a.attempt + 1, a.ended_at, CASE WHEN a.lost THEN 'lost' ELSE 'failed' END, a.attempt, a.worker, a.error
        FROM rouse.attempt AS a WHERE a.job = history.id
        UNION ALL
        SELECT 2 * j.attempt, j.claimed_at, 'claimed', j.attempt, j.worker, NULL
        FROM rouse.job AS j WHERE j.id = history.id AND j.state = 'running'
        UNION ALL
        SELECT 2 * f.attempt, coalesce(f.started_at, f.claimed_at), CASE WHEN f.started_at IS NULL THEN 'claimed' ELSE 'started' END,
               f.attempt, f.worker, NULL
        FROM rouse.finished AS f WHERE f.id = history.id AND f.claimed_at IS NOT NULL
        UNION ALL
        SELECT 2 * f.attempt + 1, f.finished_at, f.state::text, nullif(f.attempt, 0), f.worker, f.error
        FROM rouse.finished AS f WHERE f.id = history.id
    ) AS e
    LEFT JOIN rouse.worker AS w ON w.incarnation = e.worker
    ORDER BY e.place, e.at
$$;

REVOKE ALL ON FUNCTION rouse.job, rouse.result, rouse.history FROM PUBLIC;
GRANT EXECUTE ON FUNCTION rouse.job, rouse.result, rouse.history TO rouse_producer, rouse_worker, rouse_observer;
GRANT SELECT ON rouse.jobs, rouse.queues TO rouse_observer;
