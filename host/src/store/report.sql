-- Reports the progress of attempts; see rouse.report (migrations/functions/steps.sql).
SELECT id FROM rouse.report($1, $2, $3, $4, $5) AS r(id)
