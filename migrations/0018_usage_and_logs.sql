-- What an attempt has used and what it has said: kept with the attempt (SPEC row B5), and shown while it runs.
--
-- What this does to a database with live jobs: columns without a default are added to rouse.finished and rouse.attempt,
-- which takes a moment and rewrites nothing; three tables are made; functions and views are replaced. Older
-- hosts go on: what their attempts use is not known.

-- All null where nothing ran, where somebody else has ended the job (only its worker knew), and before this migration.
ALTER TABLE rouse.finished
    -- Processor time of the guest and of the host calls that it made, microseconds.
    ADD COLUMN cpu_us bigint,
    ADD COLUMN memory_peak_bytes bigint,
    ADD COLUMN host_calls integer,
    -- Over the network.
    ADD COLUMN bytes_in bigint,
    ADD COLUMN bytes_out bigint,
    -- The SHA-256 of the module that ran.
    ADD COLUMN digest bytea CHECK (length(digest) = 32);
ALTER TABLE rouse.attempt
    ADD COLUMN lane bigint,
    ADD COLUMN tenant text,
    ADD COLUMN cpu_us bigint,
    ADD COLUMN memory_peak_bytes bigint,
    ADD COLUMN host_calls integer,
    ADD COLUMN bytes_in bigint,
    ADD COLUMN bytes_out bigint,
    ADD COLUMN digest bytea CHECK (length(digest) = 32);

-- What running attempts have used so far: those that have run for some seconds, told every few seconds. Unlogged: after
-- a crash of the server it is told again. A row says nothing once its fence is not that of the job.
CREATE UNLOGGED TABLE rouse.running (
    job          bigint PRIMARY KEY,
    fence        bigint NOT NULL,
    worker       bigint NOT NULL,
    cpu_us       bigint NOT NULL,
    memory_bytes bigint NOT NULL,
    host_calls   integer NOT NULL,
    bytes_in     bigint NOT NULL,
    bytes_out    bigint NOT NULL,
    at           timestamptz NOT NULL
) WITH (fillfactor = 50);
CREATE INDEX running_worker ON rouse.running (worker);
GRANT SELECT (job, worker, cpu_us, memory_bytes, host_calls, bytes_in, bytes_out, at) ON rouse.running TO rouse_observer;

-- What attempts print and log, a row for each line. Insert-only, one partition a day.
CREATE TABLE rouse.log (
    job     bigint NOT NULL,
    attempt integer NOT NULL,
    -- From 1, within the attempt.
    line    integer NOT NULL,
    worker  bigint NOT NULL,
    at      timestamptz NOT NULL,
    level   text NOT NULL CHECK (level IN ('trace', 'debug', 'info', 'warn', 'error')),
    text    text NOT NULL
) PARTITION BY RANGE (at);
CREATE INDEX log_job ON rouse.log (job);
GRANT SELECT ON rouse.log TO rouse_observer;

-- As it is shown; null where nothing is known.
CREATE FUNCTION rouse._usage(p_cpu_us bigint, p_memory_bytes bigint, p_host_calls integer, p_bytes_in bigint, p_bytes_out bigint, p_digest bytea)
RETURNS jsonb
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN p_cpu_us IS NOT NULL THEN jsonb_strip_nulls(jsonb_build_object(
        'cpu_ms', round(p_cpu_us / 1000.0, 3), 'memory_bytes', p_memory_bytes, 'host_calls', p_host_calls,
        'bytes_in', p_bytes_in, 'bytes_out', p_bytes_out, 'sha256', encode(p_digest, 'hex'))) END
$$;

-- The fields are those of SPEC row B5. An older host calls rouse.settle without them.
DROP FUNCTION rouse._settle(bigint, bigint[], bigint[], rouse.state[], bigint[], jsonb[], jsonb[], bigint[], timestamptz[], bigint[]);

