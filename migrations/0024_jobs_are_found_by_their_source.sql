-- A host runs jobs of a source that it has bound to a handler of its own, also where it lacks the handler that their producer
-- named (SPEC row H2): such jobs it finds by their source.
--
-- What this does to a database with live jobs: an index is made on rouse.job, of the ready jobs that have a source, while nobody can
-- enqueue, claim, renew or settle: 0.5 s for a million jobs without a source, 5 s where all have one. Where that is too long (leases are good for 60 s), make
-- it beforehand, as rouse_owner: CREATE INDEX CONCURRENTLY with the rest of the statement below. Hosts of before go on.

-- Serves claims by source: the next turns of a lane that come from it.
CREATE INDEX IF NOT EXISTS job_source ON rouse.job (lane, source, turn) WHERE state = 'queued' AND turn IS NOT NULL AND source IS NOT NULL;

-- As rouse.claim, of these lanes in their order only jobs of these sources, in theirs, and from the start of each: there are no cursors. Served by
-- job_source: a range in its order, and without sorting, nothing else does.
CREATE FUNCTION rouse.claim_bound(
    p_worker bigint, p_key bytea, p_fence bigint, p_lanes bigint[], p_sources text[], p_lease_ms bigint, p_wanted integer)
RETURNS TABLE (id bigint, lane bigint, turn bigint, attempt integer, lost integer, max_attempts integer, tenant text, source text,
               requested_at timestamptz, claimed_at timestamptz, payload jsonb, memory_bytes bigint, grants jsonb)
LANGUAGE plpgsql SECURITY DEFINER ROWS 100
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at timestamptz := clock_timestamp();
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM FROM rouse.queue AS q WHERE q.paused_at IS NOT NULL;
    IF FOUND THEN
        p_lanes := rouse._not_paused(p_lanes);
    END IF;
    RETURN QUERY
    WITH picked AS MATERIALIZED (
        SELECT found.id
        FROM (
            SELECT ready.id, ready.bytes, sum(ready.bytes) OVER (ROWS UNBOUNDED PRECEDING) AS bytes_so_far
            FROM unnest(p_lanes) AS wanted(lane)
            CROSS JOIN LATERAL (
                SELECT j.id, j.bytes FROM unnest(p_sources) AS bound(source)
                CROSS JOIN LATERAL (
                    SELECT j.id, CASE WHEN pg_column_compression(j.payload) IS NULL THEN pg_column_size(j.payload)
                                      ELSE 16 * least(pg_column_size(j.payload), 1048576) END AS bytes
                    FROM rouse.job AS j
                    WHERE j.lane >= wanted.lane AND j.lane <= wanted.lane AND j.source >= bound.source AND j.source <= bound.source
                      AND j.state = 'queued' AND j.turn IS NOT NULL
                    ORDER BY j.lane, j.source, j.turn LIMIT p_wanted FOR NO KEY UPDATE SKIP LOCKED) AS j
                LIMIT p_wanted) AS ready
            LIMIT p_wanted) AS found
        WHERE found.bytes_so_far - found.bytes < 8388608)
    UPDATE rouse.job AS j
    SET state = 'running', attempt = j.attempt + 1, fence = p_fence, worker = p_worker,
        claimed_at = at, lease_until = at + p_lease_ms * interval '1 millisecond'
    FROM picked WHERE j.id = ANY (ARRAY[picked.id])
    RETURNING j.id, j.lane, j.turn, j.attempt, j.lost, j.max_attempts, j.tenant, j.source, j.requested_at, j.claimed_at, j.payload, j.memory_bytes,
              j.grants;
END
$$;

-- Takes over jobs whose lease has run out: up to `p_wanted` are claimed at once, ahead of everything
-- queued. A job's first loss is taken up like that; after a later one it waits (10 s, doubled
-- each time); a job that was lost p_lost_max times fails, because it probably kills its workers.
-- `within_ms`: only leases that ran out within the last so many
-- milliseconds are looked for; null: all. Served by job_lease. Rows that somebody else holds locked are skipped, and
-- so are those of paused queues, jobs that have grants of their own, for a worker that does not say that it narrows, and, where p_sources
-- is given, jobs of other sources.
--
-- Returns those that were claimed (`became` is null), and, if asked to tell, those that were not: `queued` or `failed`, with
-- the attempt that was lost, and `lost_after_ms`, its time from the claim to now.
CREATE FUNCTION rouse.adopt(
    p_worker bigint, p_key bytea, p_fence bigint, p_lanes bigint[], p_lease_ms bigint[], p_wanted integer, p_lost_max integer,
    p_within_ms bigint, p_tell boolean, p_narrows boolean, p_sources text[])
