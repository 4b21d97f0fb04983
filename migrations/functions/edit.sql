-- Admin actions of operators that change what a queued job is: rouse.set_priority and rouse.replace_payload. Errors as in admin.sql.

-- Locks a queued job for a change by function `p_name`, and refuses any other. Served by the primary key.
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

-- Changes the priority of a queued job. True: it has this priority now, by this call or by an earlier one. A ready job goes to the end of
-- those with its new priority.
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
    lane_id := rouse._lane(was.handler, was.queue, live.tenant, live.source, set_priority.priority, NULL, live.max_attempts, was.tags,
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

-- Gives a queued job another payload, as a new job: the old one is cancelled and keeps its payload, its attempts and its log. Returns the id
-- of the new job, which goes on with the chain: jobs that wait for the old one wait for it. It has the same queue, priority, tags, tenant,
-- source, unique key, limits and deadline, waits for the same jobs, and starts no earlier; its steps start over.
CREATE OR REPLACE FUNCTION rouse.replace_payload(id bigint, payload jsonb) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    live     rouse.job := rouse._lock_queued('replace_payload', replace_payload.id, 'given another payload');
    at       timestamptz := clock_timestamp();
    lane     rouse.lane := (SELECT l FROM rouse.lane AS l WHERE l.id = live.lane LIMIT 1);
    deadline rouse.deadline := (SELECT d FROM rouse.deadline AS d WHERE d.job = live.id);
    was      rouse.finished;
    done     record;
BEGIN
    IF replace_payload.payload IS NULL THEN
        RAISE EXCEPTION 'rouse.replace_payload: payload must not be null'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Pass ''null'' for the JSON null.';
    END IF;
    PERFORM rouse._check_payload(octet_length(replace_payload.payload::text), lane.queue);
    -- As in rouse._enqueue.
    IF live.source IS NULL AND live.origin IS NULL AND live.chain IS NULL THEN
        PERFORM rouse._check_contract(lane.handler, replace_payload.payload);
    END IF;
    PERFORM rouse._ensure_partitions(at);
    -- Its chain does not end, so nothing that waits for it is released.
    PERFORM rouse._end_queued(ARRAY[live.id], 'cancelled', NULL, NULL, at);
    was := rouse._ended_job(live.id);
    was.payload := replace_payload.payload;
    was.payload_at := NULL;
    was.lane := rouse._lane(lane.handler, lane.queue, live.tenant, live.source, lane.priority::text, NULL, live.max_attempts, lane.tags,
                            replace_payload.payload);
    SELECT * INTO done FROM rouse._retry(was, at);
    IF done.made IS NULL THEN
        RAISE EXCEPTION 'rouse: job % cannot be given another payload: it waits for job %, which has failed', live.id, done.failed
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Retry that job first.';
    END IF;
    -- A job that has not begun waits for its time.
    IF live.attempt = 0 AND live.available_at > at THEN
        UPDATE rouse.job AS j SET turn = NULL, available_at = live.available_at WHERE j.id = done.made;
    END IF;
    DELETE FROM rouse.deadline AS d WHERE d.job = live.id;
    IF deadline.job IS NOT NULL THEN
        INSERT INTO rouse.deadline (job, deadline_at, try_at, timeout_ms)
        VALUES (done.made, deadline.deadline_at, deadline.try_at, deadline.timeout_ms);
    END IF;
    INSERT INTO rouse.record (at, job, event, attempt, who, detail)
    VALUES (clock_timestamp(), live.id, 'payload_replaced', live.attempt, session_user, jsonb_build_object('as', done.made));
    RETURN done.made;
END
$$;
