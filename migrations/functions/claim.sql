-- rouse.claim and rouse.claim_bound: claim ready jobs for a worker; rouse.claimed: reads them.
--
-- A claim commits before anything large is sent. Postgres sends rows before it commits, and waits for a client that
-- does not read (a frozen host) as long as the client is connected. During the wait, the claim would be neither
-- committed nor rolled back, and the jobs could not be adopted, cancelled or deleted. A small result fits into the
-- buffers of the connection. Therefore rouse.claim returns the jobs themselves only if they take less than 128 KiB and
-- all payloads are in their rows. Otherwise it returns their ids, and rouse.claimed reads the jobs.
--
-- The plans do not depend on statistics, and are never JIT-compiled: a session keeps the plan that it made first. A
-- plan made while rouse.job had the statistics of an empty table read the whole primary key where ids are joined: `j.id
-- = s.id` can be served by a merge join, or by a scan of the whole index on the outer side; for an empty table, both
-- are as cheap as a lookup. After 300,000 jobs had been enqueued, a claim took 3.5 seconds. `j.id = ANY (ARRAY[s.id])`
-- is equivalent, and can only be served by a lookup for each id. With a million pending jobs, the cost estimates reach
-- the threshold at which Postgres JIT-compiles a plan at each execution: a claim takes 10 ms instead of 1. This applies
-- to all functions for workers.

-- Claims up to `p_wanted` jobs from these lanes, in the given order, each lane starting after its cursor, and stops
-- after the job that makes the total size reach 8 MiB (CLAIM_BYTES_MAX of the host). A lease is at most a day, and a
-- worker of a limited login claims only what its limits permit (logins.sql). Safe under concurrency: rows that another
-- claim has locked are skipped, and each row is checked again under its lock, because it may have been claimed in the
-- meantime. Served by job_ready, then by the primary key. Nothing is claimed from paused queues; that check reads an
-- index that is empty unless a queue is paused. The checks of gates (gates.sql) and of shards (shards.sql) read such
-- indexes too. The commit does not wait for the disk, unless a gate throttles the jobs: a claim that is lost in a
-- server crash is simply made again. Jobs beyond the size limit are locked until the claim commits, and otherwise
-- unchanged. The size of a job is rouse.job.bytes plus 120 bytes for the columns that every row has.
--
-- Orphans go first. If a lease has ended since `p_checked_at`, nothing is claimed, and the result is one row without an
-- id: its `claimed_at` is the time up to which leases were checked. The caller adopts, and passes that time to its next
-- claim. The result does not identify the orphan. If `p_checked_at` is null, leases are not checked. Each check starts
-- where the previous one ended, so that each worker reads the dead entries of job_lease that an old transaction keeps
-- only once.
--
-- `p_in_batches`: all lanes have a gate of kind batch, and `p_wanted` is a number of batches.
--
-- Returns the jobs (`unread` is null), or one row whose `unread` has the ids of all of them, in the order of the ids:
-- rows that were enqueued together are updated together, regardless of lane. The caller knows the order of the lanes.
-- These are followed by a row without an id for each lane from which gates let no job start now: `closed_by` names the
-- gates, and `lease_ms` is the number of milliseconds for which they let none start (null: until a job of the key has
-- ended). The last rows name the lanes from which the worker's login may not claim: `closed_by` is `the login`, which
-- is not the name of a gate, and `lease_ms` half a minute. Peeks do not check the login, and would find these lanes
-- again.
CREATE OR REPLACE FUNCTION rouse.claim(
    p_worker bigint, p_key bytea, p_fence bigint, p_orders rouse.claim_order[], p_wanted integer, p_checked_at timestamptz DEFAULT NULL,
    p_in_batches boolean DEFAULT false)
RETURNS TABLE (id bigint, lane bigint, turn bigint, attempt integer, uncounted integer, max_attempts integer, tenant text, source text,
               requested_at timestamptz, available_at timestamptz, claimed_at timestamptz, payload text, memory_bytes bigint, grants text,
               lease_ms bigint, timeout_ms bigint, trace text, unread bigint[], closed_by text[])
LANGUAGE plpgsql SECURITY DEFINER ROWS 100
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at       timestamptz := clock_timestamp();
    lanes    bigint[];
    ids      bigint[];
    leases   bigint[];
    is_small boolean;
    has_gates boolean;
    gated     rouse.gated_lane[];
    -- The lane of each job.
    started   bigint[];
    -- The lanes from which the worker's login may not claim. Null: it has no limits.
    forbidden bigint[];
