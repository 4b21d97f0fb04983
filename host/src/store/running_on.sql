-- The running attempts of worker $1, longest first, at most $2: rows as in top.sql; and how many running jobs were
-- examined for that. There is no index by worker, because it would cost a write with each claim. So the running jobs of
-- all workers are examined in the order in which their leases end, at most $3 of them. One read, without locks. Served
-- by job_lease, and the found jobs by the primary key.
WITH examined AS MATERIALIZED (
    SELECT j.id, j.worker, j.claimed_at FROM rouse.job AS j WHERE j.state = 'running' ORDER BY j.lease_until LIMIT $3)
SELECT (SELECT count(*) FROM examined),
       ARRAY(
           SELECT to_jsonb(t) || jsonb_build_object(
               'running_s', round(extract(epoch FROM clock_timestamp() - t.claimed_at)::numeric, 1))
           FROM rouse.top AS t
           WHERE t.id = ANY (ARRAY(
               SELECT e.id FROM examined AS e JOIN rouse.worker AS w ON w.incarnation = e.worker
               WHERE w.worker_id = $1 ORDER BY e.claimed_at, e.id LIMIT $2))
           ORDER BY t.claimed_at, t.id)
