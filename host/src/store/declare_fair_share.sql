-- Sets the fair share of a queue from the settings of a worker; see rouse.declare_fair_share
-- (migrations/functions/fair.sql).
SELECT rouse.declare_fair_share($3, $4, $1, n.policy, n.key, n.quantum, n.weights, n.default_weight, n.starvation_s * interval '1 second', n.max_in_flight, n.charge)
FROM jsonb_to_record($2) AS n(policy text, key text, quantum integer, weights jsonb, default_weight double precision,
                              starvation_s double precision, max_in_flight integer, charge text)
