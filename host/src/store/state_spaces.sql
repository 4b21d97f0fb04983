-- The state namespaces of all handlers, whether or not a worker has the handler. Reads the whole primary key.
SELECT jsonb_build_object('handler', s.handler, 'tenant', nullif(s.tenant, ''), 'keys', count(*), 'bytes', sum(s.bytes))
FROM rouse.handler_state AS s GROUP BY s.handler, s.tenant ORDER BY s.handler, s.tenant
