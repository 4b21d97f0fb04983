-- Sets how a queue is shared; see rouse.set_fair_share (migrations/functions/fair.sql).
SELECT jsonb_build_object('policy', s.policy, 'key', s.key, 'quantum', s.quantum, 'weights', s.weights, 'default_weight', s.default_weight,
                          'starvation_ms', (extract(epoch FROM s.starvation) * 1000)::bigint, 'max_in_flight', s.max_in_flight, 'charge', s.charge)
FROM jsonb_to_record($2) AS n(policy text, key text, quantum integer, weights jsonb, default_weight double precision,
                              starvation_s double precision, max_in_flight integer, charge text)
CROSS JOIN LATERAL rouse.set_fair_share($1, n.policy, n.key, n.quantum, n.weights, n.default_weight, n.starvation_s * interval '1 second', n.max_in_flight, n.charge) AS s
