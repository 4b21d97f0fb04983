-- A page of the newest flows, and whether there are older ones; see the view rouse.flows
-- (migrations/functions/flows.sql), which counts the jobs of each. Only the flows of the page are counted: up to $2
-- flows, and of these as many as it takes to reach $3 jobs, so that large flows make a short page. Served by flow_pkey.
SELECT to_jsonb(w) - 'age' || jsonb_build_object('age_s', round(extract(epoch FROM w.age), 3)),
       EXISTS (SELECT FROM rouse.flow AS f WHERE f.id < w.id)
FROM (
    SELECT f.id
    FROM (
        SELECT f.id, sum(f.jobs) OVER (ORDER BY f.id DESC) - f.jobs AS jobs_before
        FROM (SELECT f.id, f.jobs FROM rouse.flow AS f WHERE f.id < $1 ORDER BY f.id DESC LIMIT $2) AS f) AS f
    WHERE f.jobs_before < $3) AS page
CROSS JOIN LATERAL (SELECT * FROM rouse.flows AS w WHERE w.id = page.id) AS w
ORDER BY w.id DESC
