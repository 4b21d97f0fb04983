-- Mends of 0016: what a queue has left is counted rightly and asked for less; challenges are bounded; a forgotten worker
-- loses all that it has said of itself.
--
-- What this does to a database with live jobs: an index is made on rouse.challenge, which has few rows; three functions are
-- replaced. Hosts of before go on, and so does a `rouse queue drain` of before.

DROP FUNCTION rouse.remaining(text, bigint);

-- What a queue has left, for each handler and list of required tags: ready; due (its time has come, or its lease has run
-- out); scheduled for later, and how many of those (`retries`) have been tried before; running here (`mine`) and elsewhere,
-- which is looked at where `p_running` says so: it takes a read of everything that runs, in all queues.
-- Ready and waiting ones are counted up to 10,000 for each lane; where there are more, `at_least` is true. What is due is
-- counted to the last one, as whoever asks goes on until there is none: it is read for all queues, because any worker gives
-- them their turn as soon as it looks. Served by job_ready, job_waiting, job_due and job_lease, after one read of the
-- catalog of lanes.
CREATE FUNCTION rouse.remaining(p_queue text, p_worker bigint, p_running boolean DEFAULT true)
RETURNS TABLE (handler text, tags text[], ready bigint, due bigint, scheduled bigint, retries bigint, mine bigint, others bigint, at_least boolean)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_mergejoin = off SET enable_sort = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at   timestamptz := clock_timestamp();
    -- Leases that have run out come first in the index.
    upto timestamptz := CASE WHEN p_running THEN 'infinity' ELSE at END;
BEGIN
    RETURN QUERY
    WITH running AS MATERIALIZED (
        SELECT r.lane,
               count(*) FILTER (WHERE r.lease_until < at) AS orphans,
               count(*) FILTER (WHERE r.lease_until >= at AND r.worker = p_worker) AS mine,
               count(*) FILTER (WHERE r.lease_until >= at AND r.worker IS DISTINCT FROM p_worker) AS others
        FROM (SELECT j.lane, j.worker, j.lease_until FROM rouse.job AS j
              WHERE j.state = 'running' AND j.lease_until > '-infinity' AND j.lease_until < upto
              ORDER BY j.lease_until LIMIT 100000) AS r
        GROUP BY r.lane),
    due AS MATERIALIZED (
        -- In that order and without sorting: only job_due does that, and reads nothing that is scheduled for later.
        SELECT d.lane, count(*) AS jobs
        FROM (SELECT j.lane FROM rouse.job AS j
              WHERE j.state = 'queued' AND j.turn IS NULL AND j.available_at <= at
              ORDER BY j.available_at) AS d
        GROUP BY d.lane)
    SELECT l.handler, l.tags, sum(least(ready.jobs, 10000))::bigint,
           sum(coalesce(due.jobs, 0) + coalesce(running.orphans, 0))::bigint, sum(waiting.later)::bigint, sum(waiting.retries)::bigint,
           sum(coalesce(running.mine, 0))::bigint, sum(coalesce(running.others, 0))::bigint,
           bool_or(ready.jobs > 10000 OR waiting.jobs > 10000)
    FROM (SELECT DISTINCT ON (l.id) l.id, l.handler, l.tags FROM rouse.lane AS l WHERE l.queue = p_queue ORDER BY l.id) AS l
    CROSS JOIN LATERAL (
        SELECT count(*) AS jobs FROM (
            SELECT FROM rouse.job AS j WHERE j.lane = l.id AND j.state = 'queued' AND j.turn IS NOT NULL
            ORDER BY j.turn LIMIT 10001) AS j) AS ready
    CROSS JOIN LATERAL (
        SELECT count(*) AS jobs, count(*) FILTER (WHERE j.available_at > at) AS later,
               count(*) FILTER (WHERE j.available_at > at AND j.attempt > 0) AS retries
        -- A range of one lane, in the order of lanes and without sorting: only job_waiting does that. `=` says nothing of
        -- an order, and job_due would do as well while the plan is made on a small table.
        FROM (SELECT j.available_at, j.attempt FROM rouse.job AS j
              WHERE j.lane >= l.id AND j.lane <= l.id AND j.state = 'queued' AND j.turn IS NULL
              ORDER BY j.lane LIMIT 10001) AS j) AS waiting
    LEFT JOIN due ON due.lane = l.id
    LEFT JOIN running ON running.lane = l.id
    GROUP BY l.handler, l.tags
    HAVING sum(ready.jobs + waiting.jobs + coalesce(due.jobs, 0)) > 0 OR count(running.lane) > 0
    ORDER BY l.handler, l.tags;
END
$$;
REVOKE ALL ON FUNCTION rouse.remaining FROM PUBLIC;
GRANT EXECUTE ON FUNCTION rouse.remaining TO rouse_worker, rouse_observer;

-- Serves the removal of old challenges.
CREATE INDEX challenge_asked ON rouse.challenge (asked_at);

-- Asks the worker of this id to prove that it can run the handler (SPEC row A9); returns the number that its answer
-- will have, which nobody can guess. The worker is told at once, where it listens; else it looks at its next heartbeat.
-- Of one worker no more than 100 challenges are open at a time, give or take those that are asked for at the same moment.
-- With each, at most 100 of more than a day ago go. Served by worker_living, challenge_open and challenge_asked.
CREATE OR REPLACE FUNCTION rouse.challenge(worker_id text, handler text) RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at     timestamptz := clock_timestamp();
    life   bigint;
    unsaid bigint;
    asked  uuid;
