-- Settles attempts behind their fences and returns the ids that were accepted, and those that are
-- locked; see rouse.settle (migrations/functions/settle.sql).
SELECT id, locked FROM rouse.settle(
    $1, $2, $3, $4, $5::text[]::rouse.state[], $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19)
