-- What becomes of jobs whose worker is gone is told to whoever finds them; what is old is dropped without copying in vain;
-- progress is locked in one order; results of steps are read one at a time.
--
-- What this does to a database with live jobs: functions are made and replaced. Older hosts go on with those that they know.

-- Takes over jobs whose lease has run out: up to `p_wanted` are claimed at once, ahead of everything
-- queued. A job's first loss is taken up like that; after a later one it waits (10 s, doubled
-- each time); a job that was lost p_lost_max times fails, because it probably kills its workers.
-- `within_ms`: only leases that ran out within the last so many
-- milliseconds are looked for; null: all. Served by job_lease. Rows that somebody else holds locked are skipped, and
-- so are those of paused queues.
--
-- Returns those that were claimed (`became` is null), and, if asked to tell, those that were not: `queued` or `failed`, with
-- the attempt that was lost, and `lost_after_ms`, its time from the claim to now.
CREATE FUNCTION rouse.adopt(
    p_worker bigint, p_key bytea, p_fence bigint, p_lanes bigint[], p_lease_ms bigint[], p_wanted integer, p_lost_max integer,
    p_within_ms bigint, p_tell boolean)
RETURNS TABLE (id bigint, lane bigint, turn bigint, attempt integer, lost integer, max_attempts integer, tenant text, source text,
               requested_at timestamptz, claimed_at timestamptz, payload jsonb, memory_bytes bigint, became rouse.state, lost_after_ms bigint)
LANGUAGE plpgsql SECURITY DEFINER ROWS 10
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at     timestamptz := clock_timestamp();
    since  timestamptz := coalesce(at - p_within_ms * interval '1 millisecond', '-infinity');
    orphan record;
    why    jsonb;
    then_it rouse.state;
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    PERFORM FROM rouse.queue AS q WHERE q.paused_at IS NOT NULL;
    IF FOUND THEN
        p_lanes := rouse._not_paused(p_lanes);
    END IF;
    FOR orphan IN
        SELECT j.id, j.lane, j.fence, j.attempt, j.lost, j.worker, j.claimed_at, asked.lease_ms, w.worker_id
        FROM rouse.job AS j
        JOIN unnest(p_lanes, p_lease_ms) AS asked(lane, lease_ms) ON asked.lane = j.lane
        LEFT JOIN rouse.worker AS w ON w.incarnation = ANY (ARRAY[j.worker])
        WHERE j.state = 'running' AND j.lease_until > since AND j.lease_until < at
        ORDER BY j.lease_until LIMIT p_wanted
        FOR NO KEY UPDATE OF j SKIP LOCKED
    LOOP
        -- A hint for the old owner, if it still lives.
        PERFORM pg_notify('rouse_worker_' || orphan.worker, orphan.id::text);
        why := jsonb_build_object('kind', 'lost', 'message', format(
            'worker %s (incarnation %s) did not renew its lease', coalesce(orphan.worker_id, 'unknown'), orphan.worker));
        IF orphan.lost + 1 >= p_lost_max THEN
            why := why || jsonb_build_object('message', format(
                'the job was lost with its worker %s times; it probably kills the worker', orphan.lost + 1));
            UPDATE rouse.job AS j SET lost = j.lost + 1 WHERE j.id = orphan.id;
            PERFORM rouse._settle(NULL, ARRAY[orphan.id], ARRAY[orphan.fence], ARRAY['failed'::rouse.state], ARRAY[NULL]::bigint[],
                ARRAY[NULL]::jsonb[], ARRAY[why], ARRAY[NULL]::bigint[], ARRAY[NULL]::timestamptz[], ARRAY[NULL]::bigint[]);
            then_it := 'failed';
        ELSE
            INSERT INTO rouse.attempt (job, attempt, lost, worker, claimed_at, started_at, ended_at, error)
            VALUES (orphan.id, orphan.attempt, true, orphan.worker, orphan.claimed_at, NULL, at, why);
            IF orphan.lost = 0 THEN
                RETURN QUERY
                UPDATE rouse.job AS j
                SET attempt = j.attempt + 1, lost = j.lost + 1, fence = p_fence, worker = p_worker, claimed_at = at,
                    lease_until = at + orphan.lease_ms * interval '1 millisecond', turn = nextval('rouse.turn_seq')
                WHERE j.id = orphan.id
                RETURNING j.id, j.lane, j.turn, j.attempt, j.lost, j.max_attempts, j.tenant, j.source, j.requested_at, j.claimed_at, j.payload,
                          j.memory_bytes, NULL::rouse.state, NULL::bigint;
                CONTINUE;
            END IF;
            UPDATE rouse.job AS j
            SET state = 'queued', turn = NULL, fence = NULL, worker = NULL, claimed_at = NULL, lease_until = NULL, lost = j.lost + 1,
                available_at = at + 10 * 2 ^ (orphan.lost - 1) * interval '1 second'
            WHERE j.id = orphan.id;
            then_it := 'queued';
        END IF;
        IF p_tell THEN
            id := orphan.id;
            lane := orphan.lane;
            attempt := orphan.attempt;
            lost := orphan.lost + 1;
            became := then_it;
            lost_after_ms := (extract(epoch FROM at - orphan.claimed_at) * 1000)::bigint;
            RETURN NEXT;
        END IF;
    END LOOP;
