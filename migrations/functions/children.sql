-- Jobs that attempts enqueue: children, calls, and the next job of their own chain. They are committed with the
-- settlement.

-- The attenuation of a job that another job enqueues: what its parent leaves it, and its own attenuation. Both apply.
CREATE OR REPLACE FUNCTION rouse._both_grants(p_parent jsonb, p_own jsonb) RETURNS jsonb
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_own IS NULL THEN p_parent WHEN p_parent IS NULL THEN p_own
                WHEN jsonb_array_length(every.list) = 1 AND jsonb_typeof(p_parent) <> 'array' THEN every.list -> 0 ELSE every.list END
    FROM (
        -- Each part once: a repeated part has no further effect.
        SELECT jsonb_agg(g.part ORDER BY g.place) AS list
        FROM (
            SELECT e.part, min(e.place) AS place
            FROM (
                SELECT a.part, a.place
                FROM jsonb_array_elements(CASE jsonb_typeof(p_parent) WHEN 'array' THEN p_parent ELSE jsonb_build_array(p_parent) END)
                     WITH ORDINALITY AS a(part, place)
                UNION ALL
                SELECT b.part, 1000 + b.place
                FROM jsonb_array_elements(CASE jsonb_typeof(p_own) WHEN 'array' THEN p_own ELSE jsonb_build_array(p_own) END)
                     WITH ORDINALITY AS b(part, place)) AS e
            GROUP BY e.part) AS g) AS every
$$;

-- Enqueues one job of an attempt, with all checks, and returns its id, or the id of the live job with its unique key,
-- if there is one. p_queue and p_priority are those of its parent; p_worker is the worker that runs the attempt. p_own:
-- the children of the attempt that are already enqueued; `after` names them as -1, -2 ….
CREATE OR REPLACE FUNCTION rouse._enqueue_child(
    p_worker bigint, p_id bigint, p_parent rouse.parent_job, p_queue text, p_priority rouse.priority, p_job rouse.new_job, p_own bigint[], p_origin jsonb) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    at      timestamptz := clock_timestamp();
    options jsonb := coalesce(p_job.options, '{}');
    delay   numeric := (options ->> 'delay_ms')::numeric;
    after   jsonb;
    made    record;
