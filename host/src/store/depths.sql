-- The depth of each queue and handler that has jobs; see rouse.depth (migrations/functions/views.sql).
SELECT d.queue, d.handler, sum(d.ready)::int8, sum(d.scheduled)::int8, sum(d.running)::int8,
       extract(epoch FROM clock_timestamp() - min(d.oldest_ready_at))::float8
FROM rouse.depth() AS d
WHERE d.ready + d.scheduled + d.running > 0
GROUP BY d.queue, d.handler
