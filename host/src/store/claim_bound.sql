-- Claims jobs by their source; see rouse.claim_bound (migrations/functions/claim.sql).
SELECT ids, is_empty FROM rouse.claim_bound($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
