-- rouse.adopt: jobs whose worker is gone.

-- How often the job was lost because its worker crashed: the attempt that is being lost, if `p_worker` was not heard of since its lease
-- ended, and those that were lost before: a worker that was heard of between the end of the lease and the adoption is known by
-- worker_lived, one that was heard of after it by seen_at, and one that has claimed this very job again since then has lived, too. An outage of the server, a freeze or a takeover of the worker id costs a job its attempt too,
-- but the worker outlives it and is heard of afterwards: the job did not kill it. Served by attempt_job and the primary
-- key of rouse.worker.
CREATE OR REPLACE FUNCTION rouse._crashes(p_job bigint, p_worker bigint, p_claimed_at timestamptz, p_lease_until timestamptz) RETURNS bigint
LANGUAGE sql STABLE SET enable_seqscan = off SET jit = off AS $$
    WITH had AS (
        SELECT p_worker AS worker, p_claimed_at AS claimed_at, p_lease_until AS at, true AS is_lost
        UNION ALL
        SELECT a.worker, a.claimed_at, a.ended_at, a.lost AND a.error -> 'worker_lived' IS NULL FROM rouse.attempt AS a WHERE a.job = p_job)
    SELECT count(*) FROM had AS lost
    WHERE lost.is_lost
      AND NOT EXISTS (SELECT FROM had WHERE had.worker = lost.worker AND had.claimed_at > lost.at)
      AND NOT EXISTS (
          SELECT FROM rouse.worker AS w
          WHERE w.incarnation = lost.worker AND (w.seen_at >= lost.at OR w.outlived_at IS NOT NULL OR w.stopped_at IS NOT NULL))
$$;

-- Takes over jobs whose lease has ended: up to `p_wanted`, ahead of everything queued. A job that was lost in a crash of its worker
-- once at most is claimed at once; after a later crash it waits (10 s, doubled each time); a job with p_lost_max crashes fails, because
-- it probably kills its workers. Other losses do not count (rouse._crashes).
-- `since`: only leases that ended at this time or later are looked for; null: all. Served by job_lease, then by the primary key.
-- Rows that somebody else holds locked are skipped, and so are those of paused queues, of lanes that the worker may not claim from, and,
-- where p_sources is given, jobs of other sources.
--
-- Orphans go by priority, then by age: by id. That order is made among the 1,000 whose leases ended first (more where
-- more are wanted), which are read without a lock; each is looked at again under its lock.
--
-- Like a claim, it ends with the job with which the claimed rows reach 8 MiB (rouse.job.bytes and 120 bytes each).
-- Returns the ids of those that were claimed (`became` is null), which rouse.claimed reads, and those that were not: `queued` or `failed`,
-- with the attempt that was lost, and `lost_after_ms`, its time from the claim to now.
CREATE OR REPLACE FUNCTION rouse.adopt(
    p_worker bigint, p_key bytea, p_fence bigint, p_lanes bigint[], p_lease_ms bigint[], p_wanted integer, p_lost_max integer,
    p_since timestamptz, p_sources text[])
RETURNS TABLE (id bigint, lane bigint, attempt integer, lost integer, became rouse.state, lost_after_ms bigint)
LANGUAGE plpgsql SECURITY DEFINER ROWS 10
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at      timestamptz := clock_timestamp();
    since   timestamptz := coalesce(p_since, '-infinity');
    high    bigint[];
    low     bigint[];
    orphan  record;
    crashes bigint;
    why     jsonb;
    ended   rouse.settlement;
    taken   bigint := 0;
