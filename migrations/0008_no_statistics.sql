-- The hot statements find their jobs by id, whatever the planner believes of the table.
--
-- The plans of these functions are made once for each connection, often while the table is empty, and
-- statistics always lag behind a queue. Where the planner took the table for empty, it went through
-- all jobs and looked each up among those that were asked for (2,000 jobs/s instead of 50,000); where
-- it took the index of running jobs for empty, it went through that one for each id. So:
--   * jobs are found by id = ANY (an array), for which there is one index and no other way;
--   * what belongs to each is joined to that by a hash, or looked up in the arrays;
--   * no WHERE says again what another says already (a job with a fence is running).

-- Claims up to `wanted` jobs from these lanes, in the order given, each lane from its cursor on.
-- They are returned in any order. Safe under concurrency: rows that another claim has locked are
-- skipped, and a row that was claimed meanwhile is checked again under its lock. Served by
-- job_ready, then by the primary key.
-- The commit does not wait for the disk: a claim that a server crash forgets is only made again.
CREATE OR REPLACE FUNCTION rouse.claim(
    p_worker bigint, p_fence bigint, p_lanes bigint[], p_cursors bigint[], p_lease_ms bigint[], p_wanted integer)
RETURNS SETOF rouse.claimed
LANGUAGE plpgsql SECURITY DEFINER ROWS 100
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off AS $$
DECLARE
    at timestamptz := clock_timestamp();
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    RETURN QUERY
    UPDATE rouse.job AS j
    SET state = 'running', attempt = j.attempt + 1, fence = p_fence, worker = p_worker, claimed_at = at,
        lease_until = at + p_lease_ms[array_position(p_lanes, j.lane)] * interval '1 millisecond'
    WHERE j.id = ANY (ARRAY(
        SELECT ready.id
        FROM unnest(p_lanes, p_cursors) AS wanted(lane, after)
        CROSS JOIN LATERAL (
            SELECT r.id FROM rouse.job AS r
            WHERE r.lane = wanted.lane AND r.turn > wanted.after AND r.state = 'queued' AND r.turn IS NOT NULL
            ORDER BY r.turn LIMIT p_wanted FOR NO KEY UPDATE SKIP LOCKED) AS ready
        LIMIT p_wanted))
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
    at timestamptz := clock_timestamp();
BEGIN
    RETURN QUERY
    WITH gone AS (
        DELETE FROM rouse.job AS j
        USING unnest(p_ids, p_fences, p_states, p_started_us, p_results, p_errors) AS s(id, fence, state, started_us, result, error)
        WHERE j.id = ANY (p_ids) AND j.id = s.id AND j.fence = s.fence AND s.state <> 'queued'
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
        WHERE j.id = ANY (p_ids) AND j.id = s.id AND j.fence = s.fence AND s.state = 'queued' AND s.error IS NOT NULL
          AND was.id = ANY (p_ids) AND was.id = j.id
        RETURNING j.id, j.attempt, was.worker, was.claimed_at, s.started_us, s.error)
    INSERT INTO rouse.attempt AS a (job, attempt, lost, worker, claimed_at, started_at, ended_at, error)
    SELECT b.id, b.attempt, false, b.worker, b.claimed_at, b.claimed_at + b.started_us * interval '1 microsecond', at, b.error
    FROM back AS b
    RETURNING a.job;

    -- Claims given back: as if the claim had never been made.
    RETURN QUERY
    UPDATE rouse.job AS j
    SET state = 'queued', attempt = j.attempt - 1, fence = NULL, worker = NULL, claimed_at = NULL, lease_until = NULL,
        turn = nextval('rouse.turn_seq')
    FROM unnest(p_ids, p_fences, p_states, p_errors) AS s(id, fence, state, error)
    WHERE j.id = ANY (p_ids) AND j.id = s.id AND j.fence = s.fence AND s.state = 'queued' AND s.error IS NULL
    RETURNING j.id;
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
SET enable_seqscan = off SET enable_nestloop = off SET enable_mergejoin = off SET enable_bitmapscan = off AS $$
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
        JOIN rouse.job AS j ON j.id = ANY (p_ids) AND j.id = s.id AND j.fence = s.fence
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
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off AS $$
DECLARE
    at      timestamptz := clock_timestamp();
    renewed bigint[];
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    WITH extended AS (
        UPDATE rouse.job AS j
        SET lease_until = at + p_lease_ms[array_position(p_ids, j.id)] * interval '1 millisecond'
        WHERE j.id = ANY (ARRAY(
            SELECT mine.id
            FROM unnest(p_ids, p_fences) AS asked(id, fence)
            CROSS JOIN LATERAL (
                SELECT m.id FROM rouse.job AS m WHERE m.id = asked.id AND m.fence = asked.fence
                FOR NO KEY UPDATE SKIP LOCKED) AS mine))
        RETURNING j.id)
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
    LEFT JOIN rouse.job AS j ON j.id = asked.id
    LEFT JOIN LATERAL (
        SELECT f.state FROM rouse.finished AS f WHERE j.id IS NULL AND f.id = asked.id) AS f ON true;
END
$$;
