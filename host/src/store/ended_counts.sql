-- The number of jobs that have ended since the statistics started, and the number of these that live workers count as
-- failed, with the current time. The statistics of rows lag by up to a second; workers report every 30 s. One row;
-- reads statistics and few rows, but no jobs.
SELECT extract(epoch FROM clock_timestamp())::float8,
       coalesce((SELECT sum(pg_stat_get_tuples_inserted(p.relid)) FROM pg_partition_tree('rouse.finished') AS p WHERE p.isleaf), 0)::int8,
       coalesce((SELECT sum((w.stats ->> 'failed')::int8) FROM rouse.workers AS w WHERE w.stats IS NOT NULL), 0)::int8
