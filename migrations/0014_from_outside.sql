-- From outside: what a producer or an operator may do to a job or a queue that is there. Every function
-- leaves a record with the login that called it, says the same when it is called again, and
-- refuses what makes no sense with an error that says what the job is.
--
--   P0002  there is no such job (any more)
--   55000  the job is not in a state for that
--
-- What this does to a database with live jobs: two indexes are built on rouse.job, each in one read of
-- the table, during which nothing is enqueued, claimed or settled (a second for some millions of
-- jobs). They cost ordinary jobs nothing: one has retries of finished jobs, the other what waits for its time.

-- Null: the queue goes on. Else nothing of it is claimed since then.
ALTER TABLE rouse.queue ADD COLUMN paused_at timestamptz;
-- Served to every claim: empty where nothing is paused.
CREATE INDEX queue_paused ON rouse.queue (name) WHERE paused_at IS NOT NULL;
-- Of each finished job at most one retry is live.
CREATE UNIQUE INDEX job_retry ON rouse.job (retried_from) WHERE retried_from IS NOT NULL;
-- Serves the count of what waits for its time, for each lane.
CREATE INDEX job_waiting ON rouse.job (lane) WHERE state = 'queued' AND turn IS NULL;

-- The lanes, with null instead of those whose queue is paused, in the same order. Served by lane_id and queue_paused.
CREATE FUNCTION rouse._not_paused(p_lanes bigint[]) RETURNS bigint[]
LANGUAGE sql STABLE AS $$
    SELECT array_agg(CASE WHEN q.name IS NULL THEN asked.lane END ORDER BY asked.place)
    FROM unnest(p_lanes) WITH ORDINALITY AS asked(lane, place)
    LEFT JOIN LATERAL (SELECT l.queue FROM rouse.lane AS l WHERE l.id = asked.lane LIMIT 1) AS l ON true
    LEFT JOIN rouse.queue AS q ON q.name = l.queue AND q.paused_at IS NOT NULL
$$;

-- Claims up to `wanted` jobs from these lanes, in the order given, each lane from its cursor on; no
-- more after the one with which their payloads reach 8 MiB (PREFETCH_BYTES_MAX of the host).
-- Safe under concurrency: rows that another claim has locked are skipped, and a row that was
-- claimed meanwhile is checked again under its lock. Served by job_ready, then by the primary key.
-- Nothing is claimed from queues that are paused; that is looked up in an index that is empty where none is.
-- The commit does not wait for the disk: a claim that a server crash forgets is only made again.
--
-- What is too much is locked until this commits, and otherwise left as it was. The size is what the
-- table keeps, because the payload itself would have to be read for its own; one that is compressed
-- counts 16 times (JSON shrinks to a quarter or an eighth, and at the most to a ninetieth).
CREATE OR REPLACE FUNCTION rouse.claim(
    p_worker bigint, p_key bytea, p_fence bigint, p_lanes bigint[], p_cursors bigint[], p_lease_ms bigint[], p_wanted integer)
RETURNS SETOF rouse.claimed
LANGUAGE plpgsql SECURITY DEFINER ROWS 100
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at timestamptz := clock_timestamp();
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM FROM rouse.queue AS q WHERE q.paused_at IS NOT NULL;
    IF FOUND THEN
        p_lanes := rouse._not_paused(p_lanes);
    END IF;
    RETURN QUERY
    WITH picked AS MATERIALIZED (
        SELECT found.id, found.lease_ms
        FROM (
            SELECT ready.id, wanted.lease_ms, ready.bytes, sum(ready.bytes) OVER (ROWS UNBOUNDED PRECEDING) AS bytes_so_far
            FROM unnest(p_lanes, p_cursors, p_lease_ms) AS wanted(lane, after, lease_ms)
            CROSS JOIN LATERAL (
                SELECT j.id, CASE WHEN pg_column_compression(j.payload) IS NULL THEN pg_column_size(j.payload)
                                  ELSE 16 * least(pg_column_size(j.payload), 1048576) END AS bytes
                FROM rouse.job AS j
                WHERE j.lane = wanted.lane AND j.turn > wanted.after AND j.state = 'queued' AND j.turn IS NOT NULL
                ORDER BY j.turn LIMIT p_wanted FOR NO KEY UPDATE SKIP LOCKED) AS ready
            LIMIT p_wanted) AS found
        WHERE found.bytes_so_far - found.bytes < 8388608)
    UPDATE rouse.job AS j
    SET state = 'running', attempt = j.attempt + 1, fence = p_fence, worker = p_worker,
        claimed_at = at, lease_until = at + picked.lease_ms * interval '1 millisecond'
    FROM picked WHERE j.id = ANY (ARRAY[picked.id])
    RETURNING j.id, j.lane, j.turn, j.attempt, j.lost, j.max_attempts, j.tenant, j.source, j.requested_at, j.claimed_at, j.payload, j.memory_bytes;
