-- The recorded steps of jobs, for the worker that runs them; see rouse.recorded_steps (migrations/functions/steps.sql).
SELECT place, refusal, name, bytes, result, wait, until_ms FROM rouse.recorded_steps($1, $2, $3, $4)
