-- Every queue; see the view rouse.queue_settings (migrations/functions/views.sql). Fair queues include the counts of
-- live workers.
SELECT to_jsonb(q) - 'fair_share' || jsonb_build_object(
           'scheduler', q.fair_share || CASE WHEN q.fair_share ->> 'policy' = 'drr' THEN jsonb_build_object(
               'rounds', coalesce(t.rounds, 0), 'promotions', coalesce(t.promotions, 0)) ELSE '{}' END)
FROM rouse.queue_settings AS q
LEFT JOIN (
    SELECT f.value ->> 'queue' AS queue, sum((f.value ->> 'rounds')::bigint) AS rounds, sum((f.value ->> 'promotions')::bigint) AS promotions
    FROM rouse.workers AS w CROSS JOIN LATERAL jsonb_array_elements(w.stats -> 'fair') AS f
    WHERE w.state IN ('active', 'draining') GROUP BY 1) AS t ON t.queue = q.name
ORDER BY q.name
