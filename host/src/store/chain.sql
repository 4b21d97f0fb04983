-- One chain with its jobs, as JSON for display and for scripts; see rouse.chain (migrations/functions/chains.sql).
-- `state`, `result` and `error` are those of its last job. No row if the chain does not exist.
SELECT j.state::text,
       jsonb_build_object('chain', j.chain, 'state', j.state, 'jobs', c.jobs, 'result', j.result, 'error', j.error)
FROM (SELECT max(c.job) AS last, jsonb_agg(to_jsonb(c) ORDER BY c.job) AS jobs FROM rouse.chain($1) AS c) AS c
CROSS JOIN LATERAL rouse.job(c.last) AS j
