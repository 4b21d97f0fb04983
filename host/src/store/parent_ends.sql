-- The ends of the chains that a job has waited for, behind the fence; see rouse.parent_ends
-- (migrations/functions/suspensions.sql).
SELECT refusal, name, job, state, output, is_read FROM rouse.parent_ends($1, $2, $3, $4, $5, $6)
