-- What an attempt leaves behind while it runs: steps, progress, usage, log lines. Only the worker that has the job may write them.

-- Why a job is not this worker's under this fence (the words of the abort reasons); null: it is. Counts the
-- attempt of a worker to say something about another's job.
CREATE OR REPLACE FUNCTION rouse._refusal(p_worker bigint, p_id bigint, p_fence bigint) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    live  record;
    ended rouse.state;
BEGIN
    SELECT j.fence, j.worker INTO live FROM rouse.job AS j WHERE j.id = p_id;
    IF FOUND THEN
        IF live.fence = p_fence AND live.worker = p_worker THEN
            RETURN NULL;
        END IF;
        PERFORM rouse._count_refused(p_worker, ARRAY[p_id]);
        RETURN 'taken_by_another_worker';
    END IF;
    SELECT f.state INTO ended FROM rouse.finished AS f WHERE f.id = p_id LIMIT 1;
    RETURN CASE WHEN ended IS NULL THEN 'not_found' WHEN ended = 'cancelled' THEN 'cancelled' ELSE 'already_completed' END;
END
$$;

-- The steps of a job that are recorded, with the bytes of their results, for the worker that runs it; or one row with the
-- reason why it is not (any more) this worker's. Served by step_job, in each partition.
CREATE OR REPLACE FUNCTION rouse.recorded_step_names(p_worker bigint, p_key bytea, p_id bigint, p_fence bigint)
RETURNS TABLE (refusal text, name text, bytes integer)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    refusal := rouse._refusal(p_worker, p_id, p_fence);
    IF refusal IS NOT NULL THEN
        RETURN NEXT;
        RETURN;
    END IF;
    RETURN QUERY SELECT NULL::text, s.name, octet_length(s.result::text) FROM rouse.step AS s WHERE s.job = p_id;
END
$$;

-- The result of one recorded step, in the same way. Without a row it is not recorded.
CREATE OR REPLACE FUNCTION rouse.recorded_step(p_worker bigint, p_key bytea, p_id bigint, p_fence bigint, p_name text)
RETURNS TABLE (refusal text, result json)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    refusal := rouse._refusal(p_worker, p_id, p_fence);
    IF refusal IS NOT NULL THEN
        RETURN NEXT;
        RETURN;
    END IF;
    RETURN QUERY SELECT NULL::text, s.result FROM rouse.step AS s WHERE s.job = p_id AND s.name = p_name LIMIT 1;
END
$$;

-- Records the result of a step, and returns null, or the reason why the job is not (any more) this
-- worker's: then nothing is recorded. A second call for the same step changes nothing: the answer to the first was lost.
-- The lock keeps away whoever would settle the job or take it over, until this has committed: no result
-- of an attempt whose lease is gone is ever read by the next. Waits 250 ms for it; then the call fails
-- with lock_not_available. Served by the primary key and step_job.
CREATE OR REPLACE FUNCTION rouse.record_step(p_worker bigint, p_key bytea, p_id bigint, p_fence bigint, p_name text, p_result json)
RETURNS text
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '250ms' SET enable_seqscan = off SET jit = off AS $$
DECLARE
    at   timestamptz := clock_timestamp();
    mine integer;
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    PERFORM rouse._check_size('record_step', octet_length(p_result::text), 8388608);
    SELECT j.attempt INTO mine FROM rouse.job AS j
    WHERE j.id = p_id AND j.fence = p_fence AND j.worker = p_worker FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        -- Null would say that it is recorded. Where no reason is found a moment later, it is not all the same.
        RETURN coalesce(rouse._refusal(p_worker, p_id, p_fence), 'error');
    END IF;
    PERFORM FROM rouse.step AS s WHERE s.job = p_id AND s.name = p_name;
    IF NOT FOUND THEN
        INSERT INTO rouse.step (job, name, result, attempt, worker, at, kept_at)
        VALUES (p_id, p_name, p_result, mine, p_worker, at, at);
    END IF;
    RETURN NULL;
END
$$;

-- Says how far attempts are, and returns the ids of those that are this
-- worker's; `p_ended` are jobs whose attempts have ended: what they said is forgotten.
--
-- Rows that are there are locked in one order first, those of both lists together: two workers that are at odds about
-- jobs do not wait for each other in a ring.
CREATE OR REPLACE FUNCTION rouse.report(
    p_worker bigint, p_key bytea, p_reports rouse.progress_report[], p_ended bigint[], p_ended_fences bigint[])
