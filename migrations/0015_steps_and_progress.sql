-- What an attempt says while it runs: results of steps, which a later attempt gets back instead of running them
-- again, and how far it is. Only the worker that has the job may say either.
--
-- What this does to a database with live jobs: two tables are made, and functions and views are replaced.

-- Results of steps. Insert-only, one partition a day.
CREATE TABLE rouse.step (
    job     bigint NOT NULL,
    name    text NOT NULL CHECK (length(name) BETWEEN 1 AND 200),
    -- As the handler wrote it: json, which keeps each byte, not jsonb.
    result  json NOT NULL,
    attempt integer NOT NULL,
    worker  bigint NOT NULL,
    at      timestamptz NOT NULL,
    -- The day of its partition: `at`, or later where its job still lived when that partition was dropped.
    kept_at timestamptz NOT NULL
) PARTITION BY RANGE (kept_at);
CREATE INDEX step_job ON rouse.step (job);
GRANT SELECT ON rouse.step TO rouse_observer;

-- How far running attempts are. Unlogged: after a crash of the server they say it again. A row says nothing
-- once its fence is not that of the job.
CREATE UNLOGGED TABLE rouse.progress (
    job     bigint PRIMARY KEY,
    fence   bigint NOT NULL,
    percent smallint NOT NULL CHECK (percent BETWEEN 0 AND 100),
    step    text NOT NULL CHECK (length(step) <= 200),
    at      timestamptz NOT NULL
);
GRANT SELECT (job, percent, step, at) ON rouse.progress TO rouse_observer;

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
    FOREACH parent IN ARRAY ARRAY['finished', 'attempt', 'record', 'step'] LOOP
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
            WHERE i.inhparent IN ('rouse.finished'::regclass, 'rouse.attempt'::regclass, 'rouse.record'::regclass, 'rouse.step'::regclass))
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