END
$$;

-- Takes over jobs whose lease has run out: up to `p_wanted` are claimed at once, ahead of everything
-- queued. A job's first loss is taken up like that; after a later one it waits (10 s, doubled
-- each time); a job that was lost p_lost_max times fails, because it probably kills its workers.
-- `within_ms`: only leases that ran out within the last so many
-- milliseconds are looked for; null: all. Served by job_lease. Rows that somebody else holds locked are skipped, and
-- so are those of paused queues.
CREATE OR REPLACE FUNCTION rouse.adopt(
    p_worker bigint, p_key bytea, p_fence bigint, p_lanes bigint[], p_lease_ms bigint[], p_wanted integer, p_lost_max integer,
    p_within_ms bigint)
RETURNS SETOF rouse.claimed
LANGUAGE plpgsql SECURITY DEFINER ROWS 10
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at     timestamptz := clock_timestamp();
    since  timestamptz := coalesce(at - p_within_ms * interval '1 millisecond', '-infinity');
    orphan record;
    why    jsonb;
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    PERFORM FROM rouse.queue AS q WHERE q.paused_at IS NOT NULL;
    IF FOUND THEN
        p_lanes := rouse._not_paused(p_lanes);
    END IF;
    FOR orphan IN
        SELECT j.id, j.fence, j.attempt, j.lost, j.worker, j.claimed_at, asked.lease_ms, w.worker_id
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
            CONTINUE;
        END IF;
        INSERT INTO rouse.attempt (job, attempt, lost, worker, claimed_at, started_at, ended_at, error)
        VALUES (orphan.id, orphan.attempt, true, orphan.worker, orphan.claimed_at, NULL, at, why);
        IF orphan.lost = 0 THEN
            RETURN QUERY
            UPDATE rouse.job AS j
            SET attempt = j.attempt + 1, lost = j.lost + 1, fence = p_fence, worker = p_worker, claimed_at = at,
                lease_until = at + orphan.lease_ms * interval '1 millisecond', turn = nextval('rouse.turn_seq')
            WHERE j.id = orphan.id
            RETURNING j.id, j.lane, j.turn, j.attempt, j.lost, j.max_attempts, j.tenant, j.source, j.requested_at, j.claimed_at, j.payload, j.memory_bytes;
        ELSE
            UPDATE rouse.job AS j
            SET state = 'queued', turn = NULL, fence = NULL, worker = NULL, claimed_at = NULL, lease_until = NULL, lost = j.lost + 1,
                available_at = at + 10 * 2 ^ (orphan.lost - 1) * interval '1 second'
            WHERE j.id = orphan.id;
        END IF;
    END LOOP;
END
$$;

