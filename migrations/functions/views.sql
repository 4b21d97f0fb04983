-- Views and functions for operators and scripts.

-- Resource usage for display; null if it is unknown.
CREATE OR REPLACE FUNCTION rouse._usage(p_cpu_us bigint, p_memory_bytes bigint, p_host_calls integer, p_bytes_in bigint, p_bytes_out bigint, p_digest bytea)
RETURNS jsonb
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN p_cpu_us IS NOT NULL THEN jsonb_strip_nulls(jsonb_build_object(
        'cpu_ms', round(p_cpu_us / 1000.0, 3), 'memory_bytes', p_memory_bytes, 'host_calls', p_host_calls,
        'bytes_in', p_bytes_in, 'bytes_out', p_bytes_out, 'sha256', encode(p_digest, 'hex'))) END
$$;

-- Every job that is kept, live or finished. `error` is that of the last failed attempt; `progress` is the latest report
-- of the running attempt; `usage` is that of the last attempt, or of the running one so far; `grants` are the job's
-- attenuated grants; `lease_ms` and `timeout_ms` are the job's own, null: the handler's. `deadline_at` is the time at
-- which the job timeout of a live job expires. `orphaned_at` is the time at which the lease of a running job ended: its
-- worker is dead, and no other has adopted it yet. `after` are the chains that it waits or waited for, by name;
-- `waits_for` are those that have not ended, at most 100. `wait` is what a suspended job waits for. `parent` is the job
-- whose attempt has enqueued it. `trace` is the trace context of its producer. `ran` is the handler that ran, if its
-- worker has bound the job's source to another handler.
CREATE OR REPLACE VIEW rouse.jobs AS
SELECT j.id, l.handler, l.queue, l.priority, l.tags, j.state, j.tenant, j.source, substr(j.unique_key, strpos(j.unique_key, '/') + 1) AS unique_key,
       j.attempt, j.uncounted, j.max_attempts, j.retried_from, j.worker,
       j.requested_at, j.available_at, j.claimed_at, NULL::timestamptz AS started_at, NULL::timestamptz AS finished_at,
       rouse._payload(j.id, j.payload, j.payload_at) AS payload, NULL::jsonb AS result,
       (SELECT a.error FROM rouse.attempt AS a WHERE a.job = j.id AND a.error IS NOT NULL ORDER BY a.attempt DESC LIMIT 1) AS error,
       (SELECT jsonb_build_object('percent', p.percent, 'step', p.step, 'at', p.at)
        FROM rouse.progress AS p WHERE p.job = j.id AND p.fence = j.fence) AS progress,
       (SELECT rouse._usage(r.cpu_us, r.memory_bytes, r.host_calls, r.bytes_in, r.bytes_out, NULL)
        FROM rouse.running AS r WHERE r.job = j.id AND r.fence = j.fence) AS usage,
       j.grants, CASE WHEN j.lease_until < clock_timestamp() THEN j.lease_until END AS orphaned_at,
       NULL::text AS ran, j.lease_ms, j.timeout_ms,
       (SELECT d.deadline_at FROM rouse.deadline AS d WHERE d.job = j.id) AS deadline_at, coalesce(j.chain, j.id) AS chain, j.after,
       CASE WHEN j.blockers IS NOT NULL THEN
           -- No ORDER BY below the LIMIT: Postgres would use dependency_chain for that order, and read all of it.
           ARRAY(SELECT d.chain FROM (SELECT d.chain FROM rouse.dependency AS d WHERE d.job = j.id LIMIT 100) AS d ORDER BY 1) END AS waits_for,
       CASE WHEN j.turn IS NULL AND j.fence IS NULL THEN j.wait END AS wait, (j.origin ->> 'parent')::bigint AS parent, j.trace
FROM rouse.job AS j
CROSS JOIN LATERAL (SELECT * FROM rouse.lane AS l WHERE l.id = j.lane LIMIT 1) AS l
UNION ALL
SELECT f.id, l.handler, l.queue, l.priority, l.tags, f.state, f.tenant, f.source, substr(f.unique_key, strpos(f.unique_key, '/') + 1),
       f.attempt, f.uncounted, f.max_attempts, f.retried_from, f.worker,
       f.requested_at, f.available_at, f.claimed_at, f.started_at, f.finished_at,
       rouse._payload(f.id, f.payload, f.payload_at), f.result, f.error, NULL,
       rouse._usage(f.cpu_us, f.memory_peak_bytes, f.host_calls, f.bytes_in, f.bytes_out, f.digest), f.grants, NULL, f.handler, f.lease_ms, f.timeout_ms, NULL,
       coalesce(f.chain, f.id), f.after, NULL, NULL, (f.origin ->> 'parent')::bigint, f.trace
FROM rouse.finished AS f
CROSS JOIN LATERAL (SELECT * FROM rouse.lane AS l WHERE l.id = f.lane LIMIT 1) AS l;