-- Settles attempts, one per position of the lists, and returns the ids of those that were accepted.
-- The others had lost their lease: nothing was changed for them.
--
--   p_worker      only jobs that this worker has claimed; null: whoever's
--   p_states      succeeded, failed, timed_out, cancelled: the job's final state;
--                 queued with an error: retry after p_delays_ms; queued without: the claim is
--                 given back, and the attempt does not count
--   p_retry_at    retry then instead
--   p_memory      bytes for the next attempt; null: as they were
--   p_started_us  microseconds from the claim to the real start; null: it never started
--   p_cpu_us … p_digests   what the attempt has used, and the SHA-256 of the module that ran; null: nothing ran
--
-- Served by the primary key of rouse.job. The insert into rouse.finished goes to today's partition.
CREATE FUNCTION rouse._settle(
    p_worker bigint, p_ids bigint[], p_fences bigint[], p_states rouse.state[], p_started_us bigint[],
    p_results jsonb[], p_errors jsonb[], p_delays_ms bigint[], p_retry_at timestamptz[], p_memory bigint[],
    p_cpu_us bigint[] DEFAULT NULL, p_memory_peaks bigint[] DEFAULT NULL, p_host_calls integer[] DEFAULT NULL,
    p_bytes_in bigint[] DEFAULT NULL, p_bytes_out bigint[] DEFAULT NULL, p_digests bytea[] DEFAULT NULL)
RETURNS SETOF bigint
LANGUAGE plpgsql ROWS 100 AS $$
DECLARE
    at       timestamptz := clock_timestamp();
    released bigint[];
    lanes    bigint[];
BEGIN
    RETURN QUERY
    WITH gone AS (
        DELETE FROM rouse.job AS j
        USING unnest(p_ids, p_fences, p_states, p_started_us, p_results, p_errors, p_cpu_us, p_memory_peaks, p_host_calls, p_bytes_in, p_bytes_out, p_digests)
                  AS s(id, fence, state, started_us, result, error, cpu_us, memory_peak, host_calls, bytes_in, bytes_out, digest)
        WHERE j.id = ANY (ARRAY[s.id]) AND j.fence = s.fence AND s.state <> 'queued' AND (p_worker IS NULL OR j.worker = p_worker)
        RETURNING j.id, j.lane, j.worker, j.retried_from, j.requested_at, j.available_at, j.claimed_at,
                  j.claimed_at + s.started_us * interval '1 microsecond' AS started_at,
                  j.attempt, j.lost, j.max_attempts, s.state, j.tenant, j.source, j.unique_key, j.payload, s.result, s.error,
                  s.cpu_us, s.memory_peak, s.host_calls, s.bytes_in, s.bytes_out, s.digest)
    INSERT INTO rouse.finished AS f (id, lane, worker, retried_from, requested_at, available_at, claimed_at, started_at, finished_at,
                                attempt, lost, max_attempts, state, tenant, source, unique_key, payload, result, error,
                                cpu_us, memory_peak_bytes, host_calls, bytes_in, bytes_out, digest)
    SELECT g.id, g.lane, g.worker, g.retried_from, g.requested_at, g.available_at, g.claimed_at, g.started_at, at,
           g.attempt, g.lost, g.max_attempts, g.state, g.tenant, g.source, g.unique_key, g.payload, g.result, g.error,
           g.cpu_us, g.memory_peak, g.host_calls, g.bytes_in, g.bytes_out, g.digest
    FROM gone AS g
    RETURNING f.id;

    IF NOT ('queued' = ANY (p_states)) THEN
        RETURN;
    END IF;

    -- Retries: the attempt is kept, and the job waits for its time without a turn.
    RETURN QUERY
    WITH back AS (
        UPDATE rouse.job AS j
        SET state = 'queued', turn = NULL, fence = NULL, worker = NULL, claimed_at = NULL, lease_until = NULL,
            available_at = coalesce(s.retry_at, at + s.delay_ms * interval '1 millisecond'),
            memory_bytes = coalesce(s.memory, j.memory_bytes)
        FROM unnest(p_ids, p_fences, p_states, p_started_us, p_errors, p_delays_ms, p_retry_at, p_memory,
                    p_cpu_us, p_memory_peaks, p_host_calls, p_bytes_in, p_bytes_out, p_digests)
                 AS s(id, fence, state, started_us, error, delay_ms, retry_at, memory, cpu_us, memory_peak, host_calls, bytes_in, bytes_out, digest),
             rouse.job AS was
        WHERE j.id = ANY (ARRAY[s.id]) AND j.fence = s.fence AND s.state = 'queued' AND s.error IS NOT NULL
          AND (p_worker IS NULL OR j.worker = p_worker) AND was.id = ANY (ARRAY[s.id])
        RETURNING j.id, j.attempt, j.lane, j.tenant, was.worker, was.claimed_at, s.started_us, s.error,
                  s.cpu_us, s.memory_peak, s.host_calls, s.bytes_in, s.bytes_out, s.digest)
    INSERT INTO rouse.attempt AS a (job, attempt, lost, worker, claimed_at, started_at, ended_at, error, lane, tenant,
                                    cpu_us, memory_peak_bytes, host_calls, bytes_in, bytes_out, digest)
    SELECT b.id, b.attempt, false, b.worker, b.claimed_at, b.claimed_at + b.started_us * interval '1 microsecond', at, b.error, b.lane, b.tenant,
           b.cpu_us, b.memory_peak, b.host_calls, b.bytes_in, b.bytes_out, b.digest
    FROM back AS b
    RETURNING a.job;

    -- Claims given back: as if the claim had never been made, but for a record. Each is ready at once, for
    -- whoever sleeps.
    WITH back AS (
        UPDATE rouse.job AS j
        SET state = 'queued', attempt = j.attempt - 1, fence = NULL, worker = NULL, claimed_at = NULL, lease_until = NULL,
            turn = nextval('rouse.turn_seq')
        FROM unnest(p_ids, p_fences, p_states, p_errors) AS s(id, fence, state, error), rouse.job AS was
        WHERE j.id = ANY (ARRAY[s.id]) AND j.fence = s.fence AND s.state = 'queued' AND s.error IS NULL
          AND (p_worker IS NULL OR j.worker = p_worker) AND was.id = ANY (ARRAY[s.id])
        RETURNING j.id, j.lane, was.attempt, was.worker),
    kept AS (
        INSERT INTO rouse.record (at, job, event, attempt, worker)
        SELECT at, b.id, 'released', b.attempt, b.worker FROM back AS b)
    SELECT array_agg(b.id), array_agg(DISTINCT b.lane) INTO released, lanes FROM back AS b;
    -- The lock by which commits spare each other the same notification is one for each lane, and the server
    -- has room for some thousands of locks: for many lanes none is taken.
    PERFORM rouse._notify(l.lane, true, CASE WHEN cardinality(lanes) <= 32 THEN at ELSE '-infinity' END)
    FROM unnest(lanes) AS l(lane);
    RETURN QUERY SELECT r.id FROM unnest(released) AS r(id);
