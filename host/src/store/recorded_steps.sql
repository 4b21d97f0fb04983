-- The recorded steps of jobs, for the worker that runs them; see rouse.recorded_steps (migrations/functions/steps.sql).
SELECT place, refusal, known, added, names, bytes, results, waits, until_ms, at FROM rouse.recorded_steps($1, $2, $3, $4, $5)
