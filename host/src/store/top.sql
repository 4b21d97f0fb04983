-- The running attempts of all workers, longest first; see rouse.top (migrations/functions/views.sql). One read, without
-- locks. Served by job_lease.
SELECT to_jsonb(t) || jsonb_build_object('running_s', round(extract(epoch FROM clock_timestamp() - t.claimed_at)::numeric, 1))
FROM rouse.top AS t
ORDER BY t.claimed_at, t.id
LIMIT $1