RETURNS TABLE (id bigint, lane bigint, turn bigint, attempt integer, lost integer, max_attempts integer, tenant text, source text,
               requested_at timestamptz, claimed_at timestamptz, payload jsonb, memory_bytes bigint, became rouse.state, lost_after_ms bigint,
               grants jsonb)
LANGUAGE plpgsql SECURITY DEFINER ROWS 10
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at     timestamptz := clock_timestamp();
    since  timestamptz := coalesce(at - p_within_ms * interval '1 millisecond', '-infinity');
    orphan record;
    why    jsonb;
    then_it rouse.state;
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    PERFORM FROM rouse.queue AS q WHERE q.paused_at IS NOT NULL;
    IF FOUND THEN
        p_lanes := rouse._not_paused(p_lanes);
    END IF;
    FOR orphan IN
        SELECT j.id, j.lane, j.fence, j.attempt, j.lost, j.worker, j.claimed_at, asked.lease_ms, w.worker_id
        FROM rouse.job AS j
        JOIN unnest(p_lanes, p_lease_ms) AS asked(lane, lease_ms) ON asked.lane = j.lane
        LEFT JOIN rouse.worker AS w ON w.incarnation = ANY (ARRAY[j.worker])
        WHERE j.state = 'running' AND j.lease_until > since AND j.lease_until < at
          AND (p_narrows OR j.grants IS NULL)
          AND (p_sources IS NULL OR j.source = ANY (p_sources))
        ORDER BY j.lease_until LIMIT p_wanted
        FOR NO KEY UPDATE OF j SKIP LOCKED
    LOOP
        -- A hint for the old owner, if it still lives.
        PERFORM pg_notify('rouse_worker_' || orphan.worker, orphan.id::text);
        why := jsonb_build_object('kind', 'lost', 'message', format(
            'worker %s (incarnation %s) did not renew its lease', coalesce(orphan.worker_id, 'unknown'), orphan.worker));
        IF orphan.lost + 1 >= p_lost_max THEN
            why := why || jsonb_build_object('message', format(
                'the job was lost with its worker %s times; it probably kills the worker', orphan.lost + 1));
            UPDATE rouse.job AS j SET lost = j.lost + 1 WHERE j.id = orphan.id;
            PERFORM rouse._settle(NULL, ARRAY[orphan.id], ARRAY[orphan.fence], ARRAY['failed'::rouse.state], ARRAY[NULL]::bigint[],
                ARRAY[NULL]::jsonb[], ARRAY[why], ARRAY[NULL]::bigint[], ARRAY[NULL]::timestamptz[], ARRAY[NULL]::bigint[]);
            then_it := 'failed';
        ELSE
            INSERT INTO rouse.attempt (job, attempt, lost, worker, claimed_at, started_at, ended_at, error)
            VALUES (orphan.id, orphan.attempt, true, orphan.worker, orphan.claimed_at, NULL, at, why);
            IF orphan.lost = 0 THEN
                RETURN QUERY
                UPDATE rouse.job AS j
                SET attempt = j.attempt + 1, lost = j.lost + 1, fence = p_fence, worker = p_worker, claimed_at = at,
                    lease_until = at + orphan.lease_ms * interval '1 millisecond', turn = nextval('rouse.turn_seq')
                WHERE j.id = orphan.id
                RETURNING j.id, j.lane, j.turn, j.attempt, j.lost, j.max_attempts, j.tenant, j.source, j.requested_at, j.claimed_at, j.payload,
                          j.memory_bytes, NULL::rouse.state, NULL::bigint, j.grants;
                CONTINUE;
            END IF;
            UPDATE rouse.job AS j
            SET state = 'queued', turn = NULL, fence = NULL, worker = NULL, claimed_at = NULL, lease_until = NULL, lost = j.lost + 1,
                available_at = at + 10 * 2 ^ (orphan.lost - 1) * interval '1 second'
            WHERE j.id = orphan.id;
            then_it := 'queued';
        END IF;
        IF p_tell THEN
            id := orphan.id;
            lane := orphan.lane;
            attempt := orphan.attempt;
            lost := orphan.lost + 1;
            became := then_it;
            lost_after_ms := (extract(epoch FROM at - orphan.claimed_at) * 1000)::bigint;
            RETURN NEXT;
        END IF;
    END LOOP;
