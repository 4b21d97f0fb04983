-- The newest flows; see the view rouse.flows (migrations/functions/flows.sql), which counts the jobs of each. Only those of the page are
-- counted.
SELECT to_jsonb(w) - 'age' || jsonb_build_object('age_s', round(extract(epoch FROM w.age), 3))
FROM (SELECT f.id FROM rouse.flow AS f WHERE f.id < $1 ORDER BY f.id DESC LIMIT $2) AS page
CROSS JOIN LATERAL (SELECT * FROM rouse.flows AS w WHERE w.id = page.id) AS w
ORDER BY w.id DESC
