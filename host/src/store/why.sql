-- What is between a job and its start; see rouse.why (migrations/functions/why.sql).
SELECT to_jsonb(w) FROM rouse.why($1) AS w
