-- rouse.orphans and rouse.adopt: jobs whose worker is dead. A worker reads orphans with all that it needs to decide the
-- outcome of each (host/src/job/loss.rs), and adopts them by showing their old fences.

-- The number of times that a job was lost in a crash of its worker. The attempt that is being lost counts if `p_worker`
-- has sent nothing since the lease ended; earlier lost attempts count as well. A loss is not a crash if the worker
-- survived it: an outage of the server, a freeze or a takeover of the worker id costs the job its attempt, but the job
-- did not kill the worker. A worker survived if it sent something between the end of the lease and the adoption
-- (worker_lived), or later (seen_at), or if it claimed this job again later. A loss in the future was recorded before
-- the clock was set back. It does not count until the clock has caught up: what its worker has sent since seems to be
-- earlier. Served by attempt_job and the primary key of rouse.worker.
CREATE OR REPLACE FUNCTION rouse._crashes(p_job bigint, p_worker bigint, p_claimed_at timestamptz, p_lease_until timestamptz) RETURNS bigint
LANGUAGE sql STABLE SET enable_seqscan = off SET jit = off AS $$
    WITH had AS (
        SELECT p_worker AS worker, p_claimed_at AS claimed_at, p_lease_until AS at, true AS is_lost
        UNION ALL
        SELECT a.worker, a.claimed_at, a.ended_at, a.lost AND a.error -> 'worker_lived' IS NULL FROM rouse.attempt AS a WHERE a.job = p_job)
    SELECT count(*) FROM had AS lost
    WHERE lost.is_lost AND lost.at <= clock_timestamp()
      AND NOT EXISTS (SELECT FROM had WHERE had.worker = lost.worker AND had.claimed_at > lost.at)
      AND NOT EXISTS (
          SELECT FROM (
              SELECT n.seen_at, n.outlived_at, n.stopped_at FROM rouse.worker AS n
              WHERE n.incarnation = lost.worker ORDER BY n.seen_at DESC LIMIT 1) AS w
          WHERE w.seen_at >= lost.at OR w.outlived_at IS NOT NULL OR w.stopped_at IS NOT NULL)
$$;

-- The lanes from which this worker may adopt, of those given: its login permits them, and their queues are not paused.
CREATE OR REPLACE FUNCTION rouse._adoptable(p_worker bigint, p_key bytea, p_lanes bigint[]) RETURNS bigint[]
LANGUAGE plpgsql AS $$
BEGIN
    IF rouse._authenticated_as_limited(p_worker, p_key) THEN
        p_lanes := rouse._permitted(p_worker, p_lanes);
    END IF;
    PERFORM FROM rouse.queue AS q WHERE q.paused_at IS NOT NULL;
    IF FOUND THEN
        p_lanes := rouse._not_paused(p_lanes);
    END IF;
    RETURN p_lanes;
END
$$;

-- Lists up to `p_wanted` jobs whose lease has ended. `uncounted`: the number of their earlier attempts that do not
-- count: lost, suspended, or given back after their start. `crashes`: the number of losses that were crashes, including
-- this one. `lost_after_ms`: the time since the claim of the lost attempt. The order is by priority, then by age, that
-- is by id. It applies to the 1,000 jobs whose leases ended first (or 4 × p_wanted), which are read without a lock. If
-- other transactions have locked so many of these that fewer than `p_wanted` are free, it applies to ten times as many,
-- and then to up to 100,000: such a transaction may stay open for a long time.
--
-- `p_since`: only leases that ended at this time or later; null: all. `p_sources`: only jobs of these sources; null:
-- all. It leaves out rows that another transaction has locked, jobs of paused queues, and lanes that this worker may
-- not claim from. Served by job_lease, then by the primary key.
--
-- A job for which this loss would be crash number `p_crashes_max` is left out until `p_silence_ms` after its lease
-- ended. So this loss, which decides whether the job fails, is judged like earlier ones: after a live worker has had
-- time to report.
--
-- Waits up to 250 ms for the worker's own row; after that, the call fails with lock_not_available, and the host
-- continues with its other claims in the meantime.
CREATE OR REPLACE FUNCTION rouse.orphans(
    p_worker bigint, p_key bytea, p_lanes bigint[], p_sources text[], p_wanted integer, p_since timestamptz, p_crashes_max bigint,
    p_silence_ms bigint)
