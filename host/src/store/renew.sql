-- Extends leases and says which are lost, and why; see rouse.renew (migrations/0009_plans_without_statistics.sql).
SELECT id, refusal FROM rouse.renew($1, $2, $3)
