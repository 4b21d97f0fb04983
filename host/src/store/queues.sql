-- Every queue with its depth; see the view rouse.queues (migrations/functions/views.sql), which counts
-- no more than 10,000 jobs of each lane. Fair queues have their keys, with what living workers have counted.
WITH reported AS MATERIALIZED (
    SELECT f.value AS stats FROM rouse.workers AS w CROSS JOIN LATERAL jsonb_array_elements(w.stats -> 'fair') AS f
    WHERE w.state IN ('active', 'draining')),
by_key AS (
    SELECT r.stats ->> 'queue' AS queue, k.value ->> 'key' AS key, sum((k.value ->> 'selected')::bigint) AS selected,
           sum((k.value ->> 'deferred')::bigint) AS deferred, sum((k.value ->> 'promotions')::bigint) AS promotions,
           sum((k.value ->> 'deficit')::double precision) AS deficit
    FROM reported AS r CROSS JOIN LATERAL jsonb_array_elements(r.stats -> 'keys') AS k GROUP BY 1, 2),
keys AS (
    SELECT coalesce(c.queue, k.queue) AS queue, jsonb_agg(jsonb_build_object(
               'key', coalesce(c.key, k.key), 'weight', c.weight, 'ready', coalesce(c.ready, 0), 'at_least', coalesce(c.at_least, false),
               'in_flight', coalesce(c.in_flight, 0), 'oldest_age_s', round(extract(epoch FROM clock_timestamp() - c.oldest_ready_at), 3),
               'deficit', k.deficit, 'selected', k.selected, 'deferred', k.deferred, 'promotions', k.promotions)
               ORDER BY c.oldest_ready_at, coalesce(c.key, k.key)) AS keys
    FROM rouse.fair_keys() AS c FULL JOIN by_key AS k ON k.queue = c.queue AND k.key = c.key GROUP BY 1),
totals AS (
    SELECT r.stats ->> 'queue' AS queue, sum((r.stats ->> 'rounds')::bigint) AS rounds, sum((r.stats ->> 'promotions')::bigint) AS promotions
    FROM reported AS r GROUP BY 1)
SELECT to_jsonb(q) - 'oldest_wait' - 'fair_share' || jsonb_build_object(
           'oldest_wait_s', round(extract(epoch FROM q.oldest_wait), 3),
           'scheduler', q.fair_share || CASE WHEN q.fair_share ->> 'policy' = 'drr' THEN jsonb_build_object(
               'rounds', coalesce(t.rounds, 0), 'promotions', coalesce(t.promotions, 0), 'keys', coalesce(k.keys, '[]')) ELSE '{}' END)
FROM rouse.queues AS q LEFT JOIN keys AS k ON k.queue = q.name LEFT JOIN totals AS t ON t.queue = q.name
ORDER BY q.name
