-- Sets how a queue is shared, as the settings of a worker say; see rouse.declare_fair_share (migrations/functions/fair.sql).
SELECT rouse.declare_fair_share($1, $2, $3, $4, $5, $6, $7, $8, $9 * interval '1 second', $10, $11)
