-- At most $2 of the running attempts of worker $1, longest first; and the number of running jobs that were examined for
-- that. There is no index by worker, because it would cost a write with each claim. So the running jobs of all workers
-- are examined in the order in which their leases end, at most $3 of them. One read, without locks, of columns that
-- observers may read; the fence is not one of them. Served by job_lease; the rest is looked up by primary keys.
--
-- The limit is hidden from the planner. Without statistics, it expects fewer running jobs than that, and would read all
-- of them to sort them. Each job is read once: to look a running job up by its id, Postgres might read all of
-- job_lease.
WITH examined AS MATERIALIZED (
    SELECT j.id, j.lane, j.tenant, j.attempt, j.worker, j.claimed_at FROM rouse.job AS j
    WHERE j.state = 'running' ORDER BY j.lease_until LIMIT (SELECT $3)),
mine AS MATERIALIZED (
    SELECT e.* FROM examined AS e
    WHERE e.worker = ANY (ARRAY(
        SELECT d.worker FROM (SELECT DISTINCT e.worker FROM examined AS e) AS d
        WHERE (SELECT w.worker_id FROM rouse.worker AS w WHERE w.incarnation = d.worker) = $1))
    ORDER BY e.claimed_at, e.id LIMIT $2)
SELECT (SELECT count(*) FROM examined),
       ARRAY(
           SELECT jsonb_build_object(
               'id', m.id, 'handler', l.handler, 'queue', l.queue, 'tenant', m.tenant, 'attempt', m.attempt, 'claimed_at', m.claimed_at,
               'running_s', round(extract(epoch FROM clock_timestamp() - m.claimed_at)::numeric, 1))
           FROM mine AS m
           CROSS JOIN LATERAL (SELECT l.handler, l.queue FROM rouse.lane AS l WHERE l.id = m.lane LIMIT 1) AS l
           ORDER BY m.claimed_at, m.id)