END
$$;

-- The same for older hosts, which know of claimed jobs only.
CREATE OR REPLACE FUNCTION rouse.adopt(
    p_worker bigint, p_key bytea, p_fence bigint, p_lanes bigint[], p_lease_ms bigint[], p_wanted integer, p_lost_max integer,
    p_within_ms bigint)
RETURNS SETOF rouse.claimed
LANGUAGE sql SECURITY DEFINER ROWS 10 SET search_path = pg_catalog, pg_temp AS $$
    SELECT a.id, a.lane, a.turn, a.attempt, a.lost, a.max_attempts, a.tenant, a.source, a.requested_at, a.claimed_at, a.payload, a.memory_bytes
    FROM rouse.adopt(p_worker, p_key, p_fence, p_lanes, p_lease_ms, p_wanted, p_lost_max, p_within_ms, false) AS a
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

-- Says how far attempts are, one per position of the lists, and returns the ids of those that are this
-- worker's; `p_ended` are jobs whose attempts have ended: what they said is forgotten.
--
-- Rows that are there are locked in one order first, those of both lists together: two workers that are at odds about
-- jobs do not wait for each other in a ring.
CREATE OR REPLACE FUNCTION rouse.report(
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
    PERFORM FROM (SELECT DISTINCT u.id FROM unnest(p_ids || p_ended) AS u(id) ORDER BY u.id) AS asked
    CROSS JOIN LATERAL (SELECT FROM rouse.progress AS p WHERE p.job = asked.id FOR UPDATE) AS there;
    DELETE FROM rouse.progress AS p USING unnest(p_ended, p_ended_fences) AS e(id, fence)
    WHERE p.job = ANY (ARRAY[e.id]) AND p.fence = e.fence;
    WITH said AS (
        INSERT INTO rouse.progress AS p (job, fence, percent, step, at)
        SELECT s.id, s.fence, s.percent, s.step, at
        FROM unnest(p_ids, p_fences, p_percents, p_steps) AS s(id, fence, percent, step)
        CROSS JOIN LATERAL (
            SELECT FROM rouse.job AS j WHERE j.id = s.id AND j.fence = s.fence AND j.worker = p_worker) AS j
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

-- Records the result of a step, and returns null, or the reason why the job is not (any more) this
-- worker's: then nothing is recorded. A second call for the same step changes nothing: the answer to the first was lost.
-- The lock keeps away whoever would settle the job or take it over, until this has committed: no result
-- of an attempt whose lease is gone is ever read by the next. Waits 250 ms for it; then the call fails
-- with lock_not_available. Served by the primary key and step_job.
CREATE OR REPLACE FUNCTION rouse.record_step(p_worker bigint, p_key bytea, p_id bigint, p_fence bigint, p_name text, p_result json)
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
        -- Null would say that it is recorded. Where no reason is found a moment later, it is not all the same.
        RETURN coalesce(rouse._refusal(p_worker, p_id, p_fence), 'error');
    END IF;
    PERFORM FROM rouse.step AS s WHERE s.job = p_id AND s.name = p_name;
    IF NOT FOUND THEN
        INSERT INTO rouse.step (job, name, result, attempt, worker, at, kept_at)
        VALUES (p_id, p_name, p_result, mine, p_worker, at, at);
    END IF;
    RETURN NULL;
END
$$;

-- The steps of a job that are recorded, with the bytes of their results, for the worker that runs it; or one row with the
-- reason why it is not (any more) this worker's. Served by step_job, in each partition.
CREATE FUNCTION rouse.recorded_step_names(p_worker bigint, p_key bytea, p_id bigint, p_fence bigint)
RETURNS TABLE (refusal text, name text, bytes integer)
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
    RETURN QUERY SELECT NULL::text, s.name, octet_length(s.result::text) FROM rouse.step AS s WHERE s.job = p_id;
END
$$;

-- The result of one recorded step, in the same way. Without a row it is not recorded.
CREATE FUNCTION rouse.recorded_step(p_worker bigint, p_key bytea, p_id bigint, p_fence bigint, p_name text)
RETURNS TABLE (refusal text, result json)
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
    RETURN QUERY SELECT NULL::text, s.result FROM rouse.step AS s WHERE s.job = p_id AND s.name = p_name LIMIT 1;
END
$$;

REVOKE ALL ON FUNCTION rouse.adopt(bigint, bytea, bigint, bigint[], bigint[], integer, integer, bigint, boolean),
    rouse.recorded_step_names, rouse.recorded_step FROM PUBLIC;
GRANT EXECUTE ON FUNCTION rouse.adopt(bigint, bytea, bigint, bigint[], bigint[], integer, integer, bigint, boolean),
    rouse.recorded_step_names, rouse.recorded_step TO rouse_worker;
