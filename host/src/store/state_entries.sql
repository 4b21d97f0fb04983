-- A handler's state entries for a tenant, without the values. Served by the primary key.
SELECT jsonb_build_object('key', s.key, 'bytes', s.bytes, 'version', s.version::text, 'set_at', s.set_at)
FROM rouse.handler_state AS s WHERE s.handler = $1 AND s.tenant = coalesce($2, '') ORDER BY s.key
