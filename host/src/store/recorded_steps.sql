-- The recorded steps of a job, for the worker that runs it; see rouse.recorded_steps (migrations/0015_steps_and_progress.sql).
SELECT refusal, name, result::text FROM rouse.recorded_steps($1, $2, $3, $4)
