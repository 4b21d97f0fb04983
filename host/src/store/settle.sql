-- Settles attempts behind their fences and returns the ids that were accepted, and those that are
-- locked; see rouse.settle (migrations/0009_plans_without_statistics.sql).
SELECT id, locked FROM rouse.settle($1, $2, $3::text[]::rouse.state[], $4, $5, $6, $7, $8)
