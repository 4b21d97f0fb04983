-- The sessions that have written, or hold a snapshot: a concurrent index waits for them. Prepared transactions have pid
-- 0. The columns and limits are those of blockers.sql; reads no table.
SELECT a.pid, a.usename::text, a.application_name, floor(extract(epoch FROM clock_timestamp() - a.xact_start))
FROM pg_catalog.pg_stat_activity AS a
WHERE a.datname = current_database() AND a.pid <> pg_catalog.pg_backend_pid() AND (a.backend_xid IS NOT NULL OR a.backend_xmin IS NOT NULL)
UNION ALL
SELECT 0, NULL, NULL, NULL FROM pg_catalog.pg_prepared_xacts AS p WHERE p.database = current_database()
