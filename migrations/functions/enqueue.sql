-- rouse.enqueue, rouse.enqueue_unique, rouse.enqueue_and_report and rouse.enqueue_many: add a job to its lane, in the
-- caller's transaction.
--
-- They look up their lane through its index, whatever the statistics say (enable_seqscan): a session that planned while
-- the catalog had one or two pages would otherwise keep reading all of it when it has 10,000 rows.

-- Enforces the payload limit, in bytes of the JSON text that a handler gets. Callers serialise the payload once and
-- pass its size.
CREATE OR REPLACE FUNCTION rouse._check_payload(p_bytes integer, p_queue text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    bytes_max integer := coalesce((SELECT q.payload_bytes_max FROM rouse.queue AS q WHERE q.name = p_queue), 262144);
BEGIN
    IF p_bytes > bytes_max THEN
        RAISE EXCEPTION 'rouse.enqueue: the payload is % bytes long; queue % allows %', p_bytes, p_queue, bytes_max
            USING ERRCODE = 'program_limit_exceeded',
                  HINT = 'Store large data elsewhere and enqueue a reference to it, or raise the limit of the queue with rouse.set_payload_limit.';
    END IF;
END
$$;

-- The part of rouse.job.bytes apart from the payload, whose size the writer of a job already knows.
CREATE OR REPLACE FUNCTION rouse._other_bytes(p_tenant text, p_source text, p_grants jsonb, p_trace text) RETURNS integer
LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(octet_length(p_tenant), 0) + coalesce(octet_length(p_source), 0) + coalesce(octet_length(p_grants::text), 0)
         + coalesce(octet_length(p_trace), 0)
$$;

-- True for a valid traceparent, as in https://www.w3.org/TR/trace-context/#traceparent-header: version, trace id, span
-- id and flags in lower-case hexadecimal.
CREATE OR REPLACE FUNCTION rouse._is_traceparent(p_text text) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT p_text ~ '^(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}$'
$$;

-- The trace context of a job: the argument `trace`, or else the setting rouse.traceparent of the caller's transaction.
-- An invalid argument is an error. An invalid setting is ignored, as the W3C specification requires: instrumentation
-- sets it, and must not make the code that it observes fail.
CREATE OR REPLACE FUNCTION rouse._trace(p_trace text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    setting text := current_setting('rouse.traceparent', true);
BEGIN
    IF p_trace IS NULL THEN
        RETURN CASE WHEN rouse._is_traceparent(setting) THEN setting END;
    END IF;
    IF NOT rouse._is_traceparent(p_trace) THEN
        RAISE EXCEPTION 'rouse.enqueue: trace must be a W3C traceparent, not %', quote_literal(left(p_trace, 140))
            USING ERRCODE = 'invalid_parameter_value', HINT = 'For instance 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01.';
    END IF;
    RETURN p_trace;
END
$$;

-- True for valid patterns of hosts: *, a name, *. before a name, an address; an IPv6 address may be in brackets.
CREATE OR REPLACE FUNCTION rouse._is_host_pattern(p_text text) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    name text := regexp_replace(p_text, '^[*][.]', '');
BEGIN
    IF p_text = '*' OR p_text ~ '^((25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])([.](?!$)|$)){4}$' THEN
        RETURN true;
    END IF;
    IF p_text ~ ':' THEN
        BEGIN
            RETURN p_text ~ '^([[][0-9A-Fa-f:]+([0-9]+([.][0-9]+){3})?[]]|[0-9A-Fa-f:]+([0-9]+([.][0-9]+){3})?)$'
               AND family(btrim(p_text, '[]')::inet) = 6;
        EXCEPTION
            WHEN invalid_text_representation THEN
                RETURN false;
        END;
    END IF;
    -- The last label of a name is not a number; that would be an IP address in another notation.
    RETURN length(rtrim(name, '.')) <= 253
       AND name ~ '^([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?([.]|$))+$'
       AND name !~* '(^|[.])([0-9]+|0x[0-9a-f]*)[.]?$';
END
$$;

-- Rejects grants that no host would enforce, so that the error occurs where they are written. Whether names and hosts
-- exist is not checked: a job never gets what the handler does not have.
CREATE OR REPLACE FUNCTION rouse._check_grants(p_grants jsonb) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    entry    record;
    expected text;
BEGIN
    IF jsonb_typeof(p_grants) = 'array' AND jsonb_array_length(p_grants) BETWEEN 1 AND 32 AND octet_length(p_grants::text) <= 8192
       AND NOT jsonb_path_exists(p_grants, 'strict $[*] ? (@.type() == "array")') THEN
        PERFORM rouse._check_grants(g) FROM jsonb_array_elements(p_grants) AS g;
        RETURN;
    END IF;
    IF jsonb_typeof(p_grants) <> 'object' THEN
        RAISE EXCEPTION 'rouse.enqueue: grants must be an object, or an array of up to 32 objects which all apply, not %', left(p_grants::text, 140)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'For instance {"http": ["api.example.com"], "memory_mb": 32}. Leave it out for all grants of the handler.';
    END IF;
    IF octet_length(p_grants::text) > 8192 THEN
        RAISE EXCEPTION 'rouse.enqueue: grants are % bytes long; at most 8192 are allowed', octet_length(p_grants::text)
            USING ERRCODE = 'program_limit_exceeded';
    END IF;
    FOR entry IN SELECT g.key, g.value FROM jsonb_each(p_grants) AS g LOOP
        IF entry.key IN ('http', 'secrets', 'dirs', 'env', 'enqueue', 'sql') THEN
            IF jsonb_typeof(entry.value) <> 'array'
               OR jsonb_path_exists(entry.value, 'strict $[*] ? (@.type() != "string")') THEN
                expected := 'an array of strings';
            ELSIF entry.key = 'http' AND EXISTS (
                SELECT FROM jsonb_array_elements_text(entry.value) AS host WHERE NOT rouse._is_host_pattern(host)) THEN
                expected := 'an array of hosts such as api.example.com or *.example.com, without a scheme or port';
            ELSIF entry.key = 'dirs' AND EXISTS (
                SELECT FROM jsonb_array_elements_text(entry.value) AS dir WHERE dir !~ '^(/|(/[^/:]+)+)(:read|:read-write)?$') THEN
                expected := 'an array of paths as the handler sees them, such as /photos or /out:read';
            END IF;
        ELSIF entry.key = 'state' THEN
            IF entry.value <> 'false' THEN
                expected := 'false, which denies the job access to state';
            END IF;
        ELSIF entry.key = 'memory_mb' THEN
            IF jsonb_typeof(entry.value) <> 'number' OR entry.value::text !~ '^[0-9]{1,4}$' OR entry.value = '0' THEN
                expected := 'a whole number of MiB, 1 to 9999';
            END IF;
        ELSIF entry.key IN ('cpu', 'timeout') THEN
            IF jsonb_typeof(entry.value) <> 'string' OR entry.value #>> '{}' !~ '^0*[1-9][0-9]{0,8}(ms|s|m|h|d)$' THEN
                expected := 'a duration above zero such as "500ms", "90s", "5m", "1h" or "1d"';
            END IF;
        ELSE
            RAISE EXCEPTION 'rouse.enqueue: % is not a key of grants', quote_literal(left(entry.key, 140))
                USING ERRCODE = 'invalid_parameter_value',
                      HINT = 'The keys are http, secrets, dirs, env, enqueue, sql, state, memory_mb, cpu and timeout.';
        END IF;
        IF expected IS NOT NULL THEN
            RAISE EXCEPTION 'rouse.enqueue: % of grants must be %, not %', entry.key, expected, left(entry.value::text, 140)
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
    END LOOP;
END
$$;

-- A lease, a run timeout or a job timeout, `p_name`, in milliseconds; rejects values that no host would honour. A lease
-- shorter than two seconds could not be renewed in time. A job timeout may be ten years long, so that it can cover any
-- practical wait.
CREATE OR REPLACE FUNCTION rouse._time_ms(p_name text, p_time interval) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    least_ms bigint := CASE p_name WHEN 'lease' THEN 2000 ELSE 1 END;
    ms       numeric := extract(epoch FROM p_time) * 1000;
    most_ms  bigint := CASE p_name WHEN 'lease' THEN 86400000 WHEN 'timeout' THEN 2592000000 ELSE 316224000000 END;
BEGIN
    IF p_time IS NULL THEN
        RETURN NULL;
    END IF;
    -- Not a comparison of intervals, which would count a month as 30 days, and a year as 360.
    IF ms NOT BETWEEN least_ms AND most_ms THEN
        RAISE EXCEPTION 'rouse.enqueue: % must be between % and %, not %', p_name,
            CASE p_name WHEN 'lease' THEN '2 seconds' ELSE '1 millisecond' END,
            CASE p_name WHEN 'lease' THEN '1 day' WHEN 'timeout' THEN '30 days' ELSE '3660 days' END, p_time
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = CASE p_name WHEN 'job_timeout' THEN 'Leave it out for no job timeout.' ELSE 'Leave it out for the handler''s own.' END;
    END IF;
    RETURN ms::bigint;
END
$$;

-- Enqueues one job and returns its id. Part of the caller's transaction: a rollback leaves nothing, and no worker sees
-- the job before the commit. A null argument means its default.
--
--   queue         the queue; the lane is (handler, queue, priority, tags)
--   tenant        the tenant that it belongs to
--   source        what triggered it
--   priority      high, normal or low
--   run_at        not before this time; a time in the past means now, and does not count as time waited
--   max_attempts  the maximum number of attempts; null: the handler's own
--   unique_key    unique among the live jobs of the handler and the tenant (null tenants count as one): if such a job
--                 exists, its id is returned and nothing is inserted; rouse.enqueue_unique also returns which of the
--                 two was the case
--   tags          only workers that have all of these take the job
--   grants        an attenuation of the handler's grants: {"http": hosts, "secrets": names, "dirs": paths, "env":
--                 names, "enqueue": handlers, "sql": statements, "state": false, "memory_mb": …, "cpu": …, "timeout":
--                 …}; entries that a given list does not name are removed; a list of such objects: all of them apply
--   lease         the duration of a claim without renewal, 2 seconds to 1 day; null: the handler's own
--   timeout       the run timeout of an attempt, 1 millisecond to 30 days; null: the handler's own. If rouse.toml sets
--                 one for the handler, the shorter of the two counts
--   job_timeout   the time within which the job has to end, from run_at, or from now if that is later; 1 millisecond to
--                 3,660 days; null: no limit. A job that has not ended by then fails, whatever its state
--                 (rouse.enforce_deadlines)
--   after         the jobs that it waits for, at most 10,000: an array of ids, or an object with a name for each,
--                 {"charge": 17} or {"charge": {"job": 17, "on_failure": "cancel"}}. It waits for the end of their
--                 chains. `on_failure`: a failed chain cancels the job (cancel, the default), counts as ended (run), or
--                 the job waits until it has been retried and has succeeded (wait)
--   trace         the trace context of the caller, a W3C traceparent; null: the setting rouse.traceparent of the
--                 transaction, if it is set
CREATE OR REPLACE FUNCTION rouse.enqueue(
    handler      text,
    payload      jsonb       DEFAULT '{}',
    queue        text        DEFAULT 'default',
    tenant       text        DEFAULT NULL,
    source       text        DEFAULT NULL,
    priority     text        DEFAULT 'normal',
    run_at       timestamptz DEFAULT NULL,
    max_attempts integer     DEFAULT NULL,
    unique_key   text        DEFAULT NULL,
    tags         text[]      DEFAULT '{}',
    grants       jsonb       DEFAULT NULL,
    lease        interval    DEFAULT NULL,
    timeout      interval    DEFAULT NULL,
    job_timeout  interval    DEFAULT NULL,
    after        jsonb       DEFAULT NULL,
    trace        text        DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_variable
DECLARE
    at             timestamptz := clock_timestamp();
    payload_text   text := payload::text;
    bytes          integer := octet_length(payload_text);
    bytes_max      integer := 1024;
    sent_bytes     integer := bytes;
    valid          boolean := true;
    inline_payload jsonb := payload;
    stored_at      timestamptz;
    job_id         bigint := nextval('rouse.turn_seq');
BEGIN
    -- A condition is prepared again in each transaction that reaches it, whether or not its parts are needed. So
    -- conditions that most calls do not need are in a branch that they do not enter.
    IF unique_key IS NOT NULL THEN
        RETURN (SELECT e.id FROM rouse._enqueue(
            job_id, handler, payload, bytes, NULL, queue, tenant, source, priority, run_at, max_attempts, unique_key, tags, grants, lease, timeout,
            job_timeout, after, NULL, NULL, p_trace => trace) AS e);
    END IF;
    IF bytes > bytes_max THEN
        bytes_max := coalesce((SELECT q.payload_bytes_max FROM rouse.queue AS q WHERE q.name = queue), 262144);
        IF bytes <= bytes_max THEN
            stored_at := rouse._payload_at(bytes, at);
            IF stored_at IS NOT NULL THEN
                INSERT INTO rouse.payload (job, payload, kept_at) VALUES (job_id, payload_text, stored_at);
                inline_payload := NULL;
            END IF;
        END IF;
    END IF;
    IF coalesce(tenant, source, trace, nullif(current_setting('rouse.traceparent', true), '')) IS NOT NULL OR run_at IS NOT NULL
       OR max_attempts IS NOT NULL OR grants IS NOT NULL THEN
        IF grants IS NOT NULL THEN
            PERFORM rouse._check_grants(grants);
        END IF;
        IF coalesce(trace, nullif(current_setting('rouse.traceparent', true), '')) IS NOT NULL THEN
            trace := rouse._trace(trace);
        END IF;
        sent_bytes := bytes + rouse._other_bytes(tenant, source, grants, trace);
        valid := (run_at IS NULL OR isfinite(run_at))
            AND (max_attempts IS NULL OR max_attempts BETWEEN 1 AND 1000)
            AND (tenant IS NULL OR length(tenant) BETWEEN 1 AND 200)
            AND (source IS NULL OR length(source) BETWEEN 1 AND 200);
    END IF;
    -- Rare: the statement below leaves these arguments out, so that they cost other jobs nothing.
    IF coalesce(lease, timeout, job_timeout) IS NOT NULL OR after IS NOT NULL THEN
        valid := false;
    END IF;
    -- Entries of the catalog are valid: if the lane is found, its parts need no checks of their own. Null parts find no
    -- lane.
    IF valid AND bytes <= bytes_max AND priority IN ('high', 'normal', 'low') THEN
        -- No lane is found either if the contract refuses the payload, or if the handler is unknown: _enqueue reports
        -- that. The same applies to jobs of fair queues, whose lane _enqueue finds by their key. Served by lane_key.
        INSERT INTO rouse.job AS j (id, lane, turn, requested_at, available_at, max_attempts, bytes, tenant, source, payload, payload_at, wake, grants, trace)
        SELECT job_id, l.id, CASE WHEN run_at > at THEN NULL ELSE job_id END, at, greatest(run_at, at),
               max_attempts, sent_bytes, tenant, source, inline_payload, stored_at, true, grants, trace
        FROM rouse.lane AS l
        WHERE l.handler = handler AND l.queue = queue AND l.priority = priority::rouse.priority AND l.tags = tags AND l.key = '' AND l.closed_at IS NULL
          AND l.divided_by IS NULL AND (source IS NOT NULL OR NOT coalesce(jsonb_path_match(payload, l.refuses, '{}', true), false))
        LIMIT 1;
        IF FOUND THEN
            RETURN job_id;
        END IF;
    END IF;

    -- The lane is new, or an argument is null, rare or invalid: rouse._enqueue makes all checks, in order.
    RETURN (SELECT e.id FROM rouse._enqueue(
        job_id, handler, payload, bytes, stored_at, queue, tenant, source, priority, run_at, max_attempts, NULL, tags, grants, lease, timeout,
        job_timeout, after, NULL, NULL, p_trace => trace) AS e);
END
$$;

-- Checks all arguments of an enqueue, and enqueues the job as `p_id`, unless a live job has its unique key. For the
-- functions of producers, under their settings; p_bytes is the size of the payload's text, and p_stored_at is the key
-- of the payload if it is in rouse.payload already. `p_may_refuse`: a gate may refuse the job with an error; otherwise
-- it gives way without one. `p_worker`: the worker whose attempt enqueues the job. `p_module_schedule`: the schedule
-- that enqueues it, if a module has declared it. Waits for a transaction that is enqueuing the same key. Served by
-- job_unique_key.
CREATE OR REPLACE FUNCTION rouse._enqueue(
    p_id bigint, p_handler text, p_payload jsonb, p_bytes integer, p_stored_at timestamptz, p_queue text, p_tenant text, p_source text, p_priority text, p_run_at timestamptz,
    p_max_attempts integer, p_unique_key text, p_tags text[], p_grants jsonb, p_lease interval, p_timeout interval,
    p_job_timeout interval, p_after jsonb, p_flow bigint, p_flow_name text, p_chain bigint DEFAULT NULL, p_origin jsonb DEFAULT NULL,
    p_may_refuse boolean DEFAULT true, p_trace text DEFAULT NULL, p_worker bigint DEFAULT NULL, p_module_schedule text DEFAULT NULL,
    OUT id bigint, OUT created boolean, OUT differs text[])
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    at          timestamptz := clock_timestamp();
    lane_id     bigint := rouse._lane(p_handler, p_queue, p_tenant, p_source, p_priority, p_run_at, p_max_attempts, p_tags, p_payload);
    key         text := p_handler || '/' || p_unique_key;
    stored_at   timestamptz;
    lease       bigint;
    timeout     bigint;
    job_timeout bigint;
    parents     record;
    blockers    integer;
    passed      record;
    -- The rows of the gates that have let the job through, as they were before.
    gates       rouse.gate_key[];
BEGIN
    IF coalesce(p_lease, p_timeout, p_job_timeout) IS NOT NULL THEN
        lease := rouse._time_ms('lease', p_lease);
        timeout := rouse._time_ms('timeout', p_timeout);
        job_timeout := rouse._time_ms('job_timeout', p_job_timeout);
    END IF;
    IF p_payload IS NULL THEN
        p_payload := '{}';
        p_bytes := octet_length('{}');
    END IF;
    IF p_bytes > 1024 THEN
        PERFORM rouse._check_payload(p_bytes, coalesce(p_queue, 'default'));
        stored_at := coalesce(p_stored_at, rouse._payload_at(p_bytes, at));
    END IF;
    IF p_grants IS NOT NULL THEN
        PERFORM rouse._check_grants(p_grants);
    END IF;
    p_trace := rouse._trace(p_trace);
    -- Handler, key and tenant have to fit into an index entry of 2,704 bytes.
    IF p_unique_key = '' OR length(p_unique_key) > 512 OR octet_length(p_unique_key) > 1024 THEN
        RAISE EXCEPTION 'rouse.enqueue: unique_key must have 1 to 512 characters and at most 1024 bytes, or be left out'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- A source may be bound to another handler. The worker checks what its attempts enqueue.
    IF p_source IS NULL AND p_origin IS NULL AND p_chain IS NULL THEN
        PERFORM rouse._check_contract(p_handler, p_payload);
    END IF;
    PERFORM FROM rouse.gate AS g WHERE g.kind IN ('singleton', 'debounce') AND g.handler = p_handler;
    -- Gates do not apply to the next job of a chain.
    IF FOUND AND p_chain IS NULL THEN
        passed := rouse._pass_gates(p_id, coalesce(p_queue, 'default'), p_handler, p_tenant, p_source, p_payload, at, p_may_refuse, p_run_at);
        IF passed.live IS NOT NULL THEN
            -- Before the earlier job is moved to the lane of this one.
            IF p_worker IS NOT NULL THEN
                PERFORM rouse._check_merged(p_worker, passed.live, NULL);
            ELSIF p_module_schedule IS NOT NULL THEN
                PERFORM rouse._check_merged_run(p_module_schedule, passed.live);
            END IF;
            IF passed.replaced THEN
                PERFORM rouse._replace_queued(
                    passed.live, lane_id, p_payload, p_bytes, p_source, p_max_attempts, p_grants, lease, timeout, at, passed.run_at,
                    p_trace);
            END IF;
            _enqueue.id := passed.live;
            created := false;
            differs := '{}';
            RETURN;
        END IF;
        p_run_at := passed.run_at;
        gates := passed.passed;
    END IF;
    IF p_after IS NOT NULL THEN
        parents := rouse._find_parents(p_after, p_flow IS NOT NULL OR p_worker IS NOT NULL);
        p_after := parents.after;
        blockers := nullif(cardinality(parents.chains), 0);
    END IF;
    FOR try IN 1 .. 10 LOOP
        INSERT INTO rouse.job AS j (id, lane, turn, flow, flow_name, requested_at, available_at, max_attempts, blockers, bytes, tenant, source, unique_key,
                                    payload, payload_at, wake, grants, lease_ms, timeout_ms, after, chain, origin, trace)
        VALUES (p_id, lane_id, CASE WHEN p_run_at > at OR blockers > 0 THEN NULL ELSE p_id END, p_flow, p_flow_name, at, greatest(p_run_at, at),
                p_max_attempts, blockers, p_bytes + rouse._other_bytes(p_tenant, p_source, p_grants, p_trace), p_tenant, p_source, key,
                CASE WHEN stored_at IS NULL THEN p_payload END, stored_at, CASE WHEN blockers IS NULL THEN true END, p_grants, lease, timeout, p_after, p_chain, p_origin,
                p_trace)
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            IF job_timeout IS NOT NULL THEN
                PERFORM rouse._add_deadlines(ARRAY[p_id], p_run_at, at, job_timeout);
            END IF;
            IF p_after IS NOT NULL THEN
                PERFORM rouse._add_dependencies(p_id, parents.chains, parents.on_failures, parents.failed);
            END IF;
            IF stored_at IS NOT NULL AND p_stored_at IS NULL THEN
                INSERT INTO rouse.payload (job, payload, kept_at) VALUES (p_id, p_payload::text, stored_at);
            END IF;
            _enqueue.id := p_id;
            created := true;
            differs := '{}';
            RETURN;
        END IF;
        SELECT j.id, false, array_remove(ARRAY[
                   CASE WHEN rouse._payload(j.id, j.payload, j.payload_at) <> p_payload THEN 'payload' END,
                   CASE WHEN live_lane.queue <> new_lane.queue THEN 'queue' END,
                   CASE WHEN j.source IS DISTINCT FROM p_source THEN 'source' END,
                   CASE WHEN live_lane.priority <> new_lane.priority THEN 'priority' END,
                   CASE WHEN j.max_attempts IS DISTINCT FROM p_max_attempts THEN 'max_attempts' END,
                   CASE WHEN live_lane.tags <> new_lane.tags THEN 'tags' END,
                   CASE WHEN j.grants IS DISTINCT FROM p_grants THEN 'grants' END,
                   CASE WHEN j.lease_ms IS DISTINCT FROM lease THEN 'lease' END,
                   CASE WHEN j.timeout_ms IS DISTINCT FROM timeout THEN 'timeout' END,
                   CASE WHEN (SELECT d.timeout_ms FROM rouse.deadline AS d WHERE d.job = j.id) IS DISTINCT FROM job_timeout THEN 'job_timeout' END,
                   CASE WHEN j.after IS DISTINCT FROM p_after THEN 'after' END], NULL)
        INTO _enqueue.id, created, differs
        FROM rouse.job AS j
        CROSS JOIN LATERAL (SELECT l.queue, l.priority, l.tags FROM rouse.lane AS l WHERE l.id = j.lane LIMIT 1) AS live_lane
        CROSS JOIN (SELECT l.queue, l.priority, l.tags FROM rouse.lane AS l WHERE l.id = lane_id LIMIT 1) AS new_lane
        WHERE j.unique_key = key AND coalesce(j.tenant, '') = coalesce(p_tenant, '');
        IF FOUND THEN
            IF p_worker IS NOT NULL THEN
                PERFORM rouse._check_merged(p_worker, _enqueue.id, p_unique_key);
            END IF;
            PERFORM rouse._open_gates(p_id, gates);
            RETURN;
        END IF;
        -- The other job ended between the two statements: its key is free again.
    END LOOP;
    RAISE EXCEPTION 'rouse.enqueue: unique_key % is taken and freed faster than it can be read', quote_literal(p_unique_key)
        USING ERRCODE = 'serialization_failure', HINT = 'Try again.';
END
$$;

-- Enqueues a job with a unique key like rouse.enqueue, and returns the result. A null key is an error: a key that is
-- null by accident would allow duplicates.
--
--   id       this job, or the one to which it has given way: the live one that has its unique key, or the one that a
--            gate let through before, which may have ended if the gate is a singleton with during => 'period'
--   created  true: this call has enqueued it; false: it was there before. Nothing was added; a gate may have replaced
--            its arguments
--   differs  the arguments of this call in which the live job with the key differs: payload, queue, source, priority,
--            max_attempts, tags, grants, lease, timeout, job_timeout and after; not run_at, which each retry changes.
--            Empty if a gate has decided
CREATE OR REPLACE FUNCTION rouse.enqueue_unique(
    handler      text,
    unique_key   text,
    payload      jsonb       DEFAULT '{}',
    queue        text        DEFAULT 'default',
    tenant       text        DEFAULT NULL,
    source       text        DEFAULT NULL,
    priority     text        DEFAULT 'normal',
    run_at       timestamptz DEFAULT NULL,
    max_attempts integer     DEFAULT NULL,
    tags         text[]      DEFAULT '{}',
    grants       jsonb       DEFAULT NULL,
    lease        interval    DEFAULT NULL,
    timeout      interval    DEFAULT NULL,
    job_timeout  interval    DEFAULT NULL,
    after        jsonb       DEFAULT NULL,
    trace        text        DEFAULT NULL,
    OUT id       bigint,
    OUT created  boolean,
    OUT differs  text[]
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_variable
BEGIN
    IF unique_key IS NULL THEN
        RAISE EXCEPTION 'rouse.enqueue_unique: unique_key must not be null'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'For a job without a unique key, call rouse.enqueue or rouse.enqueue_and_report.';
    END IF;
    SELECT u.id, u.created, u.differs INTO id, created, differs
    FROM rouse._enqueue(nextval('rouse.turn_seq'), handler, payload, octet_length(payload::text), NULL, queue, tenant, source, priority,
                        run_at, max_attempts, unique_key, tags, grants, lease, timeout, job_timeout, after, NULL, NULL, p_trace => trace) AS u;
END
$$;

-- Enqueues a job like rouse.enqueue, and returns the same result as rouse.enqueue_unique. Without a unique key, only a
-- gate can make the job give way.
CREATE OR REPLACE FUNCTION rouse.enqueue_and_report(
    handler      text,
    payload      jsonb       DEFAULT '{}',
    queue        text        DEFAULT 'default',
    tenant       text        DEFAULT NULL,
    source       text        DEFAULT NULL,
    priority     text        DEFAULT 'normal',
    run_at       timestamptz DEFAULT NULL,
    max_attempts integer     DEFAULT NULL,
    unique_key   text        DEFAULT NULL,
    tags         text[]      DEFAULT '{}',
    grants       jsonb       DEFAULT NULL,
    lease        interval    DEFAULT NULL,
    timeout      interval    DEFAULT NULL,
    job_timeout  interval    DEFAULT NULL,
    after        jsonb       DEFAULT NULL,
    trace        text        DEFAULT NULL,
    OUT id       bigint,
    OUT created  boolean,
    OUT differs  text[]
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_variable
BEGIN
    SELECT u.id, u.created, u.differs INTO id, created, differs
    FROM rouse._enqueue(nextval('rouse.turn_seq'), handler, payload, octet_length(payload::text), NULL, queue, tenant, source, priority,
                        run_at, max_attempts, unique_key, tags, grants, lease, timeout, job_timeout, after, NULL, NULL, p_trace => trace) AS u;
END
$$;

-- Enqueues one job for each payload, in order, and returns their ids in the same order. A null argument means its
-- default, except handler and payloads, which have none.
CREATE OR REPLACE FUNCTION rouse.enqueue_many(
    handler      text,
    payloads     jsonb[],
    queue        text        DEFAULT 'default',
    tenant       text        DEFAULT NULL,
    source       text        DEFAULT NULL,
    priority     text        DEFAULT 'normal',
    run_at       timestamptz DEFAULT NULL,
    max_attempts integer     DEFAULT NULL,
    tags         text[]      DEFAULT '{}',
    grants       jsonb       DEFAULT NULL,
    lease        interval    DEFAULT NULL,
    timeout      interval    DEFAULT NULL,
    job_timeout  interval    DEFAULT NULL,
    trace        text        DEFAULT NULL
) RETURNS SETOF bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_variable
DECLARE
    lane_id   bigint;
    at        timestamptz := clock_timestamp();
    bytes_max integer;
    -- The lanes of the jobs may differ, or the jobs may give way to one another.
    is_spread boolean;
    others    integer;
    lease_ms  bigint;
    run_ms    bigint;
    job_ms    bigint;
    sizes     integer[];
    ids       bigint[];
    stored_at timestamptz[];
    invalid   bigint;
BEGIN
    SELECT q.payload_bytes_max, q.dispatch IN ('round-robin', 'random') OR q.dispatch = 'hash' AND array_to_string(q.dispatch_key, ' ') LIKE '%$%'
    INTO bytes_max, is_spread FROM rouse.queue AS q WHERE q.name = coalesce(queue, 'default');
    -- Each of these is served by an index, which is empty without such gates.
    PERFORM FROM rouse.gate AS g
    WHERE g.kind IN ('singleton', 'debounce') AND g.handler = enqueue_many.handler AND coalesce(g.queue, queue, 'default') = coalesce(queue, 'default');
    is_spread := is_spread OR FOUND;
    PERFORM FROM rouse.gate AS g
    WHERE g.kind IN ('max_concurrent', 'throttle', 'batch') AND coalesce(g.handler, enqueue_many.handler) = enqueue_many.handler
      AND coalesce(g.queue, queue, 'default') = coalesce(queue, 'default') AND array_to_string(g.key, ' ') LIKE '%$%';
    is_spread := is_spread OR FOUND;
    -- With direct dispatch, each enqueue chooses the lane: an extra choice here would count as a turn of a worker.
    IF is_spread IS NOT TRUE THEN
        lane_id := rouse._lane(handler, queue, tenant, source, priority, run_at, max_attempts, tags, payloads[1]);
    END IF;
    IF payloads IS NULL OR array_ndims(payloads) > 1 THEN
        RAISE EXCEPTION 'rouse.enqueue_many: payloads must be an array of JSON values, not %',
            CASE WHEN payloads IS NULL THEN 'null' ELSE 'an array of arrays' END
            USING ERRCODE = 'invalid_parameter_value', HINT = 'For instance ARRAY[''{"n": 1}'', ''{"n": 2}'']::jsonb[].';
    END IF;
    bytes_max := coalesce(bytes_max, 262144);
    sizes := ARRAY(SELECT octet_length(p.payload::text) FROM unnest(payloads) WITH ORDINALITY AS p(payload, place) ORDER BY p.place);
    SELECT s.place INTO invalid
    FROM unnest(sizes) WITH ORDINALITY AS s(bytes, place)
    WHERE s.bytes IS NULL OR s.bytes > bytes_max
    LIMIT 1;
    IF invalid IS NOT NULL THEN
        IF payloads[array_lower(payloads, 1) + invalid::integer - 1] IS NULL THEN
            RAISE EXCEPTION 'rouse.enqueue_many: payload % is null', invalid
                USING ERRCODE = 'invalid_parameter_value', HINT = 'Nothing was enqueued.';
        END IF;
        RAISE EXCEPTION 'rouse.enqueue_many: payload % is too large; queue % allows % bytes', invalid, coalesce(queue, 'default'), bytes_max
            USING ERRCODE = 'program_limit_exceeded', HINT = 'Nothing was enqueued.';
    END IF;
    IF is_spread THEN
        RETURN QUERY
        SELECT (rouse._enqueue(nextval('rouse.turn_seq'), handler, p.payload, octet_length(p.payload::text), NULL, queue, tenant, source, priority,
                               run_at, max_attempts, NULL, tags, grants, lease, timeout, job_timeout, NULL, NULL, NULL, p_trace => trace)).id
        FROM unnest(payloads) WITH ORDINALITY AS p(payload, place) ORDER BY p.place;
        RETURN;
    END IF;
    IF source IS NULL THEN
        PERFORM rouse._check_contract_of_many(handler, payloads);
    END IF;

    IF grants IS NOT NULL THEN
        PERFORM rouse._check_grants(grants);
    END IF;
    IF coalesce(lease, timeout, job_timeout) IS NOT NULL THEN
        lease_ms := rouse._time_ms('lease', lease);
        run_ms := rouse._time_ms('timeout', timeout);
        job_ms := rouse._time_ms('job_timeout', job_timeout);
    END IF;
    trace := rouse._trace(trace);
    others := rouse._other_bytes(tenant, source, grants, trace);
    ids := ARRAY(SELECT nextval('rouse.turn_seq') FROM unnest(sizes));
    IF job_ms IS NOT NULL THEN
        PERFORM rouse._add_deadlines(ids, run_at, at, job_ms);
    END IF;
    IF rouse._payload_at((SELECT max(s) FROM unnest(sizes) AS s), at) IS NOT NULL THEN
        stored_at := ARRAY(SELECT rouse._payload_at(s.bytes, at) FROM unnest(sizes) WITH ORDINALITY AS s(bytes, place) ORDER BY s.place);
        INSERT INTO rouse.payload (job, payload, kept_at)
        SELECT u.id, u.payload::text, u.stored_at FROM unnest(ids, payloads, stored_at) AS u(id, payload, stored_at) WHERE u.stored_at IS NOT NULL;
    END IF;
    RETURN QUERY
    INSERT INTO rouse.job AS j (id, lane, turn, requested_at, available_at, max_attempts, bytes, tenant, source, payload, payload_at, wake, grants,
                                lease_ms, timeout_ms, trace)
    SELECT p.id, lane_id, CASE WHEN run_at > at THEN NULL ELSE p.id END, at, greatest(run_at, at),
           max_attempts, p.bytes + others, tenant, source, CASE WHEN p.stored_at IS NULL THEN p.payload END, p.stored_at,
           CASE WHEN p.place = cardinality(payloads) THEN true END, grants, lease_ms, run_ms, trace
    FROM unnest(ids, payloads, sizes, stored_at) WITH ORDINALITY AS p(id, payload, bytes, stored_at, place)
    RETURNING j.id;
END
$$;
