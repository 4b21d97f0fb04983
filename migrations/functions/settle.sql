-- Settlement ends attempts. A running job leaves its state only through rouse._settle, rouse.adopt (lost jobs) and
-- rouse._end (admin actions, deadlines). rouse._settle is fenced: the caller has to present the fence of the claim. It
-- returns which jobs were accepted.

-- Settles attempts, and returns the ids of those that were accepted. The others had lost their lease, and nothing was
-- changed for them. `p_worker`: only jobs that this worker has claimed; null: jobs of any worker. `p_jobs`: jobs that
-- the attempts enqueue (children.sql).
--
-- The time of each end is read after its row was locked, so it is later than any renewal that the lock waited for.
--
-- Jobs that wait for these are released in the same transaction (dependencies.sql); a null id is returned if some of
-- them are left to rouse.continue_releases.
--
-- Served by the primary key of rouse.job. The insert into rouse.finished goes to a partition of today, chosen by the
-- queue's retention (partitions.sql).
CREATE OR REPLACE FUNCTION rouse._settle(p_worker bigint, p_settlements rouse.settlement[], p_jobs rouse.new_job[] DEFAULT NULL) RETURNS SETOF bigint
LANGUAGE plpgsql ROWS 100 AS $$
DECLARE
    at          timestamptz := clock_timestamp();
    some_differ boolean;
    has_inboxes boolean;
    has_jobs    boolean := coalesce(p_jobs <> '{}', false);
    ended       bigint[];
    lowest      bigint;
    highest     bigint;
    -- The jobs that are not the first of their chain, with the ids of their chains.
    continuing  bigint[];
    chains      bigint[];
    failed      bigint[];
    succeeded   boolean[];
    released    bigint[];
    lanes       bigint[];
    -- The jobs whose attempts may have enqueued jobs.
    parents     rouse.parent_job[];
    suspended   rouse.parent_job[];
    continued   bigint[];
    calls       jsonb;
