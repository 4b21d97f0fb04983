-- Plans that do not depend on statistics, and never a compiler.
--
-- A session keeps the plan that it made first. One that was made while rouse.job stood empty in the
-- statistics read all of the primary key where ids are joined: `j.id = s.id` can be served by
-- a merge or by the whole index on the outer side, and for no rows both are as cheap as a lookup.
-- With 300,000 jobs that came afterwards a claim took 3.5 seconds. `j.id = ANY (ARRAY[s.id])` says
-- the same, and can only be served by a lookup for each id. With a million pending jobs the estimates
-- reach what makes Postgres compile a plan (jit) each time it runs it: 10 ms instead of 1 for a claim.

-- Room on each page for the next version of every row on it: the claim's new version then stands on
-- the same page, and its WAL holds what has changed instead of the whole row. 345 bytes for a
-- claim instead of 442; the table is larger by two fifths. Counts for pages that are filled from now on.
ALTER TABLE rouse.job SET (fillfactor = 50);

-- Claims up to `wanted` jobs from these lanes, in the order given, each lane from its cursor on.
-- Safe under concurrency: rows that another claim has locked are skipped, and a row that was
-- claimed meanwhile is checked again under its lock. Served by job_ready, then by the primary key.
-- The commit does not wait for the disk: a claim that a server crash forgets is only made again.
CREATE OR REPLACE FUNCTION rouse.claim(
    p_worker bigint, p_fence bigint, p_lanes bigint[], p_cursors bigint[], p_lease_ms bigint[], p_wanted integer)
RETURNS SETOF rouse.claimed
LANGUAGE plpgsql SECURITY DEFINER ROWS 100
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at timestamptz := clock_timestamp();
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    RETURN QUERY
    WITH picked AS MATERIALIZED (
        SELECT ready.id, wanted.lease_ms
        FROM unnest(p_lanes, p_cursors, p_lease_ms) AS wanted(lane, after, lease_ms)
        CROSS JOIN LATERAL (
            SELECT j.id FROM rouse.job AS j
            WHERE j.lane = wanted.lane AND j.turn > wanted.after AND j.state = 'queued' AND j.turn IS NOT NULL
            ORDER BY j.turn LIMIT p_wanted FOR NO KEY UPDATE SKIP LOCKED) AS ready
        LIMIT p_wanted)
    UPDATE rouse.job AS j
    SET state = 'running', attempt = j.attempt + 1, fence = p_fence, worker = p_worker,
        claimed_at = at, lease_until = at + picked.lease_ms * interval '1 millisecond'
    FROM picked WHERE j.id = ANY (ARRAY[picked.id])
    RETURNING j.id, j.lane, j.turn, j.attempt, j.lost, j.max_attempts, j.tenant, j.source, j.requested_at, j.claimed_at, j.payload;
END
$$;

-- Settles attempts, one per position of the lists, and returns the ids of those that were accepted.
-- The others had lost their lease: nothing was changed for them.
--
--   p_states      succeeded, failed, timed_out, cancelled: the job's final state;
--                 queued with an error: retry after p_delays_ms; queued without: the claim is
--                 given back, and the attempt does not count
--   p_started_us  microseconds from the claim to the real start; null: it never started
--
-- Served by the primary key of rouse.job. The insert into rouse.finished goes to today's partition.
CREATE OR REPLACE FUNCTION rouse._settle(
    p_ids bigint[], p_fences bigint[], p_states rouse.state[], p_started_us bigint[],
    p_results jsonb[], p_errors jsonb[], p_delays_ms bigint[])
RETURNS SETOF bigint
LANGUAGE plpgsql ROWS 100 AS $$
DECLARE
    at       timestamptz := clock_timestamp();
    released bigint[];
    lanes    bigint[];
BEGIN
    RETURN QUERY
    WITH gone AS (
        DELETE FROM rouse.job AS j
        USING unnest(p_ids, p_fences, p_states, p_started_us, p_results, p_errors) AS s(id, fence, state, started_us, result, error)
        WHERE j.id = ANY (ARRAY[s.id]) AND j.fence = s.fence AND s.state <> 'queued'
        RETURNING j.id, j.lane, j.worker, j.retried_from, j.requested_at, j.available_at, j.claimed_at,
                  j.claimed_at + s.started_us * interval '1 microsecond' AS started_at,
                  j.attempt, j.lost, j.max_attempts, s.state, j.tenant, j.source, j.unique_key, j.payload, s.result, s.error)
    INSERT INTO rouse.finished AS f (id, lane, worker, retried_from, requested_at, available_at, claimed_at, started_at, finished_at,
                                attempt, lost, max_attempts, state, tenant, source, unique_key, payload, result, error)
    SELECT g.id, g.lane, g.worker, g.retried_from, g.requested_at, g.available_at, g.claimed_at, g.started_at, at,
           g.attempt, g.lost, g.max_attempts, g.state, g.tenant, g.source, g.unique_key, g.payload, g.result, g.error
    FROM gone AS g
    RETURNING f.id;

    IF NOT ('queued' = ANY (p_states)) THEN
        RETURN;
    END IF;

    -- Retries: the attempt is kept, and the job waits for its time without a turn.
    RETURN QUERY
    WITH back AS (
        UPDATE rouse.job AS j
        SET state = 'queued', turn = NULL, fence = NULL, worker = NULL, claimed_at = NULL, lease_until = NULL,
            available_at = at + s.delay_ms * interval '1 millisecond'
        FROM unnest(p_ids, p_fences, p_states, p_started_us, p_errors, p_delays_ms) AS s(id, fence, state, started_us, error, delay_ms),
             rouse.job AS was
        WHERE j.id = ANY (ARRAY[s.id]) AND j.fence = s.fence AND s.state = 'queued' AND s.error IS NOT NULL
          AND was.id = ANY (ARRAY[s.id])
        RETURNING j.id, j.attempt, was.worker, was.claimed_at, s.started_us, s.error)
    INSERT INTO rouse.attempt AS a (job, attempt, lost, worker, claimed_at, started_at, ended_at, error)
    SELECT b.id, b.attempt, false, b.worker, b.claimed_at, b.claimed_at + b.started_us * interval '1 microsecond', at, b.error
    FROM back AS b
    RETURNING a.job;

    -- Claims given back: as if the claim had never been made. Each is ready at once, for whoever sleeps.
    WITH back AS (
        UPDATE rouse.job AS j
        SET state = 'queued', attempt = j.attempt - 1, fence = NULL, worker = NULL, claimed_at = NULL, lease_until = NULL,
            turn = nextval('rouse.turn_seq')
        FROM unnest(p_ids, p_fences, p_states, p_errors) AS s(id, fence, state, error)
        WHERE j.id = ANY (ARRAY[s.id]) AND j.fence = s.fence AND s.state = 'queued' AND s.error IS NULL
        RETURNING j.id, j.lane)
    SELECT array_agg(b.id), array_agg(DISTINCT b.lane) INTO released, lanes FROM back AS b;
    PERFORM rouse._notify(l.lane, true, at) FROM unnest(lanes) AS l(lane);
    RETURN QUERY SELECT r.id FROM unnest(released) AS r(id);
