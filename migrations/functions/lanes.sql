-- The catalog of lanes: a lane is added with its first job, and removed when it has had none for some time.
--
-- A row of rouse.lane is open, then closed, then removed:
--
--   open     producers find it, workers poll it
--   closed   rouse.maintain_lanes has found no job in it for a day. Producers do not find it: the next one adds a new
--            row. Workers poll it for another day, because a producer that found it open may not have committed yet.
--            After that no worker polls it, and the row provides the names for finished jobs. If a job appears in it
--            after all, the next maintenance reopens it.
--   removed  no kept row can refer to it
--
-- In a fair queue, and behind a gate, the keys have lanes of their own (gates.sql). So do workers, if a queue has
-- direct dispatch (direct.sql).

-- Checks the arguments that all enqueuing functions share, and returns the id of their lane; null arguments mean their
-- defaults. A lane without an open row is added to the catalog, with a notice if no live worker knows the handler or a
-- key of p_payload.
CREATE OR REPLACE FUNCTION rouse._lane(
    p_handler text, p_queue text, p_tenant text, p_source text, p_priority text, p_run_at timestamptz,
    p_max_attempts integer, p_tags text[], p_payload jsonb) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    known    bigint;
    divided  text[];
    required text[];
    -- Then no worker is chosen (direct dispatch): it is not known which will be alive at that time.
    is_later boolean := p_run_at > clock_timestamp();
BEGIN
    p_queue := coalesce(p_queue, 'default');
    p_priority := coalesce(p_priority, 'normal');
    p_tags := coalesce(p_tags, '{}');
    IF p_priority NOT IN ('high', 'normal', 'low') THEN
        RAISE EXCEPTION 'rouse.enqueue: priority must be high, normal or low, not %', quote_literal(left(p_priority, 140))
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NOT isfinite(p_run_at) THEN
        RAISE EXCEPTION 'rouse.enqueue: run_at must be a time, not %', p_run_at
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Leave it out to run the job at once.';
    END IF;
    IF p_max_attempts NOT BETWEEN 1 AND 1000 THEN
        RAISE EXCEPTION 'rouse.enqueue: max_attempts must be between 1 and 1000, not %', p_max_attempts
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Leave it out for the handler''s own.';
    END IF;
    IF p_tenant = '' OR length(p_tenant) > 200 OR p_source = '' OR length(p_source) > 200 THEN
        RAISE EXCEPTION 'rouse.enqueue: tenant and source must have 1 to 200 characters, or be left out'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;

    -- Entries of the catalog are valid. Served by lane_key.
    SELECT l.id, l.divided_by INTO known, divided FROM rouse.lane AS l
    WHERE l.handler = p_handler AND l.queue = p_queue AND l.priority = p_priority::rouse.priority AND l.tags = p_tags AND l.key = ''
      AND l.closed_at IS NULL
    LIMIT 1;
    IF FOUND THEN
        RETURN rouse._divided_lane(known, p_handler, p_queue, p_priority, p_tags, CASE WHEN is_later THEN array_remove(divided, 'worker') ELSE divided END, p_tenant, p_source, p_payload);
    END IF;

    IF p_handler IS NULL OR p_handler !~ '^[a-z0-9][a-z0-9_-]*([.][a-z0-9][a-z0-9_-]*)*$' OR length(p_handler) > 128 THEN
        RAISE EXCEPTION 'rouse.enqueue: % is not a handler name', coalesce(quote_literal(left(p_handler, 140)), 'null')
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'Handler names are lower-case words joined by dots, such as email.send; at most 128 characters.';
    END IF;
    IF p_queue !~ '^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$' THEN
        RAISE EXCEPTION 'rouse.enqueue: % is not a queue name', quote_literal(left(p_queue, 140))
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'Queue names start with a letter or digit and contain letters, digits and _ . : - ; at most 128 characters. Leave it out for the queue default.';
    END IF;
    IF NOT rouse._are_tags(p_tags, 16) THEN
        RAISE EXCEPTION 'rouse.enqueue: tags must be a list of at most 16 tags, not %', left(p_tags::text, 140)
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'A tag contains letters, digits and _ . : - ; or is key=value; at most 128 characters.';
    END IF;
    required := p_tags;
    -- Arrays with other lower bounds are not equal.
    IF cardinality(p_tags) > 1 OR array_lower(p_tags, 1) <> 1 THEN
        SELECT array_agg(DISTINCT tag ORDER BY tag) INTO required FROM unnest(p_tags) AS tag;
        SELECT l.id, l.divided_by INTO known, divided FROM rouse.lane AS l
        WHERE l.handler = p_handler AND l.queue = p_queue AND l.priority = p_priority::rouse.priority AND l.tags = required AND l.key = ''
          AND l.closed_at IS NULL
        LIMIT 1;
        IF FOUND THEN
            RETURN rouse._divided_lane(known, p_handler, p_queue, p_priority, required, CASE WHEN is_later THEN array_remove(divided, 'worker') ELSE divided END, p_tenant, p_source, p_payload);
        END IF;
    END IF;

    PERFORM rouse._check_room_for_lane(p_handler);
    known := rouse._lane_id(p_handler, p_queue, p_priority, required, '');
    divided := rouse._divided_by(p_queue, p_handler);
    INSERT INTO rouse.lane (id, queue, handler, priority, tags, divided_by, refuses)
    VALUES (known, p_queue, p_handler, p_priority::rouse.priority, required, divided, rouse._contract_of_lane(p_handler));
    -- A source may be bound to another handler.
    IF p_source IS NULL THEN
        PERFORM rouse._notice_unknown_handler(p_handler);
        PERFORM rouse._notice_unknown_keys(p_handler, p_payload);
    END IF;
    RETURN rouse._divided_lane(known, p_handler, p_queue, p_priority, required, CASE WHEN is_later THEN array_remove(divided, 'worker') ELSE divided END, p_tenant, p_source, p_payload);
