-- Removes a key of a handler's state, behind the fence; see rouse.erase_state (migrations/functions/state.sql).
SELECT refusal, was_there FROM rouse.erase_state($1, $2, $3, $4, $5, $6)