BEGIN
    IF rouse._known(p_worker, p_key) THEN
        p_lanes := rouse._permitted(p_worker, p_lanes);
    END IF;
    p_wanted := least(greatest(coalesce(p_wanted, 0), 0), 20000);
    p_lost_max := least(greatest(coalesce(p_lost_max, 1), 1), 1000);
    PERFORM FROM rouse.queue AS q WHERE q.paused_at IS NOT NULL;
    IF FOUND THEN
        p_lanes := rouse._not_paused(p_lanes);
    END IF;
    -- This worker is heard of now, so that its own losses are no crashes.
    UPDATE rouse.worker AS w SET seen_at = at
    WHERE w.incarnation = p_worker AND EXISTS (
        SELECT FROM rouse.job AS j WHERE j.state = 'running' AND j.lease_until >= since AND j.lease_until < at AND j.worker = p_worker);
    SELECT array_agg(asked.lane) FILTER (WHERE l.priority = 'high'), array_agg(asked.lane) FILTER (WHERE l.priority = 'low')
    INTO high, low
    FROM unnest(p_lanes) AS asked(lane)
    CROSS JOIN LATERAL (SELECT l.priority FROM rouse.lane AS l WHERE l.id = asked.lane LIMIT 1) AS l;
    FOR orphan IN
        SELECT j.id, j.lane, j.fence, j.attempt, j.lost, j.worker, j.claimed_at, j.lease_until,
               p_lease_ms[array_position(p_lanes, j.lane)] AS lease_ms, w.worker_id, 120 + j.bytes AS bytes
        FROM (
            SELECT o.id FROM (
                SELECT j.id, j.lane FROM rouse.job AS j
                WHERE j.state = 'running' AND j.lease_until >= since AND j.lease_until < at AND j.lane = ANY (p_lanes)
                  AND (p_sources IS NULL OR j.source = ANY (p_sources))
                ORDER BY j.lease_until LIMIT greatest(1000, 4 * p_wanted)) AS o
            ORDER BY CASE WHEN o.lane = ANY (high) THEN 0 WHEN o.lane = ANY (low) THEN 2 ELSE 1 END, o.id) AS o
        CROSS JOIN LATERAL (
            SELECT * FROM rouse.job AS j
            -- Its state is looked at by the lease alone: with `state` in it, a plan could read all running jobs for each id.
            WHERE j.id = ANY (ARRAY[o.id]) AND j.lease_until < at
            FOR NO KEY UPDATE SKIP LOCKED) AS j
        LEFT JOIN rouse.worker AS w ON w.incarnation = ANY (ARRAY[j.worker])
        LIMIT p_wanted
    LOOP
        -- A hint for the old owner, if it still lives.
        PERFORM rouse._hint('rouse_worker_' || orphan.worker, orphan.id::text);
        -- Of the first loss it does not matter whose fault it was.
        crashes := CASE WHEN orphan.lost = 0 AND p_lost_max > 1 THEN 1 ELSE rouse._crashes(orphan.id, orphan.worker, orphan.claimed_at, orphan.lease_until) END;
        why := jsonb_build_object('kind', 'lost', 'message', format(
            'worker %s (incarnation %s) did not renew its lease', coalesce(orphan.worker_id, 'unknown'), orphan.worker),
            'lease_ended_at', orphan.lease_until);
        id := orphan.id;
        lane := orphan.lane;
        attempt := orphan.attempt;
        lost := orphan.lost + 1;
        lost_after_ms := (extract(epoch FROM at - orphan.claimed_at) * 1000)::bigint;
        IF crashes >= p_lost_max THEN
            became := 'failed';
            why := why || jsonb_build_object('message', format(
                'the worker crashed in %s attempts of this job; the job probably kills its worker', crashes));
            UPDATE rouse.job AS j SET lost = j.lost + 1 WHERE j.id = orphan.id;
            ended.id := orphan.id;
            ended.fence := orphan.fence;
            ended.state := 'failed';
            ended.error := why;
            PERFORM rouse._settle(NULL, ARRAY[ended]);
        ELSE
            IF EXISTS (SELECT FROM rouse.worker AS w WHERE w.incarnation = orphan.worker AND w.seen_at > orphan.lease_until) THEN
                why := why || jsonb_build_object('worker_lived', true);
            END IF;
            INSERT INTO rouse.attempt (job, attempt, lost, worker, claimed_at, started_at, ended_at, error)
            VALUES (orphan.id, orphan.attempt, true, orphan.worker, orphan.claimed_at, NULL, at, why);
            IF crashes <= 1 THEN
                became := NULL;
                taken := taken + orphan.bytes;
                UPDATE rouse.job AS j
                SET attempt = j.attempt + 1, lost = j.lost + 1, fence = p_fence, worker = p_worker, claimed_at = at,
                    lease_until = at + coalesce(j.lease_ms, least(greatest(orphan.lease_ms, 1), 86400000)) * interval '1 millisecond', turn = nextval('rouse.turn_seq')
                WHERE j.id = orphan.id;
            ELSE
                became := 'queued';
                UPDATE rouse.job AS j
                SET state = 'queued', turn = NULL, fence = NULL, worker = NULL, claimed_at = NULL, lease_until = NULL, lost = j.lost + 1,
                    available_at = at + 10 * 2 ^ (crashes - 2) * interval '1 second'
                WHERE j.id = orphan.id;
            END IF;
        END IF;
        RETURN NEXT;
        EXIT WHEN taken >= 8388608;
    END LOOP;
END
$$;
