-- One flow with the counts of its jobs (the view rouse.flows), and up to $3 of its jobs with later chains than $2
-- (null: from the first) as `listed`; see rouse.flow (migrations/functions/flows.sql).
SELECT to_jsonb(w) - 'age' || jsonb_build_object(
           'listed', (SELECT coalesce(jsonb_agg(to_jsonb(j) ORDER BY j.chain), '[]') FROM rouse.flow(w.id, $2, $3) AS j))
FROM (SELECT * FROM rouse.flows AS f WHERE f.id = $1) AS w
