-- rouse.adopt: jobs whose worker is gone.

-- Takes over jobs whose lease has run out: up to `p_wanted` are claimed at once, ahead of everything
-- queued. A job's first loss is taken up like that; after a later one it waits (10 s, doubled
-- each time); a job that was lost p_lost_max times fails, because it probably kills its workers.
-- `within_ms`: only leases that ran out within the last so many
-- milliseconds are looked for; null: all. Served by job_lease. Rows that somebody else holds locked are skipped, and
-- so are those of paused queues, of lanes that the worker may not claim from, and, where p_sources is given, jobs of other sources.
--
-- Returns those that were claimed (`became` is null), and those that were not: `queued` or `failed`, with the attempt that was lost, and
-- `lost_after_ms`, its time from the claim to now.
CREATE OR REPLACE FUNCTION rouse.adopt(
    p_worker bigint, p_key bytea, p_fence bigint, p_lanes bigint[], p_lease_ms bigint[], p_wanted integer, p_lost_max integer,
    p_within_ms bigint, p_sources text[])
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
    IF rouse._known(p_worker, p_key) THEN
        p_lanes := rouse._permitted(p_worker, p_lanes);
    END IF;
    p_wanted := least(greatest(coalesce(p_wanted, 0), 0), 20000);
    p_lost_max := least(greatest(coalesce(p_lost_max, 1), 1), 1000);
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
          AND (p_sources IS NULL OR j.source = ANY (p_sources))
        ORDER BY j.lease_until LIMIT p_wanted
        FOR NO KEY UPDATE OF j SKIP LOCKED
    LOOP
        -- A hint for the old owner, if it still lives.
        PERFORM rouse._hint('rouse_worker_' || orphan.worker, orphan.id::text);
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
                    lease_until = at + least(greatest(orphan.lease_ms, 1), 86400000) * interval '1 millisecond', turn = nextval('rouse.turn_seq')
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
        id := orphan.id;
        lane := orphan.lane;
        attempt := orphan.attempt;
        lost := orphan.lost + 1;
        became := then_it;
        lost_after_ms := (extract(epoch FROM at - orphan.claimed_at) * 1000)::bigint;
        RETURN NEXT;
    END LOOP;
END
$$;
