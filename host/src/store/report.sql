-- Says how far attempts are; see rouse.report (migrations/functions/steps.sql).
SELECT id FROM rouse.report($1, $2, $3, $4, $5) AS r(id)
