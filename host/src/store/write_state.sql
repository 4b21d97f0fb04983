-- Stores a value of a handler's state, behind the fence and within its quota; see rouse.write_state
-- (migrations/functions/state.sql).
SELECT refusal, outcome, used FROM rouse.write_state($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