END
$$;

-- rouse._settle for workers: returns the ids that were accepted, and those that are locked.
-- A row that somebody else has locked (a cancellation whose transaction is still open) fails the
-- call after 250 ms; the worker then calls again with p_skip_locked, which leaves such rows out
-- and says so. An id that is not returned at all has lost its lease.
CREATE OR REPLACE FUNCTION rouse.settle(
    p_ids bigint[], p_fences bigint[], p_states rouse.state[], p_started_us bigint[],
    p_results jsonb[], p_errors jsonb[], p_delays_ms bigint[], p_skip_locked boolean)
RETURNS TABLE (id bigint, locked boolean)
LANGUAGE plpgsql SECURITY DEFINER ROWS 100
SET search_path = pg_catalog, pg_temp SET lock_timeout = '250ms' SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    free bigint[];
BEGIN
    IF p_skip_locked THEN
        SELECT coalesce(array_agg(mine.id), '{}') INTO free
        FROM unnest(p_ids, p_fences) AS s(id, fence)
        CROSS JOIN LATERAL (
            SELECT j.id FROM rouse.job AS j
            WHERE j.id = s.id AND j.fence = s.fence FOR UPDATE SKIP LOCKED) AS mine;
        RETURN QUERY
        SELECT j.id, true FROM unnest(p_ids, p_fences) AS s(id, fence)
        JOIN rouse.job AS j ON j.id = ANY (ARRAY[s.id]) AND j.fence = s.fence
        WHERE NOT s.id = ANY (free);
        -- A null fence fits no job.
        SELECT array_agg(CASE WHEN s.id = ANY (free) THEN s.fence END ORDER BY s.ordinality) INTO p_fences
        FROM unnest(p_ids, p_fences) WITH ORDINALITY AS s(id, fence);
    END IF;
    RETURN QUERY
    SELECT done.id, false
    FROM rouse._settle(p_ids, p_fences, p_states, p_started_us, p_results, p_errors, p_delays_ms) AS done(id);
END
$$;

-- Extends leases. Answers for each job: null where it was extended, 'busy' where somebody is
-- changing it at this moment (ask again), else the reason why it is this worker's no more
-- (the words of the abort reasons). Locks nothing that it would have to wait for.
CREATE OR REPLACE FUNCTION rouse.renew(p_ids bigint[], p_fences bigint[], p_lease_ms bigint[])
RETURNS TABLE (id bigint, refusal text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at      timestamptz := clock_timestamp();
    renewed bigint[];
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    WITH mine AS MATERIALIZED (
        SELECT j.id, asked.lease_ms
        FROM unnest(p_ids, p_fences, p_lease_ms) AS asked(id, fence, lease_ms)
        CROSS JOIN LATERAL (
            SELECT j.id FROM rouse.job AS j
            WHERE j.id = asked.id AND j.fence = asked.fence
            FOR NO KEY UPDATE SKIP LOCKED) AS j),
    extended AS (
        UPDATE rouse.job AS j SET lease_until = at + mine.lease_ms * interval '1 millisecond'
        FROM mine WHERE j.id = ANY (ARRAY[mine.id]) RETURNING j.id)
    SELECT coalesce(array_agg(extended.id), '{}') INTO renewed FROM extended;

    RETURN QUERY
    SELECT asked.id, CASE
        WHEN asked.id = ANY (renewed) THEN NULL
        WHEN j.fence = asked.fence THEN 'busy'
        WHEN j.id IS NOT NULL THEN 'taken_by_another_worker'
        WHEN f.state = 'cancelled' THEN 'cancelled'
        WHEN f.state IS NOT NULL THEN 'already_completed'
        ELSE 'not_found' END
    FROM unnest(p_ids, p_fences) AS asked(id, fence)
    LEFT JOIN rouse.job AS j ON j.id = ANY (ARRAY[asked.id])
    LEFT JOIN LATERAL (
        SELECT f.state FROM rouse.finished AS f WHERE j.id IS NULL AND f.id = ANY (ARRAY[asked.id])) AS f ON true;
END
$$;
