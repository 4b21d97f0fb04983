-- The backlog of one handler ($1) or of all (null), and the workers that could take it; see the view rouse.backlog
-- (migrations/functions/views.sql), which counts no more than 10,000 jobs of each lane.
SELECT to_jsonb(b) - 'oldest_wait' || jsonb_build_object('oldest_wait_s', round(extract(epoch FROM b.oldest_wait), 3))
FROM rouse.backlog AS b
WHERE $1::text IS NULL OR b.handler = $1
ORDER BY b.queue, b.handler, b.tags
