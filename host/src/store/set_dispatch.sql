-- Sets how workers are chosen for the jobs of a queue; see rouse.set_dispatch (migrations/functions/direct.sql). $2 is
-- a JSON text, or null.
SELECT jsonb_build_object('dispatch', s.dispatch, 'key', s.key) FROM rouse.set_dispatch($1, $2 #>> '{}', $3) AS s
