-- The fair queues; see rouse.set_fair_share (migrations/functions/fair.sql).
SELECT name, fair_key, quantum, weights, default_weight, starvation_s, max_in_flight, charge
FROM rouse.queue WHERE policy = 'drr'
