-- The running attempts, of all workers or of one, longest first; see rouse.top (migrations/functions/views.sql). One
-- read, without locks. Served by job_lease.
SELECT to_jsonb(t) || jsonb_build_object('running_s', round(extract(epoch FROM clock_timestamp() - t.claimed_at)::numeric, 1))
FROM rouse.top AS t
WHERE $2::text IS NULL OR t.worker_id = $2
ORDER BY t.claimed_at, t.id
LIMIT $1
