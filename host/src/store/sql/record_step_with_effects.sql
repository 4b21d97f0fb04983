-- Starts a transaction with effects: records the result of a step behind the fence, or fails; see
-- rouse.record_step_with_effects (migrations/functions/effects.sql).
SELECT rouse.record_step_with_effects($1, $2, $3, $4, $5, $6::text::json)