END
$$;

-- rouse._settle for workers, with what each attempt has used: returns the ids that were accepted, and those that are locked.
-- A row that somebody else has locked (a cancellation whose transaction is still open) fails the
-- call after 250 ms; the worker then calls again with p_skip_locked, which leaves such rows out
-- and says so. An id that is not returned at all has lost its lease, or was never this worker's: of
-- that the worker's row keeps count.
CREATE FUNCTION rouse.settle(
    p_worker bigint, p_key bytea, p_ids bigint[], p_fences bigint[], p_states rouse.state[], p_started_us bigint[],
    p_results jsonb[], p_errors jsonb[], p_delays_ms bigint[], p_retry_at timestamptz[],
    p_memory bigint[], p_skip_locked boolean,
    p_cpu_us bigint[], p_memory_peaks bigint[], p_host_calls integer[], p_bytes_in bigint[], p_bytes_out bigint[], p_digests bytea[])
RETURNS TABLE (id bigint, locked boolean)
LANGUAGE plpgsql SECURITY DEFINER ROWS 100
SET search_path = pg_catalog, pg_temp SET lock_timeout = '250ms' SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    free bigint[];
    done bigint[];
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    IF p_skip_locked THEN
        SELECT coalesce(array_agg(mine.id), '{}') INTO free
        FROM unnest(p_ids, p_fences) AS s(id, fence)
        CROSS JOIN LATERAL (
            SELECT j.id FROM rouse.job AS j
            WHERE j.id = s.id AND j.fence = s.fence FOR UPDATE SKIP LOCKED) AS mine;
        RETURN QUERY
        SELECT j.id, true FROM unnest(p_ids, p_fences) AS s(id, fence)
        JOIN rouse.job AS j ON j.id = ANY (ARRAY[s.id]) AND j.fence = s.fence
        WHERE NOT s.id = ANY (free);
        -- A null fence fits no job.
        SELECT array_agg(CASE WHEN s.id = ANY (free) THEN s.fence END ORDER BY s.ordinality) INTO p_fences
        FROM unnest(p_ids, p_fences) WITH ORDINALITY AS s(id, fence);
    END IF;
    done := ARRAY(SELECT s.id FROM rouse._settle(
        p_worker, p_ids, p_fences, p_states, p_started_us, p_results, p_errors, p_delays_ms, p_retry_at, p_memory,
        p_cpu_us, p_memory_peaks, p_host_calls, p_bytes_in, p_bytes_out, p_digests) AS s(id));
    IF cardinality(done) < cardinality(p_ids) THEN
        PERFORM rouse._count_refused(p_worker, ARRAY(SELECT a.id FROM unnest(p_ids) AS a(id) WHERE NOT a.id = ANY (done)));
    END IF;
    RETURN QUERY SELECT d.id, false FROM unnest(done) AS d(id);
