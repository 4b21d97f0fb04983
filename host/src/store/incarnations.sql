-- Every incarnation of one worker ($1), or of all (null), that is not forgotten, with the age of its last heartbeat by
-- the database's clock. A scan of few rows.
SELECT to_jsonb(w) || jsonb_build_object('seen_s', round(extract(epoch FROM now() - w.seen_at), 3))
FROM rouse.workers AS w
WHERE $1::text IS NULL OR w.worker_id = $1
ORDER BY w.worker_id, w.incarnation DESC
