-- Sets how a queue is shared; see rouse.set_fair_share (migrations/functions/fair.sql).
SELECT jsonb_build_object('policy', s.policy, 'key', s.key, 'quantum', s.quantum, 'weights', s.weights, 'default_weight', s.default_weight,
                          'starvation_s', extract(epoch FROM s.starvation)::integer, 'max_in_flight', s.max_in_flight, 'charge', s.charge)
FROM rouse.set_fair_share($1, $2, $3, $4, $5, $6, $7 * interval '1 second', $8, $9) AS s