RETURNS SETOF bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at   timestamptz := clock_timestamp();
    mine bigint[];
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM FROM (SELECT s.id FROM unnest(p_reports) AS s UNION SELECT e.id FROM unnest(p_ended) AS e(id) ORDER BY id) AS asked
    CROSS JOIN LATERAL (SELECT FROM rouse.progress AS p WHERE p.job = asked.id FOR UPDATE) AS there;
    DELETE FROM rouse.progress AS p USING unnest(p_ended, p_ended_fences) AS e(id, fence)
    WHERE p.job = ANY (ARRAY[e.id]) AND p.fence = e.fence;
    WITH said AS (
        INSERT INTO rouse.progress AS p (job, fence, percent, step, at)
        SELECT s.id, s.fence, s.percent, s.step, at
        FROM unnest(p_reports) AS s
        CROSS JOIN LATERAL (
            SELECT FROM rouse.job AS j WHERE j.id = s.id AND j.fence = s.fence AND j.worker = p_worker) AS j
        ORDER BY s.id
        ON CONFLICT (job) DO UPDATE SET fence = excluded.fence, percent = excluded.percent, step = excluded.step, at = excluded.at
        RETURNING p.job)
    SELECT coalesce(array_agg(said.job), '{}') INTO mine FROM said;
    IF cardinality(mine) < cardinality(p_reports) THEN
        PERFORM rouse._count_refused(p_worker, ARRAY(SELECT s.id FROM unnest(p_reports) AS s WHERE NOT s.id = ANY (mine)));
    END IF;
    RETURN QUERY SELECT m.id FROM unnest(mine) AS m(id);
END
$$;

-- Says what the attempts of a worker have used so far: all of those of which that is told, so that what is not named
-- any more is forgotten. Nothing is written about jobs that are not this worker's.
CREATE OR REPLACE FUNCTION rouse.report_usage(p_worker bigint, p_key bytea, p_usages rouse.attempt_usage[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at timestamptz := clock_timestamp();
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    PERFORM set_config('synchronous_commit', 'off', true);
    DELETE FROM rouse.running AS r WHERE r.worker = p_worker AND NOT EXISTS (SELECT FROM unnest(p_usages) AS s WHERE s.id = r.job);
    INSERT INTO rouse.running AS r (job, fence, worker, cpu_us, memory_bytes, host_calls, bytes_in, bytes_out, at)
    SELECT s.id, s.fence, p_worker, abs(s.cpu_us), abs(s.memory_bytes), abs(s.host_calls), abs(s.bytes_in), abs(s.bytes_out), at
    FROM unnest(p_usages) AS s
    CROSS JOIN LATERAL (
        SELECT FROM rouse.job AS j WHERE j.id = s.id AND j.fence = s.fence AND j.worker = p_worker) AS j
    -- In one order, whoever says it: two workers at odds about a job do not wait for each other in a ring.
    ORDER BY s.id
    ON CONFLICT (job) DO UPDATE SET fence = excluded.fence, worker = excluded.worker, cpu_us = excluded.cpu_us,
        memory_bytes = excluded.memory_bytes, host_calls = excluded.host_calls, bytes_in = excluded.bytes_in,
        bytes_out = excluded.bytes_out, at = excluded.at;
END
$$;

-- Keeps what attempts have printed and logged, of the last day. Of a line
-- the first 16,384 characters are kept. Returns how many
-- were kept: a worker says something only of jobs that it has, or of which it has ended an attempt.
CREATE OR REPLACE FUNCTION rouse.append_log(p_worker bigint, p_key bytea, p_lines rouse.log_line[]) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at   timestamptz := clock_timestamp();
    mine bigint[];
    kept integer;
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    PERFORM set_config('synchronous_commit', 'off', true);
    SELECT coalesce(array_agg(said.id), '{}') INTO mine
    FROM (SELECT DISTINCT s.id FROM unnest(p_lines) AS s) AS said
    WHERE EXISTS (SELECT FROM rouse.job AS j WHERE j.id = said.id AND j.worker = p_worker)
       OR EXISTS (SELECT FROM rouse.attempt AS a WHERE a.job = said.id AND a.worker = p_worker)
       OR EXISTS (SELECT FROM rouse.finished AS f WHERE f.id = said.id AND f.worker = p_worker);
    INSERT INTO rouse.log (job, attempt, line, worker, at, level, text)
    SELECT s.id, greatest(s.attempt, 1), greatest(s.line, 1), p_worker,
           at - least(greatest(s.age_ms, 0), 86400000) * interval '1 millisecond', s.level, left(s.text, 16384)
    FROM unnest(p_lines) AS s
    WHERE s.id = ANY (mine);
    GET DIAGNOSTICS kept = ROW_COUNT;
    RETURN kept;
END
$$;
