-- The fleet, asked from outside: what it can run, whether a worker really can, which workers are to be
-- forgotten, and what a worker that empties one queue has left to do.
--
--   P0002  there is no such worker
--   55000  the worker is not in a state for that

-- Null: it is listed. A forgotten life is not, and has lost all that it said of itself but its id, which the history of
-- its jobs shows.
ALTER TABLE rouse.worker ADD COLUMN forgotten_at timestamptz;

-- Every life of every worker, the dead ones too, until they are forgotten. Stats are shown for 120 s (SPEC row A2).
CREATE OR REPLACE VIEW rouse.workers AS
SELECT w.worker_id, w.incarnation,
       CASE WHEN w.stopped_at IS NOT NULL THEN 'unregistered'
            WHEN w.dead_at IS NOT NULL OR w.seen_at < now() - interval '90 seconds' THEN 'dead'
            WHEN w.draining_at IS NOT NULL THEN 'draining'
            ELSE 'active' END AS state,
       w.hostname, w.platform, w.version, w.slots, w.queues, w.tags, w.handlers, w.capabilities,
       w.registered_at, w.seen_at, w.draining_at, coalesce(w.stopped_at, w.dead_at) AS ended_at,
       CASE WHEN w.stats_at > now() - interval '120 seconds' THEN w.stats END AS stats, w.refused
FROM rouse.worker AS w
WHERE w.forgotten_at IS NULL;

-- What the fleet can run: one row for each handler of each worker that lives.
CREATE VIEW rouse.handlers AS
SELECT c.key AS handler, c.value->>'version' AS version, c.value->>'sha256' AS sha256,
       coalesce(c.value->'grants', '[]') AS grants,
       w.worker_id, w.incarnation, w.state, w.queues, w.tags, w.slots
FROM rouse.workers AS w
CROSS JOIN LATERAL jsonb_each(w.capabilities) AS c
WHERE w.state IN ('active', 'draining');
GRANT SELECT ON rouse.handlers TO rouse_observer, rouse_worker;

-- What a worker was asked to prove, and what it has answered. Kept for a day.
CREATE TABLE rouse.challenge (
    nonce       uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    worker      bigint NOT NULL,
    handler     text NOT NULL,
    who         text NOT NULL DEFAULT session_user,
    asked_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    answered_at timestamptz,
    answer      jsonb,
    CHECK ((answer IS NULL) = (answered_at IS NULL))
);
CREATE INDEX challenge_open ON rouse.challenge (worker) WHERE answered_at IS NULL;
GRANT SELECT ON rouse.challenge TO rouse_observer;

-- Asks the worker of this id to prove that it can run the handler (SPEC row A9); returns the number that its answer
-- will have, which nobody can guess. The worker is told at once, where it listens; else it looks at its next heartbeat.
CREATE FUNCTION rouse.challenge(worker_id text, handler text) RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    life  bigint;
    asked uuid;
