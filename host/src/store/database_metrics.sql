-- Dead rows of the live table, and what keeps them from being cleaned up: sessions that hold a snapshot, and
-- transactions that have written and have not committed yet. Only members of pg_monitor see the transactions of other
-- logins. Standbys with feedback and other processes without a database count too. One row; reads statistics, no table.
SELECT pg_catalog.pg_stat_get_dead_tuples('rouse.job'::pg_catalog.regclass),
       (SELECT max(extract(epoch FROM clock_timestamp() - a.xact_start))::float8
        FROM pg_catalog.pg_stat_activity AS a
        WHERE (a.datname = current_database() OR a.datname IS NULL) AND a.pid <> pg_backend_pid()
          AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL)),
       greatest((SELECT max(greatest(age(a.backend_xmin), age(a.backend_xid)))::int8 FROM pg_catalog.pg_stat_activity AS a
                 WHERE (a.datname = current_database() OR a.datname IS NULL) AND a.pid <> pg_backend_pid()),
                (SELECT max(age(s.xmin))::int8 FROM pg_catalog.pg_replication_slots AS s),
                (SELECT max(age(p.transaction))::int8 FROM pg_catalog.pg_prepared_xacts AS p)),
       -- This value is for the whole server.
       pg_catalog.pg_notification_queue_usage()
