-- Chains: a job and those that continue it. Each function takes the id of any job of the chain. The id of a chain is
-- that of its first job.

-- The jobs of a chain that are kept, in order; no row if the job does not exist or is no longer kept. `is_last`: the
-- end of the chain is that of this job, which is live or has ended last. It is false for all jobs if the last one is no
-- longer kept. Served by finished_id, finished_chain, job_chain, the primary key and record_job.
CREATE OR REPLACE FUNCTION rouse.chain(id bigint)
RETURNS TABLE (job bigint, handler text, queue text, state rouse.state, attempt integer, retried_from bigint, requested_at timestamptz,
               finished_at timestamptz, is_last boolean)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    first bigint := rouse._chain_of(chain.id);
    last  bigint := coalesce(rouse._live_job(first), (rouse._last_ended(first)).id);
BEGIN
    RETURN QUERY
    SELECT e.id, l.handler, l.queue, e.state, e.attempt, e.retried_from, e.requested_at, e.finished_at, e.id IS NOT DISTINCT FROM last
    FROM (
        SELECT f.id, f.lane, f.state, f.attempt, f.retried_from, f.requested_at, f.finished_at FROM rouse.finished AS f WHERE f.id = first
        UNION ALL
        SELECT f.id, f.lane, f.state, f.attempt, f.retried_from, f.requested_at, f.finished_at FROM rouse.finished AS f WHERE f.chain = first
        UNION ALL
        SELECT j.id, j.lane, j.state, j.attempt, j.retried_from, j.requested_at, NULL FROM rouse.job AS j WHERE j.id = rouse._live_job(first)) AS e
    CROSS JOIN LATERAL (SELECT l.handler, l.queue FROM rouse.lane AS l WHERE l.id = e.lane LIMIT 1) AS l
    ORDER BY e.id;
END
$$;

-- The result of a chain, which is that of its last job; null while it is live, and if it has not succeeded, is unknown
-- or is no longer kept. Served by the same indexes as rouse.chain.
CREATE OR REPLACE FUNCTION rouse.chain_result(id bigint) RETURNS jsonb
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    first bigint := rouse._chain_of(chain_result.id);
BEGIN
    IF rouse._live_job(first) IS NOT NULL THEN
        RETURN NULL;
    END IF;
    RETURN (rouse._last_ended(first)).result;
END
$$;

