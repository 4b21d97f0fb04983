-- The recorded steps of a job, for the worker that runs it; see rouse.recorded_step_names (migrations/functions/steps.sql).
SELECT refusal, name, bytes, wait, until_ms FROM rouse.recorded_step_names($1, $2, $3, $4)
