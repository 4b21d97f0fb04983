-- Extends leases and says which are lost, and why; see rouse.renew (migrations/0013_workers_prove_themselves.sql).
SELECT id, refusal FROM rouse.renew($1, $2, $3, $4, $5)