-- Locks the live job of a chain and returns it; null if there is none. Waits for a concurrent change of that job; if it
-- has ended, continues with the next job of the chain. Served by the same indexes as rouse.chain.
CREATE OR REPLACE FUNCTION rouse._lock_live_job(p_chain bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    live bigint;
BEGIN
    LOOP
        live := rouse._live_job(p_chain);
        EXIT WHEN live IS NULL;
        PERFORM FROM rouse.job AS j WHERE j.id = live FOR UPDATE;
        EXIT WHEN FOUND;
    END LOOP;
    RETURN live;
END
$$;

-- Locks and returns the live job of a chain; if there is none, the job that ended last, so that the chain is not
-- retried until the caller commits. Waits for a concurrent retry. Raises an error if the chain does not exist, or its
-- end is no longer kept.
CREATE OR REPLACE FUNCTION rouse._lock_chain(p_name text, p_id bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    first bigint;
    last  bigint;
BEGIN
    PERFORM rouse._check_id(p_name, p_id);
    first := rouse._chain_of(p_id);
    IF first IS NULL THEN
        PERFORM rouse._ended_job(p_id);
    END IF;
    LOOP
        last := rouse._lock_live_job(first);
        EXIT WHEN last IS NOT NULL;
        -- A separate statement sees what was committed while this function waited for the lock.
        last := (rouse._last_ended(first)).id;
        -- A retry also locks the row (rouse._retry): it has committed, or it waits.
        PERFORM FROM rouse.finished AS f WHERE f.id = last FOR UPDATE;
        EXIT WHEN rouse._live_job(first) IS NULL AND (rouse._last_ended(first)).id IS NOT DISTINCT FROM last;
    END LOOP;
    IF last IS NULL THEN
        RAISE EXCEPTION 'rouse: the last job of chain % is no longer kept', first
            USING ERRCODE = 'no_data_found', HINT = 'The chain has ended, but how it has ended is no longer known.';
    END IF;
    RETURN last;
END
$$;

-- Completes the live job of a chain without a worker. True: the chain has succeeded with this result, because of this
-- call or an earlier one.
CREATE OR REPLACE FUNCTION rouse.complete_chain(id bigint, result jsonb DEFAULT 'null') RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    last bigint := rouse._lock_chain('complete_chain', complete_chain.id);
BEGIN
    RETURN rouse.complete(last, complete_chain.result);
END
$$;

-- Cancels the live job of a chain. True: the chain is cancelled, because of this call or an earlier one. False: it has
-- ended in another way.
CREATE OR REPLACE FUNCTION rouse.cancel_chain(id bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    last bigint := rouse._lock_chain('cancel_chain', cancel_chain.id);
BEGIN
    RETURN rouse.cancel(last);
END
$$;

-- 'job 7 waits', 'jobs 7, 8 wait', or, for more than ten, 'jobs 7, 8, … and others wait'.
CREATE OR REPLACE FUNCTION rouse._format_dependents(p_ids bigint[]) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN cardinality(p_ids) = 1 THEN 'job ' || p_ids[1] || ' waits'
                ELSE 'jobs ' || array_to_string(p_ids[:10], ', ') || CASE WHEN cardinality(p_ids) > 10 THEN ' and others wait' ELSE ' wait' END END
$$;

-- For function `p_name`, refuses a transaction with a single snapshot: jobs that have been enqueued since, and wait for
-- what the function deletes, would be invisible.
CREATE OR REPLACE FUNCTION rouse._refuse_snapshot(p_name text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE EXCEPTION 'rouse.%: a transaction with isolation level % may not see all jobs that wait', p_name, upper(current_setting('transaction_isolation'))
            USING ERRCODE = 'feature_not_supported', HINT = 'Call it in a transaction with isolation level READ COMMITTED.';
    END IF;
END
$$;

-- Deletes a chain: its queued job is cancelled, and a record shows that it was deleted. Refused while its job is
-- running, and while other jobs wait for it, unless `cascade` is true: then these jobs are cancelled first, whatever
-- their on_failure is, up to 1,000 in each call. True: the chain is deleted. False: more jobs wait for it, and the next
-- call continues. Each call is a separate transaction, so that a large number of jobs does not delay anything else.
-- Jobs that another transaction has locked are left to the next call; if all remaining jobs are locked, the call raises
-- an error. Jobs that wait for the cancelled ones follow their own on_failure. Between two calls, the chain is live as
-- before: the next call also cancels jobs that were enqueued after it in the meantime, and retries of the cancelled
-- ones. A worker may start its job if it is ready: then the next call is refused, and the jobs that still wait are
-- released or cancelled when the chain ends. Served by dependency_chain.
CREATE OR REPLACE FUNCTION rouse.delete_chain(id bigint, cascade boolean DEFAULT false) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    last      bigint := rouse._lock_chain('delete_chain', delete_chain.id);
    first     bigint := rouse._chain_of(last);
    waiting   bigint[] := ARRAY(SELECT d.job FROM (SELECT d.job FROM rouse.dependency AS d WHERE d.chain = first LIMIT 11) AS d ORDER BY 1);
    cancelled bigint[];
BEGIN
    PERFORM rouse._refuse_snapshot('delete_chain');
    IF waiting <> '{}' AND cascade IS NOT TRUE THEN
        RAISE EXCEPTION 'rouse: chain % cannot be deleted: % for it', first,
            rouse._format_dependents(waiting)
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = format('SELECT rouse.delete_chain(%s, cascade => true) cancels them too.', first);
    END IF;
    PERFORM rouse._check_deletable(last);
    IF waiting <> '{}' THEN
        WITH locked AS MATERIALIZED (
            SELECT d.ctid AS row FROM rouse.dependency AS d
            CROSS JOIN LATERAL (SELECT FROM rouse.job AS j WHERE j.id = ANY (ARRAY[d.job]) FOR UPDATE SKIP LOCKED) AS j
            WHERE d.chain = first
            LIMIT 1000),
        gone AS (
            -- As in rouse._release: rows of a job change only under its lock.
            DELETE FROM rouse.dependency AS d USING locked AS l WHERE d.ctid = l.row RETURNING d.job)
        SELECT coalesce(array_agg(g.job), '{}') INTO cancelled FROM gone AS g;
        PERFORM rouse._cancel_dependents(cancelled, array_fill(first, ARRAY[cardinality(cancelled)]));
        PERFORM FROM rouse.dependency AS d WHERE d.chain = first LIMIT 1;
        IF FOUND AND cancelled <> '{}' THEN
            RETURN false;
        ELSIF FOUND THEN
            RAISE EXCEPTION 'rouse: chain % cannot be deleted: another transaction has locked a job that waits for it', first
                USING ERRCODE = 'lock_not_available', HINT = 'Try again.';
        END IF;
    END IF;
    RETURN rouse.delete(last);
END
$$;
