-- The result of one recorded step; see rouse.recorded_step (migrations/functions/steps.sql).
SELECT refusal, result::text FROM rouse.recorded_step($1, $2, $3, $4, $5)