-- The maximum number of jobs that rouse.depth, rouse.fair_keys, rouse.gate_keys and rouse.remaining count in each of
-- this many lanes with more than 100 jobs: a million in all of them, but 100 to 10,000 in each. The first three pass
-- the number of such lanes in the queue of a lane, times the number of queues that have any.
CREATE OR REPLACE FUNCTION rouse._counted_per_lane(p_lanes bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT least(10000, greatest(100, 1000000 / greatest(p_lanes, 1)))
$$;

-- The number of jobs of each lane: ready; scheduled (including jobs that wait for others, and due ones that have no
-- turn yet); running, and of these `orphans`, whose lease has ended. Ready and scheduled jobs are counted up to 10,000
-- for each lane, and up to about a million in total, running ones up to 100,000 in total; if there are more, `at_least`
-- is true. Served by job_ready, job_waiting and job_lease.
--
-- Each lane is counted up to 100 first. The number of lanes with more decides how far these are counted, so that 10,000
-- of them do not take minutes. Each queue with such lanes gets the same share of the million: thousands of lanes of one
-- queue do not hide the backlog of another (RouseBacklog in examples/monitoring).
CREATE OR REPLACE FUNCTION rouse.depth()
RETURNS TABLE (queue text, handler text, priority rouse.priority, tags text[],
               ready bigint, scheduled bigint, running bigint, at_least boolean, oldest_ready_at timestamptz, orphans bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_mergejoin = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH running AS MATERIALIZED (
        SELECT r.lane, count(*) AS jobs, count(*) FILTER (WHERE r.lease_until < clock_timestamp()) AS orphans,
               sum(count(*)) OVER () > 100000 AS at_least
        FROM (SELECT j.lane, j.lease_until FROM rouse.job AS j
              WHERE j.state = 'running' AND j.lease_until > '-infinity' LIMIT 100001) AS r
        GROUP BY r.lane),
    lanes AS MATERIALIZED (
        SELECT l.id, l.queue, l.handler, l.priority, l.tags, ready.jobs AS ready, waiting.jobs AS waiting
        FROM (SELECT DISTINCT ON (l.id) l.id, l.queue, l.handler, l.priority, l.tags FROM rouse.lane AS l ORDER BY l.id) AS l
        CROSS JOIN LATERAL (
            SELECT count(*) AS jobs FROM (
                SELECT FROM rouse.job AS j WHERE j.lane = l.id AND j.state = 'queued' AND j.turn IS NOT NULL
                ORDER BY j.turn LIMIT 101) AS j) AS ready
        CROSS JOIN LATERAL (
            SELECT count(*) AS jobs FROM (
                SELECT FROM rouse.job AS j WHERE j.lane = l.id AND j.state = 'queued' AND j.turn IS NULL LIMIT 101) AS j) AS waiting),
    -- `jobs`: the number up to which the jobs of the lane are counted.
    counted AS MATERIALIZED (
        SELECT l.*, rouse._counted_per_lane(
                   (SELECT count(DISTINCT d.queue) FROM lanes AS d WHERE d.ready > 100 OR d.waiting > 100)
                   * sum((l.ready > 100)::integer + (l.waiting > 100)::integer) OVER (PARTITION BY l.queue)) AS jobs
        FROM lanes AS l)
    SELECT d.queue, d.handler, d.priority, d.tags, least(d.ready, d.jobs), least(d.waiting, d.jobs), coalesce(d.running, 0),
           d.ready > d.jobs OR d.waiting > d.jobs OR coalesce((SELECT r.at_least FROM running AS r LIMIT 1), false), d.oldest,
           coalesce(d.orphans, 0)
    FROM (
        SELECT l.id, l.queue, l.handler, l.priority, l.tags, l.jobs, running.jobs AS running, running.orphans, oldest.available_at AS oldest,
               CASE WHEN l.ready <= 100 THEN l.ready ELSE (
                   SELECT count(*) FROM (
                       SELECT FROM rouse.job AS j WHERE j.lane = l.id AND j.state = 'queued' AND j.turn IS NOT NULL
                       ORDER BY j.turn LIMIT l.jobs + 1) AS j) END AS ready,
               CASE WHEN l.waiting <= 100 THEN l.waiting ELSE (
                   SELECT count(*) FROM (
                       SELECT FROM rouse.job AS j WHERE j.lane = l.id AND j.state = 'queued' AND j.turn IS NULL
                       LIMIT l.jobs + 1) AS j) END AS waiting
        FROM counted AS l
        LEFT JOIN LATERAL (
            SELECT j.available_at FROM rouse.job AS j WHERE j.lane = l.id AND j.state = 'queued' AND j.turn IS NOT NULL
            ORDER BY j.turn LIMIT 1) AS oldest ON true
        -- FULL: a plan that was made for few lanes could compare each lane with each row of `running` for a left join.
        -- OFFSET 0 keeps the planner from applying the outer condition to the join, which would make it a left join
        -- again.
        FULL JOIN running ON running.lane = l.id
        OFFSET 0) AS d
    WHERE d.id IS NOT NULL;
END
$$;

-- The keys of fair queues that have jobs, ready or running: with their weight, ready jobs (counted as in rouse.depth;
-- if there are more, `at_least` is true), running jobs, and the time since which the oldest ready one has been ready.
-- Jobs without a key have the empty key. Served by job_ready and job_lease, after a read of the catalog.
CREATE OR REPLACE FUNCTION rouse.fair_keys(p_queue text DEFAULT NULL)
RETURNS TABLE (queue text, key text, weight double precision, ready bigint, at_least boolean, in_flight bigint, oldest_ready_at timestamptz)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_mergejoin = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH running AS MATERIALIZED (
        SELECT j.lane, count(*) AS jobs FROM rouse.job AS j WHERE j.state = 'running' AND j.lease_until > '-infinity' GROUP BY j.lane),
    -- As in rouse.depth.
    shallow AS MATERIALIZED (
        SELECT l.id, l.queue, l.handler, l.key, l.fair_key, ready.jobs AS ready
        FROM (SELECT DISTINCT ON (a.id) a.id, a.queue, a.handler, a.key, f.fair_key
              FROM rouse.queue AS f JOIN rouse.lane AS a ON a.queue = f.name
              WHERE f.policy = 'drr' AND (p_queue IS NULL OR f.name = p_queue) ORDER BY a.id) AS l
        CROSS JOIN LATERAL (
            SELECT count(*) AS jobs FROM (
                SELECT FROM rouse.job AS j WHERE j.lane = l.id AND j.state = 'queued' AND j.turn IS NOT NULL
                ORDER BY j.turn LIMIT 101) AS j) AS ready),
    counted AS MATERIALIZED (
        SELECT l.*, rouse._counted_per_lane(
                   (SELECT count(DISTINCT d.queue) FROM shallow AS d WHERE d.ready > 100)
                   * count(*) FILTER (WHERE l.ready > 100) OVER (PARTITION BY l.queue)) AS jobs
        FROM shallow AS l),
    -- Up to a MiB for each queue: a lookup for each key would decompress all of it each time.
    weights AS MATERIALIZED (
        SELECT f.name AS queue, w.key, w.value::double precision AS weight
        FROM rouse.queue AS f CROSS JOIN LATERAL jsonb_each_text(f.weights) AS w
        WHERE f.policy = 'drr' AND (p_queue IS NULL OR f.name = p_queue)),
    lanes AS MATERIALIZED (
        SELECT l.id, l.queue, l.handler, l.key, l.fair_key, l.jobs,
               CASE WHEN l.ready <= 100 THEN l.ready ELSE (
                   SELECT count(*) FROM (
                       SELECT FROM rouse.job AS j WHERE j.lane = l.id AND j.state = 'queued' AND j.turn IS NOT NULL
                       ORDER BY j.turn LIMIT l.jobs + 1) AS j) END AS ready
        FROM counted AS l)
    SELECT d.queue, d.key, coalesce(d.weight, q.default_weight), d.ready, d.at_least, d.in_flight, d.oldest
    FROM (
        SELECT s.*, w.weight
        FROM (
            SELECT l.queue, rouse._fair_name(l.fair_key, l.handler, l.key) AS key, sum(least(l.ready, l.jobs))::bigint AS ready,
                   bool_or(l.ready > l.jobs) AS at_least, sum(coalesce(r.jobs, 0))::bigint AS in_flight, min(oldest.available_at) AS oldest
            FROM lanes AS l
            LEFT JOIN LATERAL (
                SELECT j.available_at FROM rouse.job AS j WHERE j.lane = l.id AND j.state = 'queued' AND j.turn IS NOT NULL
                ORDER BY j.turn LIMIT 1) AS oldest ON true
            -- FULL as in rouse.depth. The rows of other queues have no lane here.
            FULL JOIN running AS r ON r.lane = l.id
            GROUP BY 1, 2
            HAVING count(l.id) > 0 AND (sum(l.ready) > 0 OR sum(r.jobs) > 0)) AS s
        -- FULL as in rouse.depth. The other weights are those of keys without jobs.
        FULL JOIN weights AS w ON w.queue = s.queue AND w.key = s.key
        OFFSET 0) AS d
    JOIN rouse.queue AS q ON q.name = d.queue
    ORDER BY d.queue, d.key;
END
$$;

-- The gates in force; see rouse.set_gate. `declared_by` is the handler whose module declares the gate; null: an
-- operator has set it.
CREATE OR REPLACE VIEW rouse.gates AS
SELECT g.name, g.kind, g.queue, g.handler, g.key, g.max, g.period_ms * interval '1 millisecond' AS period, g.burst, g.during, g.on_conflict, g.edge,
       g.max_wait_ms * interval '1 millisecond' AS max_wait, g.declared_by
FROM rouse.gate AS g;

-- The keys of a gate, or of all gates (null), that have an effect now, or have ready jobs. The limits on jobs in flight
-- of fair queues are left out (rouse.fair_keys).
--
--   key       the values by which the gate divides its jobs, in its order; a job without a value has the empty one
--   running   max_concurrent: running jobs
--   left      max_concurrent, throttle: the number of jobs that may start now
--   waiting   max_concurrent, throttle, batch: ready jobs, counted as in rouse.depth; if there are more, `at_least` is
--             true. Jobs that were enqueued before their lanes were divided by the key have the empty one
--   opens_at  throttle: the time at which the next job may start. singleton with during => 'period', debounce with the
--             leading edge: the time at which the next job is let through. debounce with the trailing edge: the time at
--             which its job is due. Null if it is open, or opens when a job starts or ends
--   job       singleton, debounce: the job that was let through, which may have ended
--
-- Served by job_ready, job_lease and gate_key_pkey, after a read of the catalog.
CREATE OR REPLACE FUNCTION rouse.gate_keys(p_gate text DEFAULT NULL)
RETURNS TABLE (gate text, key text[], running bigint, "left" bigint, waiting bigint, at_least boolean, opens_at timestamptz, job bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_mergejoin = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    now timestamptz := clock_timestamp();
BEGIN
    RETURN QUERY
    WITH gates AS MATERIALIZED (
        SELECT g.*, g.kind IN ('max_concurrent', 'throttle', 'batch') AS in_claims FROM rouse.gate AS g WHERE p_gate IS NULL OR g.name = p_gate),
    -- As in rouse.depth.
    shallow AS MATERIALIZED (
        SELECT l.id, l.queue, l.handler, l.key, r.jobs
        FROM (SELECT DISTINCT ON (a.id) a.id, a.queue, a.handler, a.key FROM rouse.lane AS a
              WHERE EXISTS (SELECT FROM gates AS g
                            WHERE g.in_claims AND coalesce(g.queue, a.queue) = a.queue AND coalesce(g.handler, a.handler) = a.handler)
              ORDER BY a.id) AS l
        CROSS JOIN LATERAL (
            SELECT count(*) AS jobs FROM (
                SELECT FROM rouse.job AS j WHERE j.lane = l.id AND j.state = 'queued' AND j.turn IS NOT NULL
                ORDER BY j.turn LIMIT 101) AS j) AS r
        WHERE r.jobs > 0),
    counted AS MATERIALIZED (
        SELECT l.*, rouse._counted_per_lane(
                   (SELECT count(DISTINCT d.queue) FROM shallow AS d WHERE d.jobs > 100)
                   * count(*) FILTER (WHERE l.jobs > 100) OVER (PARTITION BY l.queue)) AS most
        FROM shallow AS l),
    ready AS MATERIALIZED (
        SELECT l.queue, l.handler, l.key, l.most,
               CASE WHEN l.jobs <= 100 THEN l.jobs ELSE (
                   SELECT count(*) FROM (
                       SELECT FROM rouse.job AS j WHERE j.lane = l.id AND j.state = 'queued' AND j.turn IS NOT NULL
                       ORDER BY j.turn LIMIT l.most + 1) AS j) END AS jobs
        FROM counted AS l),
    waiting AS MATERIALIZED (
        SELECT g.name AS gate, rouse._gate_key(g.key, r.queue, r.handler, r.key) AS key, sum(least(r.jobs, r.most))::bigint AS jobs,
               bool_or(r.jobs > r.most) AS at_least
        FROM gates AS g JOIN ready AS r ON coalesce(g.queue, r.queue) = r.queue AND coalesce(g.handler, r.handler) = r.handler
        WHERE g.in_claims GROUP BY 1, 2),
    running AS MATERIALIZED (
        SELECT f.gate, f.key, f.jobs
        FROM (SELECT array_agg(g.name) AS names FROM gates AS g WHERE g.kind = 'max_concurrent' HAVING count(*) > 0) AS n
        CROSS JOIN LATERAL rouse._in_flight(n.names, rouse._lease_floor(n.names, now)) AS f),
    keys AS (
        SELECT w.gate, w.key FROM waiting AS w
        UNION
        SELECT r.gate, r.key FROM running AS r
        UNION
        SELECT k.gate, k.key FROM gates AS g JOIN rouse.gate_key AS k ON k.gate = g.name)
    SELECT g.name,
           CASE WHEN g.in_claims THEN rouse._gate_key_values(g.key, u.key)
                ELSE ARRAY(SELECT coalesce(v.value, '') FROM jsonb_array_elements_text(u.key::jsonb) WITH ORDINALITY AS v(value, n) ORDER BY v.n) END,
           CASE WHEN g.kind = 'max_concurrent' THEN coalesce(r.jobs, 0)::bigint END,
           CASE g.kind WHEN 'max_concurrent' THEN greatest(g.max - coalesce(r.jobs, 0), 0) WHEN 'throttle' THEN t.tokens END::bigint,
           CASE WHEN g.in_claims THEN coalesce(w.jobs, 0) END, CASE WHEN g.in_claims THEN coalesce(w.at_least, false) END,
           CASE
               WHEN g.kind = 'throttle' THEN now + t.wait_ms * interval '1 millisecond'
               WHEN g.during = 'period' THEN k.until
               WHEN g.edge = 'leading' THEN least(k.until, k.since + g.max_wait_ms * interval '1 millisecond')
               WHEN g.edge = 'trailing' AND j.available_at > now THEN j.available_at
           END,
           CASE WHEN NOT g.in_claims THEN k.job END
    FROM keys AS u
    JOIN gates AS g ON g.name = u.gate
    -- FULL: as in rouse.fair_keys. Neither has other keys.
    FULL JOIN waiting AS w ON w.gate = u.gate AND w.key = u.key
    FULL JOIN running AS r ON r.gate = u.gate AND r.key = u.key
    LEFT JOIN rouse.gate_key AS k ON k.gate = u.gate AND k.key = u.key
    LEFT JOIN LATERAL rouse._tokens(g.max, g.period_ms, g.burst, k.starts, k.until, now) AS t ON g.kind = 'throttle'
    -- Only a lookup can serve this condition (claim.sql).
    LEFT JOIN rouse.job AS j ON NOT g.in_claims AND j.id = ANY (ARRAY[k.job])
    -- For singleton and debounce, the same as in rouse._pass_gates.
    WHERE CASE
        WHEN g.kind = 'max_concurrent' THEN r.jobs > 0 OR w.jobs > 0
        WHEN g.kind = 'batch' THEN w.jobs > 0
        WHEN g.kind = 'throttle' THEN w.jobs > 0 OR t.tokens < coalesce(g.burst, g.max)
        WHEN g.edge = 'leading' THEN now < least(k.until, k.since + g.max_wait_ms * interval '1 millisecond')
                                 AND k.until <= now + 2 * g.period_ms * interval '1 millisecond'
        WHEN g.kind = 'debounce' OR g.on_conflict = 'replace' THEN j.state = 'queued' AND j.attempt = 0 AND j.blockers IS NULL
        WHEN g.during = 'queued' THEN j.state = 'queued'
        WHEN g.during = 'running' THEN j.id IS NOT NULL
        ELSE now < k.until AND k.since <= now + g.period_ms * interval '1 millisecond' END
    ORDER BY g.name, u.key;
END
$$;

-- Every queue that has settings or has ever been used. `last_used_at` is the day on which it last had a job; null:
-- never.
CREATE OR REPLACE VIEW rouse.queue_settings AS
SELECT coalesce(q.name, l.queue) AS name, coalesce(q.payload_bytes_max, 262144) AS payload_bytes_max, q.created_at, q.paused_at,
       greatest(q.used_at, l.used_at) AS last_used_at, q.keep_days, q.keep_failed_days,
       CASE WHEN q.policy = 'drr' THEN jsonb_build_object(
           'policy', q.policy, 'key', q.fair_key, 'quantum', q.quantum, 'weights', q.weights, 'default_weight', q.default_weight,
           'starvation_ms', q.starvation_s * 1000::bigint, 'max_in_flight', q.max_in_flight, 'charge', q.charge)
       ELSE '{"policy": "fifo"}' END AS fair_share,
       coalesce(q.dispatch, 'shared') AS dispatch, CASE WHEN q.dispatch = 'hash' THEN q.dispatch_key END AS dispatch_key,
       coalesce(q.shards, 0) AS shards
FROM rouse.queue AS q
FULL JOIN (SELECT l.queue, max(l.used_at) AS used_at FROM rouse.lane AS l GROUP BY l.queue) AS l ON l.queue = q.name;

-- The rows of rouse.queue_settings, with the number of jobs of each queue.
CREATE OR REPLACE VIEW rouse.queues AS
SELECT s.name, s.payload_bytes_max, s.created_at, s.paused_at,
       coalesce(d.ready, 0)::bigint AS ready, coalesce(d.scheduled, 0)::bigint AS scheduled, coalesce(d.running, 0)::bigint AS running,
       coalesce(d.at_least, false) AS at_least, d.oldest_ready_at, clock_timestamp() - d.oldest_ready_at AS oldest_wait,
       s.last_used_at, s.keep_days, s.keep_failed_days, s.fair_share, s.dispatch, s.dispatch_key, s.shards
FROM rouse.queue_settings AS s
LEFT JOIN (
    SELECT d.queue, sum(d.ready) AS ready, sum(d.scheduled) AS scheduled, sum(d.running) AS running,
           bool_or(d.at_least) AS at_least, min(d.oldest_ready_at) AS oldest_ready_at
    FROM rouse.depth() AS d GROUP BY d.queue) AS d ON d.queue = s.name;

-- The backlog, for each (queue, handler, tags) that has jobs: for autoscalers, and for finding jobs that no worker will
-- take. `orphans` are running jobs whose worker is dead. `workers` and `slots` count the live workers that are not
-- draining, have the handler and all of the tags, and serve the queue. `known` is true if such a worker is alive, or
-- was alive within the last 7 days and has not been forgotten; otherwise, starting another host of a known kind would
-- not help.
CREATE OR REPLACE VIEW rouse.backlog AS
-- Workers with the same settings are compared once with each row: fleets have thousands of incarnations, and few
-- settings.
WITH fleet AS MATERIALIZED (
    SELECT w.handlers, w.queues, w.tags, count(*) FILTER (WHERE w.takes) AS workers, sum(w.slots) FILTER (WHERE w.takes) AS slots,
           bool_or(w.is_known) AS is_known
    FROM (
        SELECT w.handlers, w.queues, w.tags, w.slots,
               w.stopped_at IS NULL AND w.dead_at IS NULL AND w.draining_at IS NULL AND w.seen_at > now() - interval '90 seconds' AS takes,
               w.forgotten_at IS NULL AND coalesce(w.stopped_at, w.dead_at, w.seen_at) > now() - interval '7 days' AS is_known
        FROM rouse.worker AS w) AS w
    WHERE w.takes OR w.is_known
    GROUP BY w.handlers, w.queues, w.tags)
SELECT d.queue, d.handler, d.tags, d.ready, d.scheduled, d.running, d.at_least,
       d.oldest_ready_at, clock_timestamp() - d.oldest_ready_at AS oldest_wait,
       EXISTS (SELECT FROM rouse.queue AS q WHERE q.name = d.queue AND q.paused_at IS NOT NULL) AS paused,
       w.workers, w.slots, d.orphans, w.known
FROM (
    SELECT d.queue, d.handler, d.tags, sum(d.ready)::bigint AS ready, sum(d.scheduled)::bigint AS scheduled,
           sum(d.running)::bigint AS running, sum(d.orphans)::bigint AS orphans, bool_or(d.at_least) AS at_least,
           min(d.oldest_ready_at) AS oldest_ready_at
    FROM rouse.depth() AS d
    WHERE d.ready > 0 OR d.scheduled > 0 OR d.running > 0
    GROUP BY d.queue, d.handler, d.tags) AS d
CROSS JOIN LATERAL (
    SELECT coalesce(sum(f.workers), 0)::bigint AS workers, coalesce(sum(f.slots), 0)::bigint AS slots, coalesce(bool_or(f.is_known), false) AS known
    FROM fleet AS f
    WHERE d.handler = ANY (f.handlers) AND (f.queues = '{}' OR d.queue = ANY (f.queues)) AND f.tags @> d.tags) AS w;

-- Every incarnation of every worker, including dead ones, until they are forgotten or deleted
-- (rouse._delete_old_workers). `timeouts` and `timed_out_…` are its timeout flag: the number of attempts that have
-- reached their run timeout since `timed_out_since`, the last one for `timed_out_job` (rouse.clear_timeouts). Stats are
-- shown for 120 s, and capabilities until it ends.
CREATE OR REPLACE VIEW rouse.workers AS
SELECT w.worker_id, w.incarnation,
       CASE WHEN w.stopped_at IS NOT NULL THEN 'unregistered'
            WHEN w.dead_at IS NOT NULL OR w.seen_at < now() - interval '90 seconds' THEN 'dead'
            WHEN w.draining_at IS NOT NULL THEN 'draining'
            ELSE 'active' END AS state,
       w.hostname, w.platform, w.version, w.slots, w.queues, w.tags, w.handlers, w.capabilities,
       w.registered_at, w.seen_at, w.draining_at, coalesce(w.stopped_at, w.dead_at) AS ended_at,
       CASE WHEN w.stats_at > now() - interval '120 seconds' THEN w.stats END AS stats, w.refused,
       w.login, w.limited, w.timeouts, w.timed_out_since, w.timed_out_at, w.timed_out_job, w.timed_out_handler
FROM rouse.worker AS w
WHERE w.forgotten_at IS NULL;

-- The handlers that the fleet can run: one row for each handler of each live worker. `max_attempts` is the worker's
-- setting for jobs that have none of their own.
CREATE OR REPLACE VIEW rouse.handlers AS
SELECT c.key AS handler, c.value->>'version' AS version, c.value->>'sha256' AS sha256,
       coalesce(c.value->'grants', '[]') AS grants,
       w.worker_id, w.incarnation, w.state, w.queues, w.tags, w.slots,
       CASE WHEN jsonb_typeof(c.value->'max_attempts') = 'number' THEN (c.value->>'max_attempts')::numeric END AS max_attempts,
       c.value->'payload_keys' AS payload_keys, c.value->>'parked' AS parked
FROM rouse.workers AS w
CROSS JOIN LATERAL jsonb_each(w.capabilities) AS c
WHERE w.state IN ('active', 'draining');

-- Resource usage by day (UTC), handler and tenant, as long as jobs are kept. Reads every row that is kept, even with a
-- condition on the day: Postgres does not prune partitions by a value that is computed from their key.
CREATE OR REPLACE VIEW rouse.usage AS
SELECT a.day, l.handler, a.tenant, count(*) AS attempts, sum(a.cpu_us) / 1e6 AS cpu_seconds, sum(a.wall) AS wall_seconds,
       max(a.memory_peak_bytes) AS memory_peak_bytes, sum(a.host_calls) AS host_calls, sum(a.bytes_in) AS bytes_in, sum(a.bytes_out) AS bytes_out
FROM (
    SELECT (f.finished_at AT TIME ZONE 'UTC')::date AS day, f.lane, f.tenant, f.cpu_us, extract(epoch FROM f.finished_at - f.started_at) AS wall,
           f.memory_peak_bytes, f.host_calls, f.bytes_in, f.bytes_out
    FROM rouse.finished AS f WHERE f.cpu_us IS NOT NULL
    UNION ALL
    SELECT (t.ended_at AT TIME ZONE 'UTC')::date, t.lane, t.tenant, t.cpu_us, extract(epoch FROM t.ended_at - t.started_at),
           t.memory_peak_bytes, t.host_calls, t.bytes_in, t.bytes_out
    FROM rouse.attempt AS t WHERE t.cpu_us IS NOT NULL) AS a
CROSS JOIN LATERAL (SELECT * FROM rouse.lane AS l WHERE l.id = a.lane LIMIT 1) AS l
GROUP BY a.day, l.handler, a.tenant;

-- The running attempts. Served by job_lease.
CREATE OR REPLACE VIEW rouse.top AS
SELECT j.id, l.handler, l.queue, j.tenant, w.worker_id, j.attempt, j.claimed_at, p.percent, p.step,
       r.cpu_us, r.memory_bytes, r.host_calls, r.bytes_in, r.bytes_out, r.at
FROM rouse.job AS j
CROSS JOIN LATERAL (SELECT * FROM rouse.lane AS l WHERE l.id = j.lane LIMIT 1) AS l
LEFT JOIN rouse.worker AS w ON w.incarnation = j.worker
LEFT JOIN rouse.progress AS p ON p.job = j.id AND p.fence = j.fence
LEFT JOIN rouse.running AS r ON r.job = j.id AND r.fence = j.fence
WHERE j.state = 'running';

-- One job; no row if it does not exist or is no longer kept.
CREATE OR REPLACE FUNCTION rouse.job(id bigint) RETURNS SETOF rouse.jobs
LANGUAGE sql STABLE SECURITY DEFINER ROWS 1 SET search_path = pg_catalog, pg_temp AS $$
    SELECT * FROM rouse.jobs AS j WHERE j.id = job.id
$$;

-- The state of a job, and nothing else: for logins that may only enqueue. No row if it does not exist or is no longer
-- kept.
CREATE OR REPLACE FUNCTION rouse.receipt(id bigint) RETURNS TABLE (state rouse.state, requested_at timestamptz, finished_at timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER ROWS 1 SET search_path = pg_catalog, pg_temp AS $$
    SELECT j.state, j.requested_at, NULL::timestamptz FROM rouse.job AS j WHERE j.id = receipt.id
    UNION ALL
    SELECT f.state, f.requested_at, f.finished_at FROM rouse.finished AS f WHERE f.id = receipt.id
$$;

-- The result of a job that has succeeded; null otherwise.
CREATE OR REPLACE FUNCTION rouse.result(id bigint) RETURNS jsonb
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT f.result FROM rouse.finished AS f WHERE f.id = result.id
$$;

-- The events of one job, oldest first. They are immutable once it has ended. The login of an admin action that ended a
-- job is `by` in the detail of its end; `after` is the chain whose failure cancelled it.
--
-- The order is that of the attempts, even if the clock of the server was changed: `place` is 0 for the request, twice
-- the attempt number for its start and its events, and one more for its end. Released claims, and changes while the job
-- was queued, count with the next attempt. The end of the job comes after all of these, even if a claim with a higher
-- number was released before, and a retry comes last. Rows with the same `place` are ordered by time.
CREATE OR REPLACE FUNCTION rouse.history(id bigint)
RETURNS TABLE (at timestamptz, event text, attempt integer, worker text, detail jsonb)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT e.at, e.event, e.attempt, (SELECT w.worker_id FROM rouse.worker AS w WHERE w.incarnation = e.worker), e.detail
    FROM (
        SELECT 0 AS place, j.requested_at AS at, 'requested' AS event, NULL::integer AS attempt, NULL::bigint AS worker,
               jsonb_strip_nulls(jsonb_build_object('handler', j.handler, 'queue', j.queue, 'tenant', j.tenant, 'source', j.source,
                                                    'retried_from', j.retried_from, 'grants', j.grants, 'after', j.after)) AS detail
        FROM rouse.jobs AS j WHERE j.id = history.id
        UNION ALL
        SELECT 2 * a.attempt, coalesce(a.started_at, a.claimed_at), CASE WHEN a.lost THEN 'claimed' ELSE 'started' END, a.attempt, a.worker,
               CASE WHEN a.handler IS NOT NULL THEN jsonb_build_object('handler', a.handler) END
        FROM rouse.attempt AS a WHERE a.job = history.id
        UNION ALL
        SELECT 2 * a.attempt + 1, a.ended_at, CASE WHEN a.lost THEN 'lost' WHEN a.wait IS NOT NULL THEN 'suspended' ELSE 'failed' END, a.attempt, a.worker,
               coalesce(a.error, a.wait) || jsonb_strip_nulls(jsonb_build_object('usage', rouse._usage(a.cpu_us, a.memory_peak_bytes, a.host_calls, a.bytes_in, a.bytes_out, a.digest)))
        FROM rouse.attempt AS a WHERE a.job = history.id
        UNION ALL
        SELECT 2 * j.attempt, j.claimed_at, 'claimed', j.attempt, j.worker, NULL
        -- No condition on the state: with it, a plan could read all running jobs (job_lease).
        FROM rouse.job AS j WHERE j.id = history.id AND j.claimed_at IS NOT NULL
        UNION ALL
        SELECT 2 * f.attempt, coalesce(f.started_at, f.claimed_at), CASE WHEN f.started_at IS NULL THEN 'claimed' ELSE 'started' END,
               f.attempt, f.worker, CASE WHEN f.handler IS NOT NULL THEN jsonb_build_object('handler', f.handler) END
        FROM rouse.finished AS f WHERE f.id = history.id AND f.claimed_at IS NOT NULL
        UNION ALL
        SELECT 2147483646, f.finished_at, f.state::text, nullif(f.attempt, 0), f.worker,
               nullif(coalesce(f.error, '{}')
                      || jsonb_strip_nulls(jsonb_build_object('usage', rouse._usage(f.cpu_us, f.memory_peak_bytes, f.host_calls, f.bytes_in, f.bytes_out, f.digest)))
                      || coalesce((
                   SELECT jsonb_strip_nulls(jsonb_build_object('by', rouse._by(r.who, r.reader)) || coalesce(r.detail, '{}')) FROM rouse.record AS r
                   WHERE r.job = f.id AND r.event IN ('cancelled', 'completed', 'failed', 'deleted', 'purged') LIMIT 1), '{}'), '{}')
        FROM rouse.finished AS f WHERE f.id = history.id
        UNION ALL
        SELECT 2 * s.attempt, s.at, 'step', s.attempt, s.worker, jsonb_build_object('name', s.name)
        FROM rouse.step AS s WHERE s.job = history.id AND s.result IS NOT NULL
        UNION ALL
        SELECT CASE WHEN r.event IN ('released', 'renewed') THEN 2 * r.attempt
                    WHEN r.event = 'retried' THEN 2147483647
                    ELSE 2 * coalesce(r.attempt, 0) + 2 END,
               r.at, r.event, nullif(r.attempt, 0), r.worker,
               nullif(coalesce(r.detail, '{}') || CASE WHEN r.who IS NULL THEN '{}' ELSE jsonb_build_object('by', rouse._by(r.who, r.reader)) END, '{}')
        FROM rouse.record AS r
        -- The end of the job already contains these.
        WHERE r.job = history.id AND r.event NOT IN ('cancelled', 'completed', 'failed', 'purged')
    ) AS e
    ORDER BY e.place, e.at
$$;

-- Output and log lines of a job's attempts, in order, after this line of this attempt (0, 0: from the start), at most
-- `max` lines.
CREATE OR REPLACE FUNCTION rouse.job_log(id bigint, after_attempt integer DEFAULT 0, after_line integer DEFAULT 0, max integer DEFAULT 1000)
RETURNS TABLE (attempt integer, line integer, at timestamptz, level text, text text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT l.attempt, l.line, l.at, l.level, l.text FROM rouse.log AS l
    WHERE l.job = job_log.id AND (l.attempt, l.line) > (job_log.after_attempt, job_log.after_line)
    ORDER BY l.attempt, l.line LIMIT least(job_log.max, 100000)
$$;
