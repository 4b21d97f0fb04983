-- What a login that may do little could do: drop the history of yesterday with an interval of negative months, keep hosts from starting
-- by holding a lock, and enqueue grants that no host understands.

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

-- True for what a host takes as a pattern of hosts: *, a name, *. before a name, an address; an address of version 6 may stand in brackets.
CREATE FUNCTION rouse._is_host_pattern(p_text text) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    name text := regexp_replace(p_text, '^[*][.]', '');
BEGIN
    IF p_text = '*' OR p_text ~ '^((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)([.](?!$)|$)){4}$' THEN
        RETURN true;
    END IF;
    IF p_text ~ ':' THEN
        BEGIN
            RETURN p_text ~ '^([[][0-9A-Fa-f:]+(\d+[.]\d+[.]\d+[.]\d+)?[]]|[0-9A-Fa-f:]+(\d+[.]\d+[.]\d+[.]\d+)?)$' AND family(btrim(p_text, '[]')::inet) = 6;
        EXCEPTION
            WHEN invalid_text_representation THEN
                RETURN false;
        END;
    END IF;
    -- Names end in no number, which would be an address in disguise.
    RETURN length(rtrim(name, '.')) <= 253
       AND name ~ '^([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?([.]|$))+$'
       AND name !~* '(^|[.])(\d+|0x[0-9a-f]*)[.]?$';
END
$$;

REVOKE ALL ON FUNCTION rouse._is_host_pattern(text) FROM PUBLIC;

-- Refuses grants that no host would keep to, so that the mistake shows where it is made. Whether names and hosts exist is not
-- looked at: what the handler does not have, the job does not get.
CREATE OR REPLACE FUNCTION rouse._check_grants(p_grants jsonb) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    entry record;
    wrong text;
BEGIN
    IF jsonb_typeof(p_grants) <> 'object' THEN
        RAISE EXCEPTION 'rouse.enqueue: grants must be an object, not %', left(p_grants::text, 140)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'For instance {"http": ["api.example.com"], "memory_mb": 32}. Leave it out for all that the handler has.';
    END IF;
    IF octet_length(p_grants::text) > 8192 THEN
        RAISE EXCEPTION 'rouse.enqueue: grants have % bytes; 8192 are allowed', octet_length(p_grants::text)
            USING ERRCODE = 'program_limit_exceeded';
    END IF;
    FOR entry IN SELECT g.key, g.value FROM jsonb_each(p_grants) AS g LOOP
        IF entry.key IN ('http', 'secrets', 'dirs', 'env') THEN
            IF jsonb_typeof(entry.value) <> 'array'
               OR jsonb_path_exists(entry.value, 'strict $[*] ? (@.type() != "string")') THEN
                wrong := 'a list of texts';
            ELSIF entry.key = 'http' AND EXISTS (
                SELECT FROM jsonb_array_elements_text(entry.value) AS host WHERE NOT rouse._is_host_pattern(host)) THEN
                wrong := 'a list of hosts such as api.example.com or *.example.com, without scheme and port';
            ELSIF entry.key = 'dirs' AND EXISTS (
                SELECT FROM jsonb_array_elements_text(entry.value) AS dir WHERE dir !~ '^(/|(/[^/:]+)+)(:read|:read-write)?$') THEN
                wrong := 'a list of paths as the handler sees them, such as /photos or /out:read';
            END IF;
        ELSIF entry.key = 'state' THEN
            IF entry.value <> 'false' THEN
                wrong := 'false, which leaves the job no state';
            END IF;
        ELSIF entry.key = 'memory_mb' THEN
            IF jsonb_typeof(entry.value) <> 'number' OR entry.value::text !~ '^[0-9]{1,4}$' OR entry.value = '0' THEN
                wrong := 'a whole number of MiB, 1 to 9999';
            END IF;
        ELSIF entry.key IN ('cpu', 'timeout') THEN
            IF jsonb_typeof(entry.value) <> 'string' OR entry.value #>> '{}' !~ '^0*[1-9][0-9]{0,8}(ms|s|m|h|d)$' THEN
                wrong := 'a duration above zero such as "500ms", "90s", "5m", "1h" or "1d"';
            END IF;
        ELSE
            RAISE EXCEPTION 'rouse.enqueue: grants have no key %', quote_literal(left(entry.key, 140))
                USING ERRCODE = 'invalid_parameter_value',
                      HINT = 'The keys are http, secrets, dirs, env, state, memory_mb, cpu and timeout.';
        END IF;
        IF wrong IS NOT NULL THEN
            RAISE EXCEPTION 'rouse.enqueue: % of grants must be %, not %', entry.key, wrong, left(entry.value::text, 140)
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
    END LOOP;
END
$$;
