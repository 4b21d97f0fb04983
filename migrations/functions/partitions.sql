-- Daily partitions (UTC) of the history: created ahead, dropped when they are old. Functions whose name starts with _
-- are only called by other functions, under their search_path.

-- Finished jobs of a queue with its own retention are in separate partitions, so that they too can be removed by
-- dropping partitions: rouse.finished has the partitions finished_default (0 days: the default retention) and
-- finished_keep_N (N days). Those have daily partitions, finished_20270131 and finished_keep_90_20270101. Beyond 31
-- days they are monthly, because each partition makes looking up a job by its id slower.

-- The range of days of the partition that holds this day, for this retention: the day itself, or its month.
CREATE OR REPLACE FUNCTION rouse._partition_days(p_keep_days integer, p_day date, OUT first_day date, OUT end_day date)
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_keep_days > 31 THEN date_trunc('month', p_day::timestamp)::date ELSE p_day END,
           CASE WHEN p_keep_days > 31 THEN (date_trunc('month', p_day::timestamp) + interval '1 month')::date ELSE p_day + 1 END
$$;

-- All partitions, recognised by their names. Other tables are left alone.
CREATE OR REPLACE FUNCTION rouse._partitions() RETURNS TABLE (name text, parent text, keep_days integer, first_day date, end_day date)
LANGUAGE sql STABLE AS $$
    SELECT c.relname::text, matched.parts[1], keep.days, of.first_day, of.end_day
    -- Not pg_partition_tree, which waits for sessions that have locked one of them.
    FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
    CROSS JOIN LATERAL regexp_match(c.relname, '^(finished|payload|attempt|record|step|log)(_keep_([0-9]{1,4}))?_([0-9]{8})$') AS matched(parts)
    CROSS JOIN LATERAL (SELECT coalesce(matched.parts[3]::integer, 0) AS days) AS keep
    CROSS JOIN LATERAL rouse._partition_days(keep.days, to_date(matched.parts[4], 'YYYYMMDD')) AS of
    WHERE c.relnamespace = 'rouse'::regnamespace AND c.relkind = 'r' AND matched.parts IS NOT NULL
$$;

-- The retentions, in days, that queues have set. Served by queue_keeps.
CREATE OR REPLACE FUNCTION rouse._own_retentions() RETURNS TABLE (days integer)
LANGUAGE sql STABLE AS $$
    SELECT DISTINCT own.days::integer
    FROM rouse.queue AS q CROSS JOIN LATERAL (VALUES (q.keep_days), (q.keep_failed_days)) AS own(days)
    WHERE (q.keep_days IS NOT NULL OR q.keep_failed_days IS NOT NULL) AND own.days IS NOT NULL
$$;

-- True if a queue has, or had, its own retention: then a job may be dropped before one that ended earlier.
CREATE OR REPLACE FUNCTION rouse._retentions_differ() RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT count(*) > 1 FROM pg_inherits AS i WHERE i.inhparent = 'rouse.finished'::regclass
$$;

-- True if a queue keeps failed jobs for a shorter time than others: then a failed retry of a job that has succeeded may
-- be dropped before that job. Earlier settings do not count: once they have been changed, a job whose failed retry was
-- dropped counts as succeeded again. Otherwise, any retention that a queue ever had would cost a lookup for each job of
-- each flow. Served by queue_keeps.
CREATE OR REPLACE FUNCTION rouse._drops_failed_first() RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (
        SELECT FROM rouse.queue AS q CROSS JOIN rouse.limits AS l
        WHERE (q.keep_days IS NOT NULL OR q.keep_failed_days IS NOT NULL) AND q.keep_failed_days < coalesce(q.keep_days, l.keep_days))
$$;

-- The partition for jobs that end on this day, with this retention.
CREATE OR REPLACE FUNCTION rouse._retention_partition(p_keep_days integer, p_day date) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT format('finished_keep_%s_%s', p_keep_days, to_char(of.first_day, 'YYYYMMDD')) FROM rouse._partition_days(p_keep_days, p_day) AS of
$$;

