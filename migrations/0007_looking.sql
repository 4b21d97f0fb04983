-- How a worker looks for work: peek, a single read for whoever has nothing to do; and windows for
-- promote and adopt. The rows that these two have dealt with remain in their indexes, dead, for as
-- long as somebody's transaction is open: who looks only at what is new does not wade through them.

-- Whether there is anything to do for a worker: one read, which locks nothing and waits for nobody.
--
--   lanes, cursors      ready: those of these lanes that have a ready job after their cursor, in the
--                       order given, at most `most` (served by job_ready)
--   catalog_after       catalog_changed: the catalog of lanes has not `catalog_rows` rows after that
--                       place (served by its primary key)
--   orphaned_within_ms  orphans: a lease has run out, within the last so many milliseconds; null: at
--                       all (served by job_lease)
--   due_within_ms       due: a job waits for its turn whose time has come, within the last so many
--                       milliseconds; null: at all (served by job_due)
--   next_due_ms         milliseconds until the next scheduled job or retry is due; null: none waits
CREATE FUNCTION rouse.peek(
    p_lanes bigint[], p_cursors bigint[], p_catalog_after bigint, p_catalog_rows bigint,
    p_orphaned_within_ms bigint, p_due_within_ms bigint, p_most integer,
    OUT ready bigint[], OUT catalog_changed boolean, OUT orphans boolean, OUT due boolean, OUT next_due_ms bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at             timestamptz := clock_timestamp();
    orphaned_since timestamptz := coalesce(at - p_orphaned_within_ms * interval '1 millisecond', '-infinity');
    due_since      timestamptz := coalesce(at - p_due_within_ms * interval '1 millisecond', '-infinity');
    next_at        timestamptz;
BEGIN
    SELECT coalesce(array_agg(having_jobs.lane), '{}') INTO ready
    FROM (
        SELECT asked.lane
        FROM unnest(p_lanes, p_cursors) AS asked(lane, after)
        CROSS JOIN LATERAL (
            SELECT FROM rouse.job AS j
            WHERE j.lane = asked.lane AND j.turn > asked.after AND j.state = 'queued' AND j.turn IS NOT NULL
            ORDER BY j.turn LIMIT 1) AS first_job
        LIMIT p_most) AS having_jobs;
    catalog_changed := (SELECT count(*) FROM rouse.lane AS l WHERE l.seq > p_catalog_after) <> p_catalog_rows;
    orphans := EXISTS (
        SELECT FROM rouse.job AS j
        WHERE j.state = 'running' AND j.lease_until > orphaned_since AND j.lease_until < at
        ORDER BY j.lease_until LIMIT 1);
    SELECT j.available_at INTO next_at
    FROM rouse.job AS j
    WHERE j.state = 'queued' AND j.turn IS NULL AND j.available_at > due_since
    ORDER BY j.available_at LIMIT 1;
    due := coalesce(next_at <= at, false);
    -- GREATEST would make a 0 of null, and the worker would never wait.
    IF next_at IS NOT NULL THEN
        next_due_ms := greatest(0, ceil(extract(epoch FROM next_at - clock_timestamp()) * 1000))::bigint;
    END IF;
END
$$;

DROP FUNCTION rouse.promote(integer);

-- Gives scheduled jobs and retries that are due a fresh turn, at most `most` of them, and says how
-- many, and in how many milliseconds the next one is due (null: none waits). A job that is due and
-- locked by somebody else is left to a later call: it does not count as the next one, because
-- whoever waits for that would wait for no time at all. `within_ms`: only jobs that became due within
-- the last so many milliseconds are looked for; null: all. Served by job_due.
CREATE FUNCTION rouse.promote(p_most integer, p_within_ms bigint, OUT promoted integer, OUT next_due_ms bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at    timestamptz := clock_timestamp();
    since timestamptz := coalesce(at - p_within_ms * interval '1 millisecond', '-infinity');
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    WITH due AS MATERIALIZED (
        SELECT j.id FROM rouse.job AS j
        WHERE j.state = 'queued' AND j.turn IS NULL AND j.available_at > since AND j.available_at <= at
        ORDER BY j.available_at LIMIT p_most FOR NO KEY UPDATE SKIP LOCKED),
    moved AS (
        UPDATE rouse.job AS j SET turn = nextval('rouse.turn_seq') FROM due
        WHERE j.id = ANY (ARRAY[due.id]) RETURNING 1)
    SELECT count(*) INTO promoted FROM moved;
    IF promoted = p_most THEN
        next_due_ms := 0;
        RETURN;
    END IF;
    SELECT greatest(0, ceil(extract(epoch FROM j.available_at - clock_timestamp()) * 1000))::bigint INTO next_due_ms
    FROM rouse.job AS j
    WHERE j.state = 'queued' AND j.turn IS NULL AND j.available_at > at
    ORDER BY j.available_at LIMIT 1;
END
$$;

DROP FUNCTION rouse.adopt(bigint, bigint, bigint[], bigint[], integer, integer);

-- Takes over jobs whose lease has run out: up to `p_wanted` are claimed at once, ahead of everything
-- queued. A job's first loss is taken up like that; after a later one it waits (10 s, doubled
-- each time); a job that was lost p_lost_max times fails, because it probably kills its workers.
-- `within_ms`: only leases that ran out within the last so many
-- milliseconds are looked for; null: all. Served by job_lease. Rows that somebody else holds locked are skipped.
CREATE FUNCTION rouse.adopt(
    p_worker bigint, p_fence bigint, p_lanes bigint[], p_lease_ms bigint[], p_wanted integer, p_lost_max integer,
    p_within_ms bigint)
RETURNS SETOF rouse.claimed
LANGUAGE plpgsql SECURITY DEFINER ROWS 10
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at     timestamptz := clock_timestamp();
    since  timestamptz := coalesce(at - p_within_ms * interval '1 millisecond', '-infinity');
    orphan record;
    why    jsonb;
BEGIN
    FOR orphan IN
        SELECT j.id, j.fence, j.attempt, j.lost, j.worker, j.claimed_at, asked.lease_ms, w.worker_id
        FROM rouse.job AS j
        JOIN unnest(p_lanes, p_lease_ms) AS asked(lane, lease_ms) ON asked.lane = j.lane
        LEFT JOIN rouse.worker AS w ON w.incarnation = ANY (ARRAY[j.worker])
        WHERE j.state = 'running' AND j.lease_until > since AND j.lease_until < at
        ORDER BY j.lease_until LIMIT p_wanted
        FOR NO KEY UPDATE OF j SKIP LOCKED
    LOOP
        why := jsonb_build_object('kind', 'lost', 'message', format(
            'worker %s (incarnation %s) did not renew its lease', coalesce(orphan.worker_id, 'unknown'), orphan.worker));
        IF orphan.lost + 1 >= p_lost_max THEN
            why := why || jsonb_build_object('message', format(
                'the job was lost with its worker %s times; it probably kills the worker', orphan.lost + 1));
            UPDATE rouse.job AS j SET lost = j.lost + 1 WHERE j.id = orphan.id;
            PERFORM rouse._settle(ARRAY[orphan.id], ARRAY[orphan.fence], ARRAY['failed'::rouse.state], ARRAY[NULL]::bigint[],
                ARRAY[NULL]::jsonb[], ARRAY[why], ARRAY[NULL]::bigint[]);
            CONTINUE;
        END IF;
        INSERT INTO rouse.attempt (job, attempt, lost, worker, claimed_at, started_at, ended_at, error)
        VALUES (orphan.id, orphan.attempt, true, orphan.worker, orphan.claimed_at, NULL, at, why);
        IF orphan.lost = 0 THEN
            RETURN QUERY
            UPDATE rouse.job AS j
            SET attempt = j.attempt + 1, lost = j.lost + 1, fence = p_fence, worker = p_worker, claimed_at = at,
                lease_until = at + orphan.lease_ms * interval '1 millisecond', turn = nextval('rouse.turn_seq')
            WHERE j.id = orphan.id
            RETURNING j.id, j.lane, j.turn, j.attempt, j.lost, j.max_attempts, j.tenant, j.source, j.requested_at, j.claimed_at, j.payload;
        ELSE
            UPDATE rouse.job AS j
            SET state = 'queued', turn = NULL, fence = NULL, worker = NULL, claimed_at = NULL, lease_until = NULL, lost = j.lost + 1,
                available_at = at + 10 * 2 ^ (orphan.lost - 1) * interval '1 second'
            WHERE j.id = orphan.id;
        END IF;
    END LOOP;
END
$$;

REVOKE ALL ON FUNCTION rouse.peek, rouse.promote, rouse.adopt FROM PUBLIC;
GRANT EXECUTE ON FUNCTION rouse.peek, rouse.promote, rouse.adopt TO rouse_worker;
