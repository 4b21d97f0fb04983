-- Reports the usage of running attempts; see rouse.report_usage (migrations/functions/steps.sql).
SELECT rouse.report_usage($1, $2, $3)
