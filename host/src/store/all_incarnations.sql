-- All incarnations of all workers, except forgotten ones, with the age of the last heartbeat of each by the database's
-- clock. A scan of rouse.worker.
SELECT to_jsonb(w) || jsonb_build_object('seen_s', round(extract(epoch FROM now() - w.seen_at), 3))
FROM rouse.workers AS w
ORDER BY w.worker_id, w.incarnation DESC