END
$$;

-- Makes the partitions of today and the next `ahead` days (UTC). Safe to run at any time: a table is
-- created on its own and then attached, which lets inserts and reads of the others go on.
CREATE OR REPLACE FUNCTION rouse.prepare_partitions(ahead integer DEFAULT 7) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET datestyle = 'ISO' AS $$
DECLARE
    parent text;
    day    date;
    name   text;
    made   integer := 0;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('rouse.partitions', 0));
    FOREACH parent IN ARRAY ARRAY['finished', 'attempt', 'record', 'step', 'log'] LOOP
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
-- because whoever settles a job queues behind it meanwhile. And once something was dropped, it waits
-- once at most: the locks of a drop are held until the commit, so that settlements queue behind all
-- that it waits for afterwards. The rest is left to a later call. Steps of jobs that still live are kept.
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
            SELECT c.relname, i.inhparent = 'rouse.step'::regclass AS has_steps
            FROM pg_inherits AS i
            JOIN pg_class AS c ON c.oid = i.inhrelid
            WHERE i.inhparent IN ('rouse.finished'::regclass, 'rouse.attempt'::regclass, 'rouse.record'::regclass, 'rouse.step'::regclass,
                                  'rouse.log'::regclass))
        SELECT p.relname, p.has_steps FROM partition AS p
        WHERE to_date(right(p.relname, 8), 'YYYYMMDD') + 1 <= ((now() - keep) AT TIME ZONE 'UTC')::date
        -- Steps first: while they are copied, nothing else is locked.
        ORDER BY p.has_steps DESC, p.relname
    LOOP
        BEGIN
            IF old.has_steps THEN
                -- Nothing is written to so old a partition any more.
                EXECUTE format(
                    'INSERT INTO rouse.step SELECT s.job, s.name, s.result, s.attempt, s.worker, s.at, clock_timestamp() FROM rouse.%I AS s '
                    'WHERE EXISTS (SELECT FROM rouse.job AS j WHERE j.id = s.job)', old.relname);
            END IF;
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