BEGIN
    PERFORM FROM rouse.queue AS q WHERE q.keep_days IS NOT NULL OR q.keep_failed_days IS NOT NULL;
    some_differ := FOUND;
    IF has_jobs THEN
        -- Jobs are found by their parent, whatever the fence of its settlement is.
        IF EXISTS (SELECT FROM unnest(p_settlements) AS s GROUP BY s.id HAVING count(*) > 1) THEN
            RAISE EXCEPTION 'rouse.settle: settlements with jobs must be of different jobs' USING ERRCODE = 'invalid_parameter_value';
        END IF;
        -- Calls belong to suspended attempts, all others to those that have succeeded.
        IF EXISTS (SELECT FROM unnest(p_jobs) AS made WHERE made.kind IS NULL OR made.kind NOT IN ('child', 'call', 'next')) THEN
            RAISE EXCEPTION 'rouse.settle: an attempt can enqueue a child, a call or a next job' USING ERRCODE = 'invalid_parameter_value';
        END IF;
        -- Locked before their calls are enqueued, so that these are enqueued if, and only if, the attempt is accepted.
        suspended := ARRAY(
            SELECT ROW(j.id, j.lane, j.chain, j.flow, j.flow_name, j.tenant, j.grants, j.origin)::rouse.parent_job
            FROM unnest(p_settlements) AS s JOIN rouse.job AS j ON j.id = ANY (ARRAY[s.id]) AND j.fence = s.fence
            WHERE (p_worker IS NULL OR j.worker = p_worker) AND s.state = 'queued' AND s.error IS NULL AND s.result ->> 'kind' = 'call'
            FOR UPDATE OF j);
    END IF;
    WITH gone AS (
        DELETE FROM rouse.job AS j
        -- By id: rows that were enqueued together are deleted together, regardless of lane.
        USING (SELECT * FROM unnest(p_settlements) AS o ORDER BY o.id OFFSET 0) AS s
        WHERE j.id = ANY (ARRAY[s.id]) AND j.fence = s.fence AND s.state <> 'queued' AND (p_worker IS NULL OR j.worker = p_worker)
        RETURNING j.id, j.lane, j.worker, j.retried_from, j.chain, j.flow, j.flow_name, j.requested_at, j.available_at, j.claimed_at,
                  CASE WHEN s.started_us IS NOT NULL THEN least(at, j.claimed_at + least(greatest(s.started_us, 0), 31622400000000) * interval '1 microsecond') END AS started_at,
                  j.attempt, j.uncounted, j.max_attempts, s.state::rouse.state AS state, j.tenant, j.source, j.unique_key, j.payload, j.payload_at, s.result, s.error,
                  abs(s.cpu_us) AS cpu_us, abs(s.memory_peak_bytes) AS memory_peak, abs(s.host_calls) AS host_calls,
                  abs(s.bytes_in) AS bytes_in, abs(s.bytes_out) AS bytes_out, s.digest, j.grants, left(s.handler, 128) AS handler,
                  j.lease_ms, j.timeout_ms, j.after, j.origin, j.trace),
    kept AS (
        INSERT INTO rouse.finished AS f (id, lane, worker, retried_from, chain, continued, flow, flow_name, requested_at, available_at, claimed_at, started_at, finished_at,
                                    attempt, uncounted, max_attempts, state, tenant, source, unique_key, payload, payload_at, result, error,
                                    cpu_us, memory_peak_bytes, host_calls, bytes_in, bytes_out, digest, grants, handler,
                                    lease_ms, timeout_ms, after, origin, trace, keep_days)
        SELECT g.id, g.lane, g.worker, g.retried_from, g.chain,
               -- A subquery, which is hashed: with an array, each job would be compared with all elements.
               CASE WHEN has_jobs AND g.state = 'succeeded' AND g.id IN (SELECT made.parent FROM unnest(p_jobs) AS made WHERE made.kind = 'next')
                   THEN true END,
               g.flow, g.flow_name, g.requested_at, g.available_at, g.claimed_at, g.started_at, clock_timestamp(),
               g.attempt, g.uncounted, g.max_attempts, g.state, g.tenant, g.source, g.unique_key, g.payload, g.payload_at, g.result, g.error,
               g.cpu_us, g.memory_peak, g.host_calls, g.bytes_in, g.bytes_out, g.digest, g.grants, g.handler,
               g.lease_ms, g.timeout_ms, g.after, g.origin, g.trace, CASE WHEN some_differ THEN rouse._keep_days(g.lane, g.state, at) ELSE 0 END
        FROM gone AS g
        RETURNING f.id, f.lane, f.chain, f.flow, f.flow_name, f.state, f.tenant, f.grants, f.origin)
    -- Aggregating all chains and states into arrays would cost more than the rest of the settlement.
    SELECT array_agg(k.id), min(coalesce(k.chain, k.id)), max(coalesce(k.chain, k.id)),
           array_agg(k.id) FILTER (WHERE k.chain IS NOT NULL), array_agg(k.chain) FILTER (WHERE k.chain IS NOT NULL),
           array_agg(k.id) FILTER (WHERE k.state <> 'succeeded'),
           array_agg(ROW(k.id, k.lane, k.chain, k.flow, k.flow_name, k.tenant, k.grants, k.origin)::rouse.parent_job)
               FILTER (WHERE has_jobs AND k.state = 'succeeded')
    INTO ended, lowest, highest, continuing, chains, failed, parents
    FROM kept AS k;
    -- Enqueued after the predecessor has been deleted, because a chain has one live job.
    IF has_jobs THEN
        p_jobs := rouse._jobs_of(p_jobs, parents, suspended);
        parents := parents || suspended;
        continued := ARRAY(SELECT s.parent FROM unnest(p_jobs) AS s WHERE s.kind = 'next');
        SELECT jsonb_agg(to_jsonb(c)) INTO calls FROM rouse._enqueue_children(p_worker, parents, p_jobs) AS c;
    END IF;
    -- Few jobs have others that wait for them: this is a single lookup for all jobs, unless their ids are far apart.
    -- Between their ids, there may be a hundred thousand dead entries of other jobs, kept by a transaction that is open
    -- all day.
    IF highest - lowest > 100 + 10 * cardinality(ended) THEN
        PERFORM FROM rouse.dependency AS d WHERE d.chain = ANY (ended || chains) LIMIT 1;
    ELSE
        PERFORM FROM rouse.dependency AS d WHERE d.chain >= lowest AND d.chain <= highest LIMIT 1;
    END IF;
    IF FOUND OR current_setting('transaction_isolation') <> 'read committed' THEN
        SELECT s.chains, s.succeeded INTO chains, succeeded FROM rouse._ended_chains(ended, continuing, chains, failed, continued) AS s;
        IF rouse._chains_ended(chains, succeeded) THEN
            RETURN NEXT NULL;
        END IF;
    END IF;
    RETURN QUERY SELECT e.id FROM unnest(ended) AS e(id);

    PERFORM FROM unnest(p_settlements) AS s WHERE s.state = 'queued' LIMIT 1;
    IF NOT FOUND THEN
        RETURN;
    END IF;

    PERFORM FROM rouse.lane AS l WHERE l.worker IS NOT NULL LIMIT 1;
    has_inboxes := FOUND;

    -- Retries: the attempt is recorded, and the job waits for its time without a turn. It leaves the inbox of a worker.
    RETURN QUERY
    WITH back AS (
        UPDATE rouse.job AS j
        SET state = 'queued', turn = NULL, fence = NULL, worker = NULL, claimed_at = NULL, lease_until = NULL, wait = NULL,
            lane = CASE WHEN has_inboxes THEN rouse._shared_lane(j.lane) ELSE j.lane END,
            -- At most a year and a day from now. A time in the past means now: it does not count as time waited, and
            -- workers look only for jobs that have become due since their last look.
            available_at = greatest(at, least(
                coalesce(s.retry_at, at + least(greatest(s.delay_ms, 0), 31622400000) * interval '1 millisecond'), at + interval '366 days')),
            memory_bytes = nullif(least(coalesce(s.next_memory_bytes, j.memory_bytes, 0), 1099511627776), 0)
        FROM unnest(p_settlements) AS s, rouse.job AS was
        WHERE j.id = ANY (ARRAY[s.id]) AND j.fence = s.fence AND s.state = 'queued' AND s.error IS NOT NULL
          AND (p_worker IS NULL OR j.worker = p_worker) AND was.id = ANY (ARRAY[s.id])
        RETURNING j.id, j.attempt, j.lane, j.tenant, was.worker, was.claimed_at,
                  CASE WHEN s.started_us IS NOT NULL THEN least(at, was.claimed_at + least(greatest(s.started_us, 0), 31622400000000) * interval '1 microsecond') END AS started_at,
                  s.error, abs(s.cpu_us) AS cpu_us, abs(s.memory_peak_bytes) AS memory_peak, abs(s.host_calls) AS host_calls,
                  abs(s.bytes_in) AS bytes_in, abs(s.bytes_out) AS bytes_out, s.digest, left(s.handler, 128) AS handler)
    INSERT INTO rouse.attempt AS a (job, attempt, lost, worker, claimed_at, started_at, ended_at, error, lane, tenant,
                                    cpu_us, memory_peak_bytes, host_calls, bytes_in, bytes_out, digest, handler)
    SELECT b.id, b.attempt, false, b.worker, b.claimed_at, b.started_at, clock_timestamp(), b.error, b.lane, b.tenant,
           b.cpu_us, b.memory_peak, b.host_calls, b.bytes_in, b.bytes_out, b.digest, b.handler
    FROM back AS b
    RETURNING a.job;

    PERFORM FROM unnest(p_settlements) AS s WHERE s.state = 'queued' AND s.result IS NOT NULL LIMIT 1;
    IF FOUND THEN
        RETURN QUERY SELECT * FROM rouse._suspend(p_worker, p_settlements, coalesce(calls, '[]'));
    END IF;

    -- Released claims: the job gets a new turn, and a record. The number of an attempt that has not started is reused.
    -- An attempt that has started keeps its number, and is not counted: it may have recorded steps and log lines. The
    -- jobs are ready at once, so sleepers are notified.
    WITH back AS (
        UPDATE rouse.job AS j
        SET state = 'queued', attempt = j.attempt - CASE WHEN s.started_us IS NULL THEN 1 ELSE 0 END,
            uncounted = j.uncounted + CASE WHEN s.started_us IS NULL THEN 0 ELSE 1 END,
            fence = NULL, worker = NULL, claimed_at = NULL, lease_until = NULL, turn = nextval('rouse.turn_seq'),
            lane = CASE WHEN has_inboxes THEN rouse._shared_lane(j.lane) ELSE j.lane END
        FROM unnest(p_settlements) AS s, rouse.job AS was
        WHERE j.id = ANY (ARRAY[s.id]) AND j.fence = s.fence AND s.state = 'queued' AND s.error IS NULL AND s.result IS NULL
          AND (p_worker IS NULL OR j.worker = p_worker) AND was.id = ANY (ARRAY[s.id])
        RETURNING j.id, j.lane, was.attempt, was.worker, was.claimed_at,
                  CASE WHEN s.started_us IS NOT NULL THEN least(at, was.claimed_at + least(greatest(s.started_us, 0), 31622400000000) * interval '1 microsecond') END AS started_at),
    kept AS (
        INSERT INTO rouse.record (at, job, event, attempt, worker, detail)
        SELECT clock_timestamp(), b.id, 'released', b.attempt, b.worker,
               jsonb_strip_nulls(jsonb_build_object('claimed_at', b.claimed_at, 'started_at', b.started_at))
        FROM back AS b)
    SELECT array_agg(b.id), array_agg(DISTINCT b.lane) INTO released, lanes FROM back AS b;
    -- Commits avoid duplicate notifications by taking one lock per lane, and the server has room for only a few
    -- thousand locks. So no lock is taken if there are many lanes.
    PERFORM rouse._notify(l.lane, true, CASE WHEN cardinality(lanes) <= 32 THEN at ELSE '-infinity' END)
    FROM unnest(lanes) AS l(lane);
    RETURN QUERY SELECT r.id FROM unnest(released) AS r(id);
