-- The keys of a gate, those with the most jobs first, and their number; see rouse.gate_keys
-- (migrations/functions/views.sql).
SELECT to_jsonb(k) - 'gate', count(*) OVER ()
FROM rouse.gate_keys($1) AS k ORDER BY k.waiting DESC NULLS LAST, k.running DESC NULLS LAST, k.key LIMIT $2
