-- The schedules, or the schedule of this name; see the view rouse.schedules (migrations/functions/schedules.sql).
SELECT to_jsonb(s) FROM rouse.schedules AS s WHERE s.name = coalesce($1, s.name) ORDER BY s.name
