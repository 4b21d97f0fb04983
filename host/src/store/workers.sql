-- The newest incarnation of each worker, unless it has unregistered and has no timeout flag, with the age of its last
-- heartbeat by the database's clock. A scan of few rows.
SELECT to_jsonb(w) || jsonb_build_object('seen_s', round(extract(epoch FROM now() - w.seen_at), 3))
FROM (SELECT DISTINCT ON (n.worker_id) n.* FROM rouse.workers AS n ORDER BY n.worker_id, n.incarnation DESC) AS w
WHERE w.state <> 'unregistered' OR w.timed_out_since IS NOT NULL
ORDER BY w.worker_id
