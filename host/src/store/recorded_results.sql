-- Results of recorded steps; see rouse.recorded_results (migrations/functions/steps.sql).
SELECT refusal, name, result::text FROM rouse.recorded_results($1, $2, $3, $4, $5)