END
$$;

-- The chains that have ended with these jobs, and whether they have succeeded. `p_chains`: the chains of the jobs
-- p_continuing, which are not the first jobs of their chains. `p_continued`: jobs whose chain continues, so that it has
-- not ended.
CREATE OR REPLACE FUNCTION rouse._ended_chains(
    p_ended bigint[], p_continuing bigint[], p_chains bigint[], p_failed bigint[], p_continued bigint[], OUT chains bigint[], OUT succeeded boolean[])
-- In PL/pgSQL, which plans it once; with hash joins, because the lists have no index.
LANGUAGE plpgsql IMMUTABLE SET enable_hashjoin = on AS $$
BEGIN
    SELECT array_agg(coalesce(c.chain, e.id)), array_agg(f.id IS NULL) INTO chains, succeeded
    FROM unnest(p_ended) AS e(id)
    LEFT JOIN unnest(p_continuing, p_chains) AS c(id, chain) ON c.id = e.id
    LEFT JOIN unnest(p_failed) AS f(id) ON f.id = e.id
    LEFT JOIN unnest(p_continued) AS n(id) ON n.id = e.id
    WHERE n.id IS NULL;
END
$$;

-- Refuses a result or an error of more than 64 MiB.
CREATE OR REPLACE FUNCTION rouse._check_settlements(p_settlements rouse.settlement[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM rouse._check_size('settle', octet_length(one.text), 67108864)
    FROM unnest(p_settlements) AS s CROSS JOIN LATERAL (VALUES (s.result::text), (s.error::text)) AS one(text);
END
$$;

-- rouse._settle for workers. Returns the ids that were accepted, and those that are locked. A row that another
-- transaction has locked (a cancellation that is not committed yet) fails the call after 250 ms. The worker then calls
-- again with p_skip_locked, which skips locked rows and returns them as locked. That call waits up to 20 ms for other
-- locks, or 100 ms if it settles a single attempt, and then fails. A job whose id is not returned has lost its lease,
-- or never belonged to this worker; the worker's row counts these. A null id asks the worker to call
-- rouse.continue_releases.
CREATE OR REPLACE FUNCTION rouse.settle(
    p_worker bigint, p_key bytea, p_settlements rouse.settlement[], p_jobs rouse.new_job[], p_skip_locked boolean)
RETURNS TABLE (id bigint, locked boolean)
LANGUAGE plpgsql SECURITY DEFINER ROWS 100
SET search_path = pg_catalog, pg_temp SET lock_timeout = '250ms' SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    free bigint[];
    done bigint[];
BEGIN
    IF rouse._authenticated_as_limited(p_worker, p_key) AND p_jobs <> '{}' THEN
        PERFORM rouse._check_children(p_worker, p_jobs);
    END IF;
    -- Individual sizes are checked only if the total exceeds the limit for one.
    IF pg_column_size(p_settlements) > 67108864 THEN
        PERFORM rouse._check_settlements(p_settlements);
    END IF;
    IF p_skip_locked THEN
        -- The worker uses bisection to find outcomes that other locks hold up, such as that of a unique key: each
        -- failure costs this much time. The outcomes that it has found wait longer, so that they get the lock after
        -- other transactions that wait for it.
        PERFORM set_config('lock_timeout', CASE WHEN cardinality(p_settlements) > 1 THEN '20ms' ELSE '100ms' END, true);
        -- The end of a job, and a wait for a signal or for calls, need a lock that conflicts with those of producers
        -- that have named the job, or have sent it a signal. All other outcomes do not.
        SELECT coalesce(array_agg(mine.id), '{}') INTO free
        FROM (
            SELECT j.id
            FROM unnest(p_settlements) AS s
            CROSS JOIN LATERAL (
                SELECT j.id FROM rouse.job AS j
                WHERE j.id = s.id AND j.fence = s.fence FOR UPDATE SKIP LOCKED) AS j
            WHERE s.state <> 'queued' OR coalesce(s.result ->> 'kind' IN ('signal', 'call'), false)
            UNION ALL
            SELECT j.id
            FROM unnest(p_settlements) AS s
            CROSS JOIN LATERAL (
                SELECT j.id FROM rouse.job AS j
                WHERE j.id = s.id AND j.fence = s.fence FOR NO KEY UPDATE SKIP LOCKED) AS j
            WHERE s.state = 'queued' AND NOT coalesce(s.result ->> 'kind' IN ('signal', 'call'), false)) AS mine;
        RETURN QUERY
        SELECT j.id, true FROM unnest(p_settlements) AS s
        JOIN rouse.job AS j ON j.id = ANY (ARRAY[s.id]) AND j.fence = s.fence
        WHERE NOT s.id = ANY (free);
        -- The other jobs are locked or lost.
        done := ARRAY(SELECT d.id FROM rouse._settle(p_worker, ARRAY(SELECT s FROM unnest(p_settlements) AS s WHERE s.id = ANY (free)), p_jobs) AS d(id));
    ELSE
        done := ARRAY(SELECT d.id FROM rouse._settle(p_worker, p_settlements, p_jobs) AS d(id));
    END IF;
    IF array_position(done, NULL) IS NOT NULL THEN
        done := array_remove(done, NULL);
        RETURN QUERY SELECT NULL::bigint, false;
    END IF;
    IF cardinality(done) < cardinality(p_settlements) THEN
        PERFORM rouse._count_refused(p_worker, ARRAY(SELECT s.id FROM unnest(p_settlements) AS s WHERE NOT s.id = ANY (done)));
    END IF;
    PERFORM FROM unnest(p_settlements) AS s WHERE s.state IN ('timed_out', 'queued') LIMIT 1;
    IF FOUND THEN
        PERFORM rouse._flag_timeouts(p_worker, p_settlements, done, p_skip_locked);
    END IF;
    RETURN QUERY SELECT d.id, false FROM unnest(done) AS d(id);
END
$$;

-- Extends leases, by at most a day. The result for each job is null if its lease was extended, 'busy' if another
-- transaction is changing the job at this moment (call again), or else the reason why the job no longer belongs to this
-- worker (an abort reason). It never waits for a lock. Each renewal leaves a record. It commits as durably as an
-- outcome, because the worker trusts the longer lease at once: after a server crash, the earlier end of the lease would
-- let another worker adopt the job.
CREATE OR REPLACE FUNCTION rouse.renew(p_worker bigint, p_key bytea, p_ids bigint[], p_fences bigint[], p_lease_ms bigint[])
RETURNS TABLE (id bigint, refusal text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at    timestamptz := clock_timestamp();
    -- In the order of p_ids. A lease that ends at exactly this time was extended by this call.
    until timestamptz[] := ARRAY(
        SELECT at + least(greatest(l.ms, 1), 86400000) * interval '1 millisecond'
        FROM unnest(p_lease_ms) WITH ORDINALITY AS l(ms, place) ORDER BY l.place);
BEGIN
    PERFORM rouse._authenticated_as_limited(p_worker, p_key);
    WITH mine AS MATERIALIZED (
        SELECT j.id, asked.until
        FROM unnest(p_ids, p_fences, until) AS asked(id, fence, until)
        CROSS JOIN LATERAL (
            SELECT j.id FROM rouse.job AS j
            WHERE j.id = asked.id AND j.fence = asked.fence AND j.worker = p_worker
            FOR NO KEY UPDATE SKIP LOCKED) AS j),
    extended AS (
        UPDATE rouse.job AS j SET lease_until = mine.until
        FROM mine WHERE j.id = ANY (ARRAY[mine.id]) RETURNING j.id, j.attempt)
    INSERT INTO rouse.record (at, job, event, attempt, worker)
    SELECT at, e.id, 'renewed', e.attempt, p_worker FROM extended AS e;

    RETURN QUERY
    SELECT asked.id, CASE
        WHEN j.fence = asked.fence AND j.worker = p_worker THEN CASE WHEN j.lease_until = asked.until THEN NULL ELSE 'busy' END
        WHEN j.id IS NOT NULL THEN 'taken_by_another_worker'
        WHEN f.state = 'cancelled' THEN 'cancelled'
        WHEN f.state IS NOT NULL THEN 'already_completed'
        ELSE 'not_found' END
    FROM unnest(p_ids, p_fences, until) AS asked(id, fence, until)
    LEFT JOIN rouse.job AS j ON j.id = ANY (ARRAY[asked.id])
    LEFT JOIN LATERAL (
        SELECT f.state FROM rouse.finished AS f WHERE j.id IS NULL AND f.id = ANY (ARRAY[asked.id])) AS f ON true;
END
$$;
