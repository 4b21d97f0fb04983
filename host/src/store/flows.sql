-- The newest flows; see the view rouse.flows (migrations/functions/flows.sql), which counts the jobs of each.
SELECT to_jsonb(w) - 'age' || jsonb_build_object('age_s', round(extract(epoch FROM w.age), 3))
FROM rouse.flows AS w WHERE w.id < $1 ORDER BY w.id DESC LIMIT $2
