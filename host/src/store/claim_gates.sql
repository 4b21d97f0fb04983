-- The gates that act in claims; see rouse.set_gate (migrations/functions/gates.sql).
SELECT name, queue, handler, key, kind, max, gate::text FROM rouse.gate WHERE kind IN ('max_concurrent', 'throttle', 'batch') ORDER BY name