-- The partitions that have to exist for these days.
CREATE OR REPLACE FUNCTION rouse._partitions_of(p_from date, p_until date)
RETURNS TABLE (name text, of_table text, keep_days integer, first_day date, end_day date)
LANGUAGE sql STABLE AS $$
    SELECT p.parent || '_' || to_char(day, 'YYYYMMDD'), CASE p.parent WHEN 'finished' THEN 'finished_default' ELSE p.parent END, 0,
           day::date, day::date + 1
    FROM unnest(ARRAY['finished', 'payload', 'attempt', 'record', 'step', 'log']) AS p(parent),
         generate_series(p_from, p_until, interval '1 day') AS day
    -- The days of a month share a partition.
    UNION
    SELECT rouse._retention_partition(k.days, day::date), 'finished_keep_' || k.days, k.days, of.first_day, of.end_day
    FROM rouse._own_retentions() AS k(days), generate_series(p_from, p_until, interval '1 day') AS day,
         LATERAL rouse._partition_days(k.days, day::date) AS of
$$;

-- The time for which finished jobs are kept if their queue has no retention of its own.
CREATE OR REPLACE FUNCTION rouse._default_retention() RETURNS interval
LANGUAGE sql STABLE AS $$
    SELECT make_interval(days => l.keep_days) FROM rouse.limits AS l WHERE l.only_row
$$;

-- The retention, in days, of a job of this lane that ends now in this state; 0 means the default retention. If its
-- partition is missing because no worker has run for a week, the default retention applies.
CREATE OR REPLACE FUNCTION rouse._keep_days(p_lane bigint, p_state rouse.state, p_at timestamptz) RETURNS smallint
LANGUAGE plpgsql STABLE AS $$
DECLARE
    days smallint := (
        SELECT CASE WHEN p_state IN ('failed', 'timed_out') THEN coalesce(q.keep_failed_days, q.keep_days) ELSE q.keep_days END
        FROM rouse.queue AS q WHERE q.name = (SELECT l.queue FROM rouse.lane AS l WHERE l.id = p_lane LIMIT 1));
BEGIN
    IF days IS NULL OR to_regclass('rouse.' || rouse._retention_partition(days, (p_at AT TIME ZONE 'UTC')::date)) IS NULL THEN
        RETURN 0;
    END IF;
    RETURN days;
END
$$;

-- Creates the partitions of today and the next `ahead` days (UTC). Safe to run at any time: a table is created on its
-- own and then attached, so that inserts and reads of other partitions continue. Concurrent calls are serialised by a
-- lock on a table that only its owner can take, because any login of the database can hold an advisory lock.
CREATE OR REPLACE FUNCTION rouse.prepare_partitions(ahead integer DEFAULT 7) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET datestyle = 'ISO' SET lock_timeout = '10s'
-- The owner may lack privileges on the default tablespace of the caller.
SET default_tablespace = '' SET default_table_access_method = 'heap' AS $$
DECLARE
    today date;
    part  record;
    made  integer := 0;
