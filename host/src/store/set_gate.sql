-- Sets a gate; see rouse.set_gate (migrations/functions/gates.sql).
SELECT rouse.set_gate(n.name, n.kind, n.handler, n.queue, n.key, n.most, n.period_s * interval '1 second', n.burst, n.lasts, n.newcomer, n.edge,
                      n.longest_s * interval '1 second')
FROM jsonb_to_record($1) AS n(name text, kind text, handler text, queue text, key text[], most integer, period_s double precision,
                              burst integer, lasts text, newcomer text, edge text, longest_s double precision)
