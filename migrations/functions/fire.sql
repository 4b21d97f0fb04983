-- Firing: hosts list due schedules, and write their decisions. See schedules.sql.

-- True if a worker of a limited login may fire schedules of this queue and handler.
CREATE OR REPLACE FUNCTION rouse._may_fire(p_queue text, p_handler text) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (
        SELECT FROM rouse._limits() AS limits
        WHERE rouse._matches_any(p_queue, limits.queues) AND rouse._matches_any(p_handler, limits.handlers))
$$;

-- A time in microseconds since 1970.
CREATE OR REPLACE FUNCTION rouse._us(p_time timestamptz) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT (extract(epoch FROM p_time) * 1000000)::bigint
$$;

-- The live job that counts as the previous one of a schedule whose last job is p_last: the live job of its chain. If
-- p_last has ended without an attempt, for instance because it was cancelled, the job behind which it was queued may
-- still run. Null: there is none. Served by the indexes of rouse._chain_of and rouse._live_job.
CREATE OR REPLACE FUNCTION rouse._previous_job(p_last bigint) RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
DECLARE
    live bigint := rouse._live_job(rouse._chain_of(p_last));
BEGIN
    IF live IS NULL THEN
        SELECT rouse._live_job((f.after #>> '{previous,job}')::bigint) INTO live
        FROM rouse.finished AS f WHERE f.id = p_last AND f.attempt = 0 LIMIT 1;
    END IF;
    RETURN live;
END
$$;

-- Lists up to `p_max` of the schedules that became due after `p_since` (null: at any time), the most overdue first, and
-- those whose due times no host has computed yet:
--
--   now_us     the time of the database
--   wait_ms    the time until the next schedule that is not listed is due; null: there is none
--   due        [{"name", "revision", "cron", …}, …]; null: none. `previous`: waiting, if its previous job has not
--              started; running, if it has; null, if it has ended
--   backfills  up to ten that are not finished, in the order of their ids, starting after `p_after_backfill`, and
--              then from the first one; null: none
--
-- `p_except`: revisions of schedules that are left out, because the caller could not fire them a moment ago. Otherwise,
-- `p_max` schedules that cannot be fired would keep all others off the list. `p_except_backfills`: the same for
-- backfills, by id.
--
-- Locks nothing. Served by schedule_due and backfill_open.
CREATE OR REPLACE FUNCTION rouse.due_schedules(
    p_worker bigint, p_key bytea, p_max integer, p_since timestamptz, p_except bigint[] DEFAULT NULL,
    p_except_backfills bigint[] DEFAULT NULL, p_after_backfill bigint DEFAULT NULL,
    OUT now_us bigint, OUT wait_ms bigint, OUT due jsonb, OUT backfills jsonb)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at      timestamptz;
    limited boolean := rouse._authenticated_as_limited(p_worker, p_key);
    next    timestamptz;
BEGIN
    at := clock_timestamp();
    p_max := least(greatest(coalesce(p_max, 0), 1), 1000);
    now_us := rouse._us(at);
    SELECT jsonb_agg(jsonb_build_object(
        'name', s.name, 'revision', s.revision, 'cron', s.cron, 'time_zone', s.time_zone, 'overlap', s.overlap, 'catch_up', s.catch_up,
        'window_us', (extract(epoch FROM s.catch_up_window) * 1000000)::bigint, 'jitter_us', (extract(epoch FROM s.jitter) * 1000000)::bigint,
        'handled_us', rouse._us(s.handled_until),
        'previous', (SELECT CASE WHEN j.state = 'queued' AND j.attempt = 0 AND (j.id = s.last_job OR j.retried_from IS NOT NULL) THEN 'waiting' ELSE 'running' END
                     FROM rouse.job AS j WHERE j.id = rouse._previous_job(s.last_job))))
    INTO due
    FROM (
        (SELECT s.* FROM rouse.schedule AS s
         WHERE s.paused_at IS NULL AND coalesce(s.next_at, '-infinity') = '-infinity' AND (NOT limited OR rouse._may_fire(s.queue, s.handler))
           AND s.revision NOT IN (SELECT unnest(p_except))
         LIMIT p_max)
        UNION ALL
        (SELECT s.* FROM rouse.schedule AS s
         WHERE s.paused_at IS NULL AND coalesce(s.next_at, '-infinity') > coalesce(p_since, '-infinity') AND coalesce(s.next_at, '-infinity') <= at
           AND (NOT limited OR rouse._may_fire(s.queue, s.handler)) AND s.revision NOT IN (SELECT unnest(p_except))
         ORDER BY coalesce(s.next_at, '-infinity') LIMIT p_max)
        LIMIT p_max) AS s;
    next := (SELECT coalesce(s.next_at, '-infinity') FROM rouse.schedule AS s
             WHERE s.paused_at IS NULL AND coalesce(s.next_at, '-infinity') > at ORDER BY coalesce(s.next_at, '-infinity') LIMIT 1);
    IF isfinite(next) THEN
        wait_ms := ceil(extract(epoch FROM next - at) * 1000);
    END IF;
    SELECT jsonb_agg(jsonb_build_object(
        'id', b.id, 'schedule', b.schedule, 'cron', b.cron, 'time_zone', b.time_zone,
        'since_us', rouse._us(b.since), 'before_us', rouse._us(b.before), 'handled_us', rouse._us(b.handled_until)))
    INTO backfills
    FROM (
        (SELECT b.* FROM rouse.backfill AS b
         WHERE b.finished_at IS NULL AND b.id > coalesce(p_after_backfill, 0) AND b.id NOT IN (SELECT unnest(p_except_backfills))
           AND (NOT limited OR EXISTS (SELECT FROM rouse.schedule AS s WHERE s.name = b.schedule AND rouse._may_fire(s.queue, s.handler)))
         ORDER BY b.id LIMIT 10)
        UNION ALL
        (SELECT b.* FROM rouse.backfill AS b
         WHERE b.finished_at IS NULL AND b.id <= p_after_backfill AND b.id NOT IN (SELECT unnest(p_except_backfills))
           AND (NOT limited OR EXISTS (SELECT FROM rouse.schedule AS s WHERE s.name = b.schedule AND rouse._may_fire(s.queue, s.handler)))
         ORDER BY b.id LIMIT 10)
        LIMIT 10) AS b;
END
$$;

-- Makes a job that waits for its next attempt due now, for a schedule that leaves out a due time because the job is
-- live. Leaves a job alone if it waits for anything else, or if another transaction has locked it. Served by the
-- primary key.
CREATE OR REPLACE FUNCTION rouse._retry_at_once(p_id bigint, p_schedule text, p_at timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    retry record;
BEGIN
    -- CASE hides the conditions from the planner: otherwise, a plan could read all jobs that wait (job_due).
    SELECT j.lane, j.attempt INTO retry FROM rouse.job AS j
    WHERE j.id = p_id AND CASE WHEN j.state = 'queued' AND j.turn IS NULL THEN j.attempt > 0 AND j.wait IS NULL AND j.blockers IS NULL END
    FOR UPDATE SKIP LOCKED;
    IF FOUND THEN
        PERFORM rouse._ensure_partitions(p_at);
        UPDATE rouse.job AS j SET turn = nextval('rouse.turn_seq'), available_at = least(j.available_at, p_at) WHERE j.id = p_id;
        PERFORM rouse._notify(retry.lane, true, p_at);
        INSERT INTO rouse.record (at, job, event, attempt, who, detail)
        VALUES (clock_timestamp(), p_id, 'rescheduled', retry.attempt, session_user, jsonb_build_object('run_at', p_at, 'schedule', p_schedule));
    END IF;
END
$$;

-- Writes the decisions of a host about due schedules, and returns the names of the schedules to which the decisions
-- were applied. It leaves out schedules that have changed since they were listed, or that another host is firing at
-- this moment. With overlap => 'skip', a due time that finds the previous job waiting for its retry makes the retry
-- due: otherwise, a failing job would make the schedule skip due times until its last attempt. All or nothing: if one
-- of the jobs is refused, nothing is written. Waits up to p_lock_wait_ms, at most 250 ms, for another transaction that
-- has locked a previous job, or that enqueues a job with the same key of a gate; after that, the call fails with
-- lock_not_available. Once one call of a host's round has failed in this way, the other calls of the round hardly wait.
-- Served by the primary keys.
CREATE OR REPLACE FUNCTION rouse.fire_schedules(
    p_worker bigint, p_key bytea, p_changes rouse.schedule_change[], p_firings rouse.schedule_firing[],
    p_lock_wait_ms integer DEFAULT 250) RETURNS SETOF text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '250ms' SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at      timestamptz;
    limited boolean := rouse._authenticated_as_limited(p_worker, p_key);
    names   text[];
    firing  record;
    current text;
    last    bigint;
    live    bigint;
    job     bigint;
    fired   text[] := '{}';
    jobs    bigint[] := '{}';
BEGIN
    IF p_lock_wait_ms < 250 THEN
        PERFORM set_config('lock_timeout', greatest(p_lock_wait_ms, 1) || 'ms', true);
    END IF;
    IF cardinality(p_changes) > 1000 OR cardinality(p_firings) > 10000 THEN
        RAISE EXCEPTION 'rouse.fire_schedules: at most 1000 schedules and 10000 due times in one call' USING ERRCODE = 'program_limit_exceeded';
    END IF;
    names := ARRAY(
        -- Only lookups can serve such conditions (claim.sql). CASE hides the condition of schedule_due from the
        -- planner: otherwise, a plan could read all schedules.
        SELECT s.name FROM unnest(p_changes) AS c JOIN rouse.schedule AS s ON s.name = ANY (ARRAY[c.name])
        WHERE CASE WHEN s.revision = c.revision THEN s.paused_at IS NULL END AND (NOT limited OR rouse._may_fire(s.queue, s.handler))
        FOR NO KEY UPDATE OF s SKIP LOCKED);
    -- Read after the rows are locked, so that the time of the record is not before that of the due time.
    at := clock_timestamp();
    FOR firing IN
        SELECT s AS schedule, f.due_at, f.action, f.run_at, f.error
        FROM unnest(p_firings) AS f JOIN rouse.schedule AS s ON s.name = ANY (ARRAY[f.name])
        WHERE f.name = ANY (names) ORDER BY f.name, f.due_at
    LOOP
        IF firing.due_at > at OR firing.due_at <= (firing.schedule).handled_until THEN
            RAISE EXCEPTION 'rouse.fire_schedules: % is not due at %', (firing.schedule).name, firing.due_at
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
        IF (firing.schedule).name IS DISTINCT FROM current THEN
            current := (firing.schedule).name;
            last := (firing.schedule).last_job;
        END IF;
        -- A job is locked before it is cancelled: a settlement that is about to commit may continue its chain.
        live := CASE firing.action WHEN 'queue' THEN rouse._previous_job(last)
                    WHEN 'replace' THEN rouse._lock_live_job(rouse._chain_of(rouse._previous_job(last))) END;
        job := NULL;
        CASE firing.action
            WHEN 'enqueue' THEN
                job := rouse._enqueue_run(firing.schedule, firing.due_at, 'enqueued', firing.run_at, NULL, at);
            WHEN 'queue' THEN
                job := rouse._enqueue_run(
                    firing.schedule, firing.due_at, CASE WHEN live IS NULL THEN 'enqueued' ELSE 'queued' END, firing.run_at,
                    CASE WHEN live IS NOT NULL THEN jsonb_build_object('previous', jsonb_build_object('job', live, 'on_failure', 'run')) END, at);
            WHEN 'replace' THEN
                -- A due time that has its job from a backfill gets no other, so nothing is cancelled for it.
                job := rouse._enqueue_run(
                    firing.schedule, firing.due_at, CASE WHEN live IS NULL THEN 'enqueued' ELSE 'replaced' END, firing.run_at, NULL, at, live);
            ELSE
                INSERT INTO rouse.schedule_run (schedule, due_at, at, outcome, error)
                VALUES (current, firing.due_at, at, CASE firing.action WHEN 'skip' THEN 'skipped' WHEN 'miss' THEN 'missed' ELSE 'refused' END,
                        left(firing.error, 1000));
                -- With overlap => 'cancel', due times are skipped because a later one is due, not because of a live
                -- job.
                IF firing.action = 'skip' AND (firing.schedule).overlap = 'skip' THEN
                    PERFORM rouse._retry_at_once(rouse._previous_job(last), current, at);
                END IF;
        END CASE;
        IF job IS NOT NULL THEN
            last := job;
            fired := fired || current;
            jobs := jobs || job;
        END IF;
    END LOOP;
    UPDATE rouse.schedule AS s
    SET handled_until = greatest(least(c.handled_until, at), s.handled_until), next_at = coalesce(c.next_at, 'infinity'),
        upcoming = coalesce(c.upcoming[1:5], '{}'), error = left(c.error, 1000), revision = nextval('rouse.turn_seq'),
        last_job = coalesce(f.job, s.last_job)
    FROM unnest(p_changes) AS c
    LEFT JOIN (SELECT f.name, max(f.job) AS job FROM unnest(fired, jobs) AS f(name, job) GROUP BY f.name) AS f ON f.name = c.name
    WHERE s.name = ANY (ARRAY[c.name]) AND c.name = ANY (names);
    RETURN QUERY SELECT unnest(names);
END
$$;

-- Enqueues jobs for due times of a backfill, unless another host has continued it since it was listed. `p_finished`: it
-- is complete, or has failed with `p_error`. Returns whether it applied. Waits for locks as rouse.fire_schedules does.
-- Served by the primary keys.
CREATE OR REPLACE FUNCTION rouse.fire_backfill(
    p_worker bigint, p_key bytea, p_id bigint, p_since timestamptz, p_due timestamptz[], p_finished boolean,
    p_error text, p_lock_wait_ms integer DEFAULT 250) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '250ms'
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at       timestamptz := clock_timestamp();
    limited  boolean := rouse._authenticated_as_limited(p_worker, p_key);
    the      rouse.backfill;
    its      rouse.schedule;
    due_at   timestamptz;
    made     integer := 0;
BEGIN
    IF p_lock_wait_ms < 250 THEN
        PERFORM set_config('lock_timeout', greatest(p_lock_wait_ms, 1) || 'ms', true);
    END IF;
    IF cardinality(p_due) > 1000 THEN
        RAISE EXCEPTION 'rouse.fire_backfill: at most 1000 due times in one call' USING ERRCODE = 'program_limit_exceeded';
    END IF;
    SELECT * INTO the FROM rouse.backfill AS b
    WHERE b.id = p_id AND b.finished_at IS NULL AND b.handled_until IS NOT DISTINCT FROM p_since FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    SELECT * INTO its FROM rouse.schedule AS s WHERE s.name = the.schedule;
    IF NOT FOUND OR (limited AND NOT rouse._may_fire(its.queue, its.handler)) THEN
        RETURN false;
    END IF;
    FOREACH due_at IN ARRAY p_due LOOP
        IF due_at < the.since OR due_at >= the.before OR due_at <= the.handled_until THEN
            RAISE EXCEPTION 'rouse.fire_backfill: % is not in backfill %', due_at, p_id USING ERRCODE = 'invalid_parameter_value';
        END IF;
        made := made + (rouse._enqueue_run(its, due_at, 'backfilled', NULL, NULL, at) IS NOT NULL)::integer;
    END LOOP;
    UPDATE rouse.backfill AS b
    SET handled_until = coalesce(p_due[cardinality(p_due)], b.handled_until), enqueued = b.enqueued + made,
        finished_at = CASE WHEN p_finished THEN at END, error = left(p_error, 1000)
    WHERE b.id = p_id;
    RETURN true;
END
$$;

-- Deletes up to 10,000 rows about due times and finished backfills that are older than keep_days of rouse.limits, but
-- keeps the row about the last job of a schedule. For workers; those of a limited login that may not do maintenance
-- delete nothing. Returns the number of deleted rows. Served by schedule_run_at.
CREATE OR REPLACE FUNCTION rouse.maintain_schedules(p_worker bigint, p_key bytea) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    keep    interval := rouse._default_retention();
    deleted integer;
BEGIN
    IF rouse._authenticated_as_limited(p_worker, p_key) AND NOT rouse._may_maintain() THEN
        RETURN 0;
    END IF;
    DELETE FROM rouse.backfill AS b WHERE b.finished_at < now() - keep;
    DELETE FROM rouse.schedule_run AS r
    WHERE r.id = ANY (ARRAY(
        SELECT o.id FROM rouse.schedule_run AS o
        WHERE o.at < now() - keep
          AND NOT EXISTS (SELECT FROM rouse.schedule AS s WHERE s.name = o.schedule AND s.last_job = o.job)
        ORDER BY o.at LIMIT 10000 FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS deleted = ROW_COUNT;
    RETURN deleted;
END
$$;
