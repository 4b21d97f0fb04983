-- Flows: graphs of jobs that are enqueued in one call. A flow has no state of its own: it is counted from its jobs when
-- it is read.

-- Raises the error for an invalid graph.
CREATE OR REPLACE FUNCTION rouse._refuse_flow(p_message text, p_hint text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'rouse.enqueue_flow: %', p_message
        USING ERRCODE = 'invalid_parameter_value',
              HINT = coalesce(p_hint, 'A job is, for instance, {"name": "ship", "handler": "shop.ship", "payload": {"order": 17}, "after": ["charge"]}.');
END
$$;

-- The jobs of a graph in an order in which each comes after those that it waits for: their indexes in `p_names`.
-- `p_children` wait for `p_parents`, which are indexes too. Raises an error with the names of a cycle.
CREATE OR REPLACE FUNCTION rouse._in_order(p_names text[], p_parents integer[], p_children integer[]) RETURNS integer[]
LANGUAGE plpgsql AS $$
DECLARE
    -- The edges by parent: those of n are starts[n] to starts[n + 1] - 1 in `children`.
    starts   integer[];
    children integer[];
    missing  integer[];
    ready    integer[];
    place    integer;
    child    integer;
    next     integer := 1;
    -- For each remaining job, a remaining job that it waits for.
    back     integer[];
    path     integer[] := '{}';
BEGIN
    SELECT array_agg(e.child ORDER BY e.parent) INTO children FROM unnest(p_parents, p_children) AS e(parent, child);
    SELECT array_agg(1 + coalesce(e.before, 0) ORDER BY n) INTO starts
    FROM (
        SELECT n, sum(count(e.parent)) OVER (ORDER BY n) - count(e.parent) AS before
        FROM generate_series(1, cardinality(p_names) + 1) AS n LEFT JOIN unnest(p_parents) AS e(parent) ON e.parent = n
        GROUP BY n) AS e;
    SELECT array_agg(e.count ORDER BY n) INTO missing
    FROM (
        SELECT n, count(e.child)::integer AS count
        FROM generate_series(1, cardinality(p_names)) AS n LEFT JOIN unnest(p_children) AS e(child) ON e.child = n
        GROUP BY n) AS e;
    ready := ARRAY(SELECT m.n FROM unnest(missing) WITH ORDINALITY AS m(count, n) WHERE m.count = 0 ORDER BY m.n);
    WHILE next <= cardinality(ready) LOOP
        place := ready[next];
        next := next + 1;
        FOR edge IN starts[place] .. starts[place + 1] - 1 LOOP
            child := children[edge];
            missing[child] := missing[child] - 1;
            IF missing[child] = 0 THEN
                ready := ready || child;
            END IF;
        END LOOP;
    END LOOP;
    IF cardinality(ready) = cardinality(p_names) THEN
        RETURN ready;
    END IF;
    -- Each remaining job waits for another remaining job, so going back from any of them leads into a cycle.
    SELECT array_agg(b.parent ORDER BY n) INTO back
    FROM generate_series(1, cardinality(p_names)) AS n
    LEFT JOIN (
        SELECT DISTINCT ON (e.child) e.child, e.parent FROM unnest(p_parents, p_children) AS e(parent, child) WHERE missing[e.parent] > 0) AS b
        ON b.child = n;
    SELECT m.n INTO place FROM unnest(missing) WITH ORDINALITY AS m(count, n) WHERE m.count > 0 ORDER BY m.n LIMIT 1;
    WHILE NOT place = ANY (path) LOOP
        path := place || path;
        place := back[place];
    END LOOP;
    path := place || path[:array_position(path, place)];
    PERFORM rouse._refuse_flow('its jobs wait for each other in a cycle: ' || (
        SELECT string_agg(quote_literal(p_names[p.place]), ' → ' ORDER BY p.n)
               || CASE WHEN cardinality(path) > 11 THEN ' → …' ELSE '' END
        FROM unnest(path) WITH ORDINALITY AS p(place, n) WHERE p.n <= 11), 'An arrow goes from a job to one that waits for it.');
END
$$;

-- Enqueues a graph of jobs, and returns the id of the flow. `jobs` is a list of 1 to 10,000 objects:
--
--   name, handler   required; names have 1 to 200 characters and are unique in the flow
--   payload, queue, tenant, source, priority, run_at, max_attempts, unique_key, tags, grants, lease, timeout,
--   job_timeout     as in rouse.enqueue
--   after           as in rouse.enqueue, with names of this flow as strings, and ids of other jobs as numbers:
--                   ["charge", 17], or {"paid": "charge", "stock": {"job": "reserve", "on_failure": "run"}}
--
-- `name` describes the flow; `queue`, `tenant`, `source` and `priority` apply to jobs that have none. All or nothing is
-- enqueued, in the transaction of the caller. If a live job already has the unique key of one of the jobs, the live job
-- is used instead: it is not listed in the flow, and jobs of the flow wait for it.
CREATE OR REPLACE FUNCTION rouse.enqueue_flow(
    jobs     jsonb,
    name     text DEFAULT NULL,
    queue    text DEFAULT 'default',
    tenant   text DEFAULT NULL,
    source   text DEFAULT NULL,
    priority text DEFAULT 'normal'
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_variable
DECLARE
    flow_id  bigint := nextval('rouse.turn_seq');
    names    text[];
    places   jsonb;
    invalid  record;
    message  text;
    hint     text;
    parents  integer[];
    children integer[];
    ids      bigint[];
    place    integer;
    list     jsonb[];
    job      jsonb;
    after    jsonb;
BEGIN
    IF jsonb_typeof(jobs) IS DISTINCT FROM 'array' OR jsonb_array_length(jobs) NOT BETWEEN 1 AND 10000 THEN
        PERFORM rouse._refuse_flow('jobs must be an array of 1 to 10000 objects, not ' || CASE jsonb_typeof(jobs)
            WHEN 'array' THEN jsonb_array_length(jobs) || ' of them' ELSE coalesce(left(jobs::text, 140), 'null') END);
    END IF;
    IF length(name) NOT BETWEEN 1 AND 200 THEN
        PERFORM rouse._refuse_flow('name must have 1 to 200 characters, or be left out');
    END IF;
    SELECT e.n, e.job INTO invalid FROM jsonb_array_elements(jobs) WITH ORDINALITY AS e(job, n)
    WHERE jsonb_typeof(e.job) <> 'object' OR jsonb_typeof(e.job -> 'name') IS DISTINCT FROM 'string' OR length(e.job ->> 'name') NOT BETWEEN 1 AND 200
    LIMIT 1;
    IF FOUND THEN
        PERFORM rouse._refuse_flow(format('job %s must be an object with a name of 1 to 200 characters, not %s', invalid.n, left(invalid.job::text, 140)));
    END IF;
    SELECT e.job ->> 'name' AS name INTO invalid FROM jsonb_array_elements(jobs) AS e(job) GROUP BY 1 HAVING count(*) > 1 LIMIT 1;
    IF FOUND THEN
        PERFORM rouse._refuse_flow(format('two jobs have the name %L', invalid.name), 'Names are unique in a flow.');
    END IF;
    SELECT e.job ->> 'name' AS name, key INTO invalid FROM jsonb_array_elements(jobs) AS e(job), jsonb_object_keys(e.job) AS key
    WHERE key NOT IN ('name', 'handler', 'payload', 'queue', 'tenant', 'source', 'priority', 'run_at', 'max_attempts', 'unique_key', 'tags', 'grants',
                      'lease', 'timeout', 'job_timeout', 'after')
    LIMIT 1;
    IF FOUND THEN
        PERFORM rouse._refuse_flow(format('job %L has the unknown key %L', invalid.name, invalid.key),
            'The keys are name, and the arguments of rouse.enqueue except trace: the jobs of a flow have the trace of the transaction.');
    END IF;
    SELECT e.job ->> 'name' AS name, e.job -> 'after' AS after INTO invalid FROM jsonb_array_elements(jobs) AS e(job)
    WHERE coalesce(jsonb_typeof(e.job -> 'after'), 'null') NOT IN ('array', 'object', 'null') LIMIT 1;
    IF FOUND THEN
        PERFORM rouse._refuse_flow(format('after of job %L must be an array or an object, not %s', invalid.name, left(invalid.after::text, 140)));
    END IF;
    SELECT e.job ->> 'name' AS name, d.name AS entry INTO invalid
    FROM jsonb_array_elements(jobs) AS e(job) CROSS JOIN LATERAL rouse._dependencies_of(e.job -> 'after') AS d
    GROUP BY 1, 2 HAVING count(DISTINCT d.job) > 1 LIMIT 1;
    IF FOUND THEN
        PERFORM rouse._refuse_flow(format('after of job %L has two entries with the name %L', invalid.name, invalid.entry),
            'An object can give them different names.');
    END IF;
    SELECT e.job ->> 'name' AS name, e.job -> 'tags' AS tags INTO invalid FROM jsonb_array_elements(jobs) AS e(job)
    WHERE coalesce(jsonb_typeof(e.job -> 'tags'), 'null') NOT IN ('array', 'null') LIMIT 1;
    IF FOUND THEN
        PERFORM rouse._refuse_flow(format('tags of job %L must be an array, not %s', invalid.name, left(invalid.tags::text, 140)));
    END IF;
    SELECT array_agg(e.job ->> 'name' ORDER BY e.n) INTO names FROM jsonb_array_elements(jobs) WITH ORDINALITY AS e(job, n);

    list := ARRAY(SELECT e.job FROM jsonb_array_elements(jobs) WITH ORDINALITY AS e(job, n) ORDER BY e.n);
    SELECT jsonb_object_agg(n.name, n.place) INTO places FROM unnest(names) WITH ORDINALITY AS n(name, place);

    -- The dependencies within the flow.
    SELECT e.job ->> 'name' AS name, d.job #>> '{}' AS parent INTO invalid
    FROM jsonb_array_elements(jobs) AS e(job) CROSS JOIN LATERAL rouse._dependencies_of(e.job -> 'after') AS d
    WHERE jsonb_typeof(d.job) = 'string' AND NOT places ? (d.job #>> '{}')
    LIMIT 1;
    IF FOUND THEN
        PERFORM rouse._refuse_flow(format('job %L waits for %L, which is not in the flow', invalid.name, invalid.parent),
            'Jobs of the flow are named by strings; other jobs are named by their ids, as numbers.');
    END IF;
    SELECT coalesce(array_agg((places ->> (d.job #>> '{}'))::integer), '{}'), coalesce(array_agg(e.n::integer), '{}') INTO parents, children
    FROM jsonb_array_elements(jobs) WITH ORDINALITY AS e(job, n) CROSS JOIN LATERAL rouse._dependencies_of(e.job -> 'after') AS d
    WHERE jsonb_typeof(d.job) = 'string';

    INSERT INTO rouse.flow (id, name, tenant, requested_at, jobs) VALUES (flow_id, name, tenant, clock_timestamp(), cardinality(names));
    ids := array_fill(NULL::bigint, ARRAY[cardinality(names)]);
    FOREACH place IN ARRAY rouse._in_order(names, parents, children) LOOP
        job := list[place];
        SELECT jsonb_object_agg(d.name, CASE
                   WHEN jsonb_typeof(d.job) <> 'string' THEN d.entry
                   WHEN jsonb_typeof(d.entry) = 'object' THEN d.entry || jsonb_build_object('job', ids[(places ->> (d.job #>> '{}'))::integer])
                   ELSE to_jsonb(ids[(places ->> (d.job #>> '{}'))::integer]) END)
        INTO after FROM rouse._dependencies_of(job -> 'after') AS d;
        ids[place] := (SELECT e.id FROM rouse._enqueue(
            nextval('rouse.turn_seq'), job ->> 'handler', job -> 'payload', octet_length((job -> 'payload')::text), NULL,
            coalesce(job ->> 'queue', queue), coalesce(job ->> 'tenant', tenant), coalesce(job ->> 'source', source),
            coalesce(job ->> 'priority', priority), (job ->> 'run_at')::timestamptz, (job ->> 'max_attempts')::integer, job ->> 'unique_key',
            ARRAY(SELECT jsonb_array_elements_text(nullif(job -> 'tags', 'null'))), nullif(job -> 'grants', 'null'),
            (job ->> 'lease')::interval, (job ->> 'timeout')::interval, (job ->> 'job_timeout')::interval, after, flow_id, names[place]) AS e);
    END LOOP;
    RETURN flow_id;
EXCEPTION
    WHEN OTHERS THEN
        IF place IS NULL THEN
            RAISE;
        END IF;
        -- The error names the job.
        GET STACKED DIAGNOSTICS message = MESSAGE_TEXT, hint = PG_EXCEPTION_HINT;
        RAISE EXCEPTION 'rouse.enqueue_flow: job %: %', quote_literal(names[place]), regexp_replace(message, '^rouse[.]enqueue: ', '')
            USING ERRCODE = SQLSTATE, HINT = coalesce(nullif(hint, ''), 'Nothing was enqueued.');
END
$$;

-- The jobs of a flow: the latest job of each name, each after those that it waits for. `job` is its id, and `chain` the
-- chain that `after` and `waits_for` of other jobs name: that of the first job of the name. `is_stuck`: a chain that it
-- waits for has failed, until it is retried. Whether a chain has failed is looked up once for each chain, because
-- thousands of jobs may wait for the same one. If the latest job of a name is no longer kept, an older one that is kept
-- is not shown in its place. `after_chain`, `max`: only the first `max` jobs with later chains; null: all. All jobs of
-- the flow are read in any case, but lanes and dependencies only of those that are returned. Served by job_flow,
-- finished_flow, dependency_job, the primary key, job_chain, lane_id and record_job.
CREATE OR REPLACE FUNCTION rouse.flow(id bigint, after_chain bigint DEFAULT NULL, max integer DEFAULT NULL)
RETURNS TABLE (name text, job bigint, chain bigint, handler text, queue text, state rouse.state, attempt integer, after jsonb, waits_for bigint[], is_stuck boolean,
               requested_at timestamptz, available_at timestamptz, started_at timestamptz, finished_at timestamptz, error jsonb)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
    WITH latest AS MATERIALIZED (
        -- Names are compared byte by byte, as in rouse._count_flow.
        SELECT DISTINCT ON (e.name COLLATE "C") e.*, min(e.of_chain) OVER (PARTITION BY e.name COLLATE "C") AS chain FROM (
            SELECT j.flow_name AS name, j.id AS job, coalesce(j.chain, j.id) AS of_chain, j.lane, j.state, j.attempt, j.after, j.blockers,
                   j.requested_at, j.available_at, NULL::timestamptz AS started_at, NULL::timestamptz AS finished_at, NULL::jsonb AS error,
                   NULL::boolean AS continued
            FROM rouse.job AS j WHERE j.flow = flow.id
            UNION ALL
            SELECT f.flow_name, f.id, coalesce(f.chain, f.id), f.lane, f.state, f.attempt, f.after, NULL,
                   f.requested_at, f.available_at, f.started_at, f.finished_at, f.error, f.continued
            FROM rouse.finished AS f WHERE f.flow = flow.id) AS e
        ORDER BY e.name COLLATE "C", e.job DESC),
    page AS MATERIALIZED (
        SELECT e.* FROM latest AS e
        WHERE (flow.after_chain IS NULL OR e.chain > flow.after_chain)
          -- Its successor (rouse._has_successor), or its retry, is no longer kept.
          AND CASE WHEN e.continued THEN true
                   WHEN CASE WHEN e.state = 'succeeded' THEN (SELECT rouse._drops_failed_first())
                             WHEN e.state > 'succeeded' THEN (SELECT rouse._retentions_differ()) END
                   THEN (SELECT true FROM rouse.record AS r WHERE r.job = e.job AND r.event = 'retried' LIMIT 1) END IS NOT TRUE
        ORDER BY e.chain LIMIT flow.max),
    waited AS MATERIALIZED (
        -- OFFSET 0: otherwise, a plan could read all dependencies, in the order of their chains (dependency_chain).
        SELECT DISTINCT d.chain FROM page AS e CROSS JOIN LATERAL (SELECT d.chain FROM rouse.dependency AS d WHERE d.job = e.job OFFSET 0) AS d
        WHERE e.blockers IS NOT NULL),
    ended AS MATERIALIZED (
        -- As rouse._live_job, without a call for each.
        SELECT w.chain FROM waited AS w
        WHERE (SELECT j.id FROM rouse.job AS j WHERE j.id = w.chain) IS NULL AND (SELECT j.id FROM rouse.job AS j WHERE j.chain = w.chain) IS NULL),
    failed AS MATERIALIZED (
        SELECT e.chain FROM ended AS e WHERE (rouse._last_ended(e.chain)).state IS DISTINCT FROM 'succeeded')
    SELECT e.name, e.job, e.chain, l.handler, l.queue, e.state, e.attempt, e.after,
           CASE WHEN e.blockers IS NOT NULL THEN coalesce(w.chains, '{}') END, coalesce(w.is_stuck, false),
           e.requested_at, e.available_at, e.started_at, e.finished_at, e.error
    FROM page AS e
    CROSS JOIN LATERAL (SELECT l.handler, l.queue FROM rouse.lane AS l WHERE l.id = e.lane LIMIT 1) AS l
    CROSS JOIN LATERAL (
        SELECT (array_agg(d.chain ORDER BY d.chain))[1:100] AS chains, bool_or(d.chain IN (SELECT f.chain FROM failed AS f)) AS is_stuck
        FROM rouse.dependency AS d WHERE d.job = e.job AND e.blockers IS NOT NULL) AS w
    ORDER BY e.chain
$$;

-- The number of jobs of a flow in each state, for rouse.flows; of the same jobs as in rouse.flow, which also looks up
-- the lane and the dependencies of each job. `finished_at` includes the ends of older jobs that rouse.flow leaves out.
-- Served by job_flow, finished_flow, dependency_job, the primary key, job_chain and record_job.
CREATE OR REPLACE FUNCTION rouse._count_flow(
    p_id bigint, OUT jobs bigint, OUT waiting bigint, OUT scheduled bigint, OUT ready bigint, OUT running bigint, OUT succeeded bigint,
    OUT failed bigint, OUT cancelled bigint, OUT stuck bigint, OUT finished_at timestamptz)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at           timestamptz := clock_timestamp();
    differ       boolean := rouse._retentions_differ();
    drops_failed boolean := rouse._drops_failed_first();
    blocked      bigint[];
BEGIN
    SELECT count(e.state), count(*) FILTER (WHERE e.is_blocked),
           count(*) FILTER (WHERE e.state = 'queued' AND NOT e.is_blocked AND e.available_at > at),
           count(*) FILTER (WHERE e.state = 'queued' AND NOT e.is_blocked AND e.available_at <= at),
           count(*) FILTER (WHERE e.state = 'running'), count(*) FILTER (WHERE e.state = 'succeeded'),
           count(*) FILTER (WHERE e.state IN ('failed', 'timed_out')), count(*) FILTER (WHERE e.state = 'cancelled'),
           CASE WHEN coalesce(bool_and(e.state > 'running'), true) THEN max(e.finished_at) END, array_agg(e.job) FILTER (WHERE e.is_blocked)
    INTO jobs, waiting, scheduled, ready, running, succeeded, failed, cancelled, finished_at, blocked
    FROM (
        -- Without a state if its successor or its retry is no longer kept, as in rouse.flow.
        SELECT e.job, e.is_blocked, e.available_at, e.finished_at,
               CASE WHEN CASE WHEN e.continued THEN true
                              WHEN CASE WHEN e.state = 'succeeded' THEN drops_failed WHEN e.state > 'succeeded' THEN differ END
                              THEN (SELECT true FROM rouse.record AS r WHERE r.job = e.job AND r.event = 'retried' LIMIT 1) END IS NOT TRUE
                    THEN e.state END AS state
        FROM (
            -- The latest job of each name. Names are compared byte by byte, which is several times as fast.
            SELECT DISTINCT ON (e.name COLLATE "C") e.*
            FROM (
                SELECT j.flow_name AS name, j.id AS job, j.state, j.blockers IS NOT NULL AS is_blocked, j.available_at,
                       NULL::timestamptz AS finished_at, NULL::boolean AS continued
                FROM rouse.job AS j WHERE j.flow = p_id
                UNION ALL
                SELECT f.flow_name, f.id, f.state, false, f.available_at, f.finished_at, f.continued
                FROM rouse.finished AS f WHERE f.flow = p_id) AS e
            ORDER BY e.name COLLATE "C", e.job DESC) AS e) AS e;
    stuck := 0;
    IF waiting > 0 THEN
        WITH waited AS MATERIALIZED (
            -- Only a lookup can serve this condition (claim.sql).
            SELECT d.job, d.chain FROM unnest(blocked) AS b(job) JOIN rouse.dependency AS d ON d.job = ANY (ARRAY[b.job])),
        ended AS MATERIALIZED (
            -- As rouse._live_job, without a call for each.
            SELECT c.chain FROM (SELECT DISTINCT w.chain FROM waited AS w) AS c
            WHERE (SELECT j.id FROM rouse.job AS j WHERE j.id = c.chain) IS NULL AND (SELECT j.id FROM rouse.job AS j WHERE j.chain = c.chain) IS NULL)
        SELECT count(DISTINCT w.job) INTO stuck FROM waited AS w
        WHERE w.chain IN (SELECT e.chain FROM ended AS e WHERE (rouse._last_ended(e.chain)).state IS DISTINCT FROM 'succeeded');
    END IF;
END
$$;

-- Every flow that is kept, with the number of its jobs in each state, counted when it is read. `waiting`: for other
-- jobs; `scheduled`: for their time; `stuck`: those that wait for a chain that has failed, until it is retried.
-- `finished_at`: when the last job ended; null while one is live.
CREATE OR REPLACE VIEW rouse.flows AS
SELECT w.id, w.name, w.tenant, w.requested_at, c.finished_at, c.age, c.state,
       c.jobs, c.waiting, c.scheduled, c.ready, c.running, c.succeeded, c.failed, c.cancelled, c.stuck
FROM rouse.flow AS w
-- Everything that depends on the time is in this subquery, so that a query with a limit counts only the flows that it
-- returns.
CROSS JOIN LATERAL (
    SELECT c.*, coalesce(c.finished_at, clock_timestamp()) - w.requested_at AS age,
           CASE WHEN c.waiting + c.scheduled + c.ready + c.running > 0 THEN 'live' WHEN c.failed + c.cancelled > 0 THEN 'failed' ELSE 'succeeded' END AS state
    FROM rouse._count_flow(w.id) AS c) AS c;

-- Rejects an unknown flow.
CREATE OR REPLACE FUNCTION rouse._check_flow(p_name text, p_id bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM rouse._check_id(p_name, p_id);
    PERFORM FROM rouse.flow AS f WHERE f.id = p_id;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'rouse: flow % does not exist, or is no longer kept', p_id
            USING ERRCODE = 'no_data_found', HINT = 'It was never enqueued, its transaction is not committed, or none of its jobs is kept any more.';
    END IF;
END
$$;

-- Cancels up to `max` live jobs of a flow, and returns their number. Call it until it returns 0, which means that no
-- job is live: each call is a separate transaction, so that a large flow does not delay anything else. Jobs that
-- another transaction has locked at this moment are left to the next call; if only such jobs remain, the call waits for
-- one of them. Served by job_flow.
CREATE OR REPLACE FUNCTION rouse.cancel_flow(id bigint, max integer DEFAULT 1000) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at      timestamptz := clock_timestamp();
    queued  bigint[];
    running bigint[];
    chains  bigint[];
    one     bigint;
    cancelled integer := 0;
BEGIN
    PERFORM rouse._check_flow('cancel_flow', cancel_flow.id);
    IF max IS NULL OR max < 1 THEN
        RAISE EXCEPTION 'rouse.cancel_flow: max must be at least 1, not %', coalesce(max::text, 'null') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- The job for which it has waited may have ended in the meantime, and released others or continued its chain.
    WHILE cancelled = 0 AND EXISTS (SELECT FROM rouse.job AS j WHERE j.flow = cancel_flow.id) LOOP
        at := clock_timestamp();
        PERFORM rouse._ensure_partitions(at);
        queued := ARRAY(
            -- By the negated id: otherwise, a plan could read all jobs in this order.
            SELECT j.id FROM rouse.job AS j WHERE j.flow = cancel_flow.id AND j.state = 'queued' ORDER BY -j.id LIMIT max FOR UPDATE SKIP LOCKED);
        INSERT INTO rouse.record (at, job, event, who, detail)
        SELECT at, q.id, 'cancelled', session_user, jsonb_build_object('flow', cancel_flow.id) FROM unnest(queued) AS q(id);
        chains := rouse._end_queued(queued, 'cancelled', NULL, NULL, at);
        PERFORM rouse._chains_ended(chains, array_fill(false, ARRAY[cardinality(chains)]));
        running := ARRAY(
            -- Not = 'running': a plan could then read all running jobs (job_lease).
            SELECT j.id FROM rouse.job AS j WHERE j.flow = cancel_flow.id AND j.state <> 'queued' LIMIT max - cardinality(queued) FOR UPDATE SKIP LOCKED);
        IF queued = '{}' AND running = '{}' THEN
            running := ARRAY(SELECT -max(-j.id) FROM rouse.job AS j WHERE j.flow = cancel_flow.id HAVING count(*) > 0);
        END IF;
        cancelled := cardinality(queued);
        FOREACH one IN ARRAY running LOOP
            cancelled := cancelled + rouse._end(one, 'cancelled', NULL, NULL, 'cancelled', jsonb_build_object('flow', cancel_flow.id))::integer;
        END LOOP;
    END LOOP;
    IF cancelled > 0 THEN
        INSERT INTO rouse.record (at, event, who, detail)
        VALUES (at, 'flow_cancelled', session_user, jsonb_build_object('flow', cancel_flow.id, 'jobs', cancelled));
    END IF;
    RETURN cancelled;
END
$$;

-- Retries jobs of a flow that failed, timed out or were cancelled, up to `max`, and returns their number. The others
-- keep their results. Call it until it returns 0: each call is a separate transaction, which ends 30 ms after its first
-- retry, because a retry locks the jobs that it waits for, and they cannot end in the meantime. But each call reads all
-- jobs of the flow, and looks again at those that the previous calls have left out. So it retries at least one job for
-- every 200 of the former and every 10 of the latter, however long that takes: otherwise, the calls for a large flow
-- would mostly read. Jobs that ended at or after `before` (null: the time of the call) are left alone: pass the time of
-- the first call to retry each job once, even if it fails again in the meantime.
--
-- It leaves out jobs that wait for a failed chain, whose payload was removed, whose unique key a live job has, or whose
-- retry is no longer kept. Jobs are retried after those that they wait for. If another transaction has locked a job, or
-- a job that it waits for, the call ends before that job. If that job is the first, the call waits for the lock; thus
-- it never waits for a lock while others may wait for its own. Served by job_flow, finished_flow, finished_id and
-- record_job.
CREATE OR REPLACE FUNCTION rouse.retry_flow(id bigint, max integer DEFAULT 1000, before timestamptz DEFAULT NULL) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at      timestamptz := clock_timestamp();
    job     bigint;
    -- The number of jobs of the flow.
    jobs    bigint;
    was     rouse.finished;
    parents record;
    locked  integer;
    done    record;
    -- The time of the first retry.
    since   timestamptz;
    count   integer := 0;
    -- The number of jobs that were looked at and left out.
    skipped integer := 0;
BEGIN
    PERFORM rouse._check_flow('retry_flow', retry_flow.id);
    IF max IS NULL OR max < 1 THEN
        RAISE EXCEPTION 'rouse.retry_flow: max must be at least 1, not %', coalesce(max::text, 'null') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM rouse._ensure_partitions(at);
    FOR job, jobs IN
        SELECT e.job, e.jobs
        FROM (
            SELECT e.job, e.jobs
            FROM (
                -- The latest job of each name, as in rouse.flow. Grouped, because sorting by name would take longer.
                SELECT max(e.job) AS job, max(e.job) FILTER (WHERE e.has_failed) AS failed, min(e.chain) AS chain,
                       (sum(count(*)) OVER ())::bigint AS jobs
                FROM (
                    SELECT j.flow_name AS name, j.id AS job, coalesce(j.chain, j.id) AS chain, false AS has_failed
                    FROM rouse.job AS j WHERE j.flow = retry_flow.id
                    UNION ALL
                    SELECT f.flow_name, f.id, coalesce(f.chain, f.id),
                           f.state IN ('failed', 'timed_out', 'cancelled') AND f.finished_at < coalesce(retry_flow.before, at)
                    FROM rouse.finished AS f WHERE f.flow = retry_flow.id) AS e
                GROUP BY e.name COLLATE "C") AS e
            WHERE e.job = e.failed
            ORDER BY e.chain OFFSET 0) AS e
        -- If such a job was retried, the retry is no longer kept, and may have succeeded: failed jobs may be kept for
        -- longer than others. OFFSET 0 (twice): looked up for one job after another, as far as the loop gets.
        WHERE NOT EXISTS (SELECT FROM rouse.record AS r WHERE r.job = e.job AND r.event = 'retried' OFFSET 0)
    LOOP
        EXIT WHEN count >= max
            OR count >= jobs / 200 + skipped / 10 AND clock_timestamp() > since + interval '30 milliseconds';
        was := rouse._ended_job(job);
        IF count > 0 THEN
            PERFORM FROM rouse.finished AS f WHERE f.id = job FOR UPDATE SKIP LOCKED;
            EXIT WHEN NOT FOUND;
        END IF;
        -- Another transaction may have retried it since the loop began, and its retry may have ended.
        PERFORM FROM rouse.record AS r WHERE r.job = was.id AND r.event = 'retried' LIMIT 1;
        CONTINUE WHEN FOUND;
        IF was.after IS NOT NULL AND was.attempt = 0 THEN
            -- Without a lock; rouse._retry decides.
            SELECT array_agg(DISTINCT d.live) FILTER (WHERE d.live IS NOT NULL) AS live,
                   bool_or(d.live IS NULL AND d.on_failure = '"cancel"' AND (rouse._last_ended(d.chain)).state <> 'succeeded') AS has_failed
            INTO parents
            FROM (
                SELECT d.chain, d.on_failure, rouse._live_job(d.chain) AS live
                FROM (SELECT (d.job #>> '{}')::bigint AS chain, d.on_failure FROM rouse._dependencies_of(was.after) AS d) AS d) AS d;
            IF parents.has_failed THEN
                skipped := skipped + 1;
                CONTINUE;
            END IF;
            IF count > 0 THEN
                PERFORM FROM rouse.job AS j WHERE j.id = ANY (parents.live) FOR KEY SHARE SKIP LOCKED;
                GET DIAGNOSTICS locked = ROW_COUNT;
                EXIT WHEN locked < cardinality(parents.live);
            END IF;
        END IF;
        SELECT * INTO done FROM rouse._retry(was, at);
        IF done.made IS NOT NULL THEN
            count := count + 1;
            since := coalesce(since, clock_timestamp());
        ELSE
            skipped := skipped + 1;
        END IF;
    END LOOP;
    IF count > 0 THEN
        INSERT INTO rouse.record (at, event, who, detail)
        VALUES (at, 'flow_retried', session_user, jsonb_build_object('flow', retry_flow.id, 'jobs', count));
    END IF;
    RETURN count;
END
$$;

-- Deletes a flow: its queued jobs are cancelled, and records show that they were deleted. Returns their number. Refused
-- while one of its jobs runs, and while jobs outside the flow wait for it. Served by job_flow and dependency_chain.
CREATE OR REPLACE FUNCTION rouse.delete_flow(id bigint) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at      timestamptz := clock_timestamp();
    queued  bigint[];
    running bigint[];
    waiting bigint[];
    chains  bigint[];
BEGIN
    PERFORM rouse._refuse_snapshot('delete_flow');
    PERFORM rouse._check_flow('delete_flow', delete_flow.id);
    LOOP
        SELECT array_agg(j.id) FILTER (WHERE j.state = 'running'), coalesce(array_agg(j.id) FILTER (WHERE j.state = 'queued'), '{}') INTO running, queued
        -- As in rouse.cancel_flow.
        FROM (SELECT j.id, j.state FROM rouse.job AS j WHERE j.flow = delete_flow.id ORDER BY -j.id DESC FOR UPDATE) AS j;
        IF running IS NOT NULL THEN
            RAISE EXCEPTION 'rouse: flow % cannot be deleted: job % is running', delete_flow.id, running[1]
                USING ERRCODE = 'object_not_in_prerequisite_state', HINT = format('SELECT rouse.cancel_flow(%s) stops it.', delete_flow.id);
        END IF;
        -- After a wait for the lock of a job, the next job of its chain may exist, which the earlier snapshot did not
        -- show.
        EXIT WHEN (SELECT count(*) FROM rouse.job AS j WHERE j.flow = delete_flow.id) = cardinality(queued);
    END LOOP;
    waiting := ARRAY(
        SELECT DISTINCT d.job
        FROM (
            SELECT coalesce(f.chain, f.id) AS chain FROM rouse.finished AS f WHERE f.flow = delete_flow.id
            UNION SELECT coalesce(j.chain, j.id) FROM rouse.job AS j WHERE j.flow = delete_flow.id) AS its
        -- OFFSET 0: otherwise, a plan could read all dependencies, in the order of their jobs (dependency_job).
        CROSS JOIN LATERAL (SELECT d.job FROM rouse.dependency AS d WHERE d.chain = its.chain OFFSET 0) AS d
        WHERE NOT d.job = ANY (queued) LIMIT 11);
    IF waiting <> '{}' THEN
        RAISE EXCEPTION 'rouse: flow % cannot be deleted: % for it', delete_flow.id, rouse._format_dependents(waiting)
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Cancel or delete them first.';
    END IF;
    PERFORM rouse._ensure_partitions(at);
    INSERT INTO rouse.record (at, job, event, who, detail)
    SELECT at, q.id, 'deleted', session_user, jsonb_build_object('flow', delete_flow.id) FROM unnest(queued) AS q(id);
    chains := rouse._end_queued(queued, 'cancelled', NULL, NULL, at);
    PERFORM rouse._chains_ended(chains, array_fill(false, ARRAY[cardinality(chains)]));
    IF queued <> '{}' THEN
        INSERT INTO rouse.record (at, event, who, detail)
        VALUES (at, 'flow_deleted', session_user, jsonb_build_object('flow', delete_flow.id, 'jobs', cardinality(queued)));
    END IF;
    RETURN cardinality(queued);
END
$$;

-- Deletes flows of which no job is kept. Looks at the next 1,000 flows after this id; `reached` is the id of the last
-- one, or null if there are no more. For workers; those of a limited login that may not do maintenance delete nothing.
-- Served by flow_pkey, job_flow and finished_flow, with a plan that does not depend on statistics (as in
-- rouse.maintain_gate_keys).
CREATE OR REPLACE FUNCTION rouse.maintain_flows(p_worker bigint, p_key bytea, p_after bigint, OUT reached bigint, OUT deleted integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s'
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    ids       bigint[];
    -- The jobs of younger flows are kept, whatever their retention is.
    keep_days integer := least((SELECT l.keep_days FROM rouse.limits AS l WHERE l.only_row), (SELECT min(r.days) FROM rouse._own_retentions() AS r));
BEGIN
    deleted := 0;
    IF rouse._authenticated_as_limited(p_worker, p_key) AND NOT rouse._may_maintain() THEN
        RETURN;
    END IF;
    ids := ARRAY(SELECT f.id FROM rouse.flow AS f WHERE f.id > p_after ORDER BY f.id LIMIT 1000);
    DELETE FROM rouse.flow AS w
    WHERE w.ctid = ANY (ARRAY(
        SELECT f.ctid FROM rouse.flow AS f
        WHERE f.id > p_after AND f.id <= ids[cardinality(ids)] AND f.requested_at < now() - make_interval(days => keep_days)
          AND NOT EXISTS (SELECT FROM rouse.job AS j WHERE j.flow = f.id OFFSET 0)
          AND NOT EXISTS (SELECT FROM rouse.finished AS e WHERE e.flow = f.id OFFSET 0)
        ORDER BY f.id FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS deleted = ROW_COUNT;
    reached := ids[1000];
END
$$;
