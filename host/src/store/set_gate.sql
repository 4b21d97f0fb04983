-- Sets a gate; see rouse.set_gate (migrations/functions/gates.sql).
SELECT rouse.set_gate(n.name, n.kind, n.handler, n.queue, n.key, n.max, n.period_s * interval '1 second', n.burst, n.during, n.on_conflict, n.edge,
                      n.max_wait_s * interval '1 second')
FROM jsonb_to_record($1) AS n(name text, kind text, handler text, queue text, key text[], max integer, period_s double precision,
                              burst integer, during text, on_conflict text, edge text, max_wait_s double precision)
