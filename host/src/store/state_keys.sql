-- A page of the keys of a handler's state, for the worker that runs its job; see rouse.state_keys
-- (migrations/functions/state.sql).
SELECT refusal, name FROM rouse.state_keys($1, $2, $3, $4, $5, $6, $7, $8)
