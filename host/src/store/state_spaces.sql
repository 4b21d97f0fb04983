-- Whose state there is, for people: of all handlers, with or without a worker that has them. Reads the whole primary key.
SELECT jsonb_build_object('handler', s.handler, 'tenant', nullif(s.tenant, ''), 'keys', count(*), 'bytes', sum(s.bytes))
FROM rouse.handler_state AS s GROUP BY s.handler, s.tenant ORDER BY s.handler, s.tenant