-- rouse.drop_partitions for workers. What is left of the progress of attempts whose worker has gone goes with it.
CREATE OR REPLACE FUNCTION rouse.drop_partitions(p_worker bigint, p_key bytea, p_keep interval, OUT dropped integer, OUT in_use integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    DELETE FROM rouse.progress AS p
    WHERE p.at < clock_timestamp() - interval '1 hour'
      AND NOT EXISTS (SELECT FROM rouse.job AS j WHERE j.id = p.job AND j.fence = p.fence);
    SELECT d.dropped, d.in_use INTO dropped, in_use FROM rouse.drop_partitions(p_keep) AS d;
END
$$;

-- Why a job is not this worker's under this fence (the words of the abort reasons); null: it is. Counts the
-- attempt of a worker to say something about another's job.
CREATE FUNCTION rouse._refusal(p_worker bigint, p_id bigint, p_fence bigint) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    live  record;
    ended rouse.state;
BEGIN
    SELECT j.fence, j.worker INTO live FROM rouse.job AS j WHERE j.id = p_id;
    IF FOUND THEN
        IF live.fence = p_fence AND live.worker = p_worker THEN
            RETURN NULL;
        END IF;
        PERFORM rouse._count_refused(p_worker, ARRAY[p_id]);
        RETURN 'taken_by_another_worker';
    END IF;
    SELECT f.state INTO ended FROM rouse.finished AS f WHERE f.id = p_id LIMIT 1;
    RETURN CASE WHEN ended IS NULL THEN 'not_found' WHEN ended = 'cancelled' THEN 'cancelled' ELSE 'already_completed' END;
END
$$;

-- The steps of a job that are recorded, for the worker that runs it; or one row with the reason why it is
-- not (any more) this worker's. Served by step_job, in each partition.
CREATE FUNCTION rouse.recorded_steps(p_worker bigint, p_key bytea, p_id bigint, p_fence bigint)
RETURNS TABLE (refusal text, name text, result json)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    refusal := rouse._refusal(p_worker, p_id, p_fence);
    IF refusal IS NOT NULL THEN
        RETURN NEXT;
        RETURN;
    END IF;
    RETURN QUERY SELECT NULL::text, s.name, s.result FROM rouse.step AS s WHERE s.job = p_id;
END
$$;

-- Records the result of a step, and returns null, or the reason why the job is not (any more) this
-- worker's: then nothing is recorded. A second call for the same step changes nothing: the answer to the first was lost.
-- The lock keeps away whoever would settle the job or take it over, until this has committed: no result
-- of an attempt whose lease is gone is ever read by the next. Waits 250 ms for it; then the call fails
-- with lock_not_available. Served by the primary key and step_job.
CREATE FUNCTION rouse.record_step(p_worker bigint, p_key bytea, p_id bigint, p_fence bigint, p_name text, p_result json)
RETURNS text
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '250ms' SET enable_seqscan = off SET jit = off AS $$
DECLARE
    at   timestamptz := clock_timestamp();
    mine integer;
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    SELECT j.attempt INTO mine FROM rouse.job AS j
    WHERE j.id = p_id AND j.fence = p_fence AND j.worker = p_worker FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN rouse._refusal(p_worker, p_id, p_fence);
    END IF;
    PERFORM FROM rouse.step AS s WHERE s.job = p_id AND s.name = p_name;
    IF NOT FOUND THEN
        INSERT INTO rouse.step (job, name, result, attempt, worker, at, kept_at)
        VALUES (p_id, p_name, p_result, mine, p_worker, at, at);
    END IF;
    RETURN NULL;
END
$$;

-- Says how far attempts are, one per position of the lists, and returns the ids of those that are this
-- worker's; `p_ended` are jobs whose attempts have ended: what they said is forgotten.
CREATE FUNCTION rouse.report(
    p_worker bigint, p_key bytea, p_ids bigint[], p_fences bigint[], p_percents integer[], p_steps text[],
    p_ended bigint[], p_ended_fences bigint[])
RETURNS SETOF bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at   timestamptz := clock_timestamp();
    mine bigint[];
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    PERFORM set_config('synchronous_commit', 'off', true);
    DELETE FROM rouse.progress AS p USING unnest(p_ended, p_ended_fences) AS e(id, fence)
    WHERE p.job = ANY (ARRAY[e.id]) AND p.fence = e.fence;
    WITH said AS (
        INSERT INTO rouse.progress AS p (job, fence, percent, step, at)
        SELECT s.id, s.fence, s.percent, s.step, at
        FROM unnest(p_ids, p_fences, p_percents, p_steps) AS s(id, fence, percent, step)
        CROSS JOIN LATERAL (
            SELECT FROM rouse.job AS j WHERE j.id = s.id AND j.fence = s.fence AND j.worker = p_worker) AS j
        -- In one order, whoever says it: two workers at odds about a job do not wait for each other in a ring.
        ORDER BY s.id
        ON CONFLICT (job) DO UPDATE SET fence = excluded.fence, percent = excluded.percent, step = excluded.step, at = excluded.at
        RETURNING p.job)
    SELECT coalesce(array_agg(said.job), '{}') INTO mine FROM said;
    IF cardinality(mine) < cardinality(p_ids) THEN
        PERFORM rouse._count_refused(p_worker, ARRAY(SELECT a.id FROM unnest(p_ids) AS a(id) WHERE NOT a.id = ANY (mine)));
    END IF;
    RETURN QUERY SELECT m.id FROM unnest(mine) AS m(id);
END
$$;

-- Every job that is kept, live or finished. `error` is the last failed attempt's; `progress` is what the
-- attempt that runs has said last.
CREATE OR REPLACE VIEW rouse.jobs AS
SELECT j.id, l.handler, l.queue, l.priority, l.tags, j.state, j.tenant, j.source, substr(j.unique_key, strpos(j.unique_key, '/') + 1) AS unique_key,
       j.attempt, j.lost, j.max_attempts, j.retried_from, j.worker,
       j.requested_at, j.available_at, j.claimed_at, NULL::timestamptz AS started_at, NULL::timestamptz AS finished_at,
       j.payload, NULL::jsonb AS result,
       (SELECT a.error FROM rouse.attempt AS a WHERE a.job = j.id ORDER BY a.attempt DESC LIMIT 1) AS error,
       (SELECT jsonb_build_object('percent', p.percent, 'step', p.step, 'at', p.at)
        FROM rouse.progress AS p WHERE p.job = j.id AND p.fence = j.fence) AS progress
FROM rouse.job AS j
CROSS JOIN LATERAL (SELECT * FROM rouse.lane AS l WHERE l.id = j.lane LIMIT 1) AS l
UNION ALL
SELECT f.id, l.handler, l.queue, l.priority, l.tags, f.state, f.tenant, f.source, substr(f.unique_key, strpos(f.unique_key, '/') + 1),
       f.attempt, f.lost, f.max_attempts, f.retried_from, f.worker,
       f.requested_at, f.available_at, f.claimed_at, f.started_at, f.finished_at,
       f.payload, f.result, f.error, NULL
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
        SELECT 2 * a.attempt + 1, a.ended_at, CASE WHEN a.lost THEN 'lost' ELSE 'failed' END, a.attempt, a.worker, a.error
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
               nullif(coalesce(f.error, '{}') || coalesce((
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

REVOKE ALL ON FUNCTION rouse._refusal, rouse.recorded_steps, rouse.record_step, rouse.report FROM PUBLIC;
GRANT EXECUTE ON FUNCTION rouse.recorded_steps, rouse.record_step, rouse.report TO rouse_worker;

SELECT rouse.prepare_partitions();
