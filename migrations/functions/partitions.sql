-- Daily partitions (UTC) of history: made ahead, dropped when they are old. Functions whose name starts with _ are called by the
-- others only, under their search_path.

-- Makes the partitions of today and the next `ahead` days (UTC). Safe to run at any time: a table is
-- created on its own and then attached, which lets inserts and reads of the others go on. Who does so waits for who does
-- the same, with a lock on a table that nobody but its owner can take: any login of the database can hold an advisory lock.
CREATE OR REPLACE FUNCTION rouse.prepare_partitions(ahead integer DEFAULT 7) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET datestyle = 'ISO' SET lock_timeout = '10s' AS $$
DECLARE
    parents text[] := ARRAY['finished', 'attempt', 'record', 'step', 'log'];
    today   date;
    parent  text;
    day     date;
    name    text;
    made    integer := 0;
BEGIN
    IF ahead IS NULL OR ahead NOT BETWEEN 0 AND 31 THEN
        RAISE EXCEPTION 'rouse.prepare_partitions: ahead must be 0 to 31 days, not %', coalesce(ahead::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    today := (now() AT TIME ZONE 'UTC')::date;
    IF NOT EXISTS (
        SELECT FROM unnest(parents) AS p, generate_series(0, ahead) AS n
        WHERE to_regclass('rouse.' || p || '_' || to_char(today + n, 'YYYYMMDD')) IS NULL) THEN
        RETURN 0;
    END IF;
    LOCK TABLE rouse.finished IN SHARE UPDATE EXCLUSIVE MODE;
    FOREACH parent IN ARRAY parents LOOP
        FOR day IN SELECT today + n FROM generate_series(0, ahead) AS n LOOP
            name := parent || '_' || to_char(day, 'YYYYMMDD');
            IF to_regclass('rouse.' || name) IS NULL THEN
                EXECUTE format('CREATE TABLE rouse.%I (LIKE rouse.%I INCLUDING CONSTRAINTS)', name, parent);
                EXECUTE format('GRANT SELECT ON rouse.%I TO rouse_observer, rouse_operator', name);
                EXECUTE format('ALTER TABLE rouse.%I ATTACH PARTITION rouse.%I FOR VALUES FROM (%L) TO (%L)',
                    parent, name, day::timestamp AT TIME ZONE 'UTC', (day + 1)::timestamp AT TIME ZONE 'UTC');
                IF parent <> 'log' THEN
                    EXECUTE format('CREATE TRIGGER keep_table BEFORE TRUNCATE ON rouse.%I EXECUTE FUNCTION rouse._keep_history()', name);
                END IF;
                made := made + 1;
            END IF;
        END LOOP;
    END LOOP;
    RETURN made;
END
$$;

-- Where no worker has run for a week, nobody has made today's partitions.
CREATE OR REPLACE FUNCTION rouse._have_partitions(p_at timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    day text := to_char(p_at AT TIME ZONE 'UTC', 'YYYYMMDD');
BEGIN
    IF to_regclass('rouse.finished_' || day) IS NULL OR to_regclass('rouse.record_' || day) IS NULL THEN
        PERFORM rouse.prepare_partitions();
    END IF;
END
$$;

-- Drops the partitions whose last day is more than `keep` ago, and says how many, and how many
-- were in use: those are dropped by a later call. Dropping waits for nobody for more than 50 ms,
-- because whoever settles a job queues behind it meanwhile.
--
-- Each is tried out first, and that is undone: what is in use is known before steps are copied in vain, and before anything
-- is locked for long. The locks of a drop are held until the commit, so that settlements queue behind all that it
-- waits for afterwards: should something come into use in between, it is waited for once at most, and the rest is left to
-- a later call. Steps of jobs that still live are kept.
CREATE OR REPLACE FUNCTION rouse.drop_partitions(keep interval, OUT dropped integer, OUT in_use integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET datestyle = 'ISO' SET lock_timeout = '50ms' AS $$
DECLARE
    old    record;
    steps  text[] := '{}';
    others text[] := '{}';
    name   text;
BEGIN
    dropped := 0;
    in_use := 0;
    -- Not `keep < '1 day'`: that reckons months of 30 days, and `now() - keep` those of the calendar.
    IF keep IS NULL OR now() - keep > now() - interval '1 day' THEN
        RAISE EXCEPTION 'rouse.drop_partitions: keep must be at least one day, not %', coalesce(keep::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    BEGIN
        LOCK TABLE rouse.finished IN SHARE UPDATE EXCLUSIVE MODE NOWAIT;
    EXCEPTION
        WHEN lock_not_available THEN
            RETURN;
    END;
    FOR old IN
        -- The names are read as dates only once it is known that they are those of partitions: Postgres
        -- may look at them in any order otherwise, and not every table of a database ends in a date.
        WITH partition AS MATERIALIZED (
            SELECT c.relname, i.inhparent = 'rouse.step'::regclass AS has_steps
            FROM pg_inherits AS i
            JOIN pg_class AS c ON c.oid = i.inhrelid
            WHERE i.inhparent IN ('rouse.finished'::regclass, 'rouse.attempt'::regclass, 'rouse.record'::regclass, 'rouse.step'::regclass,
                                  'rouse.log'::regclass))
        SELECT p.relname, p.has_steps FROM partition AS p
        WHERE to_date(right(p.relname, 8), 'YYYYMMDD') + 1 <= ((now() - keep) AT TIME ZONE 'UTC')::date
        ORDER BY p.relname
    LOOP
        BEGIN
            EXECUTE format('DROP TABLE rouse.%I', old.relname);
            RAISE EXCEPTION USING ERRCODE = 'RDROP', MESSAGE = 'it can be dropped';
        EXCEPTION
            WHEN lock_not_available THEN
                in_use := in_use + 1;
            WHEN SQLSTATE 'RDROP' THEN
                IF old.has_steps THEN
                    steps := steps || old.relname::text;
                ELSE
                    others := others || old.relname::text;
                END IF;
        END;
    END LOOP;

    -- All or none: what was copied and is there still would be there twice. All are copied before the first is dropped:
    -- nobody can record a step from then on.
    BEGIN
        FOREACH name IN ARRAY steps LOOP
            -- Nothing is written to so old a partition any more.
            EXECUTE format(
                'INSERT INTO rouse.step SELECT s.job, s.name, s.result, s.attempt, s.worker, s.at, clock_timestamp() FROM rouse.%I AS s '
                'WHERE EXISTS (SELECT FROM rouse.job AS j WHERE j.id = s.job)', name);
        END LOOP;
        FOREACH name IN ARRAY steps LOOP
            EXECUTE format('DROP TABLE rouse.%I', name);
        END LOOP;
        dropped := cardinality(steps);
    EXCEPTION
        WHEN lock_not_available THEN
            in_use := in_use + cardinality(steps);
    END;

    FOREACH name IN ARRAY others LOOP
        BEGIN
            EXECUTE format('DROP TABLE rouse.%I', name);
            dropped := dropped + 1;
        EXCEPTION
            WHEN lock_not_available THEN
                in_use := in_use + 1;
                EXIT WHEN dropped > 0;
        END;
    END LOOP;
END
$$;

-- rouse.drop_partitions for workers; those of a limited login without the right to maintenance drop nothing. Stale progress and usage of
-- attempts whose worker has gone go with it.
CREATE OR REPLACE FUNCTION rouse.maintain_partitions(p_worker bigint, p_key bytea, p_keep interval, OUT dropped integer, OUT in_use integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF rouse._known(p_worker, p_key) AND NOT rouse._maintains() THEN
        dropped := 0;
        in_use := 0;
        RETURN;
    END IF;
    DELETE FROM rouse.progress AS p
    WHERE p.at < clock_timestamp() - interval '1 hour'
      AND NOT EXISTS (SELECT FROM rouse.job AS j WHERE j.id = p.job AND j.fence = p.fence);
    DELETE FROM rouse.running AS r
    WHERE r.at < clock_timestamp() - interval '1 hour'
      AND NOT EXISTS (SELECT FROM rouse.job AS j WHERE j.id = r.job AND j.fence = r.fence);
    SELECT d.dropped, d.in_use INTO dropped, in_use FROM rouse.drop_partitions(p_keep) AS d;
END
$$;

SELECT rouse.prepare_partitions();
