-- Records the result of a step behind the fence; see rouse.record_step (migrations/functions/steps.sql).
SELECT rouse.record_step($1, $2, $3, $4, $5, $6::text::json)
