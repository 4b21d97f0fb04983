-- What the fleet can run; see the view rouse.handlers (migrations/0016_fleet.sql). A scan of few rows.
SELECT to_jsonb(h) FROM rouse.handlers AS h ORDER BY h.handler, h.version, h.worker_id
