-- The recorded steps of a job, for the worker that runs it; see rouse.recorded_steps (migrations/functions/steps.sql).
SELECT refusal, name, bytes, result, wait, until_ms FROM rouse.recorded_steps($1, $2, $3, $4)