BEGIN
    IF rouse._authenticated_as_limited(p_worker, p_key) THEN
        lanes := rouse._permitted(p_worker, ARRAY(SELECT wanted.lane FROM unnest(p_orders) WITH ORDINALITY AS wanted ORDER BY wanted.ordinality));
        forbidden := ARRAY(SELECT wanted.lane FROM unnest(p_orders) WITH ORDINALITY AS wanted WHERE lanes[wanted.ordinality] IS NULL);
    END IF;
    IF p_checked_at IS NOT NULL THEN
        PERFORM FROM rouse.job AS j
        WHERE j.state = 'running' AND j.lease_until >= p_checked_at AND j.lease_until < at
        ORDER BY j.lease_until LIMIT 1;
        IF FOUND THEN
            claimed_at := at;
            RETURN NEXT;
            RETURN;
        END IF;
    END IF;
    p_wanted := least(greatest(coalesce(p_wanted, 0), 0), 20000);
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM FROM rouse.queue AS q WHERE q.paused_at IS NOT NULL;
    IF FOUND THEN
        lanes := rouse._not_paused(coalesce(
            lanes, ARRAY(SELECT wanted.lane FROM unnest(p_orders) WITH ORDINALITY AS wanted ORDER BY wanted.ordinality)));
    END IF;
    PERFORM FROM rouse.queue AS q WHERE q.policy = 'drr' AND q.max_in_flight > 0;
    has_gates := FOUND;
    PERFORM FROM rouse.gate AS g WHERE g.kind IN ('max_concurrent', 'throttle', 'batch');
    has_gates := has_gates OR FOUND;
    IF has_gates THEN
        SELECT w.orders, w.lanes, w.gated, w.at, least(w.wanted, 20000) INTO p_orders, lanes, gated, at, p_wanted
        FROM rouse._within_gates(p_worker, p_orders, lanes, NULL, NULL, p_wanted, p_in_batches) AS w;
        -- rouse._within_gates may have waited for other claims. In the meantime, leases may have ended, and queues may
        -- have been paused.
        IF p_checked_at IS NOT NULL THEN
            PERFORM FROM rouse.job AS j
            WHERE j.state = 'running' AND j.lease_until >= p_checked_at AND j.lease_until < at
            ORDER BY j.lease_until LIMIT 1;
            IF FOUND THEN
                claimed_at := at;
                RETURN NEXT;
                RETURN;
            END IF;
        END IF;
        PERFORM FROM rouse.queue AS q WHERE q.paused_at IS NOT NULL;
        IF FOUND THEN
            lanes := rouse._not_paused(coalesce(
                lanes, ARRAY(SELECT wanted.lane FROM unnest(p_orders) WITH ORDINALITY AS wanted ORDER BY wanted.ordinality)));
        END IF;
    ELSE
        -- rouse._within_gates does the same, after it has waited for other claims.
        PERFORM FROM rouse.queue AS q WHERE q.shards > 0;
        IF FOUND THEN
            lanes := rouse._in_own_shards(p_worker, coalesce(
                lanes, ARRAY(SELECT wanted.lane FROM unnest(p_orders) WITH ORDINALITY AS wanted ORDER BY wanted.ordinality)));
        END IF;
    END IF;
    -- Locks the rows.
    SELECT array_agg(found.id), array_agg(least(greatest(found.lease_ms, 1), 86400000)), sum(found.bytes) < 131072 AND NOT bool_or(found.is_stored),
           CASE WHEN gated IS NOT NULL THEN array_agg(found.lane) END
    INTO ids, leases, is_small, started
    FROM (
        SELECT ready.*, wanted.lane, wanted.lease_ms, sum(ready.bytes) OVER (ROWS UNBOUNDED PRECEDING) AS bytes_so_far
        FROM unnest(p_orders) WITH ORDINALITY AS wanted
        CROSS JOIN LATERAL (
            SELECT j.id, 120 + j.bytes AS bytes, j.available_at, j.payload_at IS NOT NULL AS is_stored
            FROM rouse.job AS j
            -- Null if the lane is not permitted, its queue is paused, or its shard is not leased.
            WHERE j.lane = CASE WHEN lanes IS NULL THEN wanted.lane ELSE lanes[wanted.ordinality] END
              AND j.turn > wanted.after AND j.state = 'queued' AND j.turn IS NOT NULL
            ORDER BY j.turn LIMIT least(p_wanted, wanted.max) FOR NO KEY UPDATE SKIP LOCKED) AS ready
        WHERE wanted.waited_ms IS NULL OR ready.available_at <= at - wanted.waited_ms * interval '1 millisecond'
        LIMIT p_wanted) AS found
    WHERE found.bytes_so_far - found.bytes < 8388608;
    IF is_small THEN
        RETURN QUERY
        UPDATE rouse.job AS j
        SET state = 'running', attempt = j.attempt + 1, fence = p_fence, worker = p_worker,
            claimed_at = at, lease_until = at + coalesce(j.lease_ms, picked.lease_ms) * interval '1 millisecond'
        FROM (SELECT p.id, p.lease_ms FROM unnest(ids, leases) AS p(id, lease_ms) ORDER BY p.id OFFSET 0) AS picked(id, lease_ms)
        WHERE j.id = ANY (ARRAY[picked.id])
        RETURNING j.id, j.lane, j.turn, j.attempt, j.uncounted, j.max_attempts, j.tenant, j.source, j.requested_at, j.available_at, j.claimed_at,
                  j.payload::text, j.memory_bytes, j.grants::text, j.lease_ms, j.timeout_ms, j.trace, NULL::bigint[], NULL::text[];
    ELSIF ids IS NOT NULL THEN
        WITH claimed AS (
            UPDATE rouse.job AS j
            SET state = 'running', attempt = j.attempt + 1, fence = p_fence, worker = p_worker,
                claimed_at = at, lease_until = at + coalesce(j.lease_ms, picked.lease_ms) * interval '1 millisecond'
            FROM (SELECT p.id, p.lease_ms FROM unnest(ids, leases) AS p(id, lease_ms) ORDER BY p.id OFFSET 0) AS picked(id, lease_ms)
            WHERE j.id = ANY (ARRAY[picked.id])
            RETURNING j.id)
        SELECT array_agg(c.id) INTO unread FROM claimed AS c;
        RETURN NEXT;
        unread := NULL;
    END IF;
    IF gated IS NOT NULL THEN
        FOR lane, lease_ms, closed_by IN SELECT c.lane, c.wait_ms, c.gates FROM rouse._charge_gates(gated, started, at) AS c LOOP
            RETURN NEXT;
        END LOOP;
    END IF;
    IF forbidden IS NOT NULL THEN
        lease_ms := 30000;
        closed_by := '{"the login"}';
        FOREACH lane IN ARRAY forbidden LOOP
            RETURN NEXT;
        END LOOP;
    END IF;
