-- Admin actions of operators on a job or a queue; producers may call one of them, rouse.cancel. Every function is
-- idempotent and leaves a record with the calling login. It rejects an action that the job's state does not allow, with
-- an error that includes the state. Hosts log these actions.
--
--   P0002  the job does not exist, or is no longer kept
--   55000  the state of the job does not allow the action

-- Rejects a null id, for function `p_name`.
CREATE OR REPLACE FUNCTION rouse._check_id(p_name text, p_id bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF p_id IS NULL THEN
        RAISE EXCEPTION 'rouse.%: id must not be null', p_name USING ERRCODE = 'invalid_parameter_value';
    END IF;
END
$$;

-- Ends a live job, and returns whether it was live. A running job is settled with its own fence, and its worker is
-- notified: any outcome of its attempt is refused. Waits for a concurrent change to the job, and then acts on the
-- result. `p_worker`: the worker that ends it; null: the calling login does. Served by the primary key.
CREATE OR REPLACE FUNCTION rouse._end(
    p_id bigint, p_state rouse.state, p_result jsonb, p_error jsonb, p_event text, p_detail jsonb DEFAULT NULL, p_worker bigint DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    at     timestamptz;
    live   record;
    ended  rouse.settlement;
    chains bigint[];
BEGIN
    SELECT j.state, j.fence, j.worker, j.attempt INTO live FROM rouse.job AS j WHERE j.id = p_id FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    -- Read after the row is locked, so that it is later than any change that this call waited for.
    at := clock_timestamp();
    PERFORM rouse._ensure_partitions(at);
    IF live.state = 'running' THEN
        ended.id := p_id;
        ended.fence := live.fence;
        ended.state := p_state;
        ended.result := p_result;
        ended.error := p_error;
        PERFORM rouse._settle(NULL, ARRAY[ended]);
        PERFORM rouse._hint('rouse_worker_' || live.worker, p_id::text);
    ELSE
        chains := rouse._end_queued(ARRAY[p_id], p_state, p_result, p_error, at);
        PERFORM rouse._chains_ended(chains, ARRAY[p_state = 'succeeded']);
    END IF;
    INSERT INTO rouse.record (at, job, event, attempt, worker, who, detail)
    VALUES (at, p_id, p_event, live.attempt, p_worker, CASE WHEN p_worker IS NULL THEN session_user END, p_detail);
    RETURN true;
END
$$;

-- Returns a job that is not live; raises an error if it does not exist or is no longer kept. Served by finished_id, in
-- each partition.
CREATE OR REPLACE FUNCTION rouse._ended_job(p_id bigint) RETURNS rouse.finished
LANGUAGE plpgsql STABLE AS $$
DECLARE
    was rouse.finished;
BEGIN
    SELECT * INTO was FROM rouse.finished AS f WHERE f.id = p_id LIMIT 1;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'rouse: job % does not exist, or is no longer kept', p_id
            USING ERRCODE = 'no_data_found',
                  HINT = 'Either it was never enqueued (or its transaction is not committed), or it finished so long ago that it is no longer kept.';
    END IF;
    RETURN was;
END
$$;

-- Rejects an action on a job that has already ended in another way.
CREATE OR REPLACE FUNCTION rouse._refuse_ended(p_id bigint, p_done text, p_state rouse.state, p_otherwise text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'rouse: job % cannot be %: it has already ended as %', p_id, p_done, p_state || p_otherwise
        USING ERRCODE = 'object_not_in_prerequisite_state',
              HINT = format('The outcome of a job is final. SELECT rouse.retry(%s) enqueues it again as a new job.', p_id);
END
$$;

-- Cancels a job, queued or running. True: it is cancelled now, by this call or by an earlier one. False: it has ended
-- in another way, or does not exist.
CREATE OR REPLACE FUNCTION rouse.cancel(id bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    PERFORM rouse._check_id('cancel', cancel.id);
    IF rouse._end(cancel.id, 'cancelled', NULL, NULL, 'cancelled') THEN
        RETURN true;
    END IF;
    -- A separate statement sees the result of a settlement for which the first one waited.
    RETURN coalesce((SELECT f.state = 'cancelled' FROM rouse.finished AS f WHERE f.id = cancel.id LIMIT 1), false);
END
$$;

-- Completes a job without a worker, queued or running. True: it has succeeded with this result, by
-- this call or by an earlier one.
CREATE OR REPLACE FUNCTION rouse.complete(id bigint, result jsonb DEFAULT 'null') RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    was rouse.finished;
BEGIN
    PERFORM rouse._check_id('complete', complete.id);
    IF complete.result IS NULL THEN
        RAISE EXCEPTION 'rouse.complete: result must not be null'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Omit it for the JSON null, or pass ''null''.';
    END IF;
    IF octet_length(complete.result::text) > 4194304 THEN
        RAISE EXCEPTION 'rouse.complete: the result is % bytes long; at most 4194304 are stored', octet_length(complete.result::text)
            USING ERRCODE = 'program_limit_exceeded', HINT = 'Store large data elsewhere and pass a reference to it.';
    END IF;
    IF NOT rouse._end(complete.id, 'succeeded', complete.result, NULL, 'completed') THEN
        was := rouse._ended_job(complete.id);
        IF was.state <> 'succeeded' OR was.result <> complete.result THEN
            PERFORM rouse._refuse_ended(complete.id, 'completed', was.state,
                CASE WHEN was.state = 'succeeded' THEN ', with a different result' ELSE '' END);
        END IF;
    END IF;
    RETURN true;
END
$$;

-- Ends a job as failed, queued or running, regardless of its remaining attempts. True: it has failed with this message,
-- by this call or by an earlier one.
CREATE OR REPLACE FUNCTION rouse.fail(id bigint, message text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    was rouse.finished;
BEGIN
    PERFORM rouse._check_id('fail', fail.id);
    IF coalesce(fail.message, '') = '' OR octet_length(fail.message) > 16384 THEN
        RAISE EXCEPTION 'rouse.fail: message must be 1 to 16384 bytes long' USING ERRCODE = 'invalid_parameter_value',
            HINT = 'The message is shown as the reason why the job failed.';
    END IF;
    IF NOT rouse._end(fail.id, 'failed', NULL, jsonb_build_object('kind', 'admin', 'message', fail.message), 'failed') THEN
        was := rouse._ended_job(fail.id);
        IF was.state <> 'failed' OR was.error->>'message' IS DISTINCT FROM fail.message THEN
            PERFORM rouse._refuse_ended(fail.id, 'failed', was.state,
                CASE WHEN was.state = 'failed' THEN ', with a different message' ELSE '' END);
        END IF;
    END IF;
    RETURN true;
END
$$;

-- Locks a job that is queued. Raises an error if it is running, or has ended in any way other than by cancellation.
CREATE OR REPLACE FUNCTION rouse._check_deletable(p_id bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    live rouse.state;
    was  rouse.finished;
BEGIN
    SELECT j.state INTO live FROM rouse.job AS j WHERE j.id = p_id FOR UPDATE;
    IF live = 'running' THEN
        RAISE EXCEPTION 'rouse: job % cannot be deleted: it is running', p_id
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = format('SELECT rouse.cancel(%s) stops it.', p_id);
    ELSIF live IS NULL THEN
        was := rouse._ended_job(p_id);
        IF was.state <> 'cancelled' THEN
            PERFORM rouse._refuse_ended(p_id, 'deleted', was.state, '');
        END IF;
    END IF;
END
$$;

-- Deletes a queued job: it is cancelled, and a record shows that it was deleted. True: it is cancelled now, by this
-- call or by an earlier one. A running job is not deleted.
CREATE OR REPLACE FUNCTION rouse.delete(id bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    PERFORM rouse._check_id('delete', delete.id);
    PERFORM rouse._check_deletable(delete.id);
    PERFORM rouse._end(delete.id, 'cancelled', NULL, NULL, 'deleted');
    RETURN true;
END
$$;

-- Creates a new job from an ended one, `p_was`, with the same handler, queue, priority, tags, payload, tenant, source,
-- max_attempts, grants, lease, timeout and unique key, but without a job timeout: the old job's deadline has passed, or
-- was meant for that job only. Returns the id of the new job; or, if a live job prevents the retry, the id of that live
-- job, with `is_retry`: true if it is a retry of the job, false if it only has its unique key. All are null if the
-- payload was removed. Served by job_retry and job_unique_key; wakes workers as an enqueue does.
--
-- If its chain has failed, the retry continues the chain; if the chain is live, its live job is the retry; if the end
-- of the chain is no longer kept, it is final, and the retry starts a chain of its own. If the job never ran, the retry
-- waits for what it had waited for: `failed` is a chain that has failed, and prevents the retry. So does the chain
-- whose failure has cancelled the job, if its end is no longer kept: otherwise, the retry would run although that chain
-- has failed. So does a live chain whose later jobs wait for the chain that the retry continues: none of them would ever
-- run.
CREATE OR REPLACE FUNCTION rouse._retry(
    p_was rouse.finished, p_at timestamptz, OUT made bigint, OUT live bigint, OUT is_retry boolean, OUT failed bigint)
LANGUAGE plpgsql AS $$
DECLARE
    fresh     bigint := nextval('rouse.turn_seq');
    payload   jsonb := rouse._payload(p_was.id, p_was.payload, p_was.payload_at);
    bytes     integer := octet_length(payload::text);
    stored_at timestamptz := rouse._payload_at(bytes, p_at);
    continued bigint := coalesce(p_was.chain, p_was.id);
    lane_id   bigint;
    last      rouse.finished;
    parents   record;
    blockers  integer;
BEGIN
    IF payload IS NULL THEN
        RETURN;
    END IF;
    lane_id := rouse._lane_now(p_was.lane, p_was.tenant, p_was.source, payload);
    IF p_was.state = 'succeeded' THEN
        continued := NULL;
    ELSE
        LOOP
            live := rouse._live_job(continued);
            IF live IS NOT NULL THEN
                is_retry := true;
                RETURN;
            END IF;
            last := rouse._last_ended(continued);
            -- An enqueue of a job that waits for a retry of this chain also locks the row (rouse._lock_parent).
            PERFORM FROM rouse.finished AS f WHERE f.id = last.id FOR UPDATE;
            EXIT WHEN rouse._live_job(continued) IS NULL AND (rouse._last_ended(continued)).id IS NOT DISTINCT FROM last.id;
        END LOOP;
        IF last.id IS NULL OR last.state = 'succeeded' THEN
            continued := NULL;
        END IF;
    END IF;
    IF p_was.after IS NOT NULL AND p_was.attempt = 0 THEN
        IF p_was.state = 'cancelled' THEN
            -- The chain whose failure has cancelled it: once its end is no longer kept, it cannot be retried first.
            SELECT (r.detail ->> 'after')::bigint INTO failed FROM rouse.record AS r
            WHERE r.job = p_was.id AND r.event = 'cancelled' AND r.detail ? 'after' LIMIT 1;
            IF failed IS NOT NULL AND rouse._live_job(failed) IS NULL AND (rouse._last_ended(failed)).id IS NULL THEN
                RETURN;
            END IF;
            failed := NULL;
        END IF;
        -- Any other chain whose end is no longer kept had ended when this job was released or cancelled.
        parents := rouse._find_parents((
            SELECT coalesce(jsonb_object_agg(d.name, d.entry), '{}') FROM rouse._dependencies_of(p_was.after) AS d
            WHERE coalesce(rouse._live_job((d.job #>> '{}')::bigint), (rouse._last_ended((d.job #>> '{}')::bigint)).id) IS NOT NULL), true);
        IF parents.failed IS NOT NULL THEN
            failed := parents.failed;
            RETURN;
        END IF;
        blockers := nullif(cardinality(parents.chains), 0);
        IF rouse._is_cycle(continued, parents.chains) THEN
            failed := (SELECT c.chain FROM unnest(parents.chains) AS c(chain) WHERE rouse._is_cycle(continued, ARRAY[c.chain]) LIMIT 1);
            RETURN;
        END IF;
    END IF;
    FOR try IN 1 .. 10 LOOP
        INSERT INTO rouse.job AS j (id, lane, turn, retried_from, chain, flow, flow_name, requested_at, available_at,
                                    max_attempts, blockers, bytes, tenant, source, unique_key, payload, payload_at, wake, grants, lease_ms, timeout_ms, after, origin,
                                    trace)
        VALUES (fresh, lane_id, CASE WHEN blockers IS NULL THEN fresh END, p_was.id, continued,
                p_was.flow, p_was.flow_name, p_at, p_at, p_was.max_attempts, blockers,
                bytes + rouse._other_bytes(p_was.tenant, p_was.source, p_was.grants, p_was.trace),
                p_was.tenant, p_was.source, p_was.unique_key, CASE WHEN stored_at IS NULL THEN payload END, stored_at,
                CASE WHEN blockers IS NULL THEN true END, p_was.grants, p_was.lease_ms, p_was.timeout_ms, p_was.after, p_was.origin, p_was.trace)
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            IF blockers IS NOT NULL THEN
                PERFORM rouse._add_dependencies(fresh, parents.chains, parents.on_failures, NULL);
            END IF;
            -- Jobs that the chain's failure has not reached yet then wait for the retry.
            DELETE FROM rouse.pending_release AS p WHERE p.chain = continued;
            IF stored_at IS NOT NULL THEN
                INSERT INTO rouse.payload (job, payload, kept_at) VALUES (fresh, payload::text, stored_at);
            END IF;
            -- Also for the job that ended last, if the retry of an older one continues the chain
            -- (rouse._has_successor).
            INSERT INTO rouse.record (at, job, event, who, detail)
            SELECT p_at, r.id, 'retried', session_user, jsonb_build_object('as', fresh)
            FROM (SELECT p_was.id UNION SELECT last.id WHERE continued IS NOT NULL) AS r(id);
            made := fresh;
            RETURN;
        END IF;
        SELECT j.id, true INTO live, is_retry FROM rouse.job AS j WHERE j.retried_from = p_was.id;
        IF FOUND THEN
            RETURN;
        END IF;
        SELECT j.id, false INTO live, is_retry FROM rouse.job AS j
        WHERE j.unique_key = p_was.unique_key AND coalesce(j.tenant, '') = coalesce(p_was.tenant, '');
        IF FOUND THEN
            RETURN;
        END IF;
        -- The other job ended between the statements.
    END LOOP;
    RAISE EXCEPTION 'rouse: job % cannot be retried: its unique key is taken and freed faster than it can be read', p_was.id
        USING ERRCODE = 'serialization_failure', HINT = 'Try again.';
END
$$;

-- Why this chain prevents a retry (rouse._retry).
CREATE OR REPLACE FUNCTION rouse._why_it_prevents(p_failed bigint) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN rouse._live_job(p_failed) IS NULL THEN 'has failed' ELSE 'waits for it' END
$$;

-- Creates a new job from an ended one (rouse._retry) and returns its id. While a retry of it is live, returns the id of
-- that retry. Served by the primary key, finished_id and job_retry.
CREATE OR REPLACE FUNCTION rouse.retry(id bigint) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at   timestamptz := clock_timestamp();
    live record;
    was  rouse.finished;
    done record;
BEGIN
    PERFORM rouse._check_id('retry', retry.id);
    SELECT j.state, j.blockers INTO live FROM rouse.job AS j WHERE j.id = retry.id;
    IF FOUND THEN
        RAISE EXCEPTION 'rouse: job % cannot be retried: it is %', retry.id, live.state
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = CASE WHEN live.blockers IS NOT NULL THEN 'It waits for other jobs: waits_for in rouse.jobs names them.'
                              WHEN live.state = 'queued' THEN format('SELECT rouse.reschedule(%s) makes it ready at once.', retry.id)
                              ELSE 'Wait for its end, or cancel it first.' END;
    END IF;
    was := rouse._ended_job(retry.id);
    PERFORM rouse._ensure_partitions(at);
    SELECT * INTO done FROM rouse._retry(was, at);
    IF done.is_retry = false THEN
        RAISE EXCEPTION 'rouse: job % cannot be retried: live job % has its unique key %',
            was.id, done.live, quote_literal(substr(was.unique_key, strpos(was.unique_key, '/') + 1))
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Wait for the end of that job, or cancel it first.';
    END IF;
    IF done.failed IS NOT NULL THEN
        RAISE EXCEPTION 'rouse: job % cannot be retried: it waits for job %, which %', was.id, done.failed, rouse._why_it_prevents(done.failed)
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = CASE WHEN rouse._live_job(done.failed) IS NOT NULL
                              THEN format('SELECT rouse.cancel_chain(%s) makes it possible. Or enqueue a new job with the payload of this one.', done.failed)
                         WHEN (rouse._last_ended(done.failed)).state <> 'succeeded' THEN 'Retry that job first.'
                         ELSE 'That job is no longer kept. Enqueue a new job with the payload of this one.' END;
    END IF;
    IF done.made IS NULL AND done.live IS NULL THEN
        RAISE EXCEPTION 'rouse: job % cannot be retried: its payload was removed', was.id
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'It is missing from rouse.payload. Enqueue a new job, and pass the payload again.';
    END IF;
    RETURN coalesce(done.made, done.live);
END
$$;

-- Changes the time at which a queued job may start; null, or a time in the past: at once. A job that is ready and stays
-- ready keeps its turn. The deadline of a job with a job timeout does not change. Served by the primary key.
CREATE OR REPLACE FUNCTION rouse.reschedule(id bigint, run_at timestamptz DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at      timestamptz;
    live    record;
    started record;
    was     rouse.finished;
BEGIN
    PERFORM rouse._check_id('reschedule', reschedule.id);
    IF NOT isfinite(reschedule.run_at) THEN
        RAISE EXCEPTION 'rouse.reschedule: run_at must be a time, not %', reschedule.run_at
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Omit it to run the job at once.';
    END IF;
    SELECT j.state, j.lane, j.turn, j.available_at, j.attempt, j.blockers, j.wait INTO live FROM rouse.job AS j WHERE j.id = reschedule.id FOR UPDATE;
    -- Read after the row is locked, so that it is later than any change that this call waited for.
    at := clock_timestamp();
    IF live.state IS NULL THEN
        was := rouse._ended_job(reschedule.id);
        PERFORM rouse._refuse_ended(reschedule.id, 'rescheduled', was.state, '');
    END IF;
    IF live.state = 'running' THEN
        RAISE EXCEPTION 'rouse: job % cannot be rescheduled: it is running', reschedule.id
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = format('Wait for its end, or stop it with SELECT rouse.cancel(%s).', reschedule.id);
    END IF;
    PERFORM rouse._ensure_partitions(at);
    IF live.turn IS NULL AND live.wait ->> 'kind' = 'call' THEN
        RAISE EXCEPTION 'rouse: job % cannot be rescheduled: it waits for the jobs that it has called', reschedule.id
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'rouse.jobs lists them in waits_for. Complete, fail or cancel these.';
    ELSIF live.turn IS NULL AND live.wait IS NOT NULL THEN
        -- The sleep, or the timeout of the wait for a signal, ends then.
        live.wait := live.wait || jsonb_build_object(
            'until_ms', ceil(extract(epoch FROM least(coalesce(reschedule.run_at, at), at + interval '100 years')) * 1000)::bigint);
        -- From the step, which is kept as long as the job, unlike the attempt.
        SELECT s.worker, s.at INTO started FROM rouse.step AS s
        WHERE s.job = reschedule.id AND s.name = live.wait ->> 'step' ORDER BY s.at DESC LIMIT 1;
        -- The last row of a step counts, even if the clock has been set back since the start of the wait.
        INSERT INTO rouse.step (job, name, wait, attempt, worker, at, kept_at)
        VALUES (reschedule.id, live.wait ->> 'step', live.wait, live.attempt, coalesce(started.worker, 0),
                greatest(at, started.at + interval '1 microsecond'), at);
    END IF;
    IF live.blockers IS NOT NULL THEN
        -- It gets its turn when it is released, at run_at at the earliest.
        UPDATE rouse.job AS j SET available_at = coalesce(reschedule.run_at, at) WHERE j.id = reschedule.id;
    ELSIF reschedule.run_at > at THEN
        IF live.turn IS NULL AND live.available_at = reschedule.run_at THEN
            RETURN true;
        END IF;
        -- A job that has its turn no longer waits for anything.
        UPDATE rouse.job AS j SET turn = NULL, available_at = reschedule.run_at, wait = CASE WHEN j.turn IS NULL THEN live.wait END WHERE j.id = reschedule.id;
        PERFORM rouse._notify(live.lane, false, at);
    ELSE
        IF live.turn IS NOT NULL THEN
            RETURN true;
        END IF;
        UPDATE rouse.job AS j SET turn = nextval('rouse.turn_seq'), available_at = least(j.available_at, at) WHERE j.id = reschedule.id;
        PERFORM rouse._notify(live.lane, true, at);
    END IF;
    INSERT INTO rouse.record (at, job, event, attempt, who, detail)
    VALUES (clock_timestamp(), reschedule.id, 'rescheduled', live.attempt, session_user,
            jsonb_build_object('run_at', greatest(reschedule.run_at, at)));
    RETURN true;
END
$$;

CREATE OR REPLACE FUNCTION rouse._check_queue(p_name text, p_queue text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF p_queue IS NULL OR p_queue !~ '^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$' THEN
        RAISE EXCEPTION 'rouse.%: % is not a queue name', p_name, coalesce(quote_literal(left(p_queue, 140)), 'null')
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'Queue names start with a letter or digit and contain letters, digits and _ . : - ; at most 128 characters.';
    END IF;
END
$$;

-- Pauses a queue, and returns the time at which it was paused. Every claim that starts after the commit skips jobs of
-- the queue. Claimed jobs continue, and jobs can still be enqueued.
CREATE OR REPLACE FUNCTION rouse.pause_queue(queue text) RETURNS timestamptz
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
        PERFORM rouse._ensure_partitions(at);
        INSERT INTO rouse.record (at, queue, event, who) VALUES (at, pause_queue.queue, 'paused', session_user);
    END IF;
    RETURN since;
END
$$;

-- Sets the number of days for which finished jobs of a queue are kept, and the number for those that failed or timed
-- out. Null: unchanged; 0: the default retention, or that of the queue's other jobs. Applies to jobs that end after the
-- change. Returns the current settings (null: the default retention). Leaves a record. Warns if the lookup of a job
-- would need 20 % of the server's locks: attempts and records are kept as long, and for each day, the lookup locks both
-- partitions and their five indexes.
CREATE OR REPLACE FUNCTION rouse.set_retention(
    queue text, INOUT keep_days integer DEFAULT NULL, INOUT keep_failed_days integer DEFAULT NULL)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at  timestamptz := clock_timestamp();
    was rouse.queue;
BEGIN
    PERFORM rouse._check_queue('set_retention', set_retention.queue);
    IF set_retention.keep_days NOT BETWEEN 0 AND 3650 OR set_retention.keep_failed_days NOT BETWEEN 0 AND 3650 THEN
        RAISE EXCEPTION 'rouse.set_retention: keep_days and keep_failed_days must be 1 to 3650 days, or 0 for the default retention'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    INSERT INTO rouse.queue (name) VALUES (set_retention.queue) ON CONFLICT DO NOTHING;
    SELECT * INTO was FROM rouse.queue AS q WHERE q.name = set_retention.queue FOR NO KEY UPDATE;
    UPDATE rouse.queue AS q
    SET keep_days = nullif(coalesce(set_retention.keep_days, q.keep_days), 0),
        keep_failed_days = nullif(coalesce(set_retention.keep_failed_days, q.keep_failed_days), 0)
    WHERE q.name = set_retention.queue
    RETURNING q.keep_days, q.keep_failed_days INTO keep_days, keep_failed_days;
    IF (was.keep_days, was.keep_failed_days) IS DISTINCT FROM (set_retention.keep_days::smallint, set_retention.keep_failed_days::smallint) THEN
        PERFORM rouse._ensure_partitions(at);
        INSERT INTO rouse.record (at, queue, event, who, detail)
        VALUES (at, set_retention.queue, 'retention_set', session_user,
                jsonb_build_object('keep_days', set_retention.keep_days, 'keep_failed_days', set_retention.keep_failed_days));
        PERFORM rouse._warn_of_locks('set_retention', greatest(set_retention.keep_days, set_retention.keep_failed_days), 7);
    END IF;
END
$$;

-- Sets the maximum size of the payloads of a queue, 1 KiB to 64 MiB; 256 KiB (262144) is the default. Applies to jobs
-- that are enqueued after the change. Leaves a record.
CREATE OR REPLACE FUNCTION rouse.set_payload_limit(queue text, payload_bytes_max integer) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at  timestamptz := clock_timestamp();
    was integer;
BEGIN
    PERFORM rouse._check_queue('set_payload_limit', set_payload_limit.queue);
    IF set_payload_limit.payload_bytes_max IS NULL OR set_payload_limit.payload_bytes_max NOT BETWEEN 1024 AND 67108864 THEN
        RAISE EXCEPTION 'rouse.set_payload_limit: payload_bytes_max must be 1024 to 67108864, not %',
            coalesce(set_payload_limit.payload_bytes_max::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    INSERT INTO rouse.queue (name) VALUES (set_payload_limit.queue) ON CONFLICT DO NOTHING;
    SELECT q.payload_bytes_max INTO was FROM rouse.queue AS q WHERE q.name = set_payload_limit.queue FOR NO KEY UPDATE;
    IF was <> set_payload_limit.payload_bytes_max THEN
        UPDATE rouse.queue AS q SET payload_bytes_max = set_payload_limit.payload_bytes_max WHERE q.name = set_payload_limit.queue;
        PERFORM rouse._ensure_partitions(at);
        INSERT INTO rouse.record (at, queue, event, who, detail)
        VALUES (at, set_payload_limit.queue, 'payload_limit_set', session_user,
                jsonb_build_object('payload_bytes_max', set_payload_limit.payload_bytes_max, 'was', was));
    END IF;
END
$$;

-- Sets the number of days for which finished jobs are kept if their queue has no retention of its own, and returns the
-- previous number. Workers drop older history within an hour, including that of jobs that ended before the change.
-- Leaves a record. Warns as rouse.set_retention does; for each day, the lookup of a job also locks the partition of
-- finished jobs and its six indexes.
CREATE OR REPLACE FUNCTION rouse.set_default_retention(keep_days integer) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at  timestamptz := clock_timestamp();
    was integer;
BEGIN
    IF set_default_retention.keep_days IS NULL OR set_default_retention.keep_days NOT BETWEEN 1 AND 3650 THEN
        RAISE EXCEPTION 'rouse.set_default_retention: keep_days must be 1 to 3650 days, not %', coalesce(set_default_retention.keep_days::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT l.keep_days INTO was FROM rouse.limits AS l WHERE l.only_row FOR NO KEY UPDATE;
    IF was <> set_default_retention.keep_days THEN
        UPDATE rouse.limits AS l SET keep_days = set_default_retention.keep_days WHERE l.only_row;
        PERFORM rouse._ensure_partitions(at);
        INSERT INTO rouse.record (at, event, who, detail)
        VALUES (at, 'default_retention_set', session_user, jsonb_build_object('keep_days', set_default_retention.keep_days, 'was', was));
        PERFORM rouse._warn_of_locks('set_default_retention', set_default_retention.keep_days, 14);
    END IF;
    RETURN was;
END
$$;

-- Warns if the lookup of a job would need 20 % of the locks of this server, at the given number of locks for each day
-- of history.
CREATE OR REPLACE FUNCTION rouse._warn_of_locks(p_function text, p_days integer, p_locks_per_day integer) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    locks bigint := p_days::bigint * p_locks_per_day;
    -- Approximately the number of locks that all sessions together can hold.
    total bigint := current_setting('max_locks_per_transaction')::bigint
                    * (current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint);
BEGIN
    IF locks > total / 5 THEN
        RAISE WARNING 'rouse.%: with % days of history, the lookup of a job needs about % of the % locks of this server', p_function, p_days, locks, total
            USING HINT = 'Raise max_locks_per_transaction, or keep the jobs for a shorter time.';
    END IF;
END
$$;

-- Resumes a paused queue, and returns whether it was paused. Wakes sleeping workers.
CREATE OR REPLACE FUNCTION rouse.resume_queue(queue text) RETURNS boolean
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
    -- Workers only check leases that have ended since their last check, so the leases of this queue's orphans are set
    -- to end shortly after this transaction commits. Served by job_lease.
    WITH orphan AS MATERIALIZED (
        SELECT j.id FROM rouse.job AS j
        WHERE j.state = 'running' AND j.lease_until < at
          AND (SELECT l.queue FROM rouse.lane AS l WHERE l.id = j.lane LIMIT 1) = resume_queue.queue
        FOR NO KEY UPDATE SKIP LOCKED)
    UPDATE rouse.job AS j SET lease_until = at + interval '50 ms' FROM orphan WHERE j.id = ANY (ARRAY[orphan.id]);
    PERFORM rouse._ensure_partitions(at);
    INSERT INTO rouse.record (at, queue, event, who, detail)
    VALUES (at, resume_queue.queue, 'resumed', session_user, jsonb_build_object('paused_at', since));
    -- Without a lane: a worker that receives this notification looks in all lanes.
    PERFORM rouse._hint('rouse_wake', resume_queue.queue);
    RETURN true;
END
$$;

-- Cancels up to `max` ready jobs of a queue, the oldest of each lane first, and returns their number. It does not
-- cancel running or scheduled jobs, jobs that wait for others, or jobs that are being claimed at this moment. Jobs of
-- any queue that wait for the cancelled ones are cancelled or released, as their on_failure says. One record contains
-- the number of ready jobs, and each job has a record of its own. Served by job_ready, after one read of the catalog of
-- lanes.
CREATE OR REPLACE FUNCTION rouse.purge_queue(queue text, max integer DEFAULT 1000) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at      timestamptz := clock_timestamp();
    lane_id bigint;
    ids     bigint[];
    chains  bigint[];
    purged  integer := 0;
BEGIN
    PERFORM rouse._check_queue('purge_queue', purge_queue.queue);
    IF max IS NULL OR max < 1 THEN
        RAISE EXCEPTION 'rouse.purge_queue: max must be at least 1, not %', coalesce(max::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM rouse._ensure_partitions(at);
    FOR lane_id IN SELECT DISTINCT l.id FROM rouse.lane AS l WHERE l.queue = purge_queue.queue LOOP
        ids := ARRAY(
            SELECT j.id FROM rouse.job AS j
            WHERE j.lane = lane_id AND j.state = 'queued' AND j.turn IS NOT NULL
            ORDER BY j.turn LIMIT max - purged FOR UPDATE SKIP LOCKED);
        CONTINUE WHEN ids = '{}';
        chains := rouse._end_queued(ids, 'cancelled', NULL, NULL, at);
        INSERT INTO rouse.record (at, job, event, who) SELECT at, ended.id, 'purged', session_user FROM unnest(ids) AS ended(id);
        PERFORM rouse._chains_ended(chains, array_fill(false, ARRAY[cardinality(chains)]));
        purged := purged + cardinality(ids);
        EXIT WHEN purged >= max;
    END LOOP;
    IF purged > 0 THEN
        INSERT INTO rouse.record (at, queue, event, who, detail)
        VALUES (at, purge_queue.queue, 'purged', session_user, jsonb_build_object('jobs', purged));
    END IF;
    RETURN purged;
END
$$;

-- One host logs each admin action, with its next heartbeat: the trigger copies it to rouse.audit_outbox, and
-- rouse.take_audit_outbox hands it out.
CREATE OR REPLACE FUNCTION rouse._fill_audit_outbox() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO rouse.audit_outbox (at, job, queue, event, attempt, who, detail)
    VALUES (NEW.at, NEW.job, NEW.queue, NEW.event, NEW.attempt, rouse._by(NEW.who, NEW.reader), NEW.detail);
    RETURN NULL;
END
$$;
-- Actions of workers have their own events in the log.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'rouse.record'::regclass AND tgname = 'record_to_audit_outbox') THEN
        CREATE TRIGGER record_to_audit_outbox AFTER INSERT ON rouse.record
            -- For a purge, only the record of the queue; for an action on a flow, only that of the flow.
            FOR EACH ROW WHEN (NEW.who IS NOT NULL
                AND (NEW.job IS NULL OR (NEW.event <> 'purged' AND NOT coalesce(NEW.detail ? 'flow', false))))
            EXECUTE FUNCTION rouse._fill_audit_outbox();
    END IF;
END
$$;

-- Deletes the actions of the outbox that the worker has logged (`p_logged`, their ids), and returns up to `p_max`
-- others in order, for the worker to log: their ids are the `p_logged` of its next call. An action that a worker has
-- received is returned to no other worker for two minutes. If the response is lost, the worker receives it again with
-- its next call, and if the worker has died, another one does after these two minutes. So an action is logged at least
-- once, and may be logged twice. Actions that are a day old are deleted, 1,000 at a time, whether they were logged or
-- not.
--
-- Handler and queue are null if the job is no longer kept. Workers of a limited login receive none, unless the login
-- may do maintenance. The outbox is a copy for logs: an action that a worker does not log is still in rouse.record. A
-- call waits for concurrent calls only in its first statement, in which an index scan locks the rows in order: no
-- deadlock. Served by the primary keys and finished_id.
CREATE OR REPLACE FUNCTION rouse.take_audit_outbox(p_worker bigint, p_key bytea, p_logged bigint[], p_max integer)
RETURNS TABLE (
    id bigint, at timestamptz, event text, job bigint, handler text, queue text, attempt integer, who text, detail jsonb)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    IF rouse._authenticated_as_limited(p_worker, p_key) AND NOT rouse._may_maintain() THEN
        RETURN;
    END IF;
    p_max := least(greatest(coalesce(p_max, 0), 0), 1000);
    DELETE FROM rouse.audit_outbox AS u WHERE u.id = ANY (p_logged);
    DELETE FROM rouse.audit_outbox AS u
    WHERE u.id = ANY (ARRAY(SELECT next.id FROM rouse.audit_outbox AS next ORDER BY next.id LIMIT 1000 FOR UPDATE SKIP LOCKED))
      AND u.at < clock_timestamp() - interval '1 day';
    RETURN QUERY
    WITH taken AS MATERIALIZED (
        UPDATE rouse.audit_outbox AS u SET taken_by = p_worker, taken_at = clock_timestamp()
        WHERE u.id = ANY (ARRAY(
            SELECT next.id FROM rouse.audit_outbox AS next
            WHERE next.taken_by IS NULL OR next.taken_by = p_worker
               OR next.taken_at < clock_timestamp() - interval '2 minutes'
               -- The clock has been set back.
               OR next.taken_at > clock_timestamp() + interval '10 seconds'
            ORDER BY next.id LIMIT p_max FOR UPDATE SKIP LOCKED))
        RETURNING u.*)
    SELECT t.id, t.at, t.event, t.job, l.handler, coalesce(t.queue, l.queue), nullif(t.attempt, 0), t.who, t.detail
    FROM taken AS t
    LEFT JOIN LATERAL (
        SELECT lane.handler, lane.queue FROM rouse.lane AS lane
        WHERE lane.id = coalesce((SELECT j.lane FROM rouse.job AS j WHERE j.id = t.job),
                                 (SELECT f.lane FROM rouse.finished AS f WHERE f.id = t.job LIMIT 1))
        LIMIT 1) AS l ON true
    ORDER BY t.id;
END
$$;
