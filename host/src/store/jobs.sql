-- The newest jobs of a queue, a handler, a state: live and finished ones, each from the end of its ids on (the
-- primary key of rouse.job, and finished_id of each partition), and no more of each than are asked for.
-- Of a job that waits for another attempt or is at one, `attempts_max` says how many there may be where an attempt has told.
SELECT to_jsonb(j) || CASE WHEN j.finished_at IS NULL AND j.attempt > 0 THEN jsonb_build_object('attempts_max', coalesce(
           to_jsonb(j.max_attempts),
           (SELECT a.error->'max_attempts' FROM rouse.attempt AS a WHERE a.job = j.id AND a.error ? 'max_attempts'
            ORDER BY a.attempt DESC LIMIT 1))) ELSE '{}' END
FROM (
    (SELECT j.id, j.state, l.handler, l.queue, l.priority, l.tags, j.tenant, j.source, j.attempt, j.lost, j.max_attempts,
            j.requested_at, j.available_at, j.claimed_at, NULL::timestamptz AS finished_at
     FROM rouse.job AS j
     CROSS JOIN LATERAL (SELECT * FROM rouse.lane AS l WHERE l.id = j.lane LIMIT 1) AS l
     WHERE ($1 IS NULL OR l.queue = $1) AND ($2 IS NULL OR l.handler = $2) AND ($3 IS NULL OR j.state = $3::rouse.state)
     ORDER BY j.id DESC LIMIT $4)
    UNION ALL
    (SELECT f.id, f.state, l.handler, l.queue, l.priority, l.tags, f.tenant, f.source, f.attempt, f.lost, f.max_attempts,
            f.requested_at, f.available_at, f.claimed_at, f.finished_at
     FROM rouse.finished AS f
     CROSS JOIN LATERAL (SELECT * FROM rouse.lane AS l WHERE l.id = f.lane LIMIT 1) AS l
     WHERE ($1 IS NULL OR l.queue = $1) AND ($2 IS NULL OR l.handler = $2) AND ($3 IS NULL OR f.state = $3::rouse.state)
     ORDER BY f.id DESC LIMIT $4)) AS j
ORDER BY j.id DESC LIMIT $4
