-- Writes what was decided about due times; see rouse.fire_schedules (migrations/functions/fire.sql).
SELECT rouse.fire_schedules($1, $2, $3, $4, $5)