RETURNS TABLE (id bigint, fence bigint, lane bigint, attempt integer, uncounted integer, crashes bigint, lost_after_ms bigint, source text)
LANGUAGE plpgsql SECURITY DEFINER ROWS 10
SET search_path = pg_catalog, pg_temp SET lock_timeout = '250ms' SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at     timestamptz := clock_timestamp();
    since  timestamptz := coalesce(p_since, '-infinity');
    silent timestamptz := at - least(greatest(coalesce(p_silence_ms, 0), 0), 86400000) * interval '1 millisecond';
    -- The jobs whose leases ended first, in the order of their adoption, and the maximum number of these.
    listed   bigint[];
    list_max integer;
    -- Those of them that this call has locked.
    free     bigint[];
BEGIN
    p_lanes := rouse._adoptable(p_worker, p_key, p_lanes);
    p_wanted := least(greatest(coalesce(p_wanted, 0), 0), 20000);
    list_max := greatest(1000, 4 * p_wanted);
    -- This worker is alive, so its own losses are not crashes.
    UPDATE rouse.worker AS w SET seen_at = at
    WHERE w.incarnation = p_worker AND EXISTS (
        SELECT FROM rouse.job AS j WHERE j.state = 'running' AND j.lease_until >= since AND j.lease_until < at AND j.worker = p_worker);
    LOOP
        listed := ARRAY(
            SELECT o.id FROM (
                SELECT j.id, j.lane FROM rouse.job AS j
                WHERE j.state = 'running' AND j.lease_until >= since AND j.lease_until < at AND j.lane = ANY (p_lanes)
                  AND (p_sources IS NULL OR j.source = ANY (p_sources))
                  -- `uncounted` includes all crashes before this one.
                  AND (j.lease_until <= silent OR p_crashes_max IS NULL OR j.uncounted + 1 < p_crashes_max
                       OR rouse._crashes(j.id, j.worker, j.claimed_at, j.lease_until) < p_crashes_max)
                ORDER BY j.lease_until LIMIT list_max) AS o
            -- The priority is looked up for these jobs only, because each look of each worker reads orphans that no
            -- worker adopts.
            ORDER BY (
                SELECT CASE l.priority WHEN 'high' THEN 0 WHEN 'low' THEN 2 ELSE 1 END
                FROM rouse.lane AS l WHERE l.id = o.lane LIMIT 1), o.id);
        free := ARRAY(
            SELECT j.id FROM unnest(listed) AS o(id)
            CROSS JOIN LATERAL (
                SELECT j.id FROM rouse.job AS j
                -- Without `state` in the condition: with it, a plan could read all running jobs for each id.
                WHERE j.id = ANY (ARRAY[o.id]) AND j.lease_until < at
                FOR NO KEY UPDATE SKIP LOCKED) AS j
            LIMIT p_wanted);
        EXIT WHEN cardinality(free) >= p_wanted OR cardinality(listed) < list_max OR list_max >= 100000;
        list_max := least(10 * list_max, 100000);
    END LOOP;
    RETURN QUERY
    SELECT j.id, j.fence, j.lane, j.attempt, j.uncounted, rouse._crashes(j.id, j.worker, j.claimed_at, j.lease_until),
           (extract(epoch FROM at - j.claimed_at) * 1000)::bigint, j.source
    FROM unnest(free) AS o(id) CROSS JOIN LATERAL (SELECT * FROM rouse.job AS j WHERE j.id = ANY (ARRAY[o.id])) AS j;
END
$$;

-- Takes over orphans as the calling worker has decided, in the order given, and returns the ids of those that were
-- taken over. It leaves out a job if its fence has changed, its lease was renewed, another transaction has locked it,
-- it may not be adopted (as in rouse.orphans), or it was to fail for a loss that proved not to be a crash, because its
-- worker has sent something in the meantime.
--
-- The old attempt is recorded as lost. Like a claim, the call ends with the job whose row makes the total reach 8 MiB
-- (rouse.job.bytes and 120 bytes each); rouse.claimed reads the claimed jobs. It waits for locks as rouse.orphans does.
CREATE OR REPLACE FUNCTION rouse.adopt(p_worker bigint, p_key bytea, p_fence bigint, p_adoptions rouse.adoption[]) RETURNS SETOF bigint
LANGUAGE plpgsql SECURITY DEFINER ROWS 10
SET search_path = pg_catalog, pg_temp SET lock_timeout = '250ms' SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at     timestamptz := clock_timestamp();
    lanes  bigint[] := rouse._adoptable(p_worker, p_key, ARRAY(
        SELECT DISTINCT j.lane FROM unnest(p_adoptions[:20000]) AS a
        CROSS JOIN LATERAL (SELECT j.lane FROM rouse.job AS j WHERE j.id = ANY (ARRAY[a.id])) AS j));
    orphan record;
    why    jsonb;
    ended  rouse.settlement;
    taken  bigint := 0;
