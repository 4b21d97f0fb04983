-- The lanes of the newest jobs; see rouse.newest_lanes (migrations/functions/look.sql).
SELECT lanes, last FROM rouse.newest_lanes($1, $2)
