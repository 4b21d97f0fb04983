-- A drop of old partitions waits for one reader at most. And it fails no longer over the names of other
-- tables, any of which it might read as a date.

-- Drops the partitions whose last day is more than `keep` ago, and says how many, and how many
-- were in use: those are dropped by a later call. Dropping waits for nobody for more than 50 ms,
-- because whoever settles a job queues behind it meanwhile. And once something was dropped, it waits
-- once at most: the locks of a drop are held until the commit, so that settlements queue behind all
-- that it waits for afterwards. The rest is left to a later call.
CREATE OR REPLACE FUNCTION rouse.drop_partitions(keep interval, OUT dropped integer, OUT in_use integer)
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
        -- The names are read as dates only once it is known that they are those of partitions: Postgres
        -- may look at them in any order otherwise, and not every table of a database ends in a date.
        WITH partition AS MATERIALIZED (
            SELECT c.relname
            FROM pg_inherits AS i
            JOIN pg_class AS c ON c.oid = i.inhrelid
            WHERE i.inhparent IN ('rouse.finished'::regclass, 'rouse.attempt'::regclass))
        SELECT p.relname FROM partition AS p
        WHERE to_date(right(p.relname, 8), 'YYYYMMDD') + 1 <= ((now() - keep) AT TIME ZONE 'UTC')::date
        ORDER BY p.relname
    LOOP
        BEGIN
            EXECUTE format('DROP TABLE rouse.%I', old.relname);
            dropped := dropped + 1;
        EXCEPTION
            WHEN lock_not_available THEN
                in_use := in_use + 1;
                EXIT WHEN dropped > 0;
        END;
    END LOOP;
END
$$;
