-- Effects: statements that a handler's module has declared, committed together with the outcome of an attempt or with a
-- recorded step.
--
-- A host runs them in a session of the handler's own login, in one transaction that starts with one of these functions.
-- So the effects are committed if, and only if, the attempt still holds the job: both functions raise an error (RW007)
-- instead of returning a refusal, which ends the transaction before any effect happens. The worker is identified by its
-- key alone, because the login is not the worker's.
--
-- rouse.confirm runs in the worker's own session. It returns the outcome of a commit whose response was lost.

-- Settles attempts that have succeeded, like rouse.settle, all of them or none. Returns whether rouse.continue_releases
-- has anything to do. Waits up to p_lock_wait_ms, at most 250 ms, for a locked row; after that, the call fails with
-- lock_not_available. A host has few of these sessions, so it waits that long only for a single attempt whose row it
-- has found locked before. Served by the primary key of rouse.job.
CREATE OR REPLACE FUNCTION rouse.settle_with_effects(
    p_worker bigint, p_key bytea, p_settlements rouse.settlement[], p_jobs rouse.new_job[], p_lock_wait_ms integer DEFAULT 250) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '250ms' SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    done bigint[];
    lost bigint[];
BEGIN
    IF rouse._authenticated_as_limited(p_worker, p_key, true) AND p_jobs <> '{}' THEN
        PERFORM rouse._check_children(p_worker, p_jobs);
    END IF;
    IF p_lock_wait_ms < 250 THEN
        PERFORM set_config('lock_timeout', greatest(p_lock_wait_ms, 1) || 'ms', true);
    END IF;
    PERFORM FROM unnest(p_settlements) AS s WHERE s.state IS DISTINCT FROM 'succeeded';
    IF FOUND THEN
        RAISE EXCEPTION 'rouse.settle_with_effects: only attempts that have succeeded have effects' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- As in rouse.settle.
    IF pg_column_size(p_settlements) > 67108864 THEN
        PERFORM rouse._check_settlements(p_settlements);
    END IF;
    done := ARRAY(SELECT d.id FROM rouse._settle(p_worker, p_settlements, p_jobs) AS d(id));
    lost := ARRAY(SELECT s.id FROM unnest(p_settlements) AS s WHERE NOT s.id = ANY (array_remove(done, NULL)));
    IF lost <> '{}' THEN
        RAISE EXCEPTION 'rouse.settle_with_effects: worker % does not hold the jobs % under these fences', p_worker, lost USING ERRCODE = 'RW007';
    END IF;
    RETURN array_position(done, NULL) IS NOT NULL;
END
$$;

-- Records the result of a step, like rouse.record_step. A step that is already recorded is an error (RW008): its
-- effects have been committed.
CREATE OR REPLACE FUNCTION rouse.record_step_with_effects(
    p_worker bigint, p_key bytea, p_id bigint, p_fence bigint, p_name text, p_result json) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '250ms' SET enable_seqscan = off SET jit = off AS $$
DECLARE
    recorded boolean;
BEGIN
    PERFORM rouse._authenticated_as_limited(p_worker, p_key, true);
    recorded := rouse._record_step(p_worker, p_id, p_fence, p_name, p_result);
    IF recorded IS NULL THEN
        RAISE EXCEPTION 'rouse.record_step_with_effects: worker % does not hold job % under this fence', p_worker, p_id USING ERRCODE = 'RW007';
    ELSIF NOT recorded THEN
        RAISE EXCEPTION 'rouse.record_step_with_effects: the step % of job % is recorded already', p_name, p_id USING ERRCODE = 'RW008';
    END IF;
END
$$;

-- The outcome of an attempt whose settlement had no response: 'held' if the worker still holds the job under this
-- fence, so that nothing was committed; 'settled' if this attempt has ended the job; 'lost' otherwise. Waits up to 250
-- ms for the transaction in question, which has locked the row; after that, the call fails with lock_not_available.
-- Does not wait for a producer that has named the job: its lock is weaker than that of a settlement or of a recorded
-- step. Served by the primary keys.
CREATE OR REPLACE FUNCTION rouse.confirm(p_worker bigint, p_key bytea, p_id bigint, p_fence bigint, p_attempt integer) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '250ms' SET enable_seqscan = off SET jit = off AS $$
BEGIN
    PERFORM rouse._authenticated_as_limited(p_worker, p_key);
    PERFORM FROM rouse.job AS j WHERE j.id = p_id AND j.fence = p_fence AND j.worker = p_worker FOR NO KEY UPDATE;
    IF FOUND THEN
        RETURN 'held';
    END IF;
    PERFORM FROM rouse.finished AS f WHERE f.id = p_id AND f.worker = p_worker AND f.attempt = p_attempt AND f.state = 'succeeded';
    RETURN CASE WHEN FOUND THEN 'settled' ELSE 'lost' END;
END
$$;
