-- Which lanes have waited too long; see rouse.overdue (migrations/functions/look.sql).
SELECT lane, jobs FROM rouse.overdue($1, $2, $3, $4)
