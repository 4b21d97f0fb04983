-- One chain with its jobs, as JSON for display and for scripts; see rouse.chain (migrations/functions/chains.sql).
-- `state`, `result` and `error` are those of its last job; if only older jobs are kept, the state is empty, or null in
-- the JSON. No row if the chain does not exist.
SELECT CASE WHEN c.has_last THEN j.state::text ELSE '' END,
       jsonb_build_object('chain', j.chain, 'state', CASE WHEN c.has_last THEN j.state END, 'jobs', c.jobs,
                          'result', CASE WHEN c.has_last THEN j.result END, 'error', CASE WHEN c.has_last THEN j.error END)
FROM (SELECT max(c.job) AS newest, bool_or(c.is_last) AS has_last, jsonb_agg(to_jsonb(c) ORDER BY c.job) AS jobs FROM rouse.chain($1) AS c) AS c
CROSS JOIN LATERAL rouse.job(c.newest) AS j
