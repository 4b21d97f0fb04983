-- Daily partitions of rouse.finished and rouse.attempt: made ahead, dropped when they are old.

-- Makes the partitions of today and the next `ahead` days (UTC). Safe to run at any time: a table is
-- created on its own and then attached, which lets inserts and reads of the others go on.
CREATE FUNCTION rouse.prepare_partitions(ahead integer DEFAULT 7) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET datestyle = 'ISO' AS $$
DECLARE
    parent text;
    day    date;
    name   text;
    made   integer := 0;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('rouse.partitions', 0));
    FOREACH parent IN ARRAY ARRAY['finished', 'attempt'] LOOP
        FOR day IN SELECT d::date FROM generate_series(
            (now() AT TIME ZONE 'UTC')::date, (now() AT TIME ZONE 'UTC')::date + ahead, '1 day') AS d
        LOOP
            name := parent || '_' || to_char(day, 'YYYYMMDD');
            IF to_regclass('rouse.' || name) IS NULL THEN
                EXECUTE format('CREATE TABLE rouse.%I (LIKE rouse.%I INCLUDING CONSTRAINTS)', name, parent);
                EXECUTE format('GRANT SELECT ON rouse.%I TO rouse_observer', name);
                EXECUTE format('ALTER TABLE rouse.%I ATTACH PARTITION rouse.%I FOR VALUES FROM (%L) TO (%L)',
                    parent, name, day::timestamp AT TIME ZONE 'UTC', (day + 1)::timestamp AT TIME ZONE 'UTC');
                made := made + 1;
            END IF;
        END LOOP;
    END LOOP;
    RETURN made;
END
$$;

-- Drops the partitions whose last day is more than `keep` ago, and says how many, and how many
-- were in use: those are dropped by a later call. Dropping waits for nobody for more than 50 ms,
-- because whoever settles a job queues behind it meanwhile.
CREATE FUNCTION rouse.drop_partitions(keep interval, OUT dropped integer, OUT in_use integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET datestyle = 'ISO' SET lock_timeout = '50ms' AS $$
DECLARE
    old record;
BEGIN
    dropped := 0;
    in_use := 0;
    IF keep IS NULL OR keep < '1 day' THEN
        RAISE EXCEPTION 'rouse.drop_partitions: keep must be at least one day, not %', coalesce(keep::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NOT pg_try_advisory_xact_lock(hashtextextended('rouse.partitions', 0)) THEN
        RETURN;
    END IF;
    FOR old IN
        SELECT c.relname
        FROM pg_class AS c
        JOIN pg_inherits AS i ON i.inhrelid = c.oid
        WHERE i.inhparent IN ('rouse.finished'::regclass, 'rouse.attempt'::regclass)
          AND to_date(right(c.relname, 8), 'YYYYMMDD') + 1 <= ((now() - keep) AT TIME ZONE 'UTC')::date
    LOOP
        BEGIN
            EXECUTE format('DROP TABLE rouse.%I', old.relname);
            dropped := dropped + 1;
        EXCEPTION
            WHEN lock_not_available THEN in_use := in_use + 1;
        END;
    END LOOP;
END
$$;

REVOKE ALL ON FUNCTION rouse.prepare_partitions, rouse.drop_partitions FROM PUBLIC;
GRANT EXECUTE ON FUNCTION rouse.prepare_partitions, rouse.drop_partitions TO rouse_worker;

SELECT rouse.prepare_partitions();
