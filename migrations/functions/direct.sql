-- Direct dispatch (rouse.queue.dispatch): a live worker is chosen for each job of a queue when it is enqueued. That
-- worker may have died just before: this is known only once the heartbeat of another worker has detected it.
--
-- The job goes to the inbox of that worker: a lane whose key has the additional value `worker`, the incarnation. The
-- inbox is an index, and the job a row like any other: cursors and counted gates apply as usual; fair shares and the
-- order of claims apply within each worker. Only that worker claims from its inbox and is notified; all workers of the
-- queue claim from the shared lane, which has the same key without `worker`. A job leaves the inbox if its attempt does
-- not end it, or if its worker ends or no longer takes such jobs. It then moves to the shared lane, and no other worker
-- is chosen for it.

-- The workers that take jobs of this kind, in the order of their ids: they are not known to be dead, do not drain, have
-- the handler, the tags and the queue, and their logins permit it. Reads one row for each worker. Served by
-- live_worker_pkey: the settings of producers forbid a scan, so its estimated cost would be so high that Postgres would
-- JIT-compile the plan at each enqueue, which takes 100 ms or more.
CREATE OR REPLACE FUNCTION rouse._takers(p_queue text, p_handler text, p_tags text[], OUT workers bigint[], OUT worker_ids text[])
LANGUAGE plpgsql AS $$
BEGIN
    SELECT array_agg(t.worker ORDER BY t.worker_id), array_agg(t.worker_id ORDER BY t.worker_id) INTO workers, worker_ids
    FROM rouse.live_worker AS t
    WHERE t.worker > 0 AND NOT t.draining AND p_handler = ANY (t.handlers) AND NOT p_handler = ANY (t.parked)
      AND (t.queues = '{}' OR p_queue = ANY (t.queues)) AND p_tags <@ t.tags
      AND CASE WHEN t.limited THEN rouse._login_takes(t.login, p_queue, p_handler, p_tags) ELSE true END;
END
$$;

-- True if the limits of this login permit claims from such lanes, as rouse._permitted does.
CREATE OR REPLACE FUNCTION rouse._login_takes(p_login name, p_queue text, p_handler text, p_tags text[]) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM rouse.worker_login AS limits
        WHERE limits.login = to_regrole(quote_ident(p_login))
          AND rouse._matches_any(p_queue, limits.queues) AND rouse._matches_any(p_handler, limits.handlers)
          AND NOT EXISTS (SELECT FROM unnest(p_tags) AS tag WHERE NOT rouse._matches_any(tag, limits.tags)));
END
$$;

-- Chooses the worker for a job, by the policy of its queue; null: none, because none takes such jobs, or the job has no
-- value for the key.
--
--   round-robin  the next one in the order of their ids. Each session counts for itself, by lane and starting at a
--                random number, so that producers do not wait for each other. A session keeps at most 1,024 counters,
--                because the server never frees them: with more lanes, some share one
--   random       any
--   hash         the same one for the same values: that with the highest hash of key and worker id (rendezvous
--                hashing). Only the keys of a worker that ends go to others, and a new worker takes only the keys for
--                which its hash is the highest. A restart changes nothing
CREATE OR REPLACE FUNCTION rouse._choose_worker(
    p_lane bigint, p_handler text, p_queue text, p_tags text[], p_tenant text, p_source text, p_payload jsonb) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    policy   text;
    key_of   text[];
    takers   record;
    own      text;
    counter  text;
    place    bigint;