-- rouse.drop_partitions for workers. What is left of what attempts have said whose worker has gone goes with it.
CREATE OR REPLACE FUNCTION rouse.drop_partitions(p_worker bigint, p_key bytea, p_keep interval, OUT dropped integer, OUT in_use integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    DELETE FROM rouse.progress AS p
    WHERE p.at < clock_timestamp() - interval '1 hour'
      AND NOT EXISTS (SELECT FROM rouse.job AS j WHERE j.id = p.job AND j.fence = p.fence);
    DELETE FROM rouse.running AS r
    WHERE r.at < clock_timestamp() - interval '1 hour'
      AND NOT EXISTS (SELECT FROM rouse.job AS j WHERE j.id = r.job AND j.fence = r.fence);
    SELECT d.dropped, d.in_use INTO dropped, in_use FROM rouse.drop_partitions(p_keep) AS d;
END
$$;

-- Every job that is kept, live or finished. `error` is the last failed attempt's; `progress` is what the
-- attempt that runs has said last; `usage` is what the last attempt has used, or the one that runs so far.
CREATE OR REPLACE VIEW rouse.jobs AS
SELECT j.id, l.handler, l.queue, l.priority, l.tags, j.state, j.tenant, j.source, substr(j.unique_key, strpos(j.unique_key, '/') + 1) AS unique_key,
       j.attempt, j.lost, j.max_attempts, j.retried_from, j.worker,
       j.requested_at, j.available_at, j.claimed_at, NULL::timestamptz AS started_at, NULL::timestamptz AS finished_at,
       j.payload, NULL::jsonb AS result,
       (SELECT a.error FROM rouse.attempt AS a WHERE a.job = j.id ORDER BY a.attempt DESC LIMIT 1) AS error,
       (SELECT jsonb_build_object('percent', p.percent, 'step', p.step, 'at', p.at)
        FROM rouse.progress AS p WHERE p.job = j.id AND p.fence = j.fence) AS progress,
       (SELECT rouse._usage(r.cpu_us, r.memory_bytes, r.host_calls, r.bytes_in, r.bytes_out, NULL)
        FROM rouse.running AS r WHERE r.job = j.id AND r.fence = j.fence) AS usage
FROM rouse.job AS j
CROSS JOIN LATERAL (SELECT * FROM rouse.lane AS l WHERE l.id = j.lane LIMIT 1) AS l
UNION ALL
SELECT f.id, l.handler, l.queue, l.priority, l.tags, f.state, f.tenant, f.source, substr(f.unique_key, strpos(f.unique_key, '/') + 1),
       f.attempt, f.lost, f.max_attempts, f.retried_from, f.worker,
       f.requested_at, f.available_at, f.claimed_at, f.started_at, f.finished_at,
       f.payload, f.result, f.error, NULL,
       rouse._usage(f.cpu_us, f.memory_peak_bytes, f.host_calls, f.bytes_in, f.bytes_out, f.digest)
FROM rouse.finished AS f
CROSS JOIN LATERAL (SELECT * FROM rouse.lane AS l WHERE l.id = f.lane LIMIT 1) AS l;

-- What has happened to one job, oldest first. Nothing of it is rewritten once it has ended. Who ended
-- a job from outside stands as `by` in the detail of its end.
CREATE OR REPLACE FUNCTION rouse.history(id bigint)
RETURNS TABLE (at timestamptz, event text, attempt integer, worker text, detail jsonb)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT e.at, e.event, e.attempt, w.worker_id, e.detail
    FROM (
        SELECT 0 AS place, j.requested_at AS at, 'requested' AS event, NULL::integer AS attempt, NULL::bigint AS worker,
               jsonb_strip_nulls(jsonb_build_object('handler', j.handler, 'queue', j.queue, 'tenant', j.tenant, 'source', j.source,
                                                    'retried_from', j.retried_from)) AS detail
        FROM rouse.jobs AS j WHERE j.id = history.id
        UNION ALL
        SELECT 2 * a.attempt, coalesce(a.started_at, a.claimed_at), CASE WHEN a.lost THEN 'claimed' ELSE 'started' END, a.attempt, a.worker, NULL
        FROM rouse.attempt AS a WHERE a.job = history.id
        UNION ALL
        SELECT 2 * a.attempt + 1, a.ended_at, CASE WHEN a.lost THEN 'lost' ELSE 'failed' END, a.attempt, a.worker,
               a.error || jsonb_strip_nulls(jsonb_build_object('usage', rouse._usage(a.cpu_us, a.memory_peak_bytes, a.host_calls, a.bytes_in, a.bytes_out, a.digest)))
        FROM rouse.attempt AS a WHERE a.job = history.id
        UNION ALL
        SELECT 2 * j.attempt, j.claimed_at, 'claimed', j.attempt, j.worker, NULL
        FROM rouse.job AS j WHERE j.id = history.id AND j.state = 'running'
        UNION ALL
        SELECT 2 * f.attempt, coalesce(f.started_at, f.claimed_at), CASE WHEN f.started_at IS NULL THEN 'claimed' ELSE 'started' END,
               f.attempt, f.worker, NULL
        FROM rouse.finished AS f WHERE f.id = history.id AND f.claimed_at IS NOT NULL
        UNION ALL
        SELECT 2 * f.attempt + 1, f.finished_at, f.state::text, nullif(f.attempt, 0), f.worker,
               nullif(coalesce(f.error, '{}')
                      || jsonb_strip_nulls(jsonb_build_object('usage', rouse._usage(f.cpu_us, f.memory_peak_bytes, f.host_calls, f.bytes_in, f.bytes_out, f.digest)))
                      || coalesce((
                   SELECT jsonb_build_object('by', r.who) FROM rouse.record AS r
                   WHERE r.job = f.id AND r.event IN ('cancelled', 'completed', 'failed', 'deleted') LIMIT 1), '{}'), '{}')
        FROM rouse.finished AS f WHERE f.id = history.id
        UNION ALL
        SELECT 2 * s.attempt, s.at, 'step', s.attempt, s.worker, jsonb_build_object('name', s.name)
        FROM rouse.step AS s WHERE s.job = history.id
        UNION ALL
        -- Within an attempt between its start and its end; after an attempt until the next begins; and what was
        -- done to the job after its end, last.
        SELECT CASE WHEN r.event IN ('released', 'renewed') THEN 2 * r.attempt
                    WHEN r.event = 'retried' THEN 2147483647
                    ELSE 2 * coalesce(r.attempt, 0) + 1 END,
               r.at, r.event, nullif(r.attempt, 0), r.worker,
               nullif(coalesce(r.detail, '{}') || CASE WHEN r.who IS NULL THEN '{}' ELSE jsonb_build_object('by', r.who) END, '{}')
        FROM rouse.record AS r
        -- The end itself says the same as these.
        WHERE r.job = history.id AND r.event NOT IN ('cancelled', 'completed', 'failed')
    ) AS e
    LEFT JOIN rouse.worker AS w ON w.incarnation = e.worker
    ORDER BY e.place, e.at, e.event = 'deleted' DESC
$$;

-- What was used, by day (UTC), handler and tenant, for as long as jobs are kept. Reads every row of the days that are asked for.
CREATE VIEW rouse.usage AS
SELECT a.day, l.handler, a.tenant, count(*) AS attempts, sum(a.cpu_us) / 1e6 AS cpu_seconds, sum(a.wall) AS wall_seconds,
       max(a.memory_peak_bytes) AS memory_peak_bytes, sum(a.host_calls) AS host_calls, sum(a.bytes_in) AS bytes_in, sum(a.bytes_out) AS bytes_out
FROM (
    SELECT (f.finished_at AT TIME ZONE 'UTC')::date AS day, f.lane, f.tenant, f.cpu_us, extract(epoch FROM f.finished_at - f.started_at) AS wall,
           f.memory_peak_bytes, f.host_calls, f.bytes_in, f.bytes_out
    FROM rouse.finished AS f WHERE f.cpu_us IS NOT NULL
    UNION ALL
    SELECT (t.ended_at AT TIME ZONE 'UTC')::date, t.lane, t.tenant, t.cpu_us, extract(epoch FROM t.ended_at - t.started_at),
           t.memory_peak_bytes, t.host_calls, t.bytes_in, t.bytes_out
    FROM rouse.attempt AS t WHERE t.cpu_us IS NOT NULL) AS a
CROSS JOIN LATERAL (SELECT * FROM rouse.lane AS l WHERE l.id = a.lane LIMIT 1) AS l
GROUP BY a.day, l.handler, a.tenant;
GRANT SELECT ON rouse.usage TO rouse_observer;

-- What runs now, the longest first. Served by job_lease.
CREATE VIEW rouse.top AS
SELECT j.id, l.handler, l.queue, j.tenant, w.worker_id, j.attempt, j.claimed_at, p.percent, p.step,
       r.cpu_us, r.memory_bytes, r.host_calls, r.bytes_in, r.bytes_out, r.at
FROM rouse.job AS j
CROSS JOIN LATERAL (SELECT * FROM rouse.lane AS l WHERE l.id = j.lane LIMIT 1) AS l
LEFT JOIN rouse.worker AS w ON w.incarnation = j.worker
LEFT JOIN rouse.progress AS p ON p.job = j.id AND p.fence = j.fence
LEFT JOIN rouse.running AS r ON r.job = j.id AND r.fence = j.fence
WHERE j.state = 'running';
GRANT SELECT ON rouse.top TO rouse_observer;

-- Says what the attempts of a worker have used so far: all of those of which that is told, so that what is not named
-- any more is forgotten. Nothing is written about jobs that are not this worker's.
CREATE FUNCTION rouse.report_usage(
    p_worker bigint, p_key bytea, p_ids bigint[], p_fences bigint[], p_cpu_us bigint[], p_memory_bytes bigint[],
    p_host_calls integer[], p_bytes_in bigint[], p_bytes_out bigint[])
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at timestamptz := clock_timestamp();
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    PERFORM set_config('synchronous_commit', 'off', true);
    DELETE FROM rouse.running AS r WHERE r.worker = p_worker AND NOT r.job = ANY (p_ids);
    INSERT INTO rouse.running AS r (job, fence, worker, cpu_us, memory_bytes, host_calls, bytes_in, bytes_out, at)
    SELECT s.id, s.fence, p_worker, s.cpu_us, s.memory_bytes, s.host_calls, s.bytes_in, s.bytes_out, at
    FROM unnest(p_ids, p_fences, p_cpu_us, p_memory_bytes, p_host_calls, p_bytes_in, p_bytes_out)
             AS s(id, fence, cpu_us, memory_bytes, host_calls, bytes_in, bytes_out)
    CROSS JOIN LATERAL (
        SELECT FROM rouse.job AS j WHERE j.id = s.id AND j.fence = s.fence AND j.worker = p_worker) AS j
    -- In one order, whoever says it: two workers at odds about a job do not wait for each other in a ring.
    ORDER BY s.id
    ON CONFLICT (job) DO UPDATE SET fence = excluded.fence, worker = excluded.worker, cpu_us = excluded.cpu_us,
        memory_bytes = excluded.memory_bytes, host_calls = excluded.host_calls, bytes_in = excluded.bytes_in,
        bytes_out = excluded.bytes_out, at = excluded.at;
END
$$;

-- Keeps what attempts have printed and logged, one line per position of the lists; `p_ages_ms`: how long ago. Returns how many
-- were kept: a worker says something only of jobs that it has, or of which it has ended an attempt.
CREATE FUNCTION rouse.append_log(
    p_worker bigint, p_key bytea, p_ids bigint[], p_attempts integer[], p_lines integer[], p_ages_ms bigint[], p_levels text[], p_texts text[])
RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at   timestamptz := clock_timestamp();
    mine bigint[];
    kept integer;
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    PERFORM set_config('synchronous_commit', 'off', true);
    SELECT coalesce(array_agg(said.id), '{}') INTO mine
    FROM (SELECT DISTINCT u.id FROM unnest(p_ids) AS u(id)) AS said
    WHERE EXISTS (SELECT FROM rouse.job AS j WHERE j.id = said.id AND j.worker = p_worker)
       OR EXISTS (SELECT FROM rouse.attempt AS a WHERE a.job = said.id AND a.worker = p_worker)
       OR EXISTS (SELECT FROM rouse.finished AS f WHERE f.id = said.id AND f.worker = p_worker);
    INSERT INTO rouse.log (job, attempt, line, worker, at, level, text)
    SELECT s.id, s.attempt, s.line, p_worker, at - s.age_ms * interval '1 millisecond', s.level, s.text
    FROM unnest(p_ids, p_attempts, p_lines, p_ages_ms, p_levels, p_texts) AS s(id, attempt, line, age_ms, level, text)
    WHERE s.id = ANY (mine);
    GET DIAGNOSTICS kept = ROW_COUNT;
    RETURN kept;
END
$$;

-- What the attempts at a job have printed and logged, in order, after this line of this attempt (0, 0: from the start), at most `p_most` lines.
CREATE FUNCTION rouse.job_log(id bigint, after_attempt integer DEFAULT 0, after_line integer DEFAULT 0, most integer DEFAULT 1000)
RETURNS TABLE (attempt integer, line integer, at timestamptz, level text, text text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT l.attempt, l.line, l.at, l.level, l.text FROM rouse.log AS l
    WHERE l.job = job_log.id AND (l.attempt, l.line) > (job_log.after_attempt, job_log.after_line)
    ORDER BY l.attempt, l.line LIMIT least(job_log.most, 100000)
$$;

REVOKE ALL ON FUNCTION rouse._usage, rouse._settle, rouse.report_usage, rouse.append_log, rouse.job_log FROM PUBLIC;
REVOKE ALL ON FUNCTION rouse.settle(bigint, bytea, bigint[], bigint[], rouse.state[], bigint[], jsonb[], jsonb[], bigint[], timestamptz[], bigint[], boolean,
    bigint[], bigint[], integer[], bigint[], bigint[], bytea[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION rouse.settle(bigint, bytea, bigint[], bigint[], rouse.state[], bigint[], jsonb[], jsonb[], bigint[], timestamptz[], bigint[], boolean,
    bigint[], bigint[], integer[], bigint[], bigint[], bytea[]) TO rouse_worker;
GRANT EXECUTE ON FUNCTION rouse.report_usage, rouse.append_log TO rouse_worker;
GRANT EXECUTE ON FUNCTION rouse.job_log TO rouse_producer, rouse_worker, rouse_observer;
-- The views read with the rights of whoever made them; this one is called with those of the reader.
GRANT EXECUTE ON FUNCTION rouse._usage TO rouse_observer;

SELECT rouse.prepare_partitions();
