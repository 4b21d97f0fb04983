-- Waits: sleeps, signals and calls of suspended jobs.
--
-- A job is suspended if it is queued, has no turn, and the column `wait` of its row describes what it waits for:
--
--   {"kind": "sleep", "step": …, "until_ms": …}               available_at is that time, and rouse.promote ends the
--                                                             wait
--   {"kind": "signal", "step": …, "name": …, "until_ms": …}   the same, with the timeout; a signal ends it earlier
--   {"kind": "call", "step": …, "jobs": […]}                  it depends on the chains of these jobs, like a job with
--                                                             `after`
--
-- No signal is lost: rouse.signal locks the row of the job (FOR KEY SHARE) until it commits, as producers that name a
-- parent do. A suspension that waits for a signal takes a stronger lock: either it waits, and sees the signal, or the
-- sender waits, and sees the wait.

-- Those of the listed jobs that the job has called, according to its steps. Others are left out, because a suspension
-- locks the jobs that it waits for. Served by step_job.
CREATE OR REPLACE FUNCTION rouse._called_jobs(p_job bigint, p_jobs jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF coalesce(p_jobs, '[]') = '[]' THEN
        RETURN '[]';
    END IF;
    RETURN coalesce((
        SELECT jsonb_agg(DISTINCT s.wait -> 'job') FROM rouse.step AS s
        WHERE s.job = p_job AND s.wait ->> 'kind' = 'call' AND p_jobs @> (s.wait -> 'job')), '[]');
END
$$;

-- Suspends the attempts that are settled as suspended, and returns their jobs. `p_calls`: the jobs that they have
-- called, as a list of {"parent": …, "step": …, "id": …}. `is_recorded` is set if the attempt waits at a step that an
-- earlier attempt has already recorded. Served by the primary key and signal_job.
CREATE OR REPLACE FUNCTION rouse._suspend(p_worker bigint, p_settlements rouse.settlement[], p_calls jsonb) RETURNS SETOF bigint
LANGUAGE plpgsql ROWS 10
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off AS $$
DECLARE
    at        timestamptz := clock_timestamp();
    -- The calls by the id of their parent.
    calls_of  jsonb := coalesce((
        SELECT jsonb_object_agg(c.parent, c.calls)
        FROM (SELECT c.value ->> 'parent' AS parent, jsonb_agg(c.value) AS calls FROM jsonb_array_elements(p_calls) AS c GROUP BY 1) AS c), '{}');
    waiting   bigint[];
    calling   bigint[];
    listening bigint[];
    called    record;
    chains    bigint[];
    lanes     bigint[];
    has_inboxes boolean;
BEGIN
    PERFORM FROM rouse.lane AS l WHERE l.worker IS NOT NULL LIMIT 1;
    has_inboxes := FOUND;
    -- The wait is stored with the job, the attempt and the step.
    PERFORM rouse._check_size('settle', pg_column_size(s.result), 8388608),
            rouse._check_steps(s.id, greatest(jsonb_array_length(coalesce(calls_of -> s.id::text, '[]')), 1), 0)
    FROM unnest(p_settlements) AS s WHERE s.state = 'queued' AND s.error IS NULL AND s.result IS NOT NULL;
    -- Takes the lock that conflicts with those of senders.
    PERFORM FROM unnest(p_settlements) AS s JOIN rouse.job AS j ON j.id = ANY (ARRAY[s.id]) AND j.fence = s.fence
    WHERE s.state = 'queued' AND s.error IS NULL AND s.result ->> 'kind' = 'signal' FOR UPDATE OF j;
    WITH back AS (
        UPDATE rouse.job AS j
        SET state = 'queued', turn = NULL, fence = NULL, worker = NULL, claimed_at = NULL, lease_until = NULL, uncounted = j.uncounted + 1,
            lane = CASE WHEN has_inboxes THEN rouse._shared_lane(j.lane) ELSE j.lane END,
            -- Only these fields, and nothing else that the worker has sent.
            wait = jsonb_strip_nulls(jsonb_build_object(
                'kind', s.result -> 'kind', 'step', s.result -> 'step', 'name', s.result -> 'name',
                'until_ms', CASE WHEN jsonb_typeof(s.result -> 'until_ms') = 'number' THEN
                    least(greatest((s.result ->> 'until_ms')::numeric, 0), 9e15)::bigint END,
                'jobs', CASE WHEN s.result ->> 'kind' = 'call' THEN
                    rouse._called_jobs(s.id, s.result -> 'jobs') || coalesce(jsonb_path_query_array(calls_of -> s.id::text, '$[*].id'), '[]') END)),
            -- Without a timeout: a hundred years. As after a failure, a time that has passed in the meantime means now.
            available_at = CASE WHEN s.result ->> 'kind' = 'call' THEN at
                           -- With a single snapshot, a signal that this transaction waited for is invisible: the
                           -- attempt looks again.
                           WHEN s.result ->> 'kind' = 'signal' AND current_setting('transaction_isolation') <> 'read committed'
                               THEN greatest(at, least(coalesce(s.retry_at, 'infinity'), at + interval '5 seconds'))
                           ELSE greatest(at, least(coalesce(s.retry_at, 'infinity'), at + interval '100 years')) END
        FROM unnest(p_settlements) AS s, rouse.job AS was
        WHERE j.id = ANY (ARRAY[s.id]) AND j.fence = s.fence AND s.state = 'queued' AND s.error IS NULL AND s.result IS NOT NULL
          AND (p_worker IS NULL OR j.worker = p_worker) AND was.id = ANY (ARRAY[s.id])
        RETURNING j.id, j.attempt, j.lane, j.tenant, j.wait, s.result, was.worker, was.claimed_at,
                  CASE WHEN s.started_us IS NOT NULL THEN least(at, was.claimed_at + least(greatest(s.started_us, 0), 31622400000000) * interval '1 microsecond') END AS started_at,
                  abs(s.cpu_us) AS cpu_us, abs(s.memory_peak_bytes) AS memory_peak, abs(s.host_calls) AS host_calls,
                  abs(s.bytes_in) AS bytes_in, abs(s.bytes_out) AS bytes_out, s.digest, left(s.handler, 128) AS handler),
    ended AS (
        INSERT INTO rouse.attempt (job, attempt, lost, worker, claimed_at, started_at, ended_at, wait, lane, tenant,
                                   cpu_us, memory_peak_bytes, host_calls, bytes_in, bytes_out, digest, handler)
        SELECT b.id, b.attempt, false, b.worker, b.claimed_at, b.started_at, at, b.wait, b.lane, b.tenant,
               b.cpu_us, b.memory_peak, b.host_calls, b.bytes_in, b.bytes_out, b.digest, b.handler
        FROM back AS b),
    started AS (
        INSERT INTO rouse.step (job, name, wait, attempt, worker, at, kept_at)
        SELECT b.id, b.result ->> 'step', b.wait, b.attempt, b.worker, at, at FROM back AS b
        WHERE b.result ->> 'kind' <> 'call' AND b.result -> 'is_recorded' IS NULL
        UNION ALL
        SELECT b.id, c.value ->> 'step', jsonb_build_object(
                   'kind', 'call', 'job', c.value -> 'id', 'chain', coalesce(rouse._chain_of((c.value ->> 'id')::bigint), (c.value ->> 'id')::bigint)), b.attempt, b.worker, at, at
        FROM back AS b CROSS JOIN LATERAL jsonb_array_elements(calls_of -> b.id::text) AS c)
    SELECT array_agg(b.id), array_agg(b.id) FILTER (WHERE b.wait ->> 'kind' = 'call'), array_agg(b.id) FILTER (WHERE b.wait ->> 'kind' = 'signal')
    INTO waiting, calling, listening FROM back AS b;
    RETURN QUERY SELECT w.id FROM unnest(waiting) AS w(id);

    FOR called IN
        SELECT j.id, j.lane, j.chain, j.wait FROM unnest(calling) AS w(id) JOIN rouse.job AS j ON j.id = ANY (ARRAY[w.id])
    LOOP
        -- In the order of the ids, as an enqueue locks them.
        chains := '{}';
        SELECT coalesce(array_agg(DISTINCT locked.chain), '{}') INTO chains
        FROM (SELECT DISTINCT e.id::bigint AS id FROM jsonb_array_elements_text(called.wait -> 'jobs') AS e(id) ORDER BY 1) AS e
        CROSS JOIN LATERAL rouse._lock_parent(e.id, 'run') AS locked WHERE locked.waits;
        PERFORM rouse._refuse_cycle(coalesce(called.chain, called.id), chains);
        PERFORM rouse._add_dependencies(called.id, chains, array_fill('run'::text, ARRAY[cardinality(chains)]), NULL);
        UPDATE rouse.job AS j
        SET blockers = nullif(cardinality(chains), 0), turn = CASE WHEN chains = '{}' THEN nextval('rouse.turn_seq') END
        WHERE j.id = called.id;
        IF chains = '{}' THEN
            PERFORM rouse._notify(called.lane, true, at);
        END IF;
    END LOOP;

    -- A new statement sees signals that were committed while this function waited for the lock.
    WITH signalled AS (
        UPDATE rouse.job AS j SET turn = nextval('rouse.turn_seq'), available_at = at
        FROM unnest(listening) AS w(id)
        WHERE j.id = ANY (ARRAY[w.id])
          AND EXISTS (SELECT FROM rouse.signal AS g WHERE g.job = ANY (ARRAY[j.id]) AND g.name = j.wait ->> 'name')
        RETURNING j.lane)
    SELECT array_agg(DISTINCT s.lane) INTO lanes FROM signalled AS s;
    PERFORM rouse._notify(l.lane, true, CASE WHEN cardinality(lanes) <= 32 THEN at ELSE '-infinity' END) FROM unnest(lanes) AS l(lane);
END
$$;

-- Sends a signal to a job, in the caller's transaction. True: the job has the signal, which ends the wait for it, now
-- or when that wait starts. False: the job has ended. Raises an error if the job does not exist or is no longer kept,
-- or if it has 1,000 signals that no wait has taken.
--
-- Served by the primary key and signal_job. Waits for a settlement of the job that is about to commit.
CREATE OR REPLACE FUNCTION rouse.signal(id bigint, name text, payload jsonb DEFAULT 'null') RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at   timestamptz := clock_timestamp();
    lane bigint;
BEGIN
    PERFORM rouse._check_id('signal', signal.id);
    -- Hosts do not wait for any other names.
    IF signal.name IS NULL OR length(signal.name) NOT BETWEEN 1 AND 200 OR signal.name ~ E'[\\x01-\\x1f\\x7f-\\x9f]' THEN
        RAISE EXCEPTION 'rouse.signal: the name of a signal must have 1 to 200 printable characters' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF octet_length(signal.payload::text) > 262144 THEN
        RAISE EXCEPTION 'rouse.signal: the payload is % bytes long; at most 262144 are allowed', octet_length(signal.payload::text)
            USING ERRCODE = 'program_limit_exceeded', HINT = 'Store large data elsewhere and send a reference to it.';
    END IF;
    IF rouse._lock_live(signal.id) IS NULL THEN
        PERFORM rouse._ended_job(signal.id);
        RETURN false;
    END IF;
    IF (SELECT count(*) FROM (SELECT FROM rouse.signal AS g WHERE g.job = signal.id LIMIT 1000) AS g) = 1000 THEN
        RAISE EXCEPTION 'rouse.signal: job % has 1000 signals that it has not waited for yet', signal.id
            USING ERRCODE = 'program_limit_exceeded',
                  HINT = 'Each wait of the job takes one signal with its name. Send more when the job has waited, or cancel the job if it never will.';
    END IF;
    INSERT INTO rouse.signal (job, name, payload, at) VALUES (signal.id, signal.name, coalesce(signal.payload, 'null')::json, at);
    -- CASE hides the conditions from the planner: otherwise, a plan could read all jobs that wait (job_waiting).
    UPDATE rouse.job AS j SET turn = nextval('rouse.turn_seq'), available_at = least(j.available_at, at)
    WHERE j.id = signal.id
      AND CASE WHEN j.state = 'queued' AND j.turn IS NULL THEN j.wait ->> 'kind' = 'signal' AND j.wait ->> 'name' = signal.name END
    RETURNING j.lane INTO lane;
    IF FOUND THEN
        PERFORM rouse._notify(lane, true, at);
    END IF;
    RETURN true;
END
$$;

-- Locks the row of a running job for a write of its attempt, and returns the attempt; null if the job is not this
-- worker's. Fails at once with lock_not_available if another transaction has locked the row: a worker makes few such
-- calls at a time, and those of other attempts must not wait for that transaction.
CREATE OR REPLACE FUNCTION rouse._lock_attempt(p_worker bigint, p_id bigint, p_fence bigint) RETURNS integer
LANGUAGE sql AS $$
    SELECT j.attempt FROM rouse.job AS j WHERE j.id = p_id AND j.fence = p_fence AND j.worker = p_worker FOR NO KEY UPDATE NOWAIT
$$;

-- Ends a wait for a signal, for the worker that runs the job: takes the oldest signal with this name and records it as
-- the result of the step, {"payload": …}; or, if there is none at p_until, {"timed_out": true}. No row if the job has
-- to wait. A repeated call returns what is recorded. A result of more than 1,024 bytes is null here: the job is locked
-- until the response has been sent, so the response has to be small, and rouse.recorded_results returns the result.
-- Served by signal_job and step_job.
CREATE OR REPLACE FUNCTION rouse.take_signal(p_worker bigint, p_key bytea, p_id bigint, p_fence bigint, p_step text, p_name text, p_until timestamptz)
RETURNS TABLE (refusal text, result json)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '250ms' SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at      timestamptz;
    attempt integer;
    taken   record;
BEGIN
    PERFORM rouse._authenticated_as_limited(p_worker, p_key);
    attempt := rouse._lock_attempt(p_worker, p_id, p_fence);
    IF attempt IS NULL THEN
        refusal := coalesce(rouse._refusal(p_worker, p_id, p_fence), 'error');
        RETURN NEXT;
        RETURN;
    END IF;
    at := clock_timestamp();
    SELECT s.result INTO result FROM rouse.step AS s WHERE s.job = p_id AND s.name = p_step AND s.result IS NOT NULL LIMIT 1;
    IF NOT FOUND THEN
        SELECT g.id, g.payload INTO taken FROM rouse.signal AS g WHERE g.job = p_id AND g.name = p_name ORDER BY g.id LIMIT 1;
        IF FOUND THEN
            DELETE FROM rouse.signal AS g WHERE g.id = taken.id;
            result := json_build_object('payload', taken.payload);
        ELSIF p_until <= at THEN
            result := '{"timed_out": true}';
        ELSE
            RETURN;
        END IF;
        -- rouse.signal bounds the payload of a signal.
        PERFORM rouse._check_steps(p_id, 1, 0);
        INSERT INTO rouse.step (job, name, result, attempt, worker, at, kept_at) VALUES (p_id, p_step, result, attempt, p_worker, at, at);
    END IF;
    IF octet_length(result::text) > 1024 THEN
        result := NULL;
    END IF;
    RETURN NEXT;
END
$$;

-- The ends of calls, for the worker that runs the job: records the calls that have ended as the results of their steps,
-- {"output": …} or {"failed": {"kind": …, "message": …}}, and returns all that are recorded. `job`: the job of a call
-- whose chain has not ended. A call whose step is not returned has not been made yet. As in rouse.take_signal, a result
-- of more than 1,024 bytes is null, and so are those after the first 64 KiB. Fails if the results together exceed
-- p_bytes_max. Served by step_job and by the same indexes as rouse.chain.
CREATE OR REPLACE FUNCTION rouse.returned_calls(p_worker bigint, p_key bytea, p_id bigint, p_fence bigint, p_steps text[], p_bytes_max bigint)
RETURNS TABLE (refusal text, step text, result json, job bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '250ms' SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at      timestamptz := clock_timestamp();
    attempt integer;
    total   bigint := 0;
    size    integer;
    sent    integer := 0;
    called  record;
    ended   record;
BEGIN
    PERFORM rouse._authenticated_as_limited(p_worker, p_key);
    attempt := rouse._lock_attempt(p_worker, p_id, p_fence);
    IF attempt IS NULL THEN
        refusal := coalesce(rouse._refusal(p_worker, p_id, p_fence), 'error');
        RETURN NEXT;
        RETURN;
    END IF;
    FOR called IN
        SELECT s.name, (array_agg(s.result) FILTER (WHERE s.result IS NOT NULL))[1] AS result, max((s.wait ->> 'job')::bigint) AS job,
               max((s.wait ->> 'chain')::bigint) AS chain
        -- Only the steps of calls name a job. rouse._suspend has written its id.
        FROM rouse.step AS s
        WHERE s.job = p_id AND s.name = ANY (p_steps) AND (s.wait IS NULL OR s.wait ->> 'kind' = 'call') GROUP BY s.name
    LOOP
        step := called.name;
        result := called.result;
        job := NULL;
        IF result IS NULL THEN
            -- With a unique key, the called job may be a later one of its chain.
            IF rouse._live_job(called.chain) IS NOT NULL THEN
                job := called.job;
            ELSE
                ended := rouse._end_of(called.chain);
                result := CASE
                    WHEN ended.job IS NULL THEN json_build_object('failed', json_build_object(
                        'kind', 'gone', 'message', format('job %s was called, and is no longer kept', called.job)))
                    WHEN ended.state = 'succeeded' THEN json_build_object('output', ended.result)
                    ELSE json_build_object('failed', coalesce(ended.error, jsonb_build_object(
                        'kind', 'cancelled', 'message', format('job %s was called, and was cancelled', ended.job)))) END;
                INSERT INTO rouse.step (job, name, result, attempt, worker, at, kept_at) VALUES (p_id, step, result, attempt, p_worker, at, at);
            END IF;
        END IF;
        size := coalesce(octet_length(result::text), 0);
        total := total + size;
        IF total > p_bytes_max THEN
            RAISE EXCEPTION 'the results of these calls are longer than % bytes', p_bytes_max USING ERRCODE = 'program_limit_exceeded';
        END IF;
        IF size > 1024 OR sent + size > 65536 THEN
            result := NULL;
        ELSE
            sent := sent + size;
        END IF;
        RETURN NEXT;
    END LOOP;
END
$$;

-- The ends of the chains that a job has waited for (`after`), by name in byte order, for the worker that runs the job;
-- or one row with the refusal. Reads those with the names p_names; if it is empty, the first 1,000 after the name
-- p_after. Once the ends reach 1 MiB, only names follow (`is_read` is false), which the caller passes to the next call:
-- without them, each page would read and sort up to 10,000 names. `job` is null for a chain that is no longer kept; a
-- name that `after` does not have is left out. Served by the same indexes as rouse.chain.
CREATE OR REPLACE FUNCTION rouse.parent_ends(p_worker bigint, p_key bytea, p_id bigint, p_fence bigint, p_after text, p_names text[])
RETURNS TABLE (refusal text, name text, job bigint, state text, output jsonb, is_read boolean)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    parents jsonb;
    entry   jsonb;
    ended   record;
    total   bigint := 0;
BEGIN
    PERFORM rouse._authenticated_as_limited(p_worker, p_key);
    refusal := rouse._refusal(p_worker, p_id, p_fence);
    IF refusal IS NOT NULL THEN
        RETURN NEXT;
        RETURN;
    END IF;
    -- A copy in memory: each lookup in the stored value would read it from the disk.
    parents := (SELECT j.after FROM rouse.job AS j WHERE j.id = p_id) || '{}';
    IF coalesce(cardinality(p_names), 0) = 0 THEN
        p_names := ARRAY(
            SELECT n.name FROM jsonb_object_keys(parents) AS n(name)
            WHERE p_after IS NULL OR n.name COLLATE "C" > p_after
            ORDER BY n.name COLLATE "C" LIMIT 1000);
    END IF;
    FOREACH name IN ARRAY p_names[:1000] LOOP
        entry := parents -> name;
        CONTINUE WHEN entry IS NULL;
        is_read := total <= 1048576;
        job := NULL;
        state := NULL;
        output := NULL;
        IF is_read THEN
            -- The enqueue has stored the chain.
            ended := rouse._end_of((CASE jsonb_typeof(entry) WHEN 'object' THEN entry -> 'job' ELSE entry END #>> '{}')::bigint);
            job := ended.job;
            state := ended.state;
            output := coalesce(ended.result, ended.error);
            total := total + coalesce(octet_length(output::text), 0);
        END IF;
        RETURN NEXT;
    END LOOP;
END
$$;

-- Deletes signals to jobs that have ended. Reads the next 10,000 signals after the id p_after; `reached` is the id of
-- the last one, or null if there are no more. Signals of the last hour stay. For workers; those of a limited login that
-- may not do maintenance delete nothing. Served by the primary keys, with a plan that does not depend on statistics (as
-- in rouse.maintain_gate_keys).
CREATE OR REPLACE FUNCTION rouse.maintain_signals(p_worker bigint, p_key bytea, p_after bigint, OUT reached bigint, OUT deleted integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s'
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    ids bigint[];
BEGIN
    deleted := 0;
    IF rouse._authenticated_as_limited(p_worker, p_key) AND NOT rouse._may_maintain() THEN
        RETURN;
    END IF;
    ids := ARRAY(SELECT s.id FROM rouse.signal AS s WHERE s.id > p_after ORDER BY s.id LIMIT 10000);
    DELETE FROM rouse.signal AS g
    WHERE g.ctid = ANY (ARRAY(
        SELECT s.ctid FROM rouse.signal AS s
        WHERE s.id > p_after AND s.id <= ids[cardinality(ids)] AND s.at < now() - interval '1 hour'
          AND NOT EXISTS (SELECT FROM rouse.job AS j WHERE j.id = s.job OFFSET 0)
        ORDER BY s.id FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS deleted = ROW_COUNT;
    reached := ids[10000];
END
$$;
