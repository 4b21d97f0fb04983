-- Lanes whose jobs have waited too long, or soon will have; see rouse.overdue (migrations/functions/look.sql).
SELECT lane, in_ms, jobs FROM rouse.overdue($1, $2, $3, $4, $5)
