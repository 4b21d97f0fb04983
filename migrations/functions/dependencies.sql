-- Dependencies: a job waits for the end of other chains, and is released by the transaction that ends the last of them.
--
-- A chain is a job and those that continue it, one after another; most jobs are a chain of their own. A chain succeeds
-- or fails with its last job. rouse.dependency has a row for each chain that a job waits for, and `blockers` of the job
-- counts these rows. A job that waits has no turn, so claims do not see it.
--
-- No release is lost:
--   - An enqueue locks the live job of each chain that it names (FOR KEY SHARE) until it commits. So the settlement of
--     that job waits for it, and then sees the dependency; or the enqueue waits for the settlement, and then sees the
--     end of the chain.
--   - A release locks the waiting job before it subtracts, and subtracts only dependencies that it has deleted itself.
--   - A release never waits for a lock. If some dependencies of a chain are left, because another transaction has
--     locked their jobs or because there are too many, the chain is noted in rouse.pending_release in the same
--     transaction. The host that settled it continues the release at once; any other host continues it after a second.

-- The chain of a job; null if the job does not exist or is no longer kept. Served by the primary key,
-- job_chain, finished_id and finished_chain.
CREATE OR REPLACE FUNCTION rouse._chain_of(p_id bigint) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT coalesce(j.chain, j.id) FROM rouse.job AS j WHERE j.id = p_id),
                    (SELECT coalesce(f.chain, f.id) FROM rouse.finished AS f WHERE f.id = p_id LIMIT 1),
                    -- The first job of a chain may no longer be kept.
                    (SELECT j.chain FROM rouse.job AS j WHERE j.chain = p_id),
                    (SELECT f.chain FROM rouse.finished AS f WHERE f.chain = p_id LIMIT 1))
$$;

-- The live job of a chain; null if the chain has ended. Served by the primary key and job_chain.
CREATE OR REPLACE FUNCTION rouse._live_job(p_chain bigint) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT j.id FROM rouse.job AS j WHERE j.id = p_chain), (SELECT j.id FROM rouse.job AS j WHERE j.chain = p_chain))
$$;

-- True if another job has followed this ended one in its chain: it has continued the chain, or was retried. Served by
-- record_job.
CREATE OR REPLACE FUNCTION rouse._has_successor(p_ended rouse.finished) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF p_ended.state = 'succeeded' THEN
        -- The retry of a job that has succeeded starts a chain of its own.
        RETURN p_ended.continued IS TRUE;
    END IF;
    RETURN EXISTS (SELECT FROM rouse.record AS r WHERE r.job = p_ended.id AND r.event = 'retried');
END
$$;

-- The job of a chain that ended last; null if it is no longer kept. An older job of the chain may be kept longer,
-- because queues have different retentions, and failed jobs too: it is not the end of a chain that has ended. Served by
-- finished_chain, finished_id, the primary key, job_chain and record_job.
CREATE OR REPLACE FUNCTION rouse._last_ended(p_chain bigint) RETURNS rouse.finished
LANGUAGE plpgsql STABLE AS $$
DECLARE
    ended rouse.finished;
BEGIN
    SELECT * INTO ended FROM rouse.finished AS f WHERE f.chain = p_chain ORDER BY f.id DESC LIMIT 1;
    IF NOT FOUND THEN
        SELECT * INTO ended FROM rouse.finished AS f WHERE f.id = p_chain LIMIT 1;
    END IF;
    IF rouse._has_successor(ended) AND rouse._live_job(p_chain) IS NULL THEN
        ended := NULL;
    END IF;
    RETURN ended;
END
$$;

-- The end of a chain, for the jobs that have waited for it; `job` is null if the end is no longer kept. Not STABLE:
-- after waiting for the drop of a partition, it has to see the end that was kept. Served by the same indexes as
-- rouse._last_ended, and by the primary key.
CREATE OR REPLACE FUNCTION rouse._end_of(p_chain bigint, OUT job bigint, OUT state rouse.state, OUT result jsonb, OUT error jsonb)
LANGUAGE plpgsql AS $$
DECLARE
    ended rouse.finished := rouse._last_ended(p_chain);
BEGIN
    SELECT k.job, k.state, k.result, k.error INTO job, state, result, error FROM rouse.kept_end AS k WHERE k.chain = p_chain;
    IF NOT FOUND OR job < ended.id THEN
        job := ended.id;
        state := ended.state;
        result := ended.result;
        error := ended.error;
    END IF;
