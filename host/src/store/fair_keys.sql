-- The keys of fair queues, by queue; see rouse.fair_keys (migrations/functions/views.sql), which counts no more than
-- 10,000 jobs of each lane, and about a million in all. Includes the counts of live workers.
WITH by_key AS (
    SELECT f.value ->> 'queue' AS queue, k.value ->> 'key' AS key, sum((k.value ->> 'selected')::bigint) AS selected,
           sum((k.value ->> 'deferred')::bigint) AS deferred, sum((k.value ->> 'promotions')::bigint) AS promotions,
           sum((k.value ->> 'deficit')::double precision) AS deficit
    FROM rouse.workers AS w CROSS JOIN LATERAL jsonb_array_elements(w.stats -> 'fair') AS f
    CROSS JOIN LATERAL jsonb_array_elements(f.value -> 'keys') AS k
    WHERE w.state IN ('active', 'draining') GROUP BY 1, 2)
SELECT coalesce(c.queue, k.queue), jsonb_agg(jsonb_build_object(
           'key', coalesce(c.key, k.key), 'weight', c.weight, 'ready', coalesce(c.ready, 0), 'at_least', coalesce(c.at_least, false),
           'in_flight', coalesce(c.in_flight, 0), 'oldest_age_s', round(extract(epoch FROM clock_timestamp() - c.oldest_ready_at), 3),
           'deficit', k.deficit, 'selected', k.selected, 'deferred', k.deferred, 'promotions', k.promotions)
           ORDER BY c.oldest_ready_at, coalesce(c.key, k.key))
FROM rouse.fair_keys() AS c FULL JOIN by_key AS k ON k.queue = c.queue AND k.key = c.key GROUP BY 1
