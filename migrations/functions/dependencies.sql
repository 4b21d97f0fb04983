-- Dependencies: a job waits for the end of other chains, and is released by the transaction that ends the last of them.
--
-- A chain is a job and those that continue it, one after another; most jobs are a chain of their own. It has succeeded or failed with its
-- last job. rouse.dependency has a row for each chain that a job waits for, and `blockers` of the job counts them. A job that waits has no
-- turn, so claims do not see it.
--
-- No release is lost:
--   - An enqueue locks the live job of each chain that it names (FOR KEY SHARE) until it commits. So the settlement of that job waits for
--     it, and then sees the dependency; or the enqueue waits for the settlement, and then sees how the chain ended.
--   - A release locks the waiting job before it subtracts, and subtracts only dependencies that it has deleted itself.
--   - A release never waits for a lock. A chain with dependencies that are left, because another transaction has locked their jobs or because
--     there are too many, is noted in rouse.pending_release in the same transaction. The host that settled continues at once, and any other
--     host after a second.

-- The chain of a job; null if the job does not exist or is no longer kept.
CREATE OR REPLACE FUNCTION rouse._chain_of(p_id bigint) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT coalesce(j.chain, j.id) FROM rouse.job AS j WHERE j.id = p_id),
                    (SELECT coalesce(f.chain, f.id) FROM rouse.finished AS f WHERE f.id = p_id LIMIT 1))
$$;

-- The live job of a chain; null if the chain has ended. Served by the primary key and job_chain.
CREATE OR REPLACE FUNCTION rouse._live_job(p_chain bigint) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT j.id FROM rouse.job AS j WHERE j.id = p_chain), (SELECT j.id FROM rouse.job AS j WHERE j.chain = p_chain))
$$;

-- The job of a chain that ended last. Served by finished_chain and finished_id.
CREATE OR REPLACE FUNCTION rouse._last_ended(p_chain bigint) RETURNS rouse.finished
LANGUAGE plpgsql STABLE AS $$
DECLARE
    ended rouse.finished;
BEGIN
    SELECT * INTO ended FROM rouse.finished AS f WHERE f.chain = p_chain ORDER BY f.id DESC LIMIT 1;
    IF NOT FOUND THEN
        SELECT * INTO ended FROM rouse.finished AS f WHERE f.id = p_chain LIMIT 1;
    END IF;
    RETURN ended;
END
$$;

-- Locks a live job against its end until the caller commits, and returns its chain; null if it is not live. Waits for a settlement that is
-- about to commit. Served by the primary key.
CREATE OR REPLACE FUNCTION rouse._lock_live(p_id bigint) RETURNS bigint
LANGUAGE sql AS $$
    SELECT coalesce(j.chain, j.id) FROM rouse.job AS j WHERE j.id = p_id FOR KEY SHARE
$$;