BEGIN
    IF challenge.handler IS NULL OR challenge.handler !~ '^[a-z0-9][a-z0-9_-]*([.][a-z0-9][a-z0-9_-]*)*$' OR length(challenge.handler) > 128 THEN
        RAISE EXCEPTION 'rouse.challenge: % is no handler name', coalesce(quote_literal(left(challenge.handler, 140)), 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT w.incarnation INTO life FROM rouse.worker AS w
    WHERE w.worker_id = challenge.worker_id AND w.stopped_at IS NULL AND w.dead_at IS NULL AND w.seen_at >= at - interval '90 seconds';
    IF NOT FOUND THEN
        RAISE EXCEPTION 'rouse.challenge: no worker % lives', coalesce(quote_literal(left(challenge.worker_id, 80)), 'null')
            USING ERRCODE = 'no_data_found';
    END IF;
    DELETE FROM rouse.challenge AS c WHERE c.nonce = ANY (ARRAY(
        SELECT o.nonce FROM rouse.challenge AS o WHERE o.asked_at < at - interval '1 day'
        ORDER BY o.asked_at LIMIT 100 FOR UPDATE SKIP LOCKED));
    -- Those that the worker can still see; see rouse.challenges.
    SELECT count(*) INTO unsaid FROM (
        SELECT FROM rouse.challenge AS c
        WHERE c.worker = life AND c.answered_at IS NULL AND c.asked_at > at - interval '10 minutes' LIMIT 100) AS c;
    IF unsaid >= 100 THEN
        RAISE EXCEPTION 'rouse.challenge: worker % has 100 challenges of the last 10 minutes to answer', challenge.worker_id
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'Ask again when it has answered, or 10 minutes after they were asked.';
    END IF;
    INSERT INTO rouse.challenge AS c (worker, handler) VALUES (life, challenge.handler) RETURNING c.nonce INTO asked;
    PERFORM pg_notify('rouse_worker_' || life, 'challenge');
    RETURN asked;
END
$$;

-- Takes the ended lives of a worker off the list, and says how many they were (SPEC row A2). Refused while one lives.
-- What it has said of itself goes at once. Rows go for good, by a later call, once they are older than everything that is
-- kept: until then the history of jobs names them. Jobs that run are found by job_lease.
CREATE OR REPLACE FUNCTION rouse.forget_worker(worker_id text) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET datestyle = 'ISO'
SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at        timestamptz := clock_timestamp();
    life      record;
    forgotten integer;
    kept_from timestamptz;
BEGIN
    -- The lock of rouse.register: nobody begins a life of this id meanwhile.
    PERFORM pg_advisory_xact_lock(hashtextextended('rouse.register ' || forget_worker.worker_id, 0));
    FOR life IN
        SELECT w.incarnation, w.hostname, w.seen_at FROM rouse.worker AS w
        WHERE w.worker_id = forget_worker.worker_id AND w.stopped_at IS NULL AND w.dead_at IS NULL
    LOOP
        IF life.seen_at > at - interval '90 seconds' THEN
            RAISE EXCEPTION 'rouse.forget_worker: worker % lives (%, heard of % s ago)', forget_worker.worker_id, life.hostname,
                round(extract(epoch FROM at - life.seen_at))
                USING ERRCODE = 'object_not_in_prerequisite_state',
                      HINT = 'Stop it first. One that is gone is dead 90 s after its last heartbeat.';
        END IF;
        PERFORM rouse._bury(life.incarnation);
    END LOOP;
    UPDATE rouse.worker AS w
    SET forgotten_at = at, key_hash = NULL, hostname = '', platform = '', version = '', slots = 0, refused = 0,
        handlers = '{}', capabilities = '{}', queues = '{}', tags = '{}', stats = NULL, stats_at = NULL
    WHERE w.worker_id = forget_worker.worker_id AND w.forgotten_at IS NULL;
    GET DIAGNOSTICS forgotten = ROW_COUNT;
    IF forgotten = 0 THEN
        RAISE EXCEPTION 'rouse.forget_worker: there is no worker %', coalesce(quote_literal(left(forget_worker.worker_id, 80)), 'null')
            USING ERRCODE = 'no_data_found';
    END IF;
    PERFORM rouse._have_partitions(at);
    INSERT INTO rouse.record (at, event, who, detail)
    VALUES (at, 'forgotten', session_user, jsonb_build_object('worker_id', forget_worker.worker_id, 'lives', forgotten));
    WITH partition AS MATERIALIZED (
        SELECT c.relname FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
        WHERE i.inhparent IN ('rouse.finished'::regclass, 'rouse.attempt'::regclass, 'rouse.record'::regclass))
    SELECT min(to_date(right(p.relname, 8), 'YYYYMMDD'))::timestamp AT TIME ZONE 'UTC' INTO kept_from FROM partition AS p;
    DELETE FROM rouse.worker AS w
    WHERE w.forgotten_at < kept_from AND NOT EXISTS (
        SELECT FROM rouse.job AS j WHERE j.state = 'running' AND j.lease_until > '-infinity' AND j.worker = w.incarnation);
    RETURN forgotten;
END
$$;
