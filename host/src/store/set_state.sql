-- Stores a value of a handler's state, behind the fence and within its quota; see rouse.set_state
-- (migrations/functions/state.sql).
SELECT refusal, outcome, used FROM rouse.set_state($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