END
$$;

-- rouse.claim for jobs of these sources only, by lane and then by source, in the given order. `p_after`: for each lane,
-- and in it for each source, only jobs with later turns; null or missing: from the start. `p_handlers`, `p_rooms`: for
-- each source, the number of the handler that runs its jobs, and the maximum number of jobs of each of these handlers;
-- null or missing: any number.
--
-- Returns ids. `is_empty`: for each lane, and in it for each source, true if there was no ready job after that turn.
-- False if there was one, even if it could not be claimed: a gate is closed, its handler has no room, or another
-- transaction has locked it. Also false if the lane was not read: it is not permitted, its queue is paused, or its
-- shard is not leased. The pairs after the last one that was read are missing.
--
-- Goes from one pair of a lane and a source that has a job to the next, and takes from each as many jobs as there is
-- room for. So a handler that is full does not keep the others from getting as many jobs as are wanted. Each pair costs
-- a lookup; one that has a job costs another statement.
--
-- Served by job_source: no other index provides a range in this order without sorting. The range is written as
-- comparisons of rows, so that it starts at that turn: the entries before it may be those of all jobs that have ended
-- since an old transaction began.
CREATE OR REPLACE FUNCTION rouse.claim_bound(
    p_worker bigint, p_key bytea, p_fence bigint, p_lanes bigint[], p_sources text[], p_lease_ms bigint, p_wanted integer,
    p_after bigint[] DEFAULT NULL, p_handlers integer[] DEFAULT NULL, p_rooms integer[] DEFAULT NULL,
    OUT ids bigint[], OUT is_empty boolean[])
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off
SET enable_sort = off SET enable_incremental_sort = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at          timestamptz := clock_timestamp();
    has_gates   boolean;
    gated       rouse.gated_lane[];
    -- By lane: the number of jobs that gates permit. Null: any number.
    mosts       integer[];
    -- The pairs that have a job, with the turn of the first. A cursor reads one at a time: a FOR loop over a query would
    -- read ten, and so perhaps all pairs, before the first one is used.
    pairs       CURSOR FOR
        SELECT wanted.place, wanted.lane, wanted.max, first_job.number, first_job.source, first_job.handler, first_job.turn
        FROM unnest(p_lanes, mosts) WITH ORDINALITY AS wanted(lane, max, place)
        CROSS JOIN LATERAL (
            SELECT (wanted.place - 1) * cardinality(p_sources) + bound.place AS number, bound.source, bound.handler, j.turn
            FROM unnest(p_sources, p_handlers) WITH ORDINALITY AS bound(source, handler, place)
            CROSS JOIN LATERAL (
                SELECT j.turn FROM rouse.job AS j
                WHERE (j.lane, j.source, j.turn) > (
                          wanted.lane, bound.source,
                          coalesce(p_after[(wanted.place - 1) * cardinality(p_sources) + bound.place], '-9223372036854775808'::bigint))
                  AND (j.lane, j.source, j.turn) <= (wanted.lane, bound.source, 9223372036854775807)
                  AND j.state = 'queued' AND j.turn IS NOT NULL AND j.source IS NOT NULL
                ORDER BY j.lane, j.source, j.turn LIMIT 1) AS j
            -- So that this is not flattened: lanes go before sources.
            OFFSET 0) AS first_job;
    -- The place of the lane of a pair, and the number of jobs that gates still permit there.
    lane_place  bigint;
    lane_room   integer;
    most        integer;
    -- The jobs of a pair, and the size of all jobs so far.
    taken       bigint[];
    taken_bytes bigint;
    all_bytes   bigint := 0;
    -- The lane of each job.
    started     bigint[];
