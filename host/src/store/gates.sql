-- The gates, or the gate of this name; see the view rouse.gates (migrations/functions/views.sql).
SELECT to_jsonb(g) - 'period' - 'max_wait' || jsonb_build_object(
    'period_ms', round(extract(epoch FROM g.period) * 1000)::bigint, 'max_wait_ms', round(extract(epoch FROM g.max_wait) * 1000)::bigint)
FROM rouse.gates AS g WHERE g.name = coalesce($1, g.name) ORDER BY g.name