-- Whether there is anything to do for a worker: one read, which locks nothing and waits for nobody.
-- In a queue that is paused there is nothing to do.
--
--   lanes, cursors      ready: those of these lanes that have a ready job after their cursor, in the
--                       order given, at most `most` (served by job_ready)
--   catalog_after       catalog_changed: the catalog of lanes has not `catalog_rows` rows after that
--                       place (served by its primary key)
--   orphaned_within_ms  orphans: a lease has run out, within the last so many milliseconds; null: at
--                       all (served by job_lease)
--   due_within_ms       due: a job waits for its turn whose time has come, within the last so many
--                       milliseconds; null: at all (served by job_due)
--   next_due_ms         milliseconds until the next scheduled job or retry is due; null: none waits
CREATE OR REPLACE FUNCTION rouse.peek(
    p_lanes bigint[], p_cursors bigint[], p_catalog_after bigint, p_catalog_rows bigint,
    p_orphaned_within_ms bigint, p_due_within_ms bigint, p_most integer,
    OUT ready bigint[], OUT catalog_changed boolean, OUT orphans boolean, OUT due boolean, OUT next_due_ms bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at             timestamptz := clock_timestamp();
    orphaned_since timestamptz := coalesce(at - p_orphaned_within_ms * interval '1 millisecond', '-infinity');
    due_since      timestamptz := coalesce(at - p_due_within_ms * interval '1 millisecond', '-infinity');
    next_at        timestamptz;
    paused         boolean;
BEGIN
    PERFORM FROM rouse.queue AS q WHERE q.paused_at IS NOT NULL;
    paused := FOUND;
    IF paused THEN
        p_lanes := rouse._not_paused(p_lanes);
    END IF;
    SELECT coalesce(array_agg(having_jobs.lane), '{}') INTO ready
    FROM (
        SELECT asked.lane
        FROM unnest(p_lanes, p_cursors) AS asked(lane, after)
        CROSS JOIN LATERAL (
            SELECT FROM rouse.job AS j
            WHERE j.lane = asked.lane AND j.turn > asked.after AND j.state = 'queued' AND j.turn IS NOT NULL
            ORDER BY j.turn LIMIT 1) AS first_job
        LIMIT p_most) AS having_jobs;
    catalog_changed := (SELECT count(*) FROM rouse.lane AS l WHERE l.seq > p_catalog_after) <> p_catalog_rows;
    IF paused THEN
        orphans := EXISTS (
            SELECT FROM rouse.job AS j
            WHERE j.state = 'running' AND j.lease_until > orphaned_since AND j.lease_until < at
              AND (rouse._not_paused(ARRAY[j.lane]))[1] IS NOT NULL
            ORDER BY j.lease_until LIMIT 1);
    ELSE
        orphans := EXISTS (
            SELECT FROM rouse.job AS j
            WHERE j.state = 'running' AND j.lease_until > orphaned_since AND j.lease_until < at
            ORDER BY j.lease_until LIMIT 1);
    END IF;
    SELECT j.available_at INTO next_at
    FROM rouse.job AS j
    WHERE j.state = 'queued' AND j.turn IS NULL AND j.available_at > due_since
    ORDER BY j.available_at LIMIT 1;
    due := coalesce(next_at <= at, false);
    -- GREATEST would make a 0 of null, and the worker would never wait.
    IF next_at IS NOT NULL THEN
        next_due_ms := greatest(0, ceil(extract(epoch FROM next_at - clock_timestamp()) * 1000))::bigint;
    END IF;
END
$$;

-- Notifies those who sleep on the lane's queue: '<queue> <lane>' for a job that is ready, '<queue>'
-- for one that is scheduled. Nobody for a queue that is paused: who resumes it notifies.
--
-- NOTIFY takes a lock that puts all notifying commits of the server in one line, through the
-- flush of each. So where somebody else is committing the same notification at this moment, this
-- one is left out: the sleeper is being woken, and finds this job at one of its next looks, which
-- are a few milliseconds apart. Not so for a job that was enqueued a while ago: cursors may
-- have passed it, and only its own notification leads there.
-- The lock's key has the time in it, so that a transaction that decides early (SET CONSTRAINTS ALL
-- IMMEDIATE) and stays open mutes the others for a tenth of a second, and not until its end.
CREATE OR REPLACE FUNCTION rouse._notify(p_lane bigint, p_ready boolean, p_since timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    at         timestamptz := clock_timestamp();
    queue_name text;
    note       text;
BEGIN
    -- Served by lane_id.
    SELECT l.queue INTO queue_name FROM rouse.lane AS l WHERE l.id = p_lane LIMIT 1;
    -- In a transaction with one snapshot for all of it, sleepers who came later cannot be seen.
    IF EXISTS (SELECT FROM rouse.sleeper AS s WHERE s.queue IN (queue_name, '*') AND s.until > at)
       OR current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM FROM rouse.queue AS q WHERE q.paused_at IS NOT NULL AND q.name = queue_name;
        IF FOUND THEN
            RETURN;
        END IF;
        note := CASE WHEN p_ready THEN queue_name || ' ' || p_lane ELSE queue_name END;
        IF at > p_since + interval '100 ms'
           OR pg_try_advisory_xact_lock(hashtextextended(
               'rouse.wake ' || note || ' ' || floor(extract(epoch FROM at) * 10), 0)) THEN
            PERFORM pg_notify('rouse_wake', note);
        END IF;
    END IF;
END
$$;

-- Where no worker has run for a week, nobody has made today's partitions.
CREATE FUNCTION rouse._have_partitions(p_at timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    day text := to_char(p_at AT TIME ZONE 'UTC', 'YYYYMMDD');
BEGIN
    IF to_regclass('rouse.finished_' || day) IS NULL OR to_regclass('rouse.record_' || day) IS NULL THEN
        PERFORM rouse.prepare_partitions();
    END IF;
END
$$;

-- Refuses an id that is null, for function `p_name`.
CREATE FUNCTION rouse._check_id(p_name text, p_id bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF p_id IS NULL THEN
        RAISE EXCEPTION 'rouse.%: id must not be null', p_name USING ERRCODE = 'invalid_parameter_value';
    END IF;
END
$$;

-- Ends a job that is live, and says whether it was. A running one is settled through the fence, and its
-- worker is told: whatever its attempt still returns is refused. Waits for whoever is changing the job at this
-- moment, and then deals with what has become of it. Served by the primary key.
CREATE FUNCTION rouse._end(p_id bigint, p_state rouse.state, p_result jsonb, p_error jsonb, p_event text) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    at   timestamptz := clock_timestamp();
    live record;
BEGIN
    SELECT j.state, j.fence, j.worker, j.attempt INTO live FROM rouse.job AS j WHERE j.id = p_id FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM rouse._have_partitions(at);
    IF live.state = 'running' THEN
        PERFORM rouse._settle(NULL, ARRAY[p_id], ARRAY[live.fence], ARRAY[p_state], ARRAY[NULL]::bigint[],
            ARRAY[p_result], ARRAY[p_error], ARRAY[NULL]::bigint[], ARRAY[NULL]::timestamptz[], ARRAY[NULL]::bigint[]);
        PERFORM pg_notify('rouse_worker_' || live.worker, p_id::text);
    ELSE
        WITH gone AS (DELETE FROM rouse.job AS j WHERE j.id = p_id RETURNING j.*)
        INSERT INTO rouse.finished (id, lane, retried_from, requested_at, available_at, finished_at,
                                    attempt, lost, max_attempts, state, tenant, source, unique_key, payload, result, error)
        SELECT g.id, g.lane, g.retried_from, g.requested_at, g.available_at, at,
               g.attempt, g.lost, g.max_attempts, p_state, g.tenant, g.source, g.unique_key, g.payload, p_result, p_error
        FROM gone AS g;
    END IF;
    INSERT INTO rouse.record (at, job, event, attempt, who) VALUES (at, p_id, p_event, live.attempt, session_user);
    RETURN true;
END
$$;

-- What became of a job that is not live (any more); an error where nothing is known of it. Served by
-- finished_id, in each partition.
CREATE FUNCTION rouse._ended(p_id bigint) RETURNS rouse.finished
LANGUAGE plpgsql STABLE AS $$
DECLARE
    was rouse.finished;
BEGIN
    SELECT * INTO was FROM rouse.finished AS f WHERE f.id = p_id LIMIT 1;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'rouse: there is no job % (any more)', p_id
            USING ERRCODE = 'no_data_found',
                  HINT = 'Either it was never enqueued (or its transaction is not committed), or it finished so long ago that it is not kept.';
    END IF;
    RETURN was;
END
$$;

-- Says that a job has ended otherwise than it was asked to.
CREATE FUNCTION rouse._refuse_ended(p_id bigint, p_done text, p_state rouse.state, p_otherwise text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'rouse: job % cannot be % any more: it has ended as %', p_id, p_done, p_state || p_otherwise
        USING ERRCODE = 'object_not_in_prerequisite_state',
              HINT = format('How a job has ended is not rewritten. SELECT rouse.retry(%s) makes a new one of it.', p_id);
END
$$;

-- Cancels a job, queued or running. True: it is cancelled now, by this call or by an earlier one.
-- False: it had finished otherwise, or there is no such job (any more).
CREATE OR REPLACE FUNCTION rouse.cancel(id bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    PERFORM rouse._check_id('cancel', cancel.id);
    IF rouse._end(cancel.id, 'cancelled', NULL, NULL, 'cancelled') THEN
        RETURN true;
    END IF;
    -- A statement of its own: it sees what the end of a settlement has left that was waited for.
    RETURN coalesce((SELECT f.state = 'cancelled' FROM rouse.finished AS f WHERE f.id = cancel.id LIMIT 1), false);
END
$$;

-- Completes a job without a worker, queued or running. True: it has succeeded with this result, by
-- this call or by an earlier one.
CREATE FUNCTION rouse.complete(id bigint, result jsonb DEFAULT 'null') RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    was rouse.finished;
BEGIN
    PERFORM rouse._check_id('complete', complete.id);
    IF complete.result IS NULL THEN
        RAISE EXCEPTION 'rouse.complete: result must not be null'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Leave it out for the JSON null, or give it as ''null''.';
    END IF;
    IF octet_length(complete.result::text) > 4194304 THEN
        RAISE EXCEPTION 'rouse.complete: the result has % bytes; at most 4194304 are kept', octet_length(complete.result::text)
            USING ERRCODE = 'program_limit_exceeded', HINT = 'Store large data elsewhere and give a reference to it.';
    END IF;
    IF NOT rouse._end(complete.id, 'succeeded', complete.result, NULL, 'completed') THEN
        was := rouse._ended(complete.id);
        IF was.state <> 'succeeded' OR was.result <> complete.result THEN
            PERFORM rouse._refuse_ended(complete.id, 'completed', was.state,
                CASE WHEN was.state = 'succeeded' THEN ', with another result' ELSE '' END);
        END IF;
    END IF;
    RETURN true;
END
$$;

-- Ends a job as failed, queued or running, whatever attempts it has left. True: it has failed with this
-- message, by this call or by an earlier one.
CREATE FUNCTION rouse.fail(id bigint, message text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    was rouse.finished;
BEGIN
    PERFORM rouse._check_id('fail', fail.id);
    IF coalesce(fail.message, '') = '' OR octet_length(fail.message) > 16384 THEN
        RAISE EXCEPTION 'rouse.fail: message has 1 to 16384 bytes' USING ERRCODE = 'invalid_parameter_value',
            HINT = 'It says why, to whoever looks at the job.';
    END IF;
    IF NOT rouse._end(fail.id, 'failed', NULL, jsonb_build_object('kind', 'outside', 'message', fail.message), 'failed') THEN
        was := rouse._ended(fail.id);
        IF was.state <> 'failed' OR was.error->>'message' IS DISTINCT FROM fail.message THEN
            PERFORM rouse._refuse_ended(fail.id, 'failed', was.state,
                CASE WHEN was.state = 'failed' THEN ', with another message' ELSE '' END);
        END IF;
    END IF;
    RETURN true;
END
$$;

-- Takes a queued job away: it is cancelled, and a record says that it was deleted. True: it is
-- cancelled now, by this call or by an earlier one. A running job is not deleted.
CREATE FUNCTION rouse.delete(id bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    live rouse.state;
    was  rouse.finished;
BEGIN
    PERFORM rouse._check_id('delete', delete.id);
    SELECT j.state INTO live FROM rouse.job AS j WHERE j.id = delete.id FOR UPDATE;
    IF live = 'running' THEN
        RAISE EXCEPTION 'rouse: job % cannot be deleted: it is running', delete.id
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = format('SELECT rouse.cancel(%s) stops it.', delete.id);
    END IF;
    IF NOT rouse._end(delete.id, 'cancelled', NULL, NULL, 'deleted') THEN
        was := rouse._ended(delete.id);
        IF was.state <> 'cancelled' THEN
            PERFORM rouse._refuse_ended(delete.id, 'deleted', was.state, '');
        END IF;
    END IF;
    RETURN true;
END
$$;

-- Makes a new job of one that has ended, with the same lane, payload, tenant, source, max_attempts and
-- unique key, and returns its id. While a retry of it is live, that one's id is returned. Served
-- by the primary key, finished_id and job_retry; wakes as an enqueue does.
CREATE FUNCTION rouse.retry(id bigint) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at    timestamptz := clock_timestamp();
    live  rouse.state;
    was   rouse.finished;
    fresh bigint := nextval('rouse.turn_seq');
    their bigint;
BEGIN
    PERFORM rouse._check_id('retry', retry.id);
    SELECT j.state INTO live FROM rouse.job AS j WHERE j.id = retry.id;
    IF FOUND THEN
        RAISE EXCEPTION 'rouse: job % cannot be retried: it is %', retry.id, live
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = CASE live WHEN 'queued' THEN format('SELECT rouse.reschedule(%s) makes it ready at once.', retry.id)
                                   ELSE 'Wait for its end, or cancel it first.' END;
    END IF;
    was := rouse._ended(retry.id);
    PERFORM rouse._have_partitions(at);
    FOR try IN 1 .. 10 LOOP
        INSERT INTO rouse.job AS j (id, lane, turn, retried_from, requested_at, available_at, max_attempts, tenant, source,
                                    unique_key, payload, wake)
        VALUES (fresh, was.lane, fresh, was.id, at, at, was.max_attempts, was.tenant, was.source, was.unique_key, was.payload, true)
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            INSERT INTO rouse.record (at, job, event, who, detail)
            VALUES (at, was.id, 'retried', session_user, jsonb_build_object('as', fresh));
            RETURN fresh;
        END IF;
        SELECT j.id INTO their FROM rouse.job AS j WHERE j.retried_from = was.id;
        IF FOUND THEN
            RETURN their;
        END IF;
        SELECT j.id INTO their FROM rouse.job AS j WHERE j.unique_key = was.unique_key;
        IF FOUND THEN
            RAISE EXCEPTION 'rouse: job % cannot be retried: job %, which is live, has its unique key %',
                was.id, their, quote_literal(substr(was.unique_key, strpos(was.unique_key, '/') + 1))
                USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Wait for the end of that one, or cancel it first.';
        END IF;
        -- The other one finished between the statements.
    END LOOP;
    RAISE EXCEPTION 'rouse: job % cannot be retried: its place is taken and freed faster than it can be read', was.id
        USING ERRCODE = 'serialization_failure', HINT = 'Try again.';
END
$$;

-- Changes when a queued job may start; null, or a time that has passed: at once. A job that is ready and
-- stays so keeps its place. Served by the primary key.
CREATE FUNCTION rouse.reschedule(id bigint, run_at timestamptz DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at   timestamptz := clock_timestamp();
    live record;
    was  rouse.finished;
BEGIN
    PERFORM rouse._check_id('reschedule', reschedule.id);
    IF NOT isfinite(reschedule.run_at) THEN
        RAISE EXCEPTION 'rouse.reschedule: run_at must be a time, not %', reschedule.run_at
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Leave it out to run the job at once.';
    END IF;
    SELECT j.state, j.lane, j.turn, j.available_at INTO live FROM rouse.job AS j WHERE j.id = reschedule.id FOR UPDATE;
    IF NOT FOUND THEN
        was := rouse._ended(reschedule.id);
        PERFORM rouse._refuse_ended(reschedule.id, 'rescheduled', was.state, '');
    END IF;
    IF live.state = 'running' THEN
        RAISE EXCEPTION 'rouse: job % cannot be rescheduled: it is running', reschedule.id
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = format('Wait for its end, or stop it with SELECT rouse.cancel(%s).', reschedule.id);
    END IF;
    IF reschedule.run_at > at THEN
        IF live.turn IS NULL AND live.available_at = reschedule.run_at THEN
            RETURN true;
        END IF;
        UPDATE rouse.job AS j SET turn = NULL, available_at = reschedule.run_at WHERE j.id = reschedule.id;
        PERFORM rouse._notify(live.lane, false, at);
    ELSE
        IF live.turn IS NOT NULL THEN
            RETURN true;
        END IF;
        UPDATE rouse.job AS j SET turn = nextval('rouse.turn_seq'), available_at = least(j.available_at, at) WHERE j.id = reschedule.id;
        PERFORM rouse._notify(live.lane, true, at);
    END IF;
    PERFORM rouse._have_partitions(at);
    INSERT INTO rouse.record (at, job, event, who, detail)
    VALUES (at, reschedule.id, 'rescheduled', session_user, jsonb_build_object('run_at', greatest(reschedule.run_at, at)));
    RETURN true;
END
$$;

CREATE FUNCTION rouse._check_queue(p_name text, p_queue text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF p_queue IS NULL OR p_queue !~ '^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$' THEN
        RAISE EXCEPTION 'rouse.%: % is no queue name', p_name, coalesce(quote_literal(left(p_queue, 140)), 'null')
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'Queue names start with a letter or digit and have letters, digits and _ . : - ; at most 128 characters.';
    END IF;
END
$$;

-- Pauses a queue, and returns since when it is paused. Every claim that begins after the commit leaves its jobs
-- alone; what has been claimed before goes on. Enqueuing goes on too.
CREATE FUNCTION rouse.pause_queue(queue text) RETURNS timestamptz
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at    timestamptz := clock_timestamp();
    since timestamptz;
BEGIN
    PERFORM rouse._check_queue('pause_queue', pause_queue.queue);
    INSERT INTO rouse.queue AS q (name, paused_at) VALUES (pause_queue.queue, at)
    ON CONFLICT (name) DO UPDATE SET paused_at = coalesce(q.paused_at, excluded.paused_at)
    RETURNING q.paused_at INTO since;
    IF since = at THEN
        PERFORM rouse._have_partitions(at);
        INSERT INTO rouse.record (at, queue, event, who) VALUES (at, pause_queue.queue, 'paused', session_user);
    END IF;
    RETURN since;
END
$$;

-- Lets a paused queue go on, and says whether it was paused. Whoever sleeps is woken.
CREATE FUNCTION rouse.resume_queue(queue text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at    timestamptz := clock_timestamp();
    since timestamptz;
BEGIN
    PERFORM rouse._check_queue('resume_queue', resume_queue.queue);
    SELECT q.paused_at INTO since FROM rouse.queue AS q
    WHERE q.name = resume_queue.queue AND q.paused_at IS NOT NULL FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE rouse.queue AS q SET paused_at = NULL WHERE q.name = resume_queue.queue;
    -- Whoever looks for orphans looks only at leases that have run out since it last looked: those of this
    -- queue run out now. Served by job_lease.
    WITH orphan AS MATERIALIZED (
        SELECT j.id FROM rouse.job AS j
        WHERE j.state = 'running' AND j.lease_until < at
          AND (SELECT l.queue FROM rouse.lane AS l WHERE l.id = j.lane LIMIT 1) = resume_queue.queue
        FOR NO KEY UPDATE SKIP LOCKED)
    UPDATE rouse.job AS j SET lease_until = at FROM orphan WHERE j.id = ANY (ARRAY[orphan.id]);
    PERFORM rouse._have_partitions(at);
    INSERT INTO rouse.record (at, queue, event, who, detail)
    VALUES (at, resume_queue.queue, 'resumed', session_user, jsonb_build_object('paused_at', since));
    -- Without a lane: whoever hears it looks everywhere.
    PERFORM pg_notify('rouse_wake', resume_queue.queue);
    RETURN true;
END
$$;

-- Cancels up to `most` ready jobs of a queue, the oldest of each lane first, and says how many. Neither
-- running jobs nor those that wait for their time, and none that somebody else is claiming at this moment.
-- One record says how many they were. Served by job_ready, after one read of the catalog of lanes.
CREATE FUNCTION rouse.purge_queue(queue text, most integer DEFAULT 1000) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at      timestamptz := clock_timestamp();
    lane_id bigint;
    taken   integer;
    purged  integer := 0;
BEGIN
    PERFORM rouse._check_queue('purge_queue', purge_queue.queue);
    IF most IS NULL OR most < 1 THEN
        RAISE EXCEPTION 'rouse.purge_queue: most must be at least 1, not %', coalesce(most::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM rouse._have_partitions(at);
    FOR lane_id IN SELECT DISTINCT l.id FROM rouse.lane AS l WHERE l.queue = purge_queue.queue LOOP
        WITH ready AS MATERIALIZED (
            SELECT j.id FROM rouse.job AS j
            WHERE j.lane = lane_id AND j.state = 'queued' AND j.turn IS NOT NULL
            ORDER BY j.turn LIMIT most - purged FOR UPDATE SKIP LOCKED),
        gone AS (
            DELETE FROM rouse.job AS j USING ready WHERE j.id = ANY (ARRAY[ready.id]) RETURNING j.*),
        kept AS (
            INSERT INTO rouse.finished (id, lane, retried_from, requested_at, available_at, finished_at,
                                        attempt, lost, max_attempts, state, tenant, source, unique_key, payload)
            SELECT g.id, g.lane, g.retried_from, g.requested_at, g.available_at, at,
                   g.attempt, g.lost, g.max_attempts, 'cancelled', g.tenant, g.source, g.unique_key, g.payload
            FROM gone AS g RETURNING 1)
        SELECT count(*) INTO taken FROM kept;
        purged := purged + taken;
        EXIT WHEN purged >= most;
    END LOOP;
    IF purged > 0 THEN
        INSERT INTO rouse.record (at, queue, event, who, detail)
        VALUES (at, purge_queue.queue, 'purged', session_user, jsonb_build_object('jobs', purged));
    END IF;
    RETURN purged;
END
$$;

-- How many jobs each lane has: ready, waiting for their time (also one whose time has come, until a worker
-- has given it its turn), running. Ready and waiting ones are counted up to 10,000 for each lane, running ones up to
-- 100,000 in all; where there are more, `at_least` is true. Served by job_ready, job_waiting and job_lease.
CREATE FUNCTION rouse.depth()
RETURNS TABLE (queue text, handler text, priority rouse.priority, tags text[],
               ready bigint, scheduled bigint, running bigint, at_least boolean, oldest_ready_at timestamptz)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_mergejoin = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH running AS MATERIALIZED (
        SELECT r.lane, count(*) AS jobs, sum(count(*)) OVER () > 100000 AS at_least
        FROM (SELECT j.lane FROM rouse.job AS j WHERE j.state = 'running' AND j.lease_until > '-infinity' LIMIT 100001) AS r
        GROUP BY r.lane)
    SELECT l.queue, l.handler, l.priority, l.tags, least(ready.jobs, 10000), least(waiting.jobs, 10000), coalesce(running.jobs, 0),
           ready.jobs > 10000 OR waiting.jobs > 10000 OR coalesce((SELECT r.at_least FROM running AS r LIMIT 1), false), oldest.available_at
    FROM (SELECT DISTINCT ON (l.id) l.id, l.queue, l.handler, l.priority, l.tags FROM rouse.lane AS l ORDER BY l.id) AS l
    CROSS JOIN LATERAL (
        SELECT count(*) AS jobs FROM (
            SELECT FROM rouse.job AS j WHERE j.lane = l.id AND j.state = 'queued' AND j.turn IS NOT NULL
            ORDER BY j.turn LIMIT 10001) AS j) AS ready
    CROSS JOIN LATERAL (
        SELECT count(*) AS jobs FROM (
            SELECT FROM rouse.job AS j WHERE j.lane = l.id AND j.state = 'queued' AND j.turn IS NULL LIMIT 10001) AS j) AS waiting
    LEFT JOIN LATERAL (
        SELECT j.available_at FROM rouse.job AS j WHERE j.lane = l.id AND j.state = 'queued' AND j.turn IS NOT NULL
        ORDER BY j.turn LIMIT 1) AS oldest ON true
    LEFT JOIN running ON running.lane = l.id;
END
$$;

-- Every queue that has settings or has ever been used, and how many jobs it has.
CREATE OR REPLACE VIEW rouse.queues AS
SELECT coalesce(q.name, d.queue) AS name, coalesce(q.payload_bytes_max, 262144) AS payload_bytes_max, q.created_at, q.paused_at,
       coalesce(d.ready, 0)::bigint AS ready, coalesce(d.scheduled, 0)::bigint AS scheduled, coalesce(d.running, 0)::bigint AS running,
       coalesce(d.at_least, false) AS at_least, d.oldest_ready_at, clock_timestamp() - d.oldest_ready_at AS oldest_wait
FROM rouse.queue AS q
FULL JOIN (
    SELECT d.queue, sum(d.ready) AS ready, sum(d.scheduled) AS scheduled, sum(d.running) AS running,
           bool_or(d.at_least) AS at_least, min(d.oldest_ready_at) AS oldest_ready_at
    FROM rouse.depth() AS d GROUP BY d.queue) AS d ON d.queue = q.name;

-- The backlog, for each (queue, handler, tags) that has jobs: for autoscalers, and for whoever wants to know what
-- waits in vain. `workers` and `slots` are those of the living workers that are not draining, have the handler
-- and all of the tags, and serve the queue.
CREATE VIEW rouse.backlog AS
SELECT d.queue, d.handler, d.tags, d.ready, d.scheduled, d.running, d.at_least,
       d.oldest_ready_at, clock_timestamp() - d.oldest_ready_at AS oldest_wait,
       EXISTS (SELECT FROM rouse.queue AS q WHERE q.name = d.queue AND q.paused_at IS NOT NULL) AS paused,
       w.workers, w.slots
FROM (
    SELECT d.queue, d.handler, d.tags, sum(d.ready)::bigint AS ready, sum(d.scheduled)::bigint AS scheduled,
           sum(d.running)::bigint AS running, bool_or(d.at_least) AS at_least, min(d.oldest_ready_at) AS oldest_ready_at
    FROM rouse.depth() AS d
    WHERE d.ready > 0 OR d.scheduled > 0 OR d.running > 0
    GROUP BY d.queue, d.handler, d.tags) AS d
CROSS JOIN LATERAL (
    SELECT count(*) AS workers, coalesce(sum(w.slots), 0)::bigint AS slots
    FROM rouse.worker AS w
    WHERE w.stopped_at IS NULL AND w.dead_at IS NULL AND w.draining_at IS NULL AND w.seen_at > now() - interval '90 seconds'
      AND d.handler = ANY (w.handlers) AND (w.queues = '{}' OR d.queue = ANY (w.queues)) AND w.tags @> d.tags) AS w;
GRANT SELECT ON rouse.backlog TO rouse_observer, rouse_worker;

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

REVOKE ALL ON FUNCTION rouse._not_paused, rouse._have_partitions, rouse._check_id, rouse._end, rouse._ended, rouse._refuse_ended,
    rouse._check_queue, rouse.complete, rouse.fail, rouse.delete, rouse.retry, rouse.reschedule,
    rouse.pause_queue, rouse.resume_queue, rouse.purge_queue, rouse.depth FROM PUBLIC;
GRANT EXECUTE ON FUNCTION rouse.complete, rouse.fail, rouse.delete, rouse.retry, rouse.reschedule,
    rouse.pause_queue, rouse.resume_queue, rouse.purge_queue TO rouse_producer;
GRANT EXECUTE ON FUNCTION rouse.depth TO rouse_observer, rouse_worker;
