-- The reasons why a job has not started; see rouse.why (migrations/functions/why.sql).
SELECT to_jsonb(w) FROM rouse.why($1) AS w
