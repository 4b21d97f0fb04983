-- The age of the oldest ready job of each key of the fair queues (rouse.fair_keys, migrations/functions/views.sql).
SELECT k.queue, q.fair_key, k.key, greatest(extract(epoch FROM clock_timestamp() - k.oldest_ready_at), 0)::float8
FROM rouse.fair_keys() AS k JOIN rouse.queue AS q ON q.name = k.queue
WHERE k.oldest_ready_at IS NOT NULL ORDER BY k.oldest_ready_at
