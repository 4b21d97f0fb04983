-- Leases shards of queues $3, or renews the lease; see rouse.lease_shards (migrations/functions/shards.sql).
SELECT queue, shards, own, lease_ms FROM rouse.lease_shards($1, $2, $3, $4)
