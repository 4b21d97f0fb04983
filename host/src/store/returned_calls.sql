-- The ends of calls, behind the fence; see rouse.returned_calls (migrations/functions/suspensions.sql).
SELECT refusal, step, result::text, job FROM rouse.returned_calls($1, $2, $3, $4, $5, $6)
