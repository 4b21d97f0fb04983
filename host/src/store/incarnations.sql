-- The newest $2 incarnations of a worker ($1) that are not forgotten, with the age of the last heartbeat of each by the
-- database's clock; and the number of all of them. A host that is restarted in a loop may have tens of thousands. Scans
-- of rouse.worker.
SELECT to_jsonb(w) || jsonb_build_object('seen_s', round(extract(epoch FROM now() - w.seen_at), 3)),
       (SELECT count(*) FROM rouse.workers AS o WHERE o.worker_id = $1)
FROM (SELECT * FROM rouse.workers AS n WHERE n.worker_id = $1 ORDER BY n.incarnation DESC LIMIT $2) AS w
ORDER BY w.incarnation DESC