BEGIN
    SELECT q.dispatch, q.dispatch_key INTO policy, key_of FROM rouse.queue AS q WHERE q.name = p_queue;
    IF policy = 'hash' THEN
        own := rouse._lane_key(key_of, p_tenant, p_source, p_payload);
    END IF;
    -- The lane may still be divided according to the previous settings of the queue.
    IF policy IS NULL OR policy = 'shared' OR own = '' THEN
        RETURN NULL;
    END IF;
    takers := rouse._takers(p_queue, p_handler, p_tags);
    IF takers.workers IS NULL THEN
        RETURN NULL;
    END IF;
    IF policy = 'hash' THEN
        RETURN (
            SELECT w.worker FROM ROWS FROM (unnest(takers.workers), unnest(takers.worker_ids)) AS w(worker, id)
            ORDER BY hashtextextended(w.id || ' ' || own, 0) DESC, w.id LIMIT 1);
    ELSIF policy = 'random' THEN
        place := floor(random() * cardinality(takers.workers));
    ELSE
        counter := 'rouse.dispatched_' || (p_lane & 1023)::text;
        place := coalesce(nullif(current_setting(counter, true), '')::bigint, floor(random() * 1e9)::bigint) + 1;
        PERFORM set_config(counter, place::text, false);
    END IF;
    RETURN takers.workers[1 + place % cardinality(takers.workers)];
END
$$;

-- The lane for a job whose shared lane is p_lane: the inbox of the worker that is chosen for it, which is added to the
-- catalog if it is new; or the shared lane, if none is chosen, no further lane may be added, or the key of the inbox is
-- too long for the catalog. Served by lane_id.
CREATE OR REPLACE FUNCTION rouse._inbox(
    p_lane bigint, p_handler text, p_queue text, p_priority text, p_tags text[], p_tenant text, p_source text, p_payload jsonb) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    chosen bigint := rouse._choose_worker(p_lane, p_handler, p_queue, p_tags, p_tenant, p_source, p_payload);
    own    text;
    inbox  bigint;
BEGIN
    IF chosen IS NULL THEN
        RETURN p_lane;
    END IF;
    own := (SELECT l.key FROM rouse.lane AS l WHERE l.id = p_lane LIMIT 1);
    -- Keys that share a lane also share one in each worker's inboxes.
    IF own = '*' THEN
        RETURN p_lane;
    END IF;
    own := (coalesce(nullif(own, ''), '{}')::jsonb || jsonb_build_object('worker', chosen::text))::text;
    IF NOT rouse._fits_catalog(p_handler, p_queue, p_tags, own) THEN
        RETURN p_lane;
    END IF;
    inbox := rouse._lane_id(p_handler, p_queue, p_priority, p_tags, own);
    IF rouse._is_open(inbox) THEN
        RETURN inbox;
    END IF;
    IF NOT rouse._has_room_for_keyed_lane(true) THEN
        RETURN p_lane;
    END IF;
    INSERT INTO rouse.lane (id, queue, handler, priority, tags, key, worker)
    VALUES (inbox, p_queue, p_handler, p_priority::rouse.priority, p_tags, own, chosen);
    RETURN inbox;
END
$$;