BEGIN
    SELECT jsonb_object_agg(d.name, jsonb_build_object('job', p_own[-(d.job #>> '{}')::bigint], 'on_failure', d.on_failure)) INTO after
    FROM rouse._dependencies_of(options -> 'after') AS d;
    IF p_job.kind = 'next' AND after IS NOT NULL THEN
        PERFORM rouse._refuse_cycle(coalesce(p_parent.chain, p_parent.id), ARRAY(SELECT rouse._chain_of(o.id) FROM unnest(p_own) AS o(id)));
    END IF;
    made := rouse._enqueue(
        p_id, p_job.handler, p_job.payload, octet_length(p_job.payload::text), NULL,
        coalesce(options ->> 'queue', p_queue), p_parent.tenant, NULL, coalesce(options ->> 'priority', p_priority::text),
        coalesce(CASE WHEN delay IS NOT NULL THEN at + least(delay, 3153600000000)::bigint * interval '1 millisecond' END, (options ->> 'run_at')::timestamptz),
        (options ->> 'max_attempts')::integer, options ->> 'unique_key',
        ARRAY(SELECT jsonb_array_elements_text(nullif(options -> 'tags', 'null'))),
        rouse._both_grants(p_parent.grants, nullif(options -> 'grants', 'null')),
        (options ->> 'lease')::interval, (options ->> 'timeout')::interval, (options ->> 'job_timeout')::interval, after,
        CASE WHEN p_job.kind = 'next' THEN p_parent.flow END, CASE WHEN p_job.kind = 'next' THEN p_parent.flow_name END,
        CASE WHEN p_job.kind = 'next' THEN coalesce(p_parent.chain, p_parent.id) END, p_origin, false, p_job.trace, p_worker);
    IF p_job.kind = 'next' AND NOT made.created THEN
        RAISE EXCEPTION 'rouse: job % cannot be continued: job % has the unique key %', p_parent.id, made.id, quote_literal(options ->> 'unique_key')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN made.id;
END
$$;

-- Rejects a job of an attempt that would give way to the job p_id, if the login of its worker is limited and its
-- workers could not run that job: the attempt would receive the result of that job, or replace its arguments.
-- `p_unique_key`: the key that both have; null: a gate has merged them.
CREATE OR REPLACE FUNCTION rouse._check_merged(p_worker bigint, p_id bigint, p_unique_key text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    limits rouse.worker_login;
BEGIN
    SELECT * INTO limits FROM rouse._limits_of(p_worker);
    IF FOUND THEN
        PERFORM rouse._check_merged_within(limits, p_id, p_unique_key);
    END IF;
END
$$;

-- Rejects a job that would give way to the job p_id, if a worker with these limits could not run that job. The role
-- rouse_enqueuer may use any job. Served by primary keys, finished_id and lane_id.
CREATE OR REPLACE FUNCTION rouse._check_merged_within(p_limits rouse.worker_login, p_id bigint, p_unique_key text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    lane record;
BEGIN
    IF pg_has_role(p_limits.login::oid, 'rouse_enqueuer'::name, 'USAGE') THEN
        RETURN;
    END IF;
    -- A gate with a period may have let through a job that has ended.
    SELECT l.queue, l.handler, l.tags INTO lane FROM rouse.lane AS l
    WHERE l.id = coalesce((SELECT j.lane FROM rouse.job AS j WHERE j.id = p_id), (SELECT f.lane FROM rouse.finished AS f WHERE f.id = p_id LIMIT 1))
    LIMIT 1;
    -- The error is also raised if the job is no longer kept.
    IF (rouse._matches_any(lane.queue, p_limits.queues) AND rouse._matches_any(lane.handler, p_limits.handlers)
        AND NOT EXISTS (SELECT FROM unnest(lane.tags) AS tag WHERE NOT rouse._matches_any(tag, p_limits.tags))) IS NOT TRUE THEN
        RAISE EXCEPTION 'rouse: login % may not use job %, %', p_limits.login, p_id,
            coalesce('which has the unique key ' || quote_literal(p_unique_key),
                     'with which a gate would merge a job' || CASE WHEN lane.queue IS NULL THEN '' ELSE format(' for handler %L; it is in queue %L', lane.handler, lane.queue) END)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Its handlers and queues are listed in rouse.worker_login.';
    END IF;
END
$$;

-- True if a job of the chain p_chain that waits for these chains would wait for itself: one of them is the same chain,
-- or waits for it. Served by dependency_chain and dependency_job.
CREATE OR REPLACE FUNCTION rouse._is_cycle(p_chain bigint, p_chains bigint[]) RETURNS boolean
LANGUAGE plpgsql SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off AS $$
BEGIN
    IF p_chain = ANY (p_chains) THEN
        RETURN true;
    END IF;
    -- Most chains have no waiting jobs.
    PERFORM FROM rouse.dependency AS d WHERE d.chain = p_chain LIMIT 1;
    RETURN FOUND AND EXISTS (
        WITH RECURSIVE waited_for(chain) AS (
            SELECT c.chain FROM unnest(p_chains) AS c(chain)
            UNION
            SELECT d.chain FROM waited_for AS w JOIN rouse.dependency AS d ON d.job = ANY (ARRAY[rouse._live_job(w.chain)]))
        SELECT FROM waited_for AS w WHERE w.chain = p_chain);
END
$$;

-- Rejects a job that would wait for itself (rouse._is_cycle).
CREATE OR REPLACE FUNCTION rouse._refuse_cycle(p_chain bigint, p_chains bigint[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF rouse._is_cycle(p_chain, p_chains) THEN
        RAISE EXCEPTION 'rouse: chain % cannot wait for a job that waits for it', p_chain
            USING ERRCODE = 'invalid_parameter_value', HINT = 'A unique key may have led to a job that is live already.';
    END IF;
END
$$;

-- The origins of the jobs that attempts enqueue: the number of jobs that their attempt may still enqueue is divided
-- equally among them. A resumed attempt, and the next job of the chain, may enqueue the full number again. Raises an
-- error if an attempt enqueues too many.
CREATE OR REPLACE FUNCTION rouse._child_origins(p_parents rouse.parent_job[], p_jobs rouse.new_job[]) RETURNS TABLE (parent bigint, origin jsonb)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    made record;
BEGIN
    FOR made IN
        SELECT p.id, s.jobs, l.depth_max, coalesce((p.origin ->> 'depth')::integer, 0) AS depth,
               coalesce((p.origin ->> 'descendants')::integer, l.descendants_max) AS rest
        FROM (SELECT s.parent, count(*)::integer AS jobs FROM unnest(p_jobs) AS s WHERE s.kind <> 'next' GROUP BY s.parent) AS s
        JOIN unnest(p_parents) AS p ON p.id = s.parent CROSS JOIN rouse.limits AS l
    LOOP
        IF made.jobs > made.rest THEN
            RAISE EXCEPTION 'rouse: job % enqueues % jobs; it may have at most % more descendants', made.id, made.jobs, made.rest
                USING ERRCODE = 'program_limit_exceeded', HINT = 'The limit for an attempt and its descendants is descendants_max in rouse.limits.';
        END IF;
        IF made.depth >= made.depth_max THEN
            RAISE EXCEPTION 'rouse: job % cannot enqueue others: they would be nested deeper than %', made.id, made.depth_max
                USING ERRCODE = 'program_limit_exceeded', HINT = 'The limit is depth_max in rouse.limits.';
        END IF;
        parent := made.id;
        origin := jsonb_build_object('parent', made.id, 'depth', made.depth + 1, 'descendants', (made.rest - made.jobs) / made.jobs);
        RETURN NEXT;
    END LOOP;
END
$$;

-- Enqueues the jobs of attempts that p_worker settles. `p_parents`: their own jobs. Returns the calls. Jobs without
-- options are inserted in one statement. Served by lane_id and lane_key.
CREATE OR REPLACE FUNCTION rouse._enqueue_children(p_worker bigint, p_parents rouse.parent_job[], p_jobs rouse.new_job[])
RETURNS TABLE (parent bigint, step text, id bigint)
LANGUAGE plpgsql SET enable_hashjoin = on AS $$
#variable_conflict use_column
DECLARE
    at      timestamptz := clock_timestamp();
    ids     bigint[] := ARRAY(SELECT nextval('rouse.turn_seq') FROM unnest(p_jobs));
    made    bigint[];
    lanes   bigint[];
    origins jsonb := '{}';
    missing bigint[];
    child   record;
    current bigint;
    own     bigint[];
BEGIN
    PERFORM FROM unnest(p_jobs) AS s WHERE s.kind <> 'next' LIMIT 1;
    IF FOUND THEN
        SELECT jsonb_object_agg(o.parent, o.origin) INTO origins FROM rouse._child_origins(p_parents, p_jobs) AS o;
    END IF;
    WITH plain AS (
        INSERT INTO rouse.job AS j (id, lane, turn, chain, flow, flow_name, requested_at, available_at, bytes, tenant, payload, grants, origin, trace)
        SELECT ids[s.place], l.id, ids[s.place], CASE WHEN s.kind = 'next' THEN coalesce(p.chain, p.id) END,
               CASE WHEN s.kind = 'next' THEN p.flow END, CASE WHEN s.kind = 'next' THEN p.flow_name END, at, at,
               octet_length(s.payload::text) + rouse._other_bytes(p.tenant, NULL, p.grants, s.trace), p.tenant, s.payload, p.grants,
               CASE WHEN s.kind = 'next' THEN p.origin ELSE origins -> p.id::text END, s.trace
        FROM unnest(p_jobs) WITH ORDINALITY AS s(parent, kind, step, handler, payload, options, trace, place)
        JOIN unnest(p_parents) AS p ON p.id = s.parent
        CROSS JOIN LATERAL (SELECT l.queue, l.priority FROM rouse.lane AS l WHERE l.id = p.lane LIMIT 1) AS own
        CROSS JOIN LATERAL (
            SELECT l.id FROM rouse.lane AS l
            WHERE l.handler = s.handler AND l.queue = own.queue AND l.priority = own.priority AND l.tags = '{}' AND l.key = '' AND l.closed_at IS NULL
              AND l.divided_by IS NULL LIMIT 1) AS l
        WHERE s.options IS NULL AND octet_length(s.payload::text) <= 1024
        RETURNING j.id, j.lane)
    SELECT array_agg(p.id), array_agg(DISTINCT p.lane) INTO made, lanes FROM plain AS p;
    IF coalesce(cardinality(made), 0) < cardinality(p_jobs) THEN
        missing := ARRAY(SELECT i.id FROM unnest(ids) AS i(id) EXCEPT SELECT m.id FROM unnest(made) AS m(id));
        FOR child IN
            SELECT s.place, s.kind, m.id IS NOT NULL AS is_missing, p AS parent, p.id AS parent_id, l.queue, l.priority,
                   ROW(s.parent, s.kind, s.step, s.handler, s.payload, s.options, s.trace)::rouse.new_job AS job
            FROM unnest(p_jobs) WITH ORDINALITY AS s(parent, kind, step, handler, payload, options, trace, place)
            JOIN unnest(p_parents) AS p ON p.id = s.parent
            CROSS JOIN LATERAL (SELECT l.queue, l.priority FROM rouse.lane AS l WHERE l.id = p.lane LIMIT 1) AS l
            LEFT JOIN unnest(missing) AS m(id) ON m.id = ids[s.place]
            ORDER BY s.parent, s.place
        LOOP
            IF child.parent_id IS DISTINCT FROM current THEN
                current := child.parent_id;
                own := '{}';
            END IF;
            IF child.is_missing THEN
                ids[child.place] := rouse._enqueue_child(p_worker, ids[child.place], child.parent, child.queue, child.priority, child.job, own,
                    CASE WHEN child.kind = 'next' THEN (child.parent).origin ELSE origins -> current::text END);
            END IF;
            IF child.kind = 'child' THEN
                own := own || ids[child.place];
            END IF;
        END LOOP;
    END IF;
    -- As in rouse._settle: if there are many lanes, no lock is taken.
    PERFORM rouse._notify(l.lane, true, CASE WHEN cardinality(lanes) <= 32 THEN at ELSE '-infinity' END) FROM unnest(lanes) AS l(lane);
    RETURN QUERY SELECT s.parent, s.step, ids[s.place]
    FROM unnest(p_jobs) WITH ORDINALITY AS s(parent, kind, step, handler, payload, options, trace, place) WHERE s.kind = 'call';
END
$$;

-- The jobs that belong to these attempts, in their order: calls of attempts that are suspended, all other jobs of
-- attempts that have succeeded.
CREATE OR REPLACE FUNCTION rouse._jobs_of(p_jobs rouse.new_job[], p_succeeded rouse.parent_job[], p_suspended rouse.parent_job[]) RETURNS rouse.new_job[]
-- In PL/pgSQL, because SQL functions that are not inlined are planned at each call.
LANGUAGE plpgsql IMMUTABLE SET enable_hashjoin = on AS $$
BEGIN
    RETURN ARRAY(
        SELECT ROW(s.parent, s.kind, s.step, s.handler, s.payload, s.options, CASE WHEN rouse._is_traceparent(s.trace) THEN s.trace END)::rouse.new_job
        FROM unnest(p_jobs) WITH ORDINALITY AS s(parent, kind, step, handler, payload, options, trace, place)
        JOIN (SELECT d.id, false AS is_suspended FROM unnest(p_succeeded) AS d UNION ALL SELECT d.id, true FROM unnest(p_suspended) AS d) AS p
            ON p.id = s.parent
        WHERE (s.kind = 'call') = p.is_suspended
        ORDER BY s.place);
END
$$;

-- Rejects jobs for handlers or queues that the limited login of a worker does not serve, unless it may enqueue
-- anything.
CREATE OR REPLACE FUNCTION rouse._check_children(p_worker bigint, p_jobs rouse.new_job[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    limits  rouse.worker_login;
    invalid record;
BEGIN
    SELECT * INTO limits FROM rouse._limits_of(p_worker);
    IF FOUND THEN
        IF pg_has_role(limits.login::oid, 'rouse_enqueuer'::name, 'USAGE') THEN
            RETURN;
        END IF;
    ELSE
        -- Either the limits have just been removed; or the role was renamed or dropped, in which case nothing is
        -- permitted.
        PERFORM FROM (SELECT n.limited FROM rouse.worker AS n WHERE n.incarnation = p_worker ORDER BY n.seen_at DESC LIMIT 1) AS w WHERE w.limited;
        IF NOT FOUND THEN
            RETURN;
        END IF;
    END IF;
    SELECT s.handler, s.options ->> 'queue' AS queue INTO invalid
    FROM unnest(p_jobs) AS s
    WHERE NOT rouse._matches_any(s.handler, limits.handlers) OR NOT rouse._matches_any(coalesce(s.options ->> 'queue', limits.queues[1]), limits.queues)
       OR EXISTS (SELECT FROM jsonb_array_elements_text(CASE jsonb_typeof(s.options -> 'tags') WHEN 'array' THEN s.options -> 'tags' END) AS t(tag)
                  WHERE NOT rouse._matches_any(t.tag, limits.tags))
    LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'rouse: login % may not enqueue jobs for handler % in queue %',
            coalesce(limits.login::text, (SELECT w.login FROM rouse.worker AS w WHERE w.incarnation = p_worker)), quote_literal(left(invalid.handler, 140)),
            coalesce(quote_literal(left(invalid.queue, 140)), 'of their parent')
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'Its handlers and queues are listed in rouse.worker_login; the role rouse_enqueuer may enqueue any job.';
    END IF;
END
$$;
