-- One flow with its jobs; see rouse.flow (migrations/functions/flows.sql).
SELECT to_jsonb(w) || jsonb_build_object('jobs', (SELECT jsonb_agg(to_jsonb(j) ORDER BY j.chain) FROM rouse.flow(w.id) AS j))
FROM (SELECT f.id, f.name, f.tenant, f.requested_at FROM rouse.flow AS f WHERE f.id = $1) AS w
