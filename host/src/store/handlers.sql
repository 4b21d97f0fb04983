-- The handlers that the fleet can run: one ($1) or all (null); see the view rouse.handlers
-- (migrations/functions/views.sql). A scan of few rows.
SELECT to_jsonb(h) FROM rouse.handlers AS h
WHERE $1::text IS NULL OR h.handler = $1
ORDER BY h.handler, h.version, h.worker_id
