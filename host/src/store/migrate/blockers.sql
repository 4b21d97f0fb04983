-- The sessions that keep session $1 waiting for a lock. Only members of pg_monitor see more than pid and user of other
-- logins' sessions. A prepared transaction has pid 0.
SELECT b.pid, a.usename::text, a.application_name, floor(extract(epoch FROM clock_timestamp() - a.xact_start))
FROM unnest(pg_catalog.pg_blocking_pids($1)) AS b(pid)
LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = b.pid
