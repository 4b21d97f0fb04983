-- Admin actions of operators that change what a queued job is: rouse.set_priority and rouse.replace_payload. Errors as
-- in admin.sql.

-- Locks a queued job for a change by function `p_name`, and refuses a job in any other state. Served by the primary
-- key.
CREATE OR REPLACE FUNCTION rouse._lock_queued(p_name text, p_id bigint, p_done text) RETURNS rouse.job
LANGUAGE plpgsql AS $$
DECLARE
    live rouse.job;
BEGIN
    PERFORM rouse._check_id(p_name, p_id);
    SELECT * INTO live FROM rouse.job AS j WHERE j.id = p_id FOR UPDATE;
    IF NOT FOUND THEN
        PERFORM rouse._refuse_ended(p_id, p_done, (rouse._ended_job(p_id)).state, '');
    END IF;
    IF live.state = 'running' THEN
        RAISE EXCEPTION 'rouse: job % cannot be %: it is running', p_id, p_done
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = format('Wait for its end, or stop it with SELECT rouse.cancel(%s).', p_id);
    END IF;
    RETURN live;
END
$$;

-- Changes the priority of a queued job. True: it has this priority now, by this call or by an earlier one. A ready job
-- goes to the end of the jobs with its new priority.
CREATE OR REPLACE FUNCTION rouse.set_priority(id bigint, priority text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    live    rouse.job := rouse._lock_queued('set_priority', set_priority.id, 'given another priority');
    at      timestamptz := clock_timestamp();
    was     rouse.lane := (SELECT l FROM rouse.lane AS l WHERE l.id = live.lane LIMIT 1);
    lane_id bigint;
BEGIN
    IF set_priority.priority IS NULL OR set_priority.priority NOT IN ('high', 'normal', 'low') THEN
        RAISE EXCEPTION 'rouse.set_priority: priority must be high, normal or low, not %', coalesce(quote_literal(left(set_priority.priority, 140)), 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF was.priority::text = set_priority.priority THEN
        RETURN true;
    END IF;
    -- A job that is not ready gets no worker (direct dispatch): it is not known which workers will be alive when it is.
    lane_id := rouse._lane(was.handler, was.queue, live.tenant, live.source, set_priority.priority,
                           CASE WHEN live.turn IS NULL THEN at + interval '1 day' END, live.max_attempts, was.tags,
                           rouse._payload(live.id, live.payload, live.payload_at));
    UPDATE rouse.job AS j SET lane = lane_id, turn = CASE WHEN j.turn IS NOT NULL THEN nextval('rouse.turn_seq') END WHERE j.id = live.id;
    IF live.turn IS NOT NULL THEN
        PERFORM rouse._notify(lane_id, true, at);
    END IF;
    PERFORM rouse._ensure_partitions(at);
    INSERT INTO rouse.record (at, job, event, attempt, who, detail)
    VALUES (at, live.id, 'priority_set', live.attempt, session_user, jsonb_build_object('from', was.priority, 'to', set_priority.priority));
    RETURN true;
END
$$;

-- Gives a queued job another payload, as a new job: the old one is cancelled and keeps its payload, its attempts and
-- its log. Returns the id of the new job, which continues the chain: jobs that wait for the old job then wait for the
-- new one. The new job has the same queue, priority, tags, tenant, source, unique key, limits, deadline and signals,
-- waits for the same jobs, and does not start before the time that was set for the old one. If the old one was
-- suspended, the new one is ready at once, because its steps start over.
CREATE OR REPLACE FUNCTION rouse.replace_payload(id bigint, payload jsonb) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    live     rouse.job;
    at       timestamptz;
    lane     rouse.lane;
    deadline rouse.deadline;
    was      rouse.finished;
    done     record;
BEGIN
    PERFORM rouse._check_id('replace_payload', replace_payload.id);
    IF replace_payload.payload IS NULL THEN
        RAISE EXCEPTION 'rouse.replace_payload: payload must not be null'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Pass ''null'' for the JSON null.';
    END IF;
    PERFORM rouse._lock_gates_of(replace_payload.id);
    live := rouse._lock_queued('replace_payload', replace_payload.id, 'given another payload');
    at := clock_timestamp();
    lane := (SELECT l FROM rouse.lane AS l WHERE l.id = live.lane LIMIT 1);
    deadline := (SELECT d FROM rouse.deadline AS d WHERE d.job = live.id);
    PERFORM rouse._check_payload(octet_length(replace_payload.payload::text), lane.queue);
    -- A source may be bound to another handler.
    IF live.source IS NULL THEN
        PERFORM rouse._check_contract(lane.handler, replace_payload.payload);
    END IF;
    PERFORM rouse._ensure_partitions(at);
    -- Its chain does not end, so nothing that waits for it is released.
    PERFORM rouse._end_queued(ARRAY[live.id], 'cancelled', NULL, NULL, at);
    was := rouse._ended_job(live.id);
    was.payload := replace_payload.payload;
    was.payload_at := NULL;
    SELECT * INTO done FROM rouse._retry(was, at);
    IF done.made IS NULL THEN
        RAISE EXCEPTION 'rouse: job % cannot be given another payload: it waits for job %, which %', live.id, done.failed, rouse._why_it_prevents(done.failed)
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = CASE WHEN rouse._live_job(done.failed) IS NULL THEN 'Retry that job first.' ELSE 'Let this job run as it is, or cancel it.' END;
    END IF;
    IF NOT rouse._is_due(live.available_at, live.requested_at, live.wait, at) THEN
        UPDATE rouse.job AS j SET turn = NULL, available_at = live.available_at WHERE j.id = done.made;
    END IF;
    DELETE FROM rouse.deadline AS d WHERE d.job = live.id;
    IF deadline.job IS NOT NULL THEN
        INSERT INTO rouse.deadline (job, deadline_at, try_at, timeout_ms)
        VALUES (done.made, deadline.deadline_at, deadline.try_at, deadline.timeout_ms);
    END IF;
    UPDATE rouse.signal AS s SET job = done.made WHERE s.job = live.id;
    PERFORM rouse._move_gates(live, lane, replace_payload.payload, done.made);
    -- rouse._retry has recorded that it was retried.
    RETURN done.made;
END
$$;

-- The gates that act on enqueues of jobs like this one, the values by which each divides its jobs, and the key of this
-- job.
CREATE OR REPLACE FUNCTION rouse._gates_of(p_job rouse.job, p_lane rouse.lane) RETURNS TABLE (gate text, parts text[], key text)
LANGUAGE sql STABLE AS $$
    SELECT g.name, g.key, rouse._gate_key_of_job(
        g.key, p_lane.queue, p_lane.handler, p_job.tenant, p_job.source, rouse._payload(p_job.id, p_job.payload, p_job.payload_at))
    FROM rouse.gate AS g
    WHERE g.kind IN ('singleton', 'debounce') AND g.handler = p_lane.handler AND coalesce(g.queue, p_lane.queue) = p_lane.queue
$$;

-- Locks the state that gates keep for a job, in the same order as rouse._pass_gates: before the job itself.
CREATE OR REPLACE FUNCTION rouse._lock_gates_of(p_id bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM rouse.gate WHERE kind IN ('singleton', 'debounce') LIMIT 1;
    IF FOUND THEN
        PERFORM FROM rouse.job AS j
        CROSS JOIN LATERAL (SELECT l AS lane FROM rouse.lane AS l WHERE l.id = j.lane LIMIT 1) AS its
        CROSS JOIN LATERAL rouse._gates_of(j, its.lane) AS o
        -- Only a lookup can serve these conditions (claim.sql).
        JOIN rouse.gate_key AS k ON k.gate = ANY (ARRAY[o.gate]) AND k.key = ANY (ARRAY[o.key]) AND k.job = j.id
        WHERE j.id = p_id ORDER BY o.gate FOR NO KEY UPDATE OF k;
    END IF;
END
$$;

-- Makes the new job replace the old one in the gates that act on enqueues. Refuses a payload with another key: the job
-- would have to pass the gate of that key.
CREATE OR REPLACE FUNCTION rouse._move_gates(p_was rouse.job, p_lane rouse.lane, p_payload jsonb, p_made bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    passed record;
BEGIN
    FOR passed IN SELECT o.* FROM rouse._gates_of(p_was, p_lane) AS o LOOP
        IF passed.key <> rouse._gate_key_of_job(passed.parts, p_lane.queue, p_lane.handler, p_was.tenant, p_was.source, p_payload) THEN
            RAISE EXCEPTION 'rouse: job % cannot be given another payload: that would change its key of gate %', p_was.id, passed.gate
                USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Cancel the job, and enqueue another one.';
        END IF;
        UPDATE rouse.gate_key AS k SET job = p_made WHERE k.gate = passed.gate AND k.key = passed.key AND k.job = p_was.id;
    END LOOP;
END
$$;
