-- The newest jobs below an id ($5; null: all) of a queue, a handler, a state: live and finished ones, from the end of their ids on. No more than
-- $6 jobs are looked at: filters that match little would read all that is kept. Merged from the primary key of rouse.job and finished_id of each
-- partition, as far as it takes. Of a job that waits for another attempt or is at one, `attempts_max` says how many there may be where an
-- attempt has recorded it.
SELECT to_jsonb(j) || CASE WHEN j.finished_at IS NULL AND j.attempt > 0 THEN jsonb_build_object('attempts_max', coalesce(
           to_jsonb(j.max_attempts),
           (SELECT a.error->'max_attempts' FROM rouse.attempt AS a WHERE a.job = j.id AND a.error ? 'max_attempts'
            ORDER BY a.attempt DESC LIMIT 1))) ELSE '{}' END
FROM (
    SELECT w.id, w.state, l.handler, l.queue, l.priority, l.tags, w.tenant, w.source, w.attempt, w.lost, w.max_attempts,
           w.requested_at, w.available_at, w.claimed_at, w.finished_at,
           CASE WHEN w.lease_until < clock_timestamp() THEN w.lease_until END AS orphaned_at
    FROM (
        SELECT * FROM (
            SELECT j.id, j.lane, j.state, j.tenant, j.source, j.attempt, j.lost, j.max_attempts,
                   j.requested_at, j.available_at, j.claimed_at, NULL::timestamptz AS finished_at, j.lease_until
            FROM rouse.job AS j
            UNION ALL
            SELECT f.id, f.lane, f.state, f.tenant, f.source, f.attempt, f.lost, f.max_attempts,
                   f.requested_at, f.available_at, f.claimed_at, f.finished_at, NULL
            FROM rouse.finished AS f) AS kept
        WHERE kept.id < coalesce($5, 9223372036854775807)
        ORDER BY kept.id DESC LIMIT $6) AS w
    CROSS JOIN LATERAL (SELECT * FROM rouse.lane AS l WHERE l.id = w.lane LIMIT 1) AS l
    WHERE ($1 IS NULL OR l.queue = $1) AND ($2 IS NULL OR l.handler = $2) AND ($3 IS NULL OR w.state = $3::rouse.state)
    ORDER BY w.id DESC LIMIT $4) AS j
ORDER BY j.id DESC