BEGIN
    IF challenge.handler IS NULL OR challenge.handler !~ '^[a-z0-9][a-z0-9_-]*([.][a-z0-9][a-z0-9_-]*)*$' OR length(challenge.handler) > 128 THEN
        RAISE EXCEPTION 'rouse.challenge: % is no handler name', coalesce(quote_literal(left(challenge.handler, 140)), 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT w.incarnation INTO life FROM rouse.workers AS w
    WHERE w.worker_id = challenge.worker_id AND w.state IN ('active', 'draining');
    IF NOT FOUND THEN
        RAISE EXCEPTION 'rouse.challenge: no worker % lives', coalesce(quote_literal(left(challenge.worker_id, 80)), 'null')
            USING ERRCODE = 'no_data_found';
    END IF;
    DELETE FROM rouse.challenge AS c WHERE c.asked_at < clock_timestamp() - interval '1 day';
    INSERT INTO rouse.challenge AS c (worker, handler) VALUES (life, challenge.handler) RETURNING c.nonce INTO asked;
    PERFORM pg_notify('rouse_worker_' || life, 'challenge');
    RETURN asked;
END
$$;

-- What was answered; null: nothing yet, or nobody was asked that.
CREATE FUNCTION rouse.challenge_answer(nonce uuid) RETURNS jsonb
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT c.answer FROM rouse.challenge AS c WHERE c.nonce = challenge_answer.nonce
$$;

-- What this life of a worker is to prove. What nobody can wait for any more is left out. Served by challenge_open.
CREATE FUNCTION rouse.challenges(p_worker bigint, p_key bytea) RETURNS TABLE (nonce uuid, handler text)
LANGUAGE plpgsql SECURITY DEFINER ROWS 10 SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    RETURN QUERY
    SELECT c.nonce, c.handler FROM rouse.challenge AS c
    WHERE c.worker = p_worker AND c.answered_at IS NULL AND c.asked_at > clock_timestamp() - interval '10 minutes'
    ORDER BY c.asked_at LIMIT 10;
END
$$;

-- Answers one of them, once. False: it is not this worker's, or has an answer.
CREATE FUNCTION rouse.answer_challenge(p_worker bigint, p_key bytea, p_nonce uuid, p_answer jsonb) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    UPDATE rouse.challenge AS c SET answer = p_answer, answered_at = clock_timestamp()
    WHERE c.nonce = p_nonce AND c.worker = p_worker AND c.answered_at IS NULL;
    RETURN FOUND;
END
$$;

-- Takes the ended lives of a worker off the list, and says how many they were (SPEC row A2). Refused while one lives.
-- Rows go for good, by a later call, once they are older than everything that is kept: until then the history of
-- jobs names them.
CREATE FUNCTION rouse.forget_worker(worker_id text) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET datestyle = 'ISO' AS $$
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
    SET forgotten_at = at, key_hash = NULL, handlers = '{}', capabilities = '{}', queues = '{}', tags = '{}', stats = NULL, stats_at = NULL
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

-- What a queue has left, for each handler and list of required tags: ready; due (its time has come, or its lease has run
-- out); scheduled for later; running here (`mine`) and elsewhere. Counted up to 10,000 for each lane and kind; where there
-- are more, `at_least` is true. Served by job_ready, job_waiting and job_lease, after one read of the catalog of lanes.
CREATE FUNCTION rouse.remaining(p_queue text, p_worker bigint)
RETURNS TABLE (handler text, tags text[], ready bigint, due bigint, scheduled bigint, mine bigint, others bigint, at_least boolean)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_mergejoin = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at timestamptz := clock_timestamp();
BEGIN
    RETURN QUERY
    WITH running AS MATERIALIZED (
        SELECT r.lane,
               count(*) FILTER (WHERE r.lease_until < at) AS orphans,
               count(*) FILTER (WHERE r.lease_until >= at AND r.worker = p_worker) AS mine,
               count(*) FILTER (WHERE r.lease_until >= at AND r.worker IS DISTINCT FROM p_worker) AS others
        FROM (SELECT j.lane, j.worker, j.lease_until FROM rouse.job AS j
              WHERE j.state = 'running' AND j.lease_until > '-infinity' LIMIT 100000) AS r
        GROUP BY r.lane)
    SELECT l.handler, l.tags, sum(least(ready.jobs, 10000))::bigint,
           sum(waiting.due + coalesce(running.orphans, 0))::bigint, sum(waiting.later)::bigint,
           sum(coalesce(running.mine, 0))::bigint, sum(coalesce(running.others, 0))::bigint,
           bool_or(ready.jobs > 10000 OR waiting.due + waiting.later > 10000)
    FROM (SELECT DISTINCT ON (l.id) l.id, l.handler, l.tags FROM rouse.lane AS l WHERE l.queue = p_queue ORDER BY l.id) AS l
    CROSS JOIN LATERAL (
        SELECT count(*) AS jobs FROM (
            SELECT FROM rouse.job AS j WHERE j.lane = l.id AND j.state = 'queued' AND j.turn IS NOT NULL
            ORDER BY j.turn LIMIT 10001) AS j) AS ready
    CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE j.available_at <= at) AS due, count(*) FILTER (WHERE j.available_at > at) AS later FROM (
            SELECT j.available_at FROM rouse.job AS j
            WHERE j.lane = l.id AND j.state = 'queued' AND j.turn IS NULL LIMIT 10001) AS j) AS waiting
    LEFT JOIN running ON running.lane = l.id
    GROUP BY l.handler, l.tags
    HAVING sum(ready.jobs + waiting.due + waiting.later) > 0 OR count(running.lane) > 0
    ORDER BY l.handler, l.tags;
END
$$;

REVOKE ALL ON FUNCTION rouse.challenge, rouse.challenge_answer, rouse.challenges, rouse.answer_challenge,
    rouse.forget_worker, rouse.remaining FROM PUBLIC;
GRANT EXECUTE ON FUNCTION rouse.challenge, rouse.challenge_answer, rouse.forget_worker TO rouse_producer;
GRANT EXECUTE ON FUNCTION rouse.challenges, rouse.answer_challenge TO rouse_worker;
GRANT EXECUTE ON FUNCTION rouse.remaining TO rouse_worker, rouse_observer;
