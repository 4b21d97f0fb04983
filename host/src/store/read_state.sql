-- Reads the value under a key of a handler's state, for the worker that runs the job; see rouse.read_state
-- (migrations/functions/state.sql).
SELECT refusal, value, version FROM rouse.read_state($1, $2, $3, $4, $5, $6)