-- The shared lane of an inbox, added to the catalog if it is not open; any other lane itself. Served by lane_id.
CREATE OR REPLACE FUNCTION rouse._shared_lane(p_lane bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    inbox  record;
    own    text;
    shared bigint;
BEGIN
    -- Without `worker` in the condition: with it, a plan could read all inboxes (lane_inbox).
    SELECT l.queue, l.handler, l.priority, l.tags, l.key, l.worker INTO inbox FROM rouse.lane AS l WHERE l.id = p_lane LIMIT 1;
    IF inbox.worker IS NULL THEN
        RETURN p_lane;
    END IF;
    own := coalesce(nullif((inbox.key::jsonb - 'worker')::text, '{}'), '');
    shared := rouse._lane_id(inbox.handler, inbox.queue, inbox.priority::text, inbox.tags, own);
    IF NOT rouse._is_open(shared) THEN
        INSERT INTO rouse.lane (id, queue, handler, priority, tags, key, divided_by, refuses)
        VALUES (shared, inbox.queue, inbox.handler, inbox.priority, inbox.tags, own,
                CASE WHEN own = '' THEN rouse._divided_by(inbox.queue, inbox.handler) END, CASE WHEN own = '' THEN rouse._contract_of_lane(inbox.handler) END);
    END IF;
    RETURN shared;
END
$$;

-- Moves up to p_wanted queued jobs from these inboxes, one inbox after the other, to their shared lanes: ready ones at
-- the end, in their order, and those that wait as they are. Returns the number of moved jobs, the number of these that
-- had been ready for more than a day, and where it has stopped: the inbox, and the last turn that it has read there;
-- null: at the end. In inbox p_inbox it starts after p_turn: given the position at which the last call stopped, it does
-- not read again the index entries of the moved jobs, which an open transaction keeps.
--
-- One call at a time for each inbox: it locks the row in the catalog, and others skip the inbox. Skips rows that
-- another transaction has locked; each row is checked again under its lock, so two calls never move the same job.
-- Served by job_ready, job_waiting and lane_id.
CREATE OR REPLACE FUNCTION rouse._move_to_shared(
    p_inboxes bigint[], p_wanted integer, p_inbox bigint, p_turn bigint, OUT moved integer, OUT late integer, OUT last_inbox bigint, OUT last_turn bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at     timestamptz := clock_timestamp();
    inbox  bigint;
    shared bigint;
    batch  record;
BEGIN
    moved := 0;
    late := 0;
    FOREACH inbox IN ARRAY p_inboxes LOOP
        EXIT WHEN moved >= p_wanted;
        last_inbox := inbox;
        last_turn := CASE WHEN inbox = p_inbox THEN p_turn ELSE '-9223372036854775808'::bigint END;
        PERFORM FROM rouse.job AS j
        WHERE j.lane = inbox AND j.turn > last_turn AND j.state = 'queued' AND j.turn IS NOT NULL ORDER BY j.turn LIMIT 1;
        IF NOT FOUND THEN
            PERFORM FROM rouse.job AS j WHERE j.lane = inbox AND j.state = 'queued' AND j.turn IS NULL LIMIT 1;
            CONTINUE WHEN NOT FOUND;
        END IF;
        PERFORM FROM rouse.lane AS l WHERE l.id = inbox FOR NO KEY UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        shared := rouse._shared_lane(inbox);
        WITH ready AS MATERIALIZED (
            SELECT j.id, j.turn FROM rouse.job AS j
            WHERE j.lane = inbox AND j.turn > last_turn AND j.state = 'queued' AND j.turn IS NOT NULL
            ORDER BY j.turn LIMIT p_wanted - moved FOR NO KEY UPDATE SKIP LOCKED),
        turns AS MATERIALIZED (
            SELECT r.id, nextval('rouse.turn_seq') AS turn FROM ready AS r),
        done AS (
            UPDATE rouse.job AS j SET lane = shared, turn = t.turn FROM turns AS t WHERE j.id = ANY (ARRAY[t.id]) RETURNING j.available_at)
        SELECT count(*) AS jobs, count(*) FILTER (WHERE d.available_at < at - interval '24 hours') AS late, (SELECT max(r.turn) FROM ready AS r) AS turn
        INTO batch FROM done AS d;
        IF batch.jobs > 0 THEN
            -- This notification is never skipped: these jobs have no other.
            PERFORM rouse._notify(shared, true, '-infinity');
        END IF;
        moved := moved + batch.jobs;
        late := late + batch.late;
        last_turn := coalesce(batch.turn, last_turn);
        WITH waiting AS MATERIALIZED (
            SELECT j.id FROM rouse.job AS j
            WHERE j.lane = inbox AND j.state = 'queued' AND j.turn IS NULL
            LIMIT p_wanted - moved FOR NO KEY UPDATE SKIP LOCKED),
        done AS (
            UPDATE rouse.job AS j SET lane = shared FROM waiting AS w WHERE j.id = ANY (ARRAY[w.id]) RETURNING j.id)
        SELECT count(*) AS jobs INTO batch FROM done AS d;
        moved := moved + batch.jobs;
    END LOOP;
    IF moved < p_wanted THEN
        last_inbox := NULL;
        last_turn := NULL;
    END IF;
END
$$;

-- Moves the first jobs from the inboxes of a worker that has ended, or drains, by priority. The rest, and jobs that are
-- committed later, are left to rouse.recover_direct. Served by lane_inbox.
CREATE OR REPLACE FUNCTION rouse._empty_inboxes(p_worker bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM rouse.lane AS l WHERE l.worker = p_worker LIMIT 1;
    IF FOUND THEN
        PERFORM rouse._move_to_shared(
            -- OFFSET 0: otherwise, a plan could read the whole catalog, in the order of lane_id.
            ARRAY(SELECT i.id
                  FROM (SELECT DISTINCT o.id, o.priority
                        FROM (SELECT l.id, l.priority FROM rouse.lane AS l WHERE l.worker = p_worker OFFSET 0) AS o) AS i
                  ORDER BY i.priority, i.id),
            1000, NULL, NULL);
    END IF;
END
$$;

-- Moves up to p_wanted jobs (at most 10,000) to shared lanes from inboxes of workers that no longer take them: they
-- have ended, or do not have the handler any more. Those of high priority go first. Returns the number of moved jobs,
-- the number of these that had been ready for more than a day, and where to continue at once: the inbox and the turn to
-- pass as p_inbox and p_turn to the next call; null: there are no more. The first call passes nulls. Any worker may
-- call it at any time, including at the same time as others: an inbox that another call is emptying is left out, and so
-- is a job that another call has moved or locked. Reads the inboxes in the catalog, and whether each has jobs. An inbox
-- that was closed more than a day ago is left out: only a transaction that was open for that long can leave a job in
-- it, and then rouse.maintain_lanes opens it. Served by lane_inbox, job_ready and job_waiting.
CREATE OR REPLACE FUNCTION rouse.recover_direct(
    p_worker bigint, p_key bytea, p_wanted integer, p_inbox bigint, p_turn bigint,
    OUT moved integer, OUT late integer, OUT inbox bigint, OUT turn bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    inboxes bigint[];
BEGIN
    PERFORM rouse._authenticated_as_limited(p_worker, p_key);
    p_wanted := least(greatest(coalesce(p_wanted, 0), 0), 10000);
    moved := 0;
    late := 0;
    PERFORM FROM rouse.lane AS l WHERE l.worker IS NOT NULL LIMIT 1;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    WITH inboxes AS MATERIALIZED (
        -- Includes closed inboxes: a producer may have found one open. rouse.maintain_lanes opens retired inboxes that
        -- have jobs.
        SELECT DISTINCT l.id, l.queue, l.handler, l.priority, l.tags, l.worker
        -- OFFSET 0: otherwise, a plan could read the whole catalog, in the order of lane_id.
        FROM (SELECT * FROM rouse.lane AS o WHERE o.worker IS NOT NULL OFFSET 0) AS l
        WHERE l.closed_at IS NULL OR l.closed_at > clock_timestamp() - interval '1 day'),
    takers AS MATERIALIZED (
        SELECT k.queue, k.handler, k.tags, t.workers
        FROM (SELECT DISTINCT i.queue, i.handler, i.tags FROM inboxes AS i) AS k CROSS JOIN LATERAL rouse._takers(k.queue, k.handler, k.tags) AS t)
    SELECT array_agg(i.id ORDER BY i.priority, i.id) INTO inboxes
    FROM inboxes AS i JOIN takers AS t ON t.queue = i.queue AND t.handler = i.handler AND t.tags = i.tags
    WHERE NOT i.worker = ANY (coalesce(t.workers, '{}'))
      AND (p_inbox IS NULL OR (i.priority, i.id) >= (SELECT p.priority, p.id FROM inboxes AS p WHERE p.id = p_inbox))
      -- Handled later, after the jobs that were moved. Not EXISTS: a plan could then read all queued jobs, and compare
      -- their lanes.
      AND (i.id = p_inbox
           OR (SELECT true FROM rouse.job AS j WHERE j.lane = i.id AND j.state = 'queued' AND j.turn IS NOT NULL LIMIT 1)
           OR (SELECT true FROM rouse.job AS j WHERE j.lane = i.id AND j.state = 'queued' AND j.turn IS NULL LIMIT 1));
    IF inboxes IS NOT NULL THEN
        SELECT m.moved, m.late, m.last_inbox, m.last_turn
        INTO recover_direct.moved, recover_direct.late, recover_direct.inbox, recover_direct.turn
        FROM rouse._move_to_shared(inboxes, p_wanted, p_inbox, p_turn) AS m;
    END IF;
END
$$;

-- Sets how workers are chosen for the jobs of a queue; null: unchanged. Returns the settings. They apply to jobs that
-- are enqueued after the change; those in inboxes stay there. Leaves a record.
--
--   dispatch  shared: none is chosen; round-robin, hash or random: see rouse._choose_worker
--   key       hash: up to three of tenant, source and paths of the payload such as $.customer.id; jobs with the same
--             values go to the same worker, and jobs without a value to the shared lane
CREATE OR REPLACE FUNCTION rouse.set_dispatch(queue text, INOUT dispatch text DEFAULT NULL, INOUT key text[] DEFAULT NULL)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at      timestamptz := clock_timestamp();
    was     rouse.queue;
    now     rouse.queue;
    problem text;
BEGIN
    PERFORM rouse._check_queue('set_dispatch', set_dispatch.queue);
    problem := CASE
        WHEN set_dispatch.dispatch NOT IN ('shared', 'round-robin', 'hash', 'random')
            THEN 'dispatch must be shared, round-robin, hash or random, not ' || quote_literal(left(set_dispatch.dispatch, 140))
        WHEN cardinality(set_dispatch.key) NOT BETWEEN 1 AND 3 OR array_ndims(set_dispatch.key) > 1 OR array_position(set_dispatch.key, NULL) IS NOT NULL
            OR EXISTS (SELECT FROM unnest(set_dispatch.key) AS k(by) WHERE k.by NOT IN ('tenant', 'source') AND k.by !~ '^[$]([.][A-Za-z0-9_-]{1,64}){1,8}$')
            OR (SELECT count(DISTINCT k.by) < count(*) FROM unnest(set_dispatch.key) AS k(by))
            THEN 'key must be one to three of tenant, source and paths of the payload such as $.customer.id, not ' || left(set_dispatch.key::text, 140)
    END;
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION 'rouse.set_dispatch: %', problem USING ERRCODE = 'invalid_parameter_value', HINT = 'Leave it out to keep the setting.';
    END IF;
    -- Before the row of the queue, as rouse.maintain_lanes does.
    LOCK TABLE rouse.lane IN SHARE UPDATE EXCLUSIVE MODE;
    INSERT INTO rouse.queue (name) VALUES (set_dispatch.queue) ON CONFLICT DO NOTHING;
    SELECT * INTO was FROM rouse.queue AS q WHERE q.name = set_dispatch.queue FOR NO KEY UPDATE;
    IF set_dispatch.key IS NOT NULL AND coalesce(set_dispatch.dispatch, was.dispatch) <> 'hash' THEN
        RAISE EXCEPTION 'rouse.set_dispatch: only hash has a key; dispatch of queue % is %', set_dispatch.queue, coalesce(set_dispatch.dispatch, was.dispatch)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Set dispatch to hash, or leave out the key.';
    END IF;
    UPDATE rouse.queue AS q
    SET dispatch = coalesce(set_dispatch.dispatch, q.dispatch), dispatch_key = coalesce(set_dispatch.key, q.dispatch_key)
    WHERE q.name = set_dispatch.queue
    RETURNING * INTO now;
    dispatch := now.dispatch;
    key := CASE WHEN now.dispatch = 'hash' THEN now.dispatch_key END;
    IF was IS DISTINCT FROM now THEN
        PERFORM rouse._ensure_partitions(at);
        INSERT INTO rouse.record (at, queue, event, who, detail)
        VALUES (at, set_dispatch.queue, 'dispatch_set', session_user, jsonb_strip_nulls(jsonb_build_object('dispatch', dispatch, 'key', key)));
    END IF;
END
$$;