END
$$;

-- The id of a lane. No part but the key can contain a line break, so different lanes have different strings.
CREATE OR REPLACE FUNCTION rouse._lane_id(p_handler text, p_queue text, p_priority text, p_tags text[], p_key text) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT ('x' || encode(substr(sha256(convert_to(
        concat_ws(E'\n', p_handler, p_queue, p_priority, array_to_string(p_tags, E'\n'), CASE WHEN p_key <> '' THEN E'\n' || p_key END), 'UTF8')), 1, 8), 'hex'))::bit(64)::bigint
$$;

-- Rejects a lane beyond the limits. Lanes of concurrent transactions are invisible: together they may exceed the
-- limits. Served by lane_key.
CREATE OR REPLACE FUNCTION rouse._check_room_for_lane(p_handler text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    -- Looked up by its key: the settings of producers forbid a scan, so its estimated cost is so high that Postgres
    -- would JIT-compile the plan each time, which takes 30 ms.
    limits rouse.limits := (SELECT l FROM rouse.limits AS l WHERE l.only_row);
BEGIN
    IF (SELECT count(DISTINCT l.id) FROM rouse.lane AS l WHERE l.handler = p_handler AND l.key = '' AND l.closed_at IS NULL)
       >= limits.lanes_per_handler_max THEN
        RAISE EXCEPTION 'rouse.enqueue: handler % already has % lanes, the maximum', p_handler, limits.lanes_per_handler_max
            USING ERRCODE = 'program_limit_exceeded',
                  HINT = 'Each combination of queue, priority and tags is a lane. Use fewer combinations (tenant and source do not count), '
                         'or raise lanes_per_handler_max in rouse.limits. Lanes without jobs are removed after a day.';
    END IF;
    IF (SELECT count(*) FROM (SELECT FROM rouse.lane AS l WHERE l.key = '' AND l.closed_at IS NULL LIMIT limits.lanes_max) AS l) >= limits.lanes_max THEN
        RAISE EXCEPTION 'rouse.enqueue: there are already % lanes, the maximum', limits.lanes_max
            USING ERRCODE = 'program_limit_exceeded',
                  HINT = 'Each combination of handler, queue, priority and tags is a lane. Use fewer combinations, or raise lanes_max in '
                         'rouse.limits. Lanes without jobs are removed after a day.';
    END IF;
END
$$;

-- True if a live worker has the handler, or one that is loading its modules may have it soon; null if no worker is
-- alive. Served by the primary keys.
CREATE OR REPLACE FUNCTION rouse._is_served(p_handler text) RETURNS boolean
LANGUAGE plpgsql SET enable_bitmapscan = off AS $$
BEGIN
    -- By its key, as in rouse._takers.
    PERFORM FROM rouse.live_worker AS l WHERE l.worker > 0 AND p_handler = ANY (l.handlers) LIMIT 1;
    IF FOUND THEN
        RETURN true;
    END IF;
    RETURN (SELECT bool_or(CASE WHEN w.stats IS NULL THEN w.handlers = '{}' ELSE w.stats ->> 'loading' = 'true' END)
            FROM rouse.live_worker AS l
            CROSS JOIN LATERAL (
                SELECT n.seen_at, n.handlers, n.stats FROM rouse.worker AS n WHERE n.incarnation = l.worker ORDER BY n.seen_at DESC LIMIT 1) AS w
            WHERE l.worker > 0 AND w.seen_at > clock_timestamp() - interval '90 seconds');
END
$$;

-- Raises a notice if no live worker has the handler: most such names are misspelt. Raises no notice if no worker is
-- alive, or if there are contracts: then rouse._report_unknown_handler decides.
CREATE OR REPLACE FUNCTION rouse._notice_unknown_handler(p_handler text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF NOT rouse._is_served(p_handler) AND NOT EXISTS (SELECT FROM rouse.contract AS c WHERE c.handler = '*') THEN
        RAISE NOTICE 'rouse.enqueue: no live worker has the handler %; its jobs wait for one that has it', p_handler
            USING HINT = 'Check the name: `rouse handlers ls` lists the handlers of the fleet.';
    END IF;
END
$$;

-- Raises a notice if a payload has a key that no live worker knows for this handler: it is probably misspelt. Raises no
-- notice if a worker with the handler has not registered its keys. Served by the primary keys.
CREATE OR REPLACE FUNCTION rouse._notice_unknown_keys(p_handler text, p_payload jsonb) RETURNS void
LANGUAGE plpgsql SET enable_bitmapscan = off AS $$
DECLARE
    known   jsonb;
    unknown text;
BEGIN
    IF jsonb_typeof(p_payload) IS DISTINCT FROM 'object' THEN
        RETURN;
    END IF;
    -- Once for each worker: the document may be large.
    known := (SELECT jsonb_agg(CASE WHEN jsonb_typeof(registered.keys) = 'array' THEN registered.keys END)
              FROM rouse.live_worker AS l
              CROSS JOIN LATERAL (
                  SELECT n.seen_at, n.capabilities FROM rouse.worker AS n WHERE n.incarnation = l.worker ORDER BY n.seen_at DESC LIMIT 1) AS w
              CROSS JOIN LATERAL (SELECT w.capabilities -> p_handler -> 'payload_keys' AS keys OFFSET 0) AS registered
              WHERE l.worker > 0 AND p_handler = ANY (l.handlers) AND w.seen_at > clock_timestamp() - interval '90 seconds');
    unknown := (SELECT quote_literal(left(k.key, 140))
                FROM jsonb_object_keys(p_payload) AS k(key)
                WHERE NOT EXISTS (SELECT FROM jsonb_array_elements(known) AS keys WHERE keys = 'null' OR keys ? k.key)
                LIMIT 1);
    IF known IS NOT NULL AND unknown IS NOT NULL THEN
        RAISE NOTICE 'rouse.enqueue: no live worker knows % in a payload of %', unknown, p_handler
            USING HINT = left(format('Check the key. Known keys: %s.', (
                SELECT string_agg(DISTINCT key, ', ') FROM jsonb_array_elements(known) AS keys, jsonb_array_elements_text(keys) AS key
                -- Workers provide them, and they appear in the terminal of a producer, so control characters and marks
                -- that change the direction of text are left out.
                WHERE key !~ E'[\\u0001-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]')), 600);
    END IF;
END
$$;

-- True if the catalog has an open row of this lane. Served by lane_id: the aggregate hides the condition of lane_key
-- from the planner; otherwise, a plan could read all open lanes.
CREATE OR REPLACE FUNCTION rouse._is_open(p_lane bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    RETURN coalesce((SELECT bool_or(l.closed_at IS NULL) FROM rouse.lane AS l WHERE l.id = p_lane), false);
END
$$;

-- The lane in which an enqueue would put a job of lane p_lane now, without choosing a worker (direct dispatch): the
-- queue may have been divided by other values since then. Unlike rouse._lane, it raises no error if there are too many
-- lanes, because the job was already accepted. Served by lane_id and lane_key.
CREATE OR REPLACE FUNCTION rouse._lane_now(p_lane bigint, p_tenant text, p_source text, p_payload jsonb) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    was     record;
    base    bigint;
    divided text[];
BEGIN
    SELECT l.queue, l.handler, l.priority, l.tags INTO was FROM rouse.lane AS l WHERE l.id = p_lane LIMIT 1;
    base := rouse._lane_id(was.handler, was.queue, was.priority::text, was.tags, '');
    divided := rouse._divided_by(was.queue, was.handler);
    IF NOT rouse._is_open(base) THEN
        INSERT INTO rouse.lane (id, queue, handler, priority, tags, divided_by, refuses)
        VALUES (base, was.queue, was.handler, was.priority, was.tags, divided, rouse._contract_of_lane(was.handler));
    END IF;
    RETURN rouse._divided_lane(
        base, was.handler, was.queue, was.priority::text, was.tags, array_remove(divided, 'worker'), p_tenant, p_source, p_payload);
END
$$;

-- Closes lanes in which the calls of this function have found no job for a day (inboxes of workers that have ended: for
-- two hours), reopens closed lanes in which a job has appeared, and removes unreferenced rows; returns the number of
-- lanes closed, reopened and removed. Also repairs the copies of contracts (rouse._copy_contracts) and of the values by
-- which lanes are divided (rouse._divide_lanes). The queues of removed lanes stay in rouse.queue, with the time of
-- their last use. Neither producers nor workers wait for it. Only one call runs at a time: another call returns at
-- once, as does any call while the table is being vacuumed. Reads the whole catalog, and checks whether each lane has
-- jobs: served by job_ready, job_waiting and job_lease.
CREATE OR REPLACE FUNCTION rouse.maintain_lanes(p_worker bigint, p_key bytea, OUT closed integer, OUT reopened integer, OUT removed integer)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s' SET timezone = 'UTC' SET datestyle = 'ISO'
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at        timestamptz := clock_timestamp();
    kept_from timestamptz;
BEGIN
    PERFORM rouse._authenticated_as_limited(p_worker, p_key);
    closed := 0;
    reopened := 0;
    removed := 0;
    BEGIN
        LOCK TABLE rouse.lane IN SHARE UPDATE EXCLUSIVE MODE NOWAIT;
    EXCEPTION
        WHEN lock_not_available THEN
            RETURN;
    END;

    WITH running AS MATERIALIZED (
        SELECT DISTINCT j.lane FROM rouse.job AS j WHERE j.state = 'running' AND j.lease_until > '-infinity'),
    live AS MATERIALIZED (
        SELECT l.id, bool_and(l.closed_at IS NOT NULL) AS is_closed
        FROM rouse.lane AS l
        GROUP BY l.id
        -- Without EXISTS: with it, a plan could read all queued jobs and compare their lanes.
        HAVING (SELECT true FROM rouse.job AS j WHERE j.lane = l.id AND j.state = 'queued' AND j.turn IS NOT NULL LIMIT 1)
            OR (SELECT true FROM rouse.job AS j WHERE j.lane = l.id AND j.state = 'queued' AND j.turn IS NULL LIMIT 1)
            OR EXISTS (SELECT FROM running AS r WHERE r.lane = l.id)),
    seen AS (
        -- A new position in the catalog makes workers reread lanes that they have dropped.
        UPDATE rouse.lane AS l
        SET used_at = at, closed_at = NULL, seq = CASE WHEN live.is_closed THEN nextval('rouse.lane_seq') ELSE l.seq END
        FROM live
        WHERE l.id = live.id AND (live.is_closed OR l.closed_at IS NULL AND l.used_at < at - interval '1 hour')
        RETURNING live.is_closed)
    SELECT count(*) FILTER (WHERE s.is_closed) INTO reopened FROM seen AS s;

    UPDATE rouse.lane AS l SET closed_at = at
    WHERE l.closed_at IS NULL AND l.id IN (
        SELECT o.id FROM rouse.lane AS o WHERE o.closed_at IS NULL GROUP BY o.id
        HAVING max(o.used_at) < at - interval '1 day'
            -- As in rouse._authenticated_as_limited.
            OR max(o.used_at) < at - interval '2 hours' AND bool_or(o.worker IS NOT NULL AND NOT EXISTS (
                   SELECT FROM rouse.live_worker AS w WHERE w.worker = o.worker)));
    GET DIAGNOSTICS closed = ROW_COUNT;

    -- A job can be in a closed lane for a little more than a day; the oldest kept day has to be later than that. In
    -- addition, all transactions that may have found the lane open must have ended.
    SELECT min(p.first_day)::timestamp AT TIME ZONE 'UTC' INTO kept_from FROM rouse._partitions() AS p WHERE p.parent IN ('finished', 'attempt');
    WITH gone AS (
        DELETE FROM rouse.lane AS l
        WHERE l.closed_at IS NOT NULL
          -- Without EXISTS: with it, a plan could read all open lanes for each closed one.
          AND (l.id IN (SELECT o.id FROM rouse.lane AS o WHERE o.closed_at IS NULL)
               OR l.closed_at < kept_from - interval '2 days' AND age(l.xmin) > age(pg_snapshot_xmin(pg_current_snapshot())::xid))
        RETURNING l.queue, l.used_at),
    -- The queue stays in the catalog, with the time of its last use.
    kept AS (
        INSERT INTO rouse.queue AS q (name, used_at)
        SELECT g.queue, max(g.used_at) FROM gone AS g GROUP BY g.queue
        ON CONFLICT (name) DO UPDATE SET used_at = greatest(q.used_at, excluded.used_at))
    SELECT count(*) INTO removed FROM gone;
    PERFORM rouse._copy_contracts();
    PERFORM rouse._divide_lanes(NULL);
END
$$;