END
$$;

-- The same, of any source.
CREATE OR REPLACE FUNCTION rouse.adopt(
    p_worker bigint, p_key bytea, p_fence bigint, p_lanes bigint[], p_lease_ms bigint[], p_wanted integer, p_lost_max integer,
    p_within_ms bigint, p_tell boolean, p_narrows boolean)
RETURNS TABLE (id bigint, lane bigint, turn bigint, attempt integer, lost integer, max_attempts integer, tenant text, source text,
               requested_at timestamptz, claimed_at timestamptz, payload jsonb, memory_bytes bigint, became rouse.state, lost_after_ms bigint,
               grants jsonb)
LANGUAGE sql SECURITY DEFINER ROWS 10 SET search_path = pg_catalog, pg_temp AS $$
    SELECT * FROM rouse.adopt(p_worker, p_key, p_fence, p_lanes, p_lease_ms, p_wanted, p_lost_max, p_within_ms, p_tell, p_narrows, NULL)
$$;

-- How many jobs of a queue come from these sources, ready, due, or lost with their worker, by handler and required tags. Counted as
-- rouse.remaining does. Served by job_source, job_due and job_lease.
CREATE FUNCTION rouse.remaining_bound(p_queue text, p_sources text[])
RETURNS TABLE (handler text, tags text[], jobs bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_mergejoin = off SET enable_sort = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at timestamptz := clock_timestamp();
BEGIN
    RETURN QUERY
    WITH soon AS MATERIALIZED (
        SELECT s.lane, count(*) AS jobs
        FROM (
            (SELECT j.lane, j.source FROM rouse.job AS j
             WHERE j.state = 'queued' AND j.turn IS NULL AND j.available_at <= at
             ORDER BY j.available_at)
            UNION ALL
            (SELECT j.lane, j.source FROM rouse.job AS j
             WHERE j.state = 'running' AND j.lease_until > '-infinity' AND j.lease_until < at
             ORDER BY j.lease_until)) AS s
        WHERE s.source = ANY (p_sources)
        GROUP BY s.lane)
    SELECT l.handler, l.tags, sum(ready.jobs + coalesce(soon.jobs, 0))::bigint
    FROM (SELECT DISTINCT ON (l.id) l.id, l.handler, l.tags FROM rouse.lane AS l WHERE l.queue = p_queue ORDER BY l.id) AS l
    CROSS JOIN LATERAL (
        SELECT count(*) AS jobs FROM (
            SELECT FROM unnest(p_sources) AS bound(source)
            CROSS JOIN LATERAL (
                SELECT FROM rouse.job AS j
                WHERE j.lane >= l.id AND j.lane <= l.id AND j.source >= bound.source AND j.source <= bound.source
                  AND j.state = 'queued' AND j.turn IS NOT NULL
                ORDER BY j.lane, j.source, j.turn LIMIT 10000) AS j
            LIMIT 10000) AS j) AS ready
    LEFT JOIN soon ON soon.lane = l.id
    GROUP BY l.handler, l.tags
    HAVING sum(ready.jobs + coalesce(soon.jobs, 0)) > 0;
END
$$;

REVOKE ALL ON FUNCTION rouse.claim_bound, rouse.remaining_bound,
    rouse.adopt(bigint, bytea, bigint, bigint[], bigint[], integer, integer, bigint, boolean, boolean, text[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION rouse.claim_bound,
    rouse.adopt(bigint, bytea, bigint, bigint[], bigint[], integer, integer, bigint, boolean, boolean, text[]) TO rouse_worker;
GRANT EXECUTE ON FUNCTION rouse.remaining_bound TO rouse_worker, rouse_observer;
