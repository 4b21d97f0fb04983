-- Removes a key of a handler's state, behind the fence; see rouse.delete_state (migrations/functions/state.sql).
SELECT refusal, was_there FROM rouse.delete_state($1, $2, $3, $4, $5, $6)
