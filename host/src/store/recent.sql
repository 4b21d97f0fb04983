-- The waits, durations and CPU times of the newest ended jobs: of all handlers, or of one ($1). Of the $2 newest jobs
-- by id, those of the handler are used. Waits count from when a job was due. Served by finished_id.
WITH newest AS MATERIALIZED (
    SELECT f.state, f.lane, f.cpu_us, extract(epoch FROM f.claimed_at - f.available_at)::float8 AS wait_s,
           extract(epoch FROM f.finished_at - f.started_at)::float8 AS run_s
    FROM rouse.finished AS f ORDER BY f.id DESC LIMIT $2)
SELECT jsonb_build_object(
    'jobs', count(*), 'failed', count(*) FILTER (WHERE n.state IN ('failed', 'timed_out')),
    'wait_p50', percentile_disc(0.5) WITHIN GROUP (ORDER BY n.wait_s), 'wait_p95', percentile_disc(0.95) WITHIN GROUP (ORDER BY n.wait_s),
    'run_p50', percentile_disc(0.5) WITHIN GROUP (ORDER BY n.run_s), 'run_p95', percentile_disc(0.95) WITHIN GROUP (ORDER BY n.run_s),
    'cpu_p50', percentile_disc(0.5) WITHIN GROUP (ORDER BY n.cpu_us) / 1e6, 'cpu_p95', percentile_disc(0.95) WITHIN GROUP (ORDER BY n.cpu_us) / 1e6)
FROM newest AS n
WHERE $1::text IS NULL OR n.lane IN (SELECT l.id FROM rouse.lane AS l WHERE l.handler = $1)
