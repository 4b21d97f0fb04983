-- The value of one state entry. Served by the primary key.
SELECT s.value, jsonb_build_object('key', s.key, 'bytes', s.bytes, 'version', s.version::text, 'set_at', s.set_at)
FROM rouse.handler_state AS s WHERE s.handler = $1 AND s.tenant = coalesce($2, '') AND s.key = $3
