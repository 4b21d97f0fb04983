-- Settles attempts behind their fences and returns the ids that were accepted, and those that are
-- locked; see rouse.settle (migrations/0013_workers_prove_themselves.sql).
SELECT id, locked FROM rouse.settle(
    $1, $2, $3, $4, $5::text[]::rouse.state[], $6, $7, $8, $9, $10, $11, $12)
