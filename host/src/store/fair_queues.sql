-- The version of the settings of fair queues; and if it is not $1 (null: in any case), these settings, in a row for
-- each queue: see rouse.set_fair_share (migrations/functions/fair.sql). A row without a name has only the version. Each
-- change to a queue writes its row at another position, or in another transaction. So the settings, up to a megabyte
-- for each queue, are not read if they are known.
SELECT v.version, q.name, q.fair_key, q.quantum, q.weights, q.default_weight, q.starvation_s, q.max_in_flight, q.charge
FROM (
    SELECT coalesce(hashtextextended(string_agg(format('%s %s', f.ctid, f.xmin), ' ' ORDER BY f.name), 0), 0) AS version
    FROM rouse.queue AS f WHERE f.policy = 'drr') AS v
LEFT JOIN rouse.queue AS q ON q.policy = 'drr' AND v.version IS DISTINCT FROM $1