BEGIN
    IF rouse._authenticated_as_limited(p_worker, p_key) THEN
        p_lanes := rouse._permitted(p_worker, p_lanes);
    END IF;
    p_wanted := least(greatest(coalesce(p_wanted, 0), 0), 20000);
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM FROM rouse.queue AS q WHERE q.paused_at IS NOT NULL;
    IF FOUND THEN
        p_lanes := rouse._not_paused(p_lanes);
    END IF;
    PERFORM FROM rouse.queue AS q WHERE q.policy = 'drr' AND q.max_in_flight > 0;
    has_gates := FOUND;
    PERFORM FROM rouse.gate AS g WHERE g.kind IN ('max_concurrent', 'throttle', 'batch');
    has_gates := has_gates OR FOUND;
    IF has_gates THEN
        SELECT coalesce(w.lanes, p_lanes), w.gated, w.at,
               ARRAY(SELECT o.max FROM unnest(w.orders) WITH ORDINALITY AS o(lane, after, lease_ms, max, waited_ms, place) ORDER BY o.place)
        INTO p_lanes, gated, at, mosts
        FROM rouse._within_gates(
            p_worker,
            ARRAY(SELECT ROW(u.lane, 0, 0, NULL, NULL)::rouse.claim_order FROM unnest(p_lanes) WITH ORDINALITY AS u(lane, place) ORDER BY u.place),
            NULL, p_sources, p_after, p_wanted, false) AS w;
        -- rouse._within_gates may have waited for other claims. In the meantime, queues may have been paused.
        PERFORM FROM rouse.queue AS q WHERE q.paused_at IS NOT NULL;
        IF FOUND THEN
            p_lanes := rouse._not_paused(p_lanes);
        END IF;
    ELSE
        -- rouse._within_gates does the same, after it has waited for other claims.
        PERFORM FROM rouse.queue AS q WHERE q.shards > 0;
        IF FOUND THEN
            p_lanes := rouse._in_own_shards(p_worker, p_lanes);
        END IF;
    END IF;
    is_empty := ARRAY(
        SELECT l.lane IS NOT NULL
        FROM unnest(p_lanes) WITH ORDINALITY AS l(lane, place) CROSS JOIN generate_subscripts(p_sources, 1) ORDER BY l.place);
    -- Locks the rows.
    FOR pair IN pairs LOOP
        is_empty[pair.number] := false;
        IF pair.place IS DISTINCT FROM lane_place THEN
            lane_place := pair.place;
            lane_room := pair.max;
        END IF;
        most := least(p_wanted, lane_room, p_rooms[pair.handler]);
        CONTINUE WHEN most <= 0;
        SELECT array_agg(f.id), sum(f.bytes) INTO taken, taken_bytes
        FROM (
            SELECT ready.id, ready.bytes, sum(ready.bytes) OVER (ROWS UNBOUNDED PRECEDING) AS bytes_so_far
            FROM (
                SELECT j.id, 120 + j.bytes AS bytes
                FROM rouse.job AS j
                WHERE (j.lane, j.source, j.turn) >= (pair.lane, pair.source, pair.turn)
                  AND (j.lane, j.source, j.turn) <= (pair.lane, pair.source, 9223372036854775807)
                  AND j.state = 'queued' AND j.turn IS NOT NULL AND j.source IS NOT NULL
                ORDER BY j.lane, j.source, j.turn LIMIT most FOR NO KEY UPDATE SKIP LOCKED) AS ready) AS f
        WHERE all_bytes + f.bytes_so_far - f.bytes < 8388608;
        CONTINUE WHEN taken IS NULL;
        ids := ids || taken;
        all_bytes := all_bytes + taken_bytes;
        p_wanted := p_wanted - cardinality(taken);
        lane_room := lane_room - cardinality(taken);
        -- An assignment to any other index would extend the array to it.
        IF pair.handler BETWEEN 1 AND cardinality(p_rooms) THEN
            p_rooms[pair.handler] := p_rooms[pair.handler] - cardinality(taken);
        END IF;
        IF p_wanted = 0 OR all_bytes >= 8388608 THEN
            is_empty := is_empty[1:pair.number];
            EXIT;
        END IF;
    END LOOP;
    WITH claimed AS (
        UPDATE rouse.job AS j
        SET state = 'running', attempt = j.attempt + 1, fence = p_fence, worker = p_worker,
            claimed_at = at, lease_until = at + coalesce(j.lease_ms, least(greatest(p_lease_ms, 1), 86400000)) * interval '1 millisecond'
        FROM unnest(ids) AS picked(id) WHERE j.id = ANY (ARRAY[picked.id])
        RETURNING j.id, j.lane)
    SELECT array_agg(c.id), array_agg(c.lane) INTO ids, started FROM claimed AS c;
    IF gated IS NOT NULL AND ids IS NOT NULL THEN
        PERFORM rouse._charge_gates(gated, started, at);
    END IF;
