-- Extends leases and says which are lost, and why; see rouse.renew (migrations/0005_settle.sql).
SELECT id, refusal FROM rouse.renew($1, $2, $3)
