-- Releases more of the jobs that wait for chains that have ended; see rouse.continue_releases
-- (migrations/functions/dependencies.sql).
SELECT rouse.continue_releases($1, $2, $3)