END
$$;

-- Returns the jobs with these ids that the worker holds under this claim, in the order of the ids. Leaves out those
-- that it has lost in the meantime. Changes nothing, and takes only the lock that a drop of payloads waits for, so a
-- client that does not read does not block anything else. Not STABLE: after waiting for such a drop, it has to see the
-- copied payloads. A removed payload is returned as an empty text, so that only its job fails. Without `p_payloads`,
-- payloads are neither read nor returned: the caller could not read all of them. Served by the primary key and
-- payload_job.
CREATE OR REPLACE FUNCTION rouse.claimed(p_worker bigint, p_key bytea, p_fence bigint, p_ids bigint[], p_payloads boolean DEFAULT true)
RETURNS TABLE (id bigint, lane bigint, turn bigint, attempt integer, uncounted integer, max_attempts integer, tenant text, source text,
               requested_at timestamptz, available_at timestamptz, claimed_at timestamptz, payload text, memory_bytes bigint, grants text,
               lease_ms bigint, timeout_ms bigint, trace text)
LANGUAGE plpgsql SECURITY DEFINER ROWS 100
-- A result of up to 8 MiB should not spill to a file.
SET work_mem = '16MB' SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    PERFORM rouse._authenticated_as_limited(p_worker, p_key);
    RETURN QUERY
    SELECT j.id, j.lane, j.turn, j.attempt, j.uncounted, j.max_attempts, j.tenant, j.source, j.requested_at, j.available_at, j.claimed_at,
           -- As in rouse._payload: usually in the partition of its day. A large payload is only read when it is sent.
           CASE WHEN p_payloads THEN coalesce(j.payload::text, stored.payload,
                    (SELECT p.payload FROM rouse.payload AS p WHERE p.job = j.id AND p.kept_at > j.payload_at ORDER BY p.kept_at DESC LIMIT 1), '')
                ELSE '' END,
           j.memory_bytes, j.grants::text, j.lease_ms, j.timeout_ms, j.trace
    FROM unnest(p_ids) AS asked(id)
    JOIN rouse.job AS j ON j.id = ANY (ARRAY[asked.id])
    LEFT JOIN LATERAL (
        SELECT p.payload FROM rouse.payload AS p WHERE p_payloads AND p.job = j.id AND p.kept_at = j.payload_at LIMIT 1) AS stored ON true
    -- No condition on the state: a job with a fence is running anyway, and the condition would allow a plan that reads
    -- all running jobs for each id (job_lease).
    WHERE j.fence = p_fence AND j.worker = p_worker;
END
$$;