BEGIN
    IF ahead IS NULL OR ahead NOT BETWEEN 0 AND 31 THEN
        RAISE EXCEPTION 'rouse.prepare_partitions: ahead must be 0 to 31 days, not %', coalesce(ahead::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    today := (now() AT TIME ZONE 'UTC')::date;
    IF NOT EXISTS (SELECT FROM rouse._partitions_of(today, today + ahead) AS p WHERE to_regclass('rouse.' || p.name) IS NULL) THEN
        RETURN 0;
    END IF;
    LOCK TABLE ONLY rouse.finished IN SHARE UPDATE EXCLUSIVE MODE;
    FOR part IN
        SELECT * FROM rouse._partitions_of(today, today + ahead) AS p WHERE to_regclass('rouse.' || p.name) IS NULL
        ORDER BY p.of_table, p.first_day
    LOOP
        IF to_regclass('rouse.' || part.of_table) IS NULL THEN
            EXECUTE format('CREATE TABLE rouse.%I (LIKE rouse.finished INCLUDING CONSTRAINTS) PARTITION BY RANGE (finished_at)', part.of_table);
            EXECUTE format('GRANT SELECT ON rouse.%I TO rouse_observer, rouse_operator', part.of_table);
            EXECUTE format('ALTER TABLE rouse.finished ATTACH PARTITION rouse.%I FOR VALUES IN (%s)', part.of_table, part.keep_days);
            EXECUTE format('CREATE TRIGGER keep_table BEFORE TRUNCATE ON rouse.%I EXECUTE FUNCTION rouse._keep_history()', part.of_table);
        END IF;
        EXECUTE format('CREATE TABLE rouse.%I (LIKE rouse.%I INCLUDING CONSTRAINTS INCLUDING COMPRESSION INCLUDING STORAGE)', part.name, part.of_table);
        EXECUTE format('GRANT SELECT ON rouse.%I TO rouse_observer, rouse_operator', part.name);
        EXECUTE format('ALTER TABLE rouse.%I ATTACH PARTITION rouse.%I FOR VALUES FROM (%L) TO (%L)',
            part.of_table, part.name, part.first_day::timestamp AT TIME ZONE 'UTC', part.end_day::timestamp AT TIME ZONE 'UTC');
        IF part.of_table <> 'log' THEN
            EXECUTE format('CREATE TRIGGER keep_table BEFORE TRUNCATE ON rouse.%I EXECUTE FUNCTION rouse._keep_history()', part.name);
        END IF;
        made := made + 1;
    END LOOP;
    RETURN made;
END
$$;

-- Creates today's partitions if they are missing because no worker has run for a week.
CREATE OR REPLACE FUNCTION rouse._ensure_partitions(p_at timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    day text := to_char(p_at AT TIME ZONE 'UTC', 'YYYYMMDD');
BEGIN
    IF to_regclass('rouse.finished_' || day) IS NULL OR to_regclass('rouse.record_' || day) IS NULL THEN
        PERFORM rouse.prepare_partitions();
    END IF;
END
$$;

-- The partitions of a queue's retention are created before the first job needs them.
CREATE OR REPLACE FUNCTION rouse._ensure_retention_partitions() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    lengths integer[] := ARRAY(SELECT days FROM rouse._own_retentions() ORDER BY days);
BEGIN
    IF cardinality(lengths) > 4 THEN
        RAISE EXCEPTION 'rouse: with queue %, queues would have % different retentions; at most 4 are allowed', NEW.name, cardinality(lengths)
            USING ERRCODE = 'program_limit_exceeded',
                  HINT = format('Each has its own partitions. Use an existing one: %s days.',
                                array_to_string(ARRAY(
                    SELECT DISTINCT own.days FROM rouse.queue AS q CROSS JOIN LATERAL (VALUES (q.keep_days), (q.keep_failed_days)) AS own(days)
                    WHERE q.name <> NEW.name AND own.days IS NOT NULL ORDER BY 1), ', '));
    END IF;
    PERFORM rouse.prepare_partitions();
    RETURN NULL;
END
$$;
-- No CREATE OR REPLACE: see wake.sql.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'rouse.queue'::regclass AND tgname = 'queue_has_partitions') THEN
        CREATE TRIGGER queue_has_partitions AFTER INSERT OR UPDATE OF keep_days, keep_failed_days ON rouse.queue
            FOR EACH ROW WHEN (NEW.keep_days IS NOT NULL OR NEW.keep_failed_days IS NOT NULL)
            EXECUTE FUNCTION rouse._ensure_retention_partitions();
    END IF;
END
$$;

-- Drops the partitions whose last day is more than `keep` ago, or, for finished jobs with their own retention, more
-- than that retention. Partitions of attempts and records are dropped once no older finished job is left, and those of
-- payloads two days after the finished jobs that were enqueued with them, by a later call. Returns the number of
-- dropped partitions, and the number of those that were in use, which a later call drops. Dropping waits for a lock for
-- at most 50 ms, because settlements queue behind it.
--
-- Each drop is first tried and rolled back, so that partitions in use are detected before steps are copied in vain, and
-- before anything is locked for a long time. The locks of a drop are held until the commit, and settlements queue
-- behind everything that it waits for afterwards. If a partition comes into use in between, that wait happens at most
-- once, and the rest is left to a later call. Steps of live jobs are copied to today's partition, as are payloads of
-- live jobs, and of finished jobs with a longer retention. The ends that live jobs have waited for are kept
-- (rouse._keep_ends). Rows of workers to which no history refers after earlier calls are deleted
-- (rouse._delete_old_workers).
CREATE OR REPLACE FUNCTION rouse.drop_partitions(keep interval, OUT dropped integer, OUT in_use integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET datestyle = 'ISO' SET lock_timeout = '50ms' AS $$
DECLARE
    old      record;
    oldest   date;
    ordinary date;
    parent   text;
    steps    text[] := '{}';
    payloads text[] := '{}';
    others   text[] := '{}';
    finished text[] := '{}';
    copied   text[];
    part     text;
BEGIN
    dropped := 0;
    in_use := 0;
    -- Not `keep < '1 day'`: that assumes months of 30 days, while `now() - keep` uses the calendar.
    IF keep IS NULL OR now() - keep > now() - interval '1 day' THEN
        RAISE EXCEPTION 'rouse.drop_partitions: keep must be at least one day, not %', coalesce(keep::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- Copies go to today's partitions.
    PERFORM rouse.prepare_partitions(0);
    PERFORM rouse._delete_old_workers();
    BEGIN
        LOCK TABLE ONLY rouse.finished IN SHARE UPDATE EXCLUSIVE MODE NOWAIT;
    EXCEPTION
        WHEN lock_not_available THEN
            RETURN;
    END;
    SELECT min(p.first_day), min(p.first_day) FILTER (WHERE p.keep_days = 0) INTO oldest, ordinary
    FROM rouse._partitions() AS p WHERE p.parent = 'finished';
    FOR old IN
        SELECT p.name, p.parent FROM rouse._partitions() AS p
        WHERE p.end_day <= ((now() - CASE WHEN p.keep_days > 0 THEN make_interval(days => p.keep_days) ELSE keep END) AT TIME ZONE 'UTC')::date
          AND (p.parent NOT IN ('attempt', 'record') OR oldest IS NULL OR p.end_day <= oldest)
          -- A job that ends within a day of its enqueue is in the partition of the next day at the latest.
          AND (p.parent <> 'payload' OR p.end_day < ordinary)
        ORDER BY p.name
    LOOP
        BEGIN
            EXECUTE format('DROP TABLE rouse.%I', old.name);
            RAISE EXCEPTION USING ERRCODE = 'RDROP', MESSAGE = 'can be dropped';
        EXCEPTION
            WHEN lock_not_available THEN
                in_use := in_use + 1;
            WHEN SQLSTATE 'RDROP' THEN
                IF old.parent = 'finished' THEN
                    finished := finished || old.name;
                END IF;
                CASE old.parent
                    WHEN 'step' THEN steps := steps || old.name;
                    WHEN 'payload' THEN payloads := payloads || old.name;
                    ELSE others := others || old.name;
                END CASE;
        END;
    END LOOP;

    IF finished <> '{}' THEN
        BEGIN
            PERFORM rouse._keep_ends(finished);
        EXCEPTION
            -- An enqueue that has named such a job is not committed yet.
            WHEN lock_not_available THEN
                in_use := in_use + cardinality(finished) + cardinality(payloads);
                others := ARRAY(SELECT o.name FROM unnest(others) AS o(name) WHERE o.name <> ALL (finished));
                payloads := '{}';
        END;
    END IF;

    FOREACH parent IN ARRAY ARRAY['step', 'payload'] LOOP
        copied := CASE parent WHEN 'step' THEN steps ELSE payloads END;
        -- All or none, because copied rows whose originals remained would exist twice. All are copied before the first
        -- is dropped: after that no session can record a step.
        BEGIN
            FOREACH part IN ARRAY copied LOOP
                -- Partitions this old are no longer written to.
                IF parent = 'step' THEN
                    EXECUTE format(
                        'INSERT INTO rouse.step SELECT s.job, s.name, s.result, s.wait, s.attempt, s.worker, s.at, clock_timestamp() FROM rouse.%I AS s '
                        'WHERE EXISTS (SELECT FROM rouse.job AS j WHERE j.id = s.job)', part);
                ELSE
                    -- As rouse._payload: one row for each job, without those that a gate has replaced.
                    EXECUTE format(
                        'INSERT INTO rouse.payload SELECT p.job, p.payload, clock_timestamp() FROM ('
                        '    SELECT j.id, j.payload_at FROM rouse.job AS j WHERE j.payload_at < $2'
                        '    UNION ALL'
                        '    SELECT f.id, f.payload_at FROM rouse.finished AS f WHERE f.payload_at < $2'
                        '      AND (f.keep_days > 0 OR f.finished_at - f.payload_at > interval ''24 hours'')) AS kept '
                        'JOIN rouse.%I AS p ON p.job = kept.id AND p.kept_at >= kept.payload_at '
                        'WHERE p.kept_at = kept.payload_at OR kept.payload_at < $1 AND NOT EXISTS ('
                        '    SELECT FROM rouse.payload AS later WHERE later.job = p.job AND later.kept_at > p.kept_at)', part)
                    USING (SELECT p.first_day::timestamp AT TIME ZONE 'UTC' FROM rouse._partitions() AS p WHERE p.name = part),
                          (SELECT p.end_day::timestamp AT TIME ZONE 'UTC' FROM rouse._partitions() AS p WHERE p.name = part);
                END IF;
            END LOOP;
            FOREACH part IN ARRAY copied LOOP
                EXECUTE format('DROP TABLE rouse.%I', part);
            END LOOP;
            dropped := dropped + cardinality(copied);
        EXCEPTION
            WHEN lock_not_available THEN
                in_use := in_use + cardinality(copied);
        END;
    END LOOP;

    FOREACH part IN ARRAY others LOOP
        BEGIN
            EXECUTE format('DROP TABLE rouse.%I', part);
            dropped := dropped + 1;
        EXCEPTION
            WHEN lock_not_available THEN
                in_use := in_use + 1;
                EXIT WHEN dropped > 0;
        END;
    END LOOP;
END
$$;

-- Deletes progress and usage that were reported more than an hour ago, unless the attempt still runs; and requests for
-- notifications that ended more than an hour ago, because their workers have died. Served by the primary key of
-- rouse.job and sleeper_until.
CREATE OR REPLACE FUNCTION rouse._delete_stale_reports() RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
BEGIN
    -- Only lookups can serve such conditions (claim.sql).
    DELETE FROM rouse.progress AS p
    WHERE p.at < clock_timestamp() - interval '1 hour'
      AND NOT EXISTS (SELECT FROM rouse.job AS j WHERE j.id = ANY (ARRAY[p.job]) AND j.fence = p.fence);
    DELETE FROM rouse.running AS r
    WHERE r.at < clock_timestamp() - interval '1 hour'
      AND NOT EXISTS (SELECT FROM rouse.job AS j WHERE j.id = ANY (ARRAY[r.job]) AND j.fence = r.fence);
    DELETE FROM rouse.sleeper AS s WHERE s.until < clock_timestamp() - interval '1 hour';
END
$$;

-- rouse.drop_partitions for workers, with keep_days of rouse.limits, because hosts do not have a retention of their
-- own. Workers of a limited login that may not do maintenance drop nothing. Also removes stale progress and usage of
-- attempts whose worker is dead, and requests of such workers for notifications.
CREATE OR REPLACE FUNCTION rouse.maintain_partitions(p_worker bigint, p_key bytea, OUT dropped integer, OUT in_use integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
BEGIN
    IF rouse._authenticated_as_limited(p_worker, p_key) AND NOT rouse._may_maintain() THEN
        dropped := 0;
        in_use := 0;
        RETURN;
    END IF;
    PERFORM rouse._delete_stale_reports();
    SELECT d.dropped, d.in_use INTO dropped, in_use FROM rouse.drop_partitions(rouse._default_retention()) AS d;
END
$$;

SELECT rouse.prepare_partitions();
