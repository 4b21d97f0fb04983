-- What a worker calls to get jobs: lanes, claim, adopt, promote; and its sleep.

-- Registers one life of a worker and returns its number.
CREATE FUNCTION rouse.register(worker_id text, hostname text, version text, handlers text[]) RETURNS bigint
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO rouse.worker (worker_id, hostname, version, handlers)
    VALUES (worker_id, hostname, version, handlers) RETURNING incarnation
$$;

-- Says that the worker lives, and which handlers it has.
CREATE FUNCTION rouse.heartbeat(p_incarnation bigint, p_handlers text[]) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    UPDATE rouse.worker SET seen_at = clock_timestamp(), handlers = p_handlers WHERE incarnation = p_incarnation
$$;

-- Says that the worker has stopped.
CREATE FUNCTION rouse.unregister(p_incarnation bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM rouse.sleeper AS s WHERE s.worker = p_incarnation;
    UPDATE rouse.worker AS w SET stopped_at = clock_timestamp() WHERE w.incarnation = p_incarnation;
END
$$;

-- What claim and adopt hand to the worker.
CREATE TYPE rouse.claimed AS (
    id bigint, lane bigint, turn bigint, attempt integer, lost integer, max_attempts integer,
    tenant text, source text, requested_at timestamptz, claimed_at timestamptz, payload jsonb);

-- Claims up to `wanted` jobs from these lanes, in the order given, each lane from its cursor on.
-- Safe under concurrency: rows that another claim has locked are skipped, and a row that was
-- claimed meanwhile is checked again under its lock. Served by job_ready, then by the primary key.
-- The commit does not wait for the disk: a claim that a server crash forgets is only made again.
CREATE FUNCTION rouse.claim(
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
    FROM picked WHERE j.id = picked.id
    RETURNING j.id, j.lane, j.turn, j.attempt, j.lost, j.max_attempts, j.tenant, j.source, j.requested_at, j.claimed_at, j.payload;
END
$$;

-- Gives scheduled jobs and retries that are due a fresh turn, at most `most` of them, and says how
-- many, and in how many milliseconds the next one is due (null: none waits). A job that is due and
-- locked by somebody else is left to a later call: it does not count as the next one, because
-- whoever waits for that would wait for no time at all. Served by job_due.
CREATE FUNCTION rouse.promote(p_most integer, OUT promoted integer, OUT next_due_ms bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off AS $$
DECLARE
    at timestamptz := clock_timestamp();
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    WITH due AS MATERIALIZED (
        SELECT j.id FROM rouse.job AS j
        WHERE j.state = 'queued' AND j.turn IS NULL AND j.available_at <= at
        ORDER BY j.available_at LIMIT p_most FOR NO KEY UPDATE SKIP LOCKED),
    moved AS (
        UPDATE rouse.job AS j SET turn = nextval('rouse.turn_seq') FROM due WHERE j.id = due.id RETURNING 1)
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

-- From now on, and for `for_ms`, the worker wants a NOTIFY for these queues ('*': for any).
CREATE FUNCTION rouse.sleep(p_worker bigint, p_queues text[], p_for_ms bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    INSERT INTO rouse.sleeper AS s (worker, queue, until)
    SELECT p_worker, q, clock_timestamp() + p_for_ms * interval '1 millisecond' FROM unnest(p_queues) AS q
    ON CONFLICT (queue, worker) DO UPDATE SET until = excluded.until;
END
$$;

-- The worker is awake: nobody needs to notify it.
CREATE FUNCTION rouse.awake(p_worker bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    DELETE FROM rouse.sleeper AS s WHERE s.worker = p_worker OR s.until < clock_timestamp() - interval '1 hour';
END
$$;

REVOKE ALL ON FUNCTION rouse.register, rouse.heartbeat, rouse.unregister, rouse.claim, rouse.promote, rouse.sleep, rouse.awake FROM PUBLIC;
GRANT EXECUTE ON FUNCTION rouse.register, rouse.heartbeat, rouse.unregister, rouse.claim, rouse.promote, rouse.sleep, rouse.awake TO rouse_worker;