BEGIN
    FOR orphan IN
        SELECT j.id, j.fence, j.attempt, j.worker, j.claimed_at, j.lease_until, 120 + j.bytes AS bytes,
               a.next, a.crashes, a.delay_ms, a.lease_ms, w.worker_id, coalesce(w.seen_at > j.lease_until, false) AS worker_lived
        FROM unnest(p_adoptions[:20000]) WITH ORDINALITY AS a(id, fence, next, crashes, delay_ms, lease_ms, n)
        CROSS JOIN LATERAL (
            SELECT * FROM rouse.job AS j
            WHERE j.id = ANY (ARRAY[a.id]) AND j.fence = a.fence AND j.lease_until < at AND j.lane = ANY (lanes)
            FOR NO KEY UPDATE SKIP LOCKED) AS j
        LEFT JOIN LATERAL (
            SELECT n.worker_id, n.seen_at FROM rouse.worker AS n WHERE n.incarnation = j.worker ORDER BY n.seen_at DESC LIMIT 1) AS w ON true
        ORDER BY a.n
    LOOP
        why := jsonb_build_object('kind', 'lost', 'message', format(
            'worker %s (incarnation %s) did not renew its lease', coalesce(orphan.worker_id, 'unknown'), orphan.worker),
            'lease_ended_at', orphan.lease_until);
        -- The fence is compared once more, because a job can be in the list twice.
        IF orphan.next = 'failed' THEN
            -- The job cannot end yet if a producer that has named it holds its lock (rouse._lock_live).
            PERFORM FROM rouse.job AS j WHERE j.id = orphan.id AND j.fence = orphan.fence FOR UPDATE SKIP LOCKED;
            CONTINUE WHEN NOT FOUND;
            CONTINUE WHEN rouse._crashes(orphan.id, orphan.worker, orphan.claimed_at, orphan.lease_until) < greatest(orphan.crashes, 1);
            UPDATE rouse.job AS j SET uncounted = j.uncounted + 1 WHERE j.id = orphan.id AND j.fence = orphan.fence;
            CONTINUE WHEN NOT FOUND;
            ended.id := orphan.id;
            ended.fence := orphan.fence;
            ended.state := 'failed';
            ended.error := why || jsonb_build_object('message', format(
                'the worker crashed in %s attempts of this job; the job probably kills its worker', orphan.crashes));
            PERFORM rouse._settle(NULL, ARRAY[ended]);
        ELSE
            IF orphan.next = 'running' THEN
                UPDATE rouse.job AS j
                SET attempt = j.attempt + 1, uncounted = j.uncounted + 1, fence = p_fence, worker = p_worker, claimed_at = at,
                    lease_until = at + coalesce(j.lease_ms, least(greatest(orphan.lease_ms, 1), 86400000)) * interval '1 millisecond', turn = nextval('rouse.turn_seq')
                WHERE j.id = orphan.id AND j.fence = orphan.fence;
                CONTINUE WHEN NOT FOUND;
                taken := taken + orphan.bytes;
            ELSE
                UPDATE rouse.job AS j
                SET state = 'queued', turn = NULL, fence = NULL, worker = NULL, claimed_at = NULL, lease_until = NULL, uncounted = j.uncounted + 1, wait = NULL,
                    lane = rouse._shared_lane(j.lane),
                    available_at = at + least(greatest(orphan.delay_ms, 0), 31622400000) * interval '1 millisecond'
                WHERE j.id = orphan.id AND j.fence = orphan.fence;
                CONTINUE WHEN NOT FOUND;
            END IF;
            IF orphan.worker_lived THEN
                why := why || jsonb_build_object('worker_lived', true);
            END IF;
            INSERT INTO rouse.attempt (job, attempt, lost, worker, claimed_at, started_at, ended_at, error)
            VALUES (orphan.id, orphan.attempt, true, orphan.worker, orphan.claimed_at, NULL, at, why);
        END IF;
        -- Notifies the old owner, if it is still alive.
        PERFORM rouse._hint('rouse_worker_' || orphan.worker, orphan.id::text);
        RETURN NEXT orphan.id;
        EXIT WHEN taken >= 8388608;
    END LOOP;
END
$$;
