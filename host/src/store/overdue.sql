-- Which lanes have waited too long; see rouse.overdue (migrations/0017_what_waits_too_long.sql).
SELECT lane, jobs FROM rouse.overdue($1, $2, $3, $4)