-- Finds the chains that `after` of an enqueue names, and locks them as described above:
--
--   after                the argument as it is stored: by name, and with chains instead of jobs; null: it names none
--   chains, on_failures  those that the job waits for: they have not ended, or have failed and it waits for a retry
--   failed               a chain whose failure cancels the job; null: none
CREATE OR REPLACE FUNCTION rouse._find_parents(p_after jsonb, OUT after jsonb, OUT chains bigint[], OUT on_failures text[], OUT failed bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    wrong  record;
    parent record;
    chain  bigint;
    live   bigint;
    ended  rouse.finished;
    names  text[] := '{}';
    named  bigint[] := '{}';
    kinds  text[] := '{}';
BEGIN
    IF jsonb_typeof(p_after) = 'array' THEN
        SELECT coalesce(jsonb_object_agg(coalesce(e.value #>> '{}', 'null'), e.value), '{}') INTO p_after FROM jsonb_array_elements(p_after) AS e;
    ELSIF jsonb_typeof(p_after) <> 'object' THEN
        RAISE EXCEPTION 'rouse.enqueue: after must be a list of job ids, or an object with a job id for each name, not %', left(p_after::text, 140)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'For instance [17, 18], or {"charge": 17, "notify": {"job": 18, "on_failure": "run"}}.';
    END IF;
    IF (SELECT count(*) FROM jsonb_object_keys(p_after)) > 10000 THEN
        RAISE EXCEPTION 'rouse.enqueue: after names more than 10000 jobs, the maximum' USING ERRCODE = 'program_limit_exceeded';
    END IF;
    SELECT e.key, e.value INTO wrong
    FROM jsonb_each(p_after) AS e
    CROSS JOIN LATERAL (SELECT CASE jsonb_typeof(e.value) WHEN 'object' THEN e.value -> 'job' ELSE e.value END AS id) AS job
    WHERE length(e.key) NOT BETWEEN 1 AND 200
       OR coalesce(jsonb_typeof(job.id), 'null') NOT IN ('number', 'string')
       OR job.id #>> '{}' !~ '^[1-9][0-9]{0,17}$'
       OR (jsonb_typeof(e.value) = 'object'
           AND (coalesce(e.value -> 'on_failure', '"cancel"') NOT IN ('"cancel"', '"run"', '"wait"') OR e.value - '{job,on_failure}'::text[] <> '{}'))
    LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'rouse.enqueue: entry % of after must be a job id, not %', quote_literal(left(wrong.key, 140)), left(wrong.value::text, 140)
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'A name has 1 to 200 characters. Its job is an id, or {"job": id, "on_failure": "cancel"}, or "run" or "wait" instead of "cancel".';
    END IF;

    chains := '{}';
    on_failures := '{}';
    FOR parent IN
        SELECT asked.name, asked.id, asked.on_failure, rouse._lock_live(asked.id) AS chain
        FROM (
            SELECT e.key AS name, (CASE jsonb_typeof(e.value) WHEN 'object' THEN e.value ->> 'job' ELSE e.value #>> '{}' END)::bigint AS id,
                   CASE jsonb_typeof(e.value) WHEN 'object' THEN coalesce(e.value ->> 'on_failure', 'cancel') ELSE 'cancel' END AS on_failure
            FROM jsonb_each(p_after) AS e ORDER BY 2) AS asked
    LOOP
        chain := coalesce(parent.chain, rouse._chain_of(parent.id));
        IF chain IS NULL THEN
            RAISE EXCEPTION 'rouse.enqueue: after names job % (as %), which does not exist or is no longer kept', parent.id, quote_literal(parent.name)
                USING ERRCODE = 'no_data_found', HINT = 'Only the transaction that enqueues a job can name it before it commits.';
        END IF;
        names := names || parent.name;
        named := named || chain;
        kinds := kinds || parent.on_failure;
        live := parent.id;
        WHILE parent.chain IS NULL LOOP
            live := rouse._live_job(chain);
            IF live IS NULL THEN
                ended := rouse._last_ended(chain);
                EXIT WHEN ended.state = 'succeeded' OR parent.on_failure = 'run';
                IF parent.on_failure = 'cancel' THEN
                    failed := chain;
                    EXIT;
                END IF;
                -- A retry takes a stronger lock of this row: either it waits, and sees the dependency, or it has committed.
                PERFORM FROM rouse.finished AS f WHERE f.id = ended.id FOR KEY SHARE;
                EXIT WHEN rouse._live_job(chain) IS NULL;
            ELSE
                -- Null if it has ended just now; then another job may continue the chain.
                parent.chain := rouse._lock_live(live);
            END IF;
        END LOOP;
        IF live IS NOT NULL OR (parent.on_failure = 'wait' AND ended.state <> 'succeeded') THEN
            chains := chains || chain;
            on_failures := on_failures || parent.on_failure;
        END IF;
    END LOOP;
    SELECT string_agg(quote_literal(n.name), ' and ') INTO wrong
    FROM unnest(names, named) AS n(name, chain) GROUP BY n.chain HAVING count(*) > 1 LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'rouse.enqueue: % of after name the same chain', wrong.string_agg
            USING ERRCODE = 'invalid_parameter_value', HINT = 'A job waits for the end of a chain, whichever of its jobs is named.';
    END IF;
    SELECT jsonb_object_agg(n.name, CASE n.kind WHEN 'cancel' THEN to_jsonb(n.chain) ELSE jsonb_build_object('job', n.chain, 'on_failure', n.kind) END)
    INTO after
    FROM unnest(names, named, kinds) AS n(name, chain, kind);
END
$$;

-- Adds the dependencies of a new job, as rouse._find_parents has found them. If one of its chains has failed, the job is cancelled.
CREATE OR REPLACE FUNCTION rouse._add_dependencies(p_job bigint, p_chains bigint[], p_on_failures text[], p_failed bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO rouse.dependency (chain, on_failure, job)
    SELECT d.chain, d.on_failure, p_job FROM unnest(p_chains, p_on_failures) AS d(chain, on_failure);
    IF p_failed IS NOT NULL THEN
        PERFORM rouse._cancel_dependents(ARRAY[p_job], ARRAY[p_failed]);
    END IF;
END
$$;

-- Ends queued jobs, which the caller has locked, and returns their chains. Their dependencies are deleted. The caller releases the jobs that
-- wait for these chains (rouse._chains_ended).
CREATE OR REPLACE FUNCTION rouse._end_queued(p_ids bigint[], p_state rouse.state, p_result jsonb, p_error jsonb, p_at timestamptz) RETURNS bigint[]
LANGUAGE plpgsql AS $$
DECLARE
    some_differ boolean;
    chains      bigint[];
BEGIN
    PERFORM FROM rouse.queue AS q WHERE q.keep_days IS NOT NULL OR q.keep_failed_days IS NOT NULL;
    some_differ := FOUND;
    DELETE FROM rouse.dependency AS d WHERE d.job = ANY (p_ids);
    WITH gone AS (
        DELETE FROM rouse.job AS j USING unnest(p_ids) AS ended(id) WHERE j.id = ANY (ARRAY[ended.id]) AND j.state = 'queued' RETURNING j.*),
    kept AS (
        INSERT INTO rouse.finished AS f (id, lane, retried_from, chain, flow, flow_name, requested_at, available_at, finished_at,
                                    attempt, lost, max_attempts, state, tenant, source, unique_key, payload, payload_at, result, error, grants,
                                    lease_ms, timeout_ms, after, keep_days)
        SELECT g.id, g.lane, g.retried_from, g.chain, g.flow, g.flow_name, g.requested_at, g.available_at, p_at,
               g.attempt, g.lost, g.max_attempts, p_state, g.tenant, g.source, g.unique_key, g.payload, g.payload_at, p_result, p_error, g.grants,
               g.lease_ms, g.timeout_ms, g.after, CASE WHEN some_differ THEN rouse._keep_days(g.lane, p_state, p_at) ELSE 0 END
        FROM gone AS g
        RETURNING coalesce(f.chain, f.id) AS chain)
    SELECT coalesce(array_agg(k.chain), '{}') INTO chains FROM kept AS k;
    RETURN chains;
END
$$;

-- Cancels jobs, which the caller has locked, because chains that they wait for have failed. What waits for them is left to
-- rouse.continue_releases, so that a transaction cancels one level of a graph.
CREATE OR REPLACE FUNCTION rouse._cancel_dependents(p_ids bigint[], p_failed bigint[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    at     timestamptz := clock_timestamp();
    chains bigint[];
BEGIN
    PERFORM rouse._ensure_partitions(at);
    INSERT INTO rouse.record (at, job, event, detail)
    SELECT at, ended.id, 'cancelled', jsonb_build_object('after', ended.failed) FROM unnest(p_ids, p_failed) AS ended(id, failed);
    chains := rouse._end_queued(p_ids, 'cancelled', NULL, NULL, at);
    INSERT INTO rouse.pending_release (chain, succeeded, tried_at)
    SELECT ended.chain, false, at FROM unnest(chains) AS ended(chain)
    WHERE EXISTS (SELECT FROM rouse.dependency AS d WHERE d.chain = ANY (ARRAY[ended.chain]) AND d.on_failure IN ('cancel', 'run'))
    ON CONFLICT (chain) DO UPDATE SET succeeded = false, tried_at = at;
END
$$;

-- Releases jobs that wait for these chains, which have ended, at most `p_most`: a chain that has succeeded counts down the blockers of each
-- job; one that has failed does so for those with on_failure 'run', cancels those with 'cancel', and leaves those with 'wait' alone. Jobs
-- that wait for nothing else become ready, or wait for their run_at. Never waits for a lock. Returns how many dependencies were resolved,
-- and the chains that have some left. Served by the primary keys.
CREATE OR REPLACE FUNCTION rouse._release(p_chains bigint[], p_succeeded boolean[], p_most integer, OUT resolved integer, OUT remaining bigint[])
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at        timestamptz := clock_timestamp();
    cancelled bigint[];
    failed    bigint[];
    lanes     bigint[];
BEGIN
    resolved := 0;
    IF false = ANY (p_succeeded) THEN
        SELECT coalesce(array_agg(d.job), '{}'), array_agg(d.chain) INTO cancelled, failed
        FROM (
            SELECT d.job, min(d.chain) AS chain
            FROM unnest(p_chains, p_succeeded) AS ended(chain, succeeded)
            CROSS JOIN LATERAL (
                SELECT d.chain, d.job FROM rouse.dependency AS d
                WHERE d.chain = ended.chain AND d.on_failure = 'cancel' LIMIT p_most) AS d
            WHERE NOT ended.succeeded
            GROUP BY d.job ORDER BY d.job LIMIT p_most) AS d
        CROSS JOIN LATERAL (SELECT FROM rouse.job AS j WHERE j.id = ANY (ARRAY[d.job]) FOR UPDATE SKIP LOCKED) AS j;
        IF cancelled <> '{}' THEN
            PERFORM rouse._cancel_dependents(cancelled, failed);
            resolved := cardinality(cancelled);
        END IF;
    END IF;
    WITH locked AS MATERIALIZED (
        SELECT d.chain, d.on_failure, d.job
        FROM (
            SELECT d.chain, d.on_failure, d.job
            FROM unnest(p_chains, p_succeeded) AS ended(chain, succeeded)
            CROSS JOIN LATERAL unnest(CASE WHEN ended.succeeded THEN '{cancel,run,wait}' ELSE '{run}' END::text[]) AS kind(name)
            CROSS JOIN LATERAL (
                SELECT d.chain, d.on_failure, d.job FROM rouse.dependency AS d
                WHERE d.chain = ended.chain AND d.on_failure = kind.name LIMIT p_most) AS d
            LIMIT p_most - resolved) AS d
        -- Once for each dependency: it is the same lock.
        CROSS JOIN LATERAL (SELECT FROM rouse.job AS j WHERE j.id = ANY (ARRAY[d.job]) FOR NO KEY UPDATE SKIP LOCKED) AS j),
    gone AS (
        DELETE FROM rouse.dependency AS d USING locked AS l
        -- Only lookups can serve these conditions (claim.sql).
        WHERE d.chain = ANY (ARRAY[l.chain]) AND d.on_failure = ANY (ARRAY[l.on_failure]) AND d.job = ANY (ARRAY[l.job])
        RETURNING d.job),
    -- In the order of their ids, which becomes that of their turns.
    counted AS MATERIALIZED (SELECT g.job, count(*)::integer AS chains FROM gone AS g GROUP BY g.job ORDER BY g.job),
    released AS (
        UPDATE rouse.job AS j
        SET blockers = nullif(j.blockers - c.chains, 0),
            turn = CASE WHEN j.blockers = c.chains AND j.available_at <= at THEN nextval('rouse.turn_seq') END,
            available_at = CASE WHEN j.blockers = c.chains THEN greatest(j.available_at, at) ELSE j.available_at END
        FROM counted AS c WHERE j.id = ANY (ARRAY[c.job])
        RETURNING j.lane, j.turn, c.chains)
    SELECT resolved + coalesce(sum(r.chains), 0), array_agg(DISTINCT r.lane) FILTER (WHERE r.turn IS NOT NULL)
    INTO resolved, lanes FROM released AS r;
    -- As in rouse._settle: for many lanes no lock is taken.
    PERFORM rouse._notify(l.lane, true, CASE WHEN cardinality(lanes) <= 32 THEN at ELSE '-infinity' END)
    FROM unnest(lanes) AS l(lane);
    remaining := ARRAY(
        SELECT ended.chain FROM unnest(p_chains, p_succeeded) AS ended(chain, succeeded)
        WHERE EXISTS (
            SELECT FROM unnest(CASE WHEN ended.succeeded THEN '{cancel,run,wait}' ELSE '{cancel,run}' END::text[]) AS kind(name)
            CROSS JOIN LATERAL (
                SELECT FROM rouse.dependency AS d WHERE d.chain = ended.chain AND d.on_failure = kind.name LIMIT 1) AS d));
END
$$;

-- Releases the jobs that wait for these chains, which have ended in this transaction. Returns whether some are left to
-- rouse.continue_releases.
CREATE OR REPLACE FUNCTION rouse._chains_ended(p_chains bigint[], p_succeeded boolean[]) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    remaining bigint[];
BEGIN
    -- Most jobs have none that wait for them.
    PERFORM FROM unnest(p_chains) AS ended(chain)
    CROSS JOIN LATERAL (SELECT FROM rouse.dependency AS d WHERE d.chain = ended.chain LIMIT 1) AS d LIMIT 1;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    SELECT r.remaining INTO remaining FROM rouse._release(p_chains, p_succeeded, 1000) AS r;
    INSERT INTO rouse.pending_release (chain, succeeded, tried_at)
    SELECT ended.chain, ended.succeeded, clock_timestamp()
    FROM unnest(p_chains, p_succeeded) AS ended(chain, succeeded) WHERE ended.chain = ANY (remaining)
    ON CONFLICT (chain) DO UPDATE SET succeeded = excluded.succeeded, tried_at = excluded.tried_at;
    RETURN remaining <> '{}';
END
$$;

-- Releases more of the jobs that wait for chains that have ended, at most `p_most`. Returns whether there is more to do at once: not if all
-- that is left is locked by other transactions. Any worker may call it. Served by pending_release_tried.
CREATE OR REPLACE FUNCTION rouse.continue_releases(p_worker bigint, p_key bytea, p_most integer) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    chains    bigint[];
    succeeded boolean[];
    released  record;
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    SELECT array_agg(p.chain), array_agg(p.succeeded) INTO chains, succeeded
    FROM (SELECT p.chain, p.succeeded FROM rouse.pending_release AS p ORDER BY p.tried_at LIMIT 100 FOR UPDATE SKIP LOCKED) AS p;
    IF chains IS NULL THEN
        RETURN false;
    END IF;
    SELECT * INTO released FROM rouse._release(chains, succeeded, least(greatest(coalesce(p_most, 0), 1), 10000));
    DELETE FROM rouse.pending_release AS p WHERE p.chain = ANY (chains) AND NOT p.chain = ANY (released.remaining);
    UPDATE rouse.pending_release AS p SET tried_at = clock_timestamp() WHERE p.chain = ANY (released.remaining);
    RETURN released.resolved > 0 AND EXISTS (SELECT FROM rouse.pending_release);
END
$$;

-- The net below all of this, for maintenance: notes chains that have ended although jobs still wait for them, which no known interleaving
-- leaves behind. A chain that is no longer kept counts as failed, and cancels also the jobs that wait for a retry of it, which can never
-- come. Looks at `p_most` chains from a random one on. Served by the primary keys.
CREATE OR REPLACE FUNCTION rouse._sweep_dependencies(p_most integer) RETURNS integer
LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    next  bigint := (SELECT max(d.chain) FROM rouse.dependency AS d) * random();
    ended rouse.finished;
    noted integer := 0;
BEGIN
    FOR n IN 1 .. p_most LOOP
        next := (SELECT min(d.chain) FROM rouse.dependency AS d WHERE d.chain > next);
        EXIT WHEN next IS NULL;
        CONTINUE WHEN rouse._live_job(next) IS NOT NULL;
        ended := rouse._last_ended(next);
        IF ended.id IS NULL THEN
            UPDATE rouse.dependency AS d SET on_failure = 'cancel' WHERE d.chain = next AND d.on_failure = 'wait';
        END IF;
        INSERT INTO rouse.pending_release (chain, succeeded, tried_at)
        SELECT next, coalesce(ended.state = 'succeeded', false), clock_timestamp()
        WHERE ended.state = 'succeeded' OR EXISTS (SELECT FROM rouse.dependency AS d WHERE d.chain = next AND d.on_failure IN ('cancel', 'run'))
        ON CONFLICT DO NOTHING;
        noted := noted + CASE WHEN FOUND THEN 1 ELSE 0 END;
    END LOOP;
    RETURN noted;
END
$$;
