-- Waiting for the ends of jobs.

-- For function `p_name`, rejects a list of ids that is null, contains a null, or is too long.
CREATE OR REPLACE FUNCTION rouse._check_ids(p_name text, p_ids bigint[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF p_ids IS NULL OR array_position(p_ids, NULL) IS NOT NULL THEN
        RAISE EXCEPTION 'rouse.%: ids must be a list of job ids, without nulls', p_name USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF cardinality(p_ids) > 10000 THEN
        RAISE EXCEPTION 'rouse.%: ids has % entries; at most 10000 are allowed', p_name, cardinality(p_ids)
            USING ERRCODE = 'program_limit_exceeded', HINT = 'Call it for 10000 of them at a time.';
    END IF;
END
$$;

-- The states of these jobs, in the order of the list: one row for each job that exists and is still kept. `result` and
-- `error` are null until the job has ended. Served by the primary key and, in each partition, finished_id.
CREATE OR REPLACE FUNCTION rouse.outcomes(ids bigint[])
RETURNS TABLE (id bigint, state rouse.state, ended boolean, attempt integer, result jsonb, error jsonb)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    PERFORM rouse._check_ids('outcomes', ids);
    RETURN QUERY
    SELECT o.*
    FROM (SELECT u.id, min(u.n) AS n FROM unnest(ids) WITH ORDINALITY AS u(id, n) GROUP BY u.id) AS u
    -- Only lookups can serve such conditions (claim.sql).
    CROSS JOIN LATERAL (
        SELECT j.id, j.state, false, j.attempt, NULL::jsonb, NULL::jsonb FROM rouse.job AS j WHERE j.id = ANY (ARRAY[u.id])
        UNION ALL
        SELECT f.id, f.state, true, f.attempt, f.result, f.error FROM rouse.finished AS f WHERE f.id = ANY (ARRAY[u.id])) AS o
    ORDER BY u.n;
END
$$;

-- Whether the caller's transaction, or one of its savepoints, has written this version of a row, which the caller sees:
-- a row that is visible although its transaction is in progress can only be the caller's own.
CREATE OR REPLACE FUNCTION rouse._wrote(p_xmin xid) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    own   bigint := pg_current_xact_id_if_assigned()::text::bigint;
    -- The transaction ids of savepoints come after that of their transaction. In a row they have 32 bits.
    ahead bigint := (p_xmin::text::bigint - own) & 4294967295;
BEGIN
    RETURN coalesce(ahead < 2147483648 AND pg_xact_status((own + ahead)::text::xid8) = 'in progress', false);
EXCEPTION
    -- "Is in the future": a row so old that its number is about to be reused.
    WHEN invalid_parameter_value THEN RETURN false;
END
$$;

-- Refuses to wait for a live job that cannot end before the caller commits, because the caller's transaction has
-- written its row, has sent it a signal, or has enqueued a job that waits for it (each of these locks the row). Served
-- by the primary key, signal_job and dependency_chain.
CREATE OR REPLACE FUNCTION rouse._refuse_own(p_ids bigint[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    own bigint;
BEGIN
    IF pg_current_xact_id_if_assigned() IS NULL THEN
        RETURN;
    END IF;
    SELECT j.id INTO own FROM unnest(p_ids) AS l(id) JOIN rouse.job AS j ON j.id = ANY (ARRAY[l.id]) WHERE rouse._wrote(j.xmin) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'rouse.wait: job % cannot run until this transaction, which has enqueued or changed it, commits', own
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Commit first, then wait.';
    END IF;
    SELECT g.job INTO own FROM unnest(p_ids) AS l(id) JOIN rouse.signal AS g ON g.job = ANY (ARRAY[l.id]) WHERE rouse._wrote(g.xmin) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'rouse.wait: job % cannot end until this transaction, which has sent it a signal, commits', own
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Commit first, then wait.';
    END IF;
    SELECT j.id INTO own
    FROM unnest(p_ids) AS l(id)
    JOIN rouse.job AS j ON j.id = ANY (ARRAY[l.id])
    JOIN rouse.dependency AS d ON d.chain = ANY (ARRAY[coalesce(j.chain, j.id)])
    WHERE rouse._wrote(d.xmin) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'rouse.wait: job % cannot end until this transaction, which has enqueued a job that waits for it, commits', own
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Commit first, then wait.';
    END IF;
END
$$;

-- Waits until all of these jobs have ended, or until the timeout: null means 30 seconds, and 5 minutes is the maximum,
-- because the transaction of the caller stays open for that time. Returns the rows of rouse.outcomes; `ended` is false
-- for jobs that have not ended in time.
--
-- A function cannot listen for notifications, so it polls: after 10 % of the time waited so far, at least 5 ms and at
-- most a second later. Each look has a snapshot of its own, as under READ COMMITTED each statement of a volatile
-- function has. Cancellations and statement_timeout end the wait.
CREATE OR REPLACE FUNCTION rouse.wait(ids bigint[], timeout interval DEFAULT NULL)
RETURNS TABLE (id bigint, state rouse.state, ended boolean, attempt integer, result jsonb, error jsonb)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    since    timestamptz := clock_timestamp();
    -- In seconds: a comparison of intervals counts a month as 30 days; adding one to a time does not.
    max_wait interval := extract(epoch FROM coalesce(wait.timeout, '30 seconds')) * interval '1 second';
    live     bigint[];
    known    bigint[];
    unknown  bigint;
BEGIN
    PERFORM rouse._check_ids('wait', ids);
    IF max_wait < '0' OR max_wait > '5 minutes' THEN
        RAISE EXCEPTION 'rouse.wait: timeout must be between 0 and 5 minutes, not %', max_wait
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Call it again to wait longer, in another transaction.';
    END IF;
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE EXCEPTION 'rouse.wait: a transaction with isolation level % never sees a job end', upper(current_setting('transaction_isolation'))
            USING ERRCODE = 'feature_not_supported', HINT = 'Wait in a transaction with isolation level READ COMMITTED.';
    END IF;
    SELECT coalesce(array_agg(o.id) FILTER (WHERE NOT o.ended), '{}'), array_agg(o.id) INTO live, known FROM rouse.outcomes(ids) AS o;
    unknown := (SELECT min(u.id) FROM (SELECT unnest(ids) EXCEPT SELECT unnest(known)) AS u(id));
    IF unknown IS NOT NULL THEN
        RAISE EXCEPTION 'rouse.wait: job % does not exist, or is no longer kept', unknown
            USING ERRCODE = 'no_data_found', HINT = 'Either it was never enqueued, or its transaction is not committed, or it ended long ago.';
    END IF;
    PERFORM rouse._refuse_own(live);
    WHILE live <> '{}' AND clock_timestamp() < since + max_wait LOOP
        PERFORM pg_sleep(extract(epoch FROM least(
            greatest((clock_timestamp() - since) / 10, '5 milliseconds'), '1 second', since + max_wait - clock_timestamp())));
        live := ARRAY(SELECT l.id FROM unnest(live) AS l(id) WHERE EXISTS (SELECT FROM rouse.job AS j WHERE j.id = ANY (ARRAY[l.id])));
    END LOOP;
    RETURN QUERY SELECT o.* FROM rouse.outcomes(ids) AS o;
END
$$;
