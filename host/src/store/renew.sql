-- Extends leases, and returns which are lost and why; see rouse.renew (migrations/functions/settle.sql).
SELECT id, refusal FROM rouse.renew($1, $2, $3, $4, $5)
