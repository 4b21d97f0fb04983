-- What running attempts have used so far; see rouse.report_usage (migrations/0018_usage_and_logs.sql).
SELECT rouse.report_usage($1, $2, $3, $4, $5, $6, $7, $8, $9)