END
$$;

-- Before partitions of rouse.finished are dropped: keeps the ends of chains that live jobs have waited for, with
-- `after` or in a call, and deletes those that no live job needs any more. An older job of a chain is not its end, even
-- if the end is no longer kept (rouse._last_ended). Reads all live jobs once.
CREATE OR REPLACE FUNCTION rouse._keep_ends(p_partitions text[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    known  bigint[];
    needed bigint[];
    name   text;
BEGIN
    -- The rows are locked before it is decided which are needed. An enqueue that relies on a row has locked it.
    known := ARRAY(SELECT k.chain FROM rouse.kept_end AS k FOR UPDATE SKIP LOCKED);
    -- In one statement, because an enqueue that commits in the meantime may keep an end itself.
    WITH needed AS MATERIALIZED (
        SELECT (d.job #>> '{}')::bigint AS chain
        FROM rouse.job AS j CROSS JOIN LATERAL rouse._dependencies_of(j.after) AS d WHERE j.after IS NOT NULL
        UNION
        -- Includes calls of an attempt that has failed since: the next attempt makes these calls again. A job with a
        -- call was suspended at least once.
        SELECT (s.wait ->> 'chain')::bigint
        FROM rouse.job AS j
        CROSS JOIN LATERAL (SELECT s.name, s.wait FROM rouse.step AS s WHERE s.job = ANY (ARRAY[j.id]) AND s.wait ->> 'kind' = 'call') AS s
        WHERE j.uncounted > 0
          AND NOT EXISTS (SELECT FROM rouse.step AS done WHERE done.job = ANY (ARRAY[j.id]) AND done.name = s.name AND done.result IS NOT NULL)),
    gone AS (
        DELETE FROM rouse.kept_end AS k USING unnest(known) AS u(chain)
        WHERE k.chain = u.chain AND NOT EXISTS (SELECT FROM needed AS n WHERE n.chain = k.chain))
    SELECT coalesce(array_agg(n.chain), '{}') INTO needed FROM needed AS n;
    IF needed = '{}' THEN
        RETURN;
    END IF;
    FOREACH name IN ARRAY p_partitions LOOP
        EXECUTE format(
            'WITH n AS MATERIALIZED (SELECT n.chain FROM unnest($1) AS n(chain) WHERE n.chain <= (SELECT max(f.id) FROM rouse.%1$I AS f)), '
            -- Materialized, so that rouse._last_ended is called for chains in this partition only.
            'e AS MATERIALIZED ('
            '    SELECT DISTINCT ON (e.chain) e.chain, e.id, e.state, e.result, e.error '
            '    FROM (SELECT n.chain, f.id, f.state, f.result, f.error FROM n JOIN rouse.%1$I AS f ON f.id = n.chain '
            '          UNION ALL SELECT n.chain, f.id, f.state, f.result, f.error FROM n JOIN rouse.%1$I AS f ON f.chain = n.chain) AS e '
            '    ORDER BY e.chain, e.id DESC) '
            'INSERT INTO rouse.kept_end AS k (chain, job, state, result, error) '
            'SELECT e.chain, e.id, e.state, e.result, e.error FROM e WHERE e.id = (rouse._last_ended(e.chain)).id '
            'ON CONFLICT (chain) DO UPDATE SET job = excluded.job, state = excluded.state, result = excluded.result, error = excluded.error '
            'WHERE k.job < excluded.job', name) USING needed;
    END LOOP;
END
$$;

-- Locks a live job, so that it cannot end before the caller commits, and returns its chain; null if it is not live.
-- Waits for a settlement that is about to commit. Served by the primary key.
CREATE OR REPLACE FUNCTION rouse._lock_live(p_id bigint) RETURNS bigint
LANGUAGE sql AS $$
    SELECT coalesce(j.chain, j.id) FROM rouse.job AS j WHERE j.id = p_id FOR KEY SHARE
$$;

-- The entries of an `after`: for each, its name, the job that it names, the effect of that job's failure, and the entry
-- itself. There are none if `after` is null. The job of an invalid entry is null or not an id.
CREATE OR REPLACE FUNCTION rouse._dependencies_of(p_after jsonb) RETURNS TABLE (name text, job jsonb, on_failure jsonb, entry jsonb)
LANGUAGE sql IMMUTABLE ROWS 10 AS $$
    SELECT e.name, CASE jsonb_typeof(e.entry) WHEN 'object' THEN coalesce(e.entry -> 'job', 'null') ELSE e.entry END,
           CASE jsonb_typeof(e.entry) WHEN 'object' THEN coalesce(e.entry -> 'on_failure', '"cancel"') ELSE '"cancel"' END, e.entry
    FROM (
        SELECT o.key, o.value FROM jsonb_each(CASE WHEN jsonb_typeof(p_after) = 'object' THEN p_after END) AS o
        UNION ALL
        SELECT coalesce(a.value #>> '{}', 'null'), a.value FROM jsonb_array_elements(CASE WHEN jsonb_typeof(p_after) = 'array' THEN p_after END) AS a
    ) AS e(name, entry)
$$;

-- Rejects a malformed `after`, with an error that names the entry.
CREATE OR REPLACE FUNCTION rouse._check_after(p_after jsonb) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    entries bigint;
    invalid record;
BEGIN
    IF jsonb_typeof(p_after) NOT IN ('array', 'object') THEN
        RAISE EXCEPTION 'rouse.enqueue: after must be an array of job ids, or an object with a job id for each name, not %', left(p_after::text, 140)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'For instance [17, 18], or {"charge": 17, "notify": {"job": 18, "on_failure": "run"}}.';
    END IF;
    entries := (SELECT count(*) FROM rouse._dependencies_of(p_after));
    IF entries > 10000 THEN
        RAISE EXCEPTION 'rouse.enqueue: after names % jobs; at most 10000 are allowed', entries
            USING ERRCODE = 'program_limit_exceeded', HINT = 'Let the job wait for others that each wait for up to 10000 jobs.';
    END IF;
    SELECT d.name, d.entry INTO invalid
    FROM rouse._dependencies_of(p_after) AS d
    WHERE length(d.name) NOT BETWEEN 1 AND 200
       OR jsonb_typeof(d.job) NOT IN ('number', 'string') OR d.job #>> '{}' !~ '^[1-9][0-9]{0,17}$'
       OR d.on_failure NOT IN ('"cancel"', '"run"', '"wait"')
       OR (jsonb_typeof(d.entry) = 'object' AND d.entry - '{job,on_failure}'::text[] <> '{}')
    LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'rouse.enqueue: entry % of after must be a job id, not %', quote_literal(left(invalid.name, 140)), left(invalid.entry::text, 140)
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'A name has 1 to 200 characters. Its job is an id, or {"job": id, "on_failure": "cancel"}, or "run" or "wait" instead of "cancel".';
    END IF;
END
$$;

-- Locks the chain of a job until the caller commits, as described above; null if the job does not exist or is no longer
-- kept, or if the end of its chain is no longer kept. `waits`: the chain has not ended, or it has failed and
-- p_on_failure waits for a retry. `has_failed`: it has failed, and p_on_failure cancels. Waits for a settlement of the
-- chain that is about to commit. Served by the primary key, job_chain, and the indexes of rouse._last_ended.
CREATE OR REPLACE FUNCTION rouse._lock_parent(p_id bigint, p_on_failure text, OUT chain bigint, OUT waits boolean, OUT has_failed boolean)
LANGUAGE plpgsql AS $$
DECLARE
    live  bigint := p_id;
    ended rouse.finished;
BEGIN
    has_failed := false;
    LOOP
        -- Null if it is not live, or has only just ended; then another job may continue its chain.
        chain := rouse._lock_live(live);
        waits := chain IS NOT NULL;
        EXIT WHEN waits;
        chain := rouse._chain_of(p_id);
        EXIT WHEN chain IS NULL;
        live := rouse._live_job(chain);
        CONTINUE WHEN live IS NOT NULL;
        ended := rouse._last_ended(chain);
        IF ended.id IS NULL THEN
            chain := NULL;
            EXIT;
        END IF;
        EXIT WHEN ended.state = 'succeeded' OR p_on_failure = 'run';
        has_failed := p_on_failure = 'cancel';
        EXIT WHEN has_failed;
        -- With a single snapshot for the whole transaction, a retry that has committed since would be invisible.
        IF current_setting('transaction_isolation') <> 'read committed' THEN
            RAISE EXCEPTION 'rouse.enqueue: job % has failed, and only a transaction with isolation level READ COMMITTED can wait for its retry', p_id
                USING ERRCODE = 'feature_not_supported',
                      HINT = 'Enqueue the new job in a transaction with that level, which is the default, or with on_failure cancel or run.';
        END IF;
        -- A retry takes a stronger lock of this row: either it waits, and sees the dependency, or it has committed, and
        -- may have ended too.
        PERFORM FROM rouse.finished AS f WHERE f.id = ended.id FOR KEY SHARE;
        waits := rouse._live_job(chain) IS NULL AND (rouse._last_ended(chain)).id = ended.id;
        EXIT WHEN waits;
    END LOOP;
END
$$;

-- Finds the chains that `after` of an enqueue names, and locks them in the order of the ids of their jobs:
--
--   after                the argument as it is stored: by name, and with chains instead of jobs; null: it names none
--   chains, on_failures  those that the job waits for
--   failed               a chain whose failure cancels the job; null: none
--
-- p_may_repeat: several names may stand for the same chain, because a unique key or a gate has made one job of several.
-- The job then waits for the chain once. Its failure cancels the job if one of the names has `cancel`; otherwise, the
-- job waits for a retry if one of them has `wait`.
CREATE OR REPLACE FUNCTION rouse._find_parents(
    p_after jsonb, p_may_repeat boolean, OUT after jsonb, OUT chains bigint[], OUT on_failures text[], OUT failed bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    parent record;
    locked record;
    names  text[] := '{}';
    named  bigint[] := '{}';
    kinds  text[] := '{}';
    waits  boolean[] := '{}';
    twice  text;
    ended  rouse.finished;
BEGIN
    PERFORM rouse._check_after(p_after);
    FOR parent IN
        SELECT d.name, (d.job #>> '{}')::bigint AS id, d.on_failure #>> '{}' AS on_failure FROM rouse._dependencies_of(p_after) AS d ORDER BY 2
    LOOP
        locked := rouse._lock_parent(parent.id, parent.on_failure);
        IF locked.chain IS NULL AND rouse._chain_of(parent.id) IS NOT NULL THEN
            RAISE EXCEPTION 'rouse.enqueue: after names job % (as %), and the last job of its chain is no longer kept', parent.id, quote_literal(parent.name)
                USING ERRCODE = 'no_data_found', HINT = 'The chain has ended, but how it has ended is no longer known.';
        ELSIF locked.chain IS NULL THEN
            RAISE EXCEPTION 'rouse.enqueue: after names job % (as %), which does not exist or is no longer kept', parent.id, quote_literal(parent.name)
                USING ERRCODE = 'no_data_found', HINT = 'Only the transaction that enqueues a job can name it before it commits.';
        END IF;
        names := names || parent.name;
        named := named || locked.chain;
        kinds := kinds || parent.on_failure;
        waits := waits || locked.waits;
        IF NOT locked.waits THEN
            -- The partition of its end may be dropped as soon as this transaction has committed: until then, _keep_ends
            -- does not see the dependency. A row that already exists is locked: _keep_ends may be about to delete it.
            LOOP
                ended := rouse._last_ended(locked.chain);
                EXIT WHEN (ended.finished_at < clock_timestamp() - interval '1 hour') IS NOT TRUE;
                INSERT INTO rouse.kept_end (chain, job, state, result, error)
                VALUES (locked.chain, ended.id, ended.state, ended.result, ended.error)
                ON CONFLICT (chain) DO NOTHING;
                -- Replaces the end of a job that was retried since. Not DO UPDATE, which would always lock the row.
                UPDATE rouse.kept_end AS k SET job = ended.id, state = ended.state, result = ended.result, error = ended.error
                WHERE k.chain = locked.chain AND k.job < ended.id;
                PERFORM FROM rouse.kept_end AS k WHERE k.chain = locked.chain FOR KEY SHARE;
                EXIT WHEN FOUND;
            END LOOP;
            IF locked.has_failed THEN
                failed := locked.chain;
            END IF;
        END IF;
    END LOOP;
    SELECT string_agg(quote_literal(n.name), ' and ') INTO twice
    FROM unnest(names, named) AS n(name, chain) GROUP BY n.chain HAVING count(*) > 1 LIMIT 1;
    IF FOUND AND p_may_repeat IS NOT TRUE THEN
        RAISE EXCEPTION 'rouse.enqueue: % of after name the same chain', left(twice, 140)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'A job waits for the end of a chain, whichever of its jobs is named.';
    END IF;
    SELECT jsonb_object_agg(n.name, CASE n.kind WHEN 'cancel' THEN to_jsonb(n.chain) ELSE jsonb_build_object('job', n.chain, 'on_failure', n.kind) END)
    INTO after
    FROM unnest(names, named, kinds) AS n(name, chain, kind);
    SELECT coalesce(array_agg(w.chain ORDER BY w.chain), '{}'), coalesce(array_agg(w.kind ORDER BY w.chain), '{}') INTO chains, on_failures
    FROM (
        SELECT n.chain, CASE WHEN bool_or(n.kind = 'cancel') THEN 'cancel' WHEN bool_or(n.kind = 'wait') THEN 'wait' ELSE 'run' END AS kind
        FROM unnest(named, kinds, waits) AS n(chain, kind, waits) GROUP BY n.chain HAVING bool_or(n.waits)) AS w;
END
$$;

-- Adds the dependencies of a new job, as rouse._find_parents has found them. If one of its chains has failed, the job
-- is cancelled. Nothing waits for the job yet. Served by dependency_chain.
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

-- Ends queued jobs, which the caller has locked, and returns their chains. Their dependencies are deleted. The caller
-- releases the jobs that wait for these chains (rouse._chains_ended). Served by the primary key, dependency_job and
-- queue_keeps.
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
                                    attempt, uncounted, max_attempts, state, tenant, source, unique_key, payload, payload_at, result, error, grants,
                                    lease_ms, timeout_ms, after, origin, trace, keep_days)
        SELECT g.id, g.lane, g.retried_from, g.chain, g.flow, g.flow_name, g.requested_at, g.available_at, p_at,
               g.attempt, g.uncounted, g.max_attempts, p_state, g.tenant, g.source, g.unique_key, g.payload, g.payload_at, p_result, p_error, g.grants,
               g.lease_ms, g.timeout_ms, g.after, g.origin, g.trace, CASE WHEN some_differ THEN rouse._keep_days(g.lane, p_state, p_at) ELSE 0 END
        FROM gone AS g
        RETURNING coalesce(f.chain, f.id) AS chain)
    SELECT coalesce(array_agg(k.chain), '{}') INTO chains FROM kept AS k;
    RETURN chains;
END
$$;

-- For rouse.continue_releases, notes which of these ended chains have dependencies; returns whether there are any.
-- Under one snapshot for the whole transaction, dependencies that producers have committed since are invisible: then
-- all are noted. Served by dependency_chain.
CREATE OR REPLACE FUNCTION rouse._note_releases(p_chains bigint[], p_succeeded boolean[]) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    at     timestamptz := clock_timestamp();
    is_old boolean := current_setting('transaction_isolation') <> 'read committed';
BEGIN
    INSERT INTO rouse.pending_release (chain, succeeded, noted_at, try_at)
    SELECT ended.chain, ended.succeeded, at, at FROM unnest(p_chains, p_succeeded) AS ended(chain, succeeded)
    LEFT JOIN LATERAL (
        SELECT true AS is_there FROM rouse.dependency AS d
        WHERE d.chain = ended.chain AND (ended.succeeded OR d.on_failure IN ('cancel', 'run')) LIMIT 1) AS d ON true
    WHERE is_old OR d.is_there
    ON CONFLICT (chain) DO UPDATE SET succeeded = excluded.succeeded, noted_at = at, try_at = at;
    RETURN FOUND;
END
$$;

-- Cancels jobs because chains that they wait for have failed. The caller has locked them. Jobs that wait for these are
-- left to rouse.continue_releases, so that a transaction cancels one level of a graph; returns whether there are any.
-- Served by dependency_chain.
CREATE OR REPLACE FUNCTION rouse._cancel_dependents(p_ids bigint[], p_failed bigint[]) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    at     timestamptz := clock_timestamp();
    chains bigint[];
BEGIN
    PERFORM rouse._ensure_partitions(at);
    INSERT INTO rouse.record (at, job, event, detail)
    SELECT at, ended.id, 'cancelled', jsonb_build_object('after', ended.failed) FROM unnest(p_ids, p_failed) AS ended(id, failed);
    chains := rouse._end_queued(p_ids, 'cancelled', NULL, NULL, at);
    RETURN rouse._note_releases(chains, array_fill(false, ARRAY[cardinality(chains)]));
END
$$;

-- True if a job that waits for others may start at p_at once these have ended: its run_at has passed; or it has none,
-- and became available when it was enqueued or suspended. If the clock has been set back since, that time lies in the
-- future, but the job does not wait for it. Inlined.
CREATE OR REPLACE FUNCTION rouse._is_due(p_available_at timestamptz, p_requested_at timestamptz, p_wait jsonb, p_at timestamptz) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT p_available_at <= p_at OR p_available_at = p_requested_at OR p_wait IS NOT NULL
$$;

-- Releases at most `p_max` jobs that wait for these ended chains: a chain that has succeeded counts down the blockers
-- of each job; a chain that has failed does so for jobs with on_failure 'run', cancels jobs with 'cancel', and leaves
-- jobs with 'wait' alone. Jobs that do not wait for anything else become ready, or wait for their run_at. Never waits
-- for a lock. Returns the number of dependencies that were resolved, the chains that have some left, and whether
-- rouse.continue_releases has anything to do. Served by the primary keys.
CREATE OR REPLACE FUNCTION rouse._release(
    p_chains bigint[], p_succeeded boolean[], p_max integer, OUT resolved integer, OUT remaining bigint[], OUT has_more boolean)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at        timestamptz := clock_timestamp();
    cancelled bigint[];
    failed    bigint[];
    lanes     bigint[];
    -- Lanes of jobs that wait for their run_at.
    scheduled bigint[];
BEGIN
    resolved := 0;
    has_more := false;
    IF false = ANY (p_succeeded) THEN
        SELECT coalesce(array_agg(d.job), '{}'), array_agg(d.chain) INTO cancelled, failed
        FROM (
            -- A job may wait for several of these chains.
            SELECT d.job, min(d.chain) AS chain
            FROM (
                SELECT d.job, d.chain
                FROM unnest(p_chains, p_succeeded) AS ended(chain, succeeded)
                -- Only lookups can serve such conditions (claim.sql).
                JOIN rouse.dependency AS d ON d.chain = ANY (ARRAY[ended.chain]) AND d.on_failure = 'cancel'
                CROSS JOIN LATERAL (SELECT FROM rouse.job AS j WHERE j.id = ANY (ARRAY[d.job]) FOR UPDATE SKIP LOCKED) AS j
                WHERE NOT ended.succeeded
                LIMIT p_max) AS d
            GROUP BY d.job) AS d;
        IF cancelled <> '{}' THEN
            has_more := rouse._cancel_dependents(cancelled, failed);
            resolved := cardinality(cancelled);
        END IF;
    END IF;
    WITH locked AS MATERIALIZED (
        SELECT d.ctid AS row, d.job
        FROM unnest(p_chains, p_succeeded) AS ended(chain, succeeded)
        -- All kinds, or only `run`: one range of the index.
        JOIN rouse.dependency AS d ON d.chain = ANY (ARRAY[ended.chain])
            AND d.on_failure >= CASE WHEN ended.succeeded THEN 'cancel' ELSE 'run' END
            AND d.on_failure <= CASE WHEN ended.succeeded THEN 'wait' ELSE 'run' END
        CROSS JOIN LATERAL (SELECT FROM rouse.job AS j WHERE j.id = ANY (ARRAY[d.job]) FOR NO KEY UPDATE SKIP LOCKED) AS j
        LIMIT p_max - resolved),
    gone AS (
        -- Rows of a job change only while the job is locked. A row that was deleted before the job was locked is not
        -- found.
        DELETE FROM rouse.dependency AS d USING locked AS l WHERE d.ctid = l.row
        RETURNING d.job),
    -- In the order of their ids, which becomes that of their turns.
    counted AS MATERIALIZED (SELECT g.job, count(*)::integer AS chains FROM gone AS g GROUP BY g.job ORDER BY g.job),
    released AS (
        UPDATE rouse.job AS j
        SET blockers = nullif(j.blockers - c.chains, 0),
            turn = CASE WHEN j.blockers = c.chains AND rouse._is_due(j.available_at, j.requested_at, j.wait, at) THEN nextval('rouse.turn_seq') END,
            available_at = CASE WHEN j.blockers = c.chains AND rouse._is_due(j.available_at, j.requested_at, j.wait, at) THEN at ELSE j.available_at END
        FROM counted AS c WHERE j.id = ANY (ARRAY[c.job])
        RETURNING j.lane, j.turn, j.blockers, c.chains)
    SELECT resolved + coalesce(sum(r.chains), 0), array_agg(DISTINCT r.lane) FILTER (WHERE r.turn IS NOT NULL),
           array_agg(DISTINCT r.lane) FILTER (WHERE r.turn IS NULL AND r.blockers IS NULL)
    INTO resolved, lanes, scheduled FROM released AS r;
    -- As in rouse._settle: if there are many lanes, no lock is taken.
    PERFORM rouse._notify(l.lane, true, CASE WHEN cardinality(lanes) <= 32 THEN at ELSE '-infinity' END)
    FROM unnest(lanes) AS l(lane);
    PERFORM rouse._notify(l.lane, false, CASE WHEN cardinality(scheduled) <= 32 THEN at ELSE '-infinity' END)
    FROM unnest(scheduled) AS l(lane);
    remaining := ARRAY(
        SELECT ended.chain FROM unnest(p_chains, p_succeeded) AS ended(chain, succeeded)
        CROSS JOIN LATERAL (
            SELECT FROM rouse.dependency AS d
            WHERE d.chain = ended.chain AND (ended.succeeded OR d.on_failure IN ('cancel', 'run')) LIMIT 1) AS d);
    has_more := has_more OR remaining <> '{}';
END
$$;

-- Releases the jobs that wait for these chains, which have ended in this transaction. Returns whether some are left to
-- rouse.continue_releases. Served by dependency_chain.
CREATE OR REPLACE FUNCTION rouse._chains_ended(p_chains bigint[], p_succeeded boolean[]) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    released record;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RETURN rouse._note_releases(p_chains, p_succeeded);
    END IF;
    -- Most jobs have no others that wait for them.
    PERFORM FROM unnest(p_chains) AS ended(chain)
    CROSS JOIN LATERAL (SELECT FROM rouse.dependency AS d WHERE d.chain = ended.chain LIMIT 1) AS d LIMIT 1;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    released := rouse._release(p_chains, p_succeeded, 1000);
    IF released.remaining <> '{}' THEN
        PERFORM rouse._note_releases(p_chains, p_succeeded);
    END IF;
    RETURN released.has_more;
END
$$;

-- Releases more of the jobs that wait for chains that have ended, at most `p_max`. Returns whether there is more to do
-- at once. A chain whose jobs are locked by other transactions is tried again after a second, and then at growing
-- intervals: after 10 % of the time since it was noted, at most a minute. Any worker may call it. Served by
-- pending_release_due.
CREATE OR REPLACE FUNCTION rouse.continue_releases(p_worker bigint, p_key bytea, p_max integer) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at        timestamptz := clock_timestamp();
    chains    bigint[];
    succeeded boolean[];
    released  record;
BEGIN
    PERFORM rouse._authenticated_as_limited(p_worker, p_key);
    p_max := least(greatest(coalesce(p_max, 0), 1), 10000);
    SELECT array_agg(p.chain), array_agg(p.succeeded) INTO chains, succeeded
    FROM (
        SELECT p.chain, p.succeeded FROM rouse.pending_release AS p
        WHERE p.try_at <= at ORDER BY p.try_at LIMIT 100 FOR UPDATE SKIP LOCKED) AS p;
    IF chains IS NULL THEN
        RETURN false;
    END IF;
    released := rouse._release(chains, succeeded, p_max);
    DELETE FROM rouse.pending_release AS p WHERE p.chain = ANY (chains) AND NOT p.chain = ANY (released.remaining);
    -- The limit may have left some of these chains untouched. They keep a time that peeks look at, so that another host
    -- continues soon if this one dies.
    UPDATE rouse.pending_release AS p
    SET try_at = CASE WHEN released.resolved < p_max THEN at + least(greatest((at - p.noted_at) / 10, interval '1 second'), interval '1 minute')
                 ELSE at END
    WHERE p.chain = ANY (released.remaining);
    RETURN EXISTS (SELECT FROM rouse.pending_release AS p WHERE p.try_at <= at);
END
$$;

-- Makes the failure of a chain cancel all jobs that wait for it, whatever their on_failure is, except those that
-- another transaction has locked. Served by dependency_chain.
CREATE OR REPLACE FUNCTION rouse._cancel_on_failure(p_chain bigint) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
BEGIN
    WITH locked AS MATERIALIZED (
        SELECT d.ctid AS row FROM rouse.dependency AS d
        CROSS JOIN LATERAL (SELECT FROM rouse.job AS j WHERE j.id = ANY (ARRAY[d.job]) FOR UPDATE SKIP LOCKED) AS j
        WHERE d.chain = p_chain AND d.on_failure IN ('run', 'wait'))
    UPDATE rouse.dependency AS d SET on_failure = 'cancel' FROM locked AS l WHERE d.ctid = l.row;
END
$$;

-- For maintenance: notes chains that have ended while jobs still wait for them. A chain whose last job is no longer
-- kept counts as failed, unless it is known to have succeeded (rouse.kept_end), and also cancels the jobs that wait for
-- a retry of it, which can never come. Looks at up to `p_max` chains, starting at a random one, for at most 250 ms:
-- during a large number of releases, the next chain with dependencies may be behind thousands of dead index entries,
-- which this transaction keeps. Served by dependency_chain and the primary keys.
--
--   lost     the number of noted chains whose release was lost, which no known interleaving causes
--   dropped  the number of noted chains that were no longer kept while jobs still waited for their retry
CREATE OR REPLACE FUNCTION rouse._sweep_dependencies(p_max integer, OUT lost integer, OUT dropped integer)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    first   bigint := (SELECT max(d.chain) FROM rouse.dependency AS d) * random();
    next    bigint := first;
    wrapped boolean := false;
    ended   rouse.finished;
    -- How the chain has ended, even if its last job is no longer kept.
    last    record;
    is_lost boolean;
    until   timestamptz := clock_timestamp() + interval '250 milliseconds';
BEGIN
    lost := 0;
    dropped := 0;
    FOR n IN 1 .. p_max LOOP
        EXIT WHEN clock_timestamp() > until;
        next := (SELECT min(d.chain) FROM rouse.dependency AS d WHERE d.chain > next);
        IF next IS NULL THEN
            EXIT WHEN wrapped;
            wrapped := true;
            next := 0;
            CONTINUE;
        END IF;
        EXIT WHEN wrapped AND next > first;
        CONTINUE WHEN rouse._live_job(next) IS NOT NULL OR EXISTS (SELECT FROM rouse.pending_release AS p WHERE p.chain = next);
        ended := rouse._last_ended(next);
        IF ended.id IS NOT NULL THEN
            -- A retry in progress has locked this row, and one that has committed is live.
            PERFORM FROM rouse.finished AS f WHERE f.id = ended.id FOR KEY SHARE SKIP LOCKED;
            CONTINUE WHEN NOT FOUND OR rouse._live_job(next) IS NOT NULL OR (rouse._last_ended(next)).id IS DISTINCT FROM ended.id;
        END IF;
        last := rouse._end_of(next);
        is_lost := true;
        IF ended.id IS NULL AND last.state IS DISTINCT FROM 'succeeded' THEN
            is_lost := EXISTS (SELECT FROM rouse.dependency AS d WHERE d.chain = next AND d.on_failure IN ('cancel', 'run'));
            PERFORM rouse._cancel_on_failure(next);
        END IF;
        IF rouse._note_releases(ARRAY[next], ARRAY[coalesce(last.state = 'succeeded', false)]) THEN
            lost := lost + is_lost::integer;
            dropped := dropped + (NOT is_lost)::integer;
        END IF;
    END LOOP;
END
$$;

-- Sweeps dependencies (rouse._sweep_dependencies). For workers; those of a limited login that may not do maintenance do
-- nothing.
CREATE OR REPLACE FUNCTION rouse.maintain_dependencies(p_worker bigint, p_key bytea, OUT lost integer, OUT dropped integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s'
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
BEGIN
    lost := 0;
    dropped := 0;
    IF rouse._authenticated_as_limited(p_worker, p_key) AND NOT rouse._may_maintain() THEN
        RETURN;
    END IF;
    SELECT s.lost, s.dropped INTO lost, dropped FROM rouse._sweep_dependencies(10000) AS s;
END
$$;
