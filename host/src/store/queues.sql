-- Every queue with its depth; see the view rouse.queues (migrations/functions/views.sql), which counts
-- no more than 10,000 jobs of each lane.
SELECT to_jsonb(q) - 'oldest_wait' || jsonb_build_object('oldest_wait_s', round(extract(epoch FROM q.oldest_wait), 3))
FROM rouse.queues AS q ORDER BY q.name
