-- Every incarnation of all workers that is not forgotten, with the age of its last heartbeat by the database's clock. A
-- scan of rouse.worker.
SELECT to_jsonb(w) || jsonb_build_object('seen_s', round(extract(epoch FROM now() - w.seen_at), 3))
FROM rouse.workers AS w
ORDER BY w.worker_id, w.incarnation DESC
