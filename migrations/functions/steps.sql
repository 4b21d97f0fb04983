-- Records of an attempt while it runs: steps, progress, usage, log lines. Only the worker that has claimed the job may
-- write them.

-- The reason why a job is not this worker's under this fence (an abort reason); null if it is. Counts refused writes to
-- jobs of other workers (rouse._count_refused).
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

-- The recorded steps of jobs with the sizes of their results in bytes, for the worker that runs them: one row for each
-- job. `place` is its position in the call, starting at 1; the row of a job that is not this worker's has the reason. A
-- worker that has read the steps of a job before passes the time of the newest one (p_known_until), and gets the newer
-- ones. `known` identifies the versions of the other rows: the worker requests all if it is not the sum of `known` and
-- `added` of its last result, because rows were removed, changed or backdated in the meantime. A null time: all.
--
-- A result of up to 1,024 bytes is in the row; rouse.recorded_results returns larger ones. A step that waits has a kind
-- instead of a size; until_ms is the time at which its wait ends on its own, in milliseconds since 1970. Rows are in no
-- particular order; the row of a step with the latest `at` counts, unless another one has its result. Served by
-- step_job, in each partition.
CREATE OR REPLACE FUNCTION rouse.recorded_steps(p_worker bigint, p_key bytea, p_ids bigint[], p_fences bigint[], p_known_until timestamptz[])
RETURNS TABLE (place bigint, refusal text, known bigint, added bigint, names text[], bytes integer[], results text[], waits text[], until_ms bigint[], at timestamptz[])
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    PERFORM rouse._authenticated_as_limited(p_worker, p_key);
    RETURN QUERY
    SELECT asked.place, asked.refusal, s.known, s.added, s.names, s.bytes, s.results, s.waits, s.until_ms, s.at
    FROM (
        SELECT a.place, a.id, a.known_until, rouse._refusal(p_worker, a.id, a.fence) AS refusal
        FROM unnest(p_ids, p_fences, p_known_until) WITH ORDINALITY AS a(id, fence, known_until, place)) AS asked
    CROSS JOIN LATERAL (
        -- Arrays in one row: with a row for each step, sending and reading the steps would cost more than finding them.
        -- They are not sorted, for the same reason.
        SELECT coalesce(sum(r.version) FILTER (WHERE NOT r.is_new), 0) AS known, coalesce(sum(r.version) FILTER (WHERE r.is_new), 0) AS added,
               array_agg(r.name) FILTER (WHERE r.is_new) AS names,
               array_agg(octet_length(r.result)) FILTER (WHERE r.is_new) AS bytes,
               array_agg(CASE WHEN octet_length(r.result) <= 1024 THEN r.result END) FILTER (WHERE r.is_new) AS results,
               array_agg(r.wait ->> 'kind') FILTER (WHERE r.is_new) AS waits,
               array_agg((r.wait ->> 'until_ms')::bigint) FILTER (WHERE r.is_new) AS until_ms,
               array_agg(r.at) FILTER (WHERE r.is_new) AS at
        FROM (
            -- A changed row has another ctid; after two changes and a vacuum, it may have the first one again.
            SELECT s.name, s.wait, s.at, hashtid(s.ctid) AS version, (s.at <= asked.known_until) IS NOT TRUE AS is_new,
                   CASE WHEN (s.at <= asked.known_until) IS NOT TRUE THEN s.result::text END AS result
            FROM rouse.step AS s
            -- Only a lookup can serve this condition (claim.sql).
            WHERE s.job = ANY (ARRAY[CASE WHEN asked.refusal IS NULL THEN asked.id END])
            -- Each result is converted once.
            OFFSET 0) AS r) AS s;
END
$$;

-- The results of these recorded steps, in the order of p_names, up to 1 MiB in total, but at least one, if any is
-- recorded. Steps that are not recorded are left out. Returns one row with the refusal instead if the job is not this
-- worker's. Served by step_job.
CREATE OR REPLACE FUNCTION rouse.recorded_results(p_worker bigint, p_key bytea, p_id bigint, p_fence bigint, p_names text[])
RETURNS TABLE (refusal text, name text, result json)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    wanted text;
    total  bigint := 0;
BEGIN
    PERFORM rouse._authenticated_as_limited(p_worker, p_key);
    refusal := rouse._refusal(p_worker, p_id, p_fence);
    IF refusal IS NOT NULL THEN
        RETURN NEXT;
        RETURN;
    END IF;
    FOREACH wanted IN ARRAY p_names LOOP
        SELECT s.name, s.result INTO name, result FROM rouse.step AS s WHERE s.job = p_id AND s.name = wanted AND s.result IS NOT NULL LIMIT 1;
        CONTINUE WHEN NOT FOUND;
        RETURN NEXT;
        total := total + octet_length(result::text);
        EXIT WHEN total >= 1048576;
    END LOOP;
END
$$;

-- Rejects steps of a job beyond what any host allows (settable.rs in host/src/sandbox): 100,000 steps, most of which
-- have one row and some a few; and 64 MiB of results, apart from the headers of their rows. `p_rows` and `p_bytes`:
-- what the call adds. Counting reads all rows of the job, so only some calls count: all that add 1 MiB, and one in
-- about 1,000 of those that add a small row. A job can thus exceed the bounds, by about 1 MiB and 1,000 rows on
-- average. Served by step_job.
CREATE OR REPLACE FUNCTION rouse._check_steps(p_job bigint, p_rows integer, p_bytes bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    recorded record;
BEGIN
    IF random() * 1048576 > p_rows * 1024::bigint + p_bytes THEN
        RETURN;
    END IF;
    SELECT count(*) AS rows, coalesce(sum(pg_column_size(s.result)), 0) AS bytes INTO recorded FROM rouse.step AS s WHERE s.job = p_job;
    IF recorded.rows + p_rows > 250000 OR recorded.bytes + p_bytes > 68157440 THEN
        RAISE EXCEPTION 'rouse: job % has % rows of recorded steps with % bytes; at most 250000 rows and 68157440 bytes are stored',
            p_job, recorded.rows, recorded.bytes USING ERRCODE = 'program_limit_exceeded';
    END IF;
END
$$;

-- Records the result of a step. Returns false if it is already recorded, and null if the job is not this worker's under
-- this fence. The row lock keeps the job from being settled or adopted until this has committed, so that no attempt
-- reads a result of an attempt whose lease had ended. Served by the primary key and step_job.
CREATE OR REPLACE FUNCTION rouse._record_step(p_worker bigint, p_id bigint, p_fence bigint, p_name text, p_result json) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    at             timestamptz := clock_timestamp();
    bytes          integer := octet_length(p_result::text);
    attempt_number integer;
BEGIN
    PERFORM rouse._check_size('record_step', bytes, 8388608);
    SELECT j.attempt INTO attempt_number FROM rouse.job AS j
    WHERE j.id = p_id AND j.fence = p_fence AND j.worker = p_worker FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    PERFORM FROM rouse.step AS s WHERE s.job = p_id AND s.name = p_name AND s.result IS NOT NULL;
    IF FOUND THEN
        RETURN false;
    END IF;
    PERFORM rouse._check_steps(p_id, 1, bytes);
    INSERT INTO rouse.step (job, name, result, attempt, worker, at, kept_at)
    VALUES (p_id, p_name, p_result, attempt_number, p_worker, at, at);
    RETURN true;
END
$$;

-- Records the result of a step, and returns null, or the reason why the job is not this worker's: then nothing is
-- recorded. A repeated call for the same step, made because the response to the first was lost, changes nothing. Fails
-- with lock_not_available at once if another transaction has locked the job, and after 250 ms for another lock.
CREATE OR REPLACE FUNCTION rouse.record_step(p_worker bigint, p_key bytea, p_id bigint, p_fence bigint, p_name text, p_result json)
RETURNS text
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '250ms' SET enable_seqscan = off SET jit = off AS $$
BEGIN
    PERFORM rouse._authenticated_as_limited(p_worker, p_key);
    -- Like rouse._lock_attempt.
    PERFORM FROM rouse.job AS j WHERE j.id = p_id AND j.fence = p_fence AND j.worker = p_worker FOR NO KEY UPDATE NOWAIT;
    IF rouse._record_step(p_worker, p_id, p_fence, p_name, p_result) IS NULL THEN
        -- Null would mean that it is recorded, so this is never null, even if no reason is found a moment later.
        RETURN coalesce(rouse._refusal(p_worker, p_id, p_fence), 'error');
    END IF;
    RETURN NULL;
END
$$;

-- Stores the progress of attempts, and returns the ids of the jobs that this worker has claimed. `p_ended` are jobs
-- whose attempts have ended: their progress is deleted.
--
-- Existing rows of both lists are first locked in the same order, so that two workers that both believe that they hold
-- a job do not deadlock. Rows that the call does not write are not locked, so that no worker can hold up the reports of
-- others.
CREATE OR REPLACE FUNCTION rouse.report(
    p_worker bigint, p_key bytea, p_reports rouse.progress_report[], p_ended bigint[], p_ended_fences bigint[])
RETURNS SETOF bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at       timestamptz := clock_timestamp();
    own_jobs bigint[];
BEGIN
    PERFORM rouse._authenticated_as_limited(p_worker, p_key);
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM FROM (
        SELECT s.id, s.fence, true AS is_own FROM unnest(p_reports) AS s
        CROSS JOIN LATERAL (
            SELECT FROM rouse.job AS j WHERE j.id = ANY (ARRAY[s.id]) AND j.fence = s.fence AND j.worker = p_worker) AS j
        UNION
        SELECT e.id, e.fence, false FROM unnest(p_ended, p_ended_fences) AS e(id, fence)
        ORDER BY id) AS asked
    CROSS JOIN LATERAL (
        SELECT FROM rouse.progress AS p WHERE p.job = asked.id AND (asked.is_own OR p.fence = asked.fence) FOR UPDATE) AS there;
    DELETE FROM rouse.progress AS p USING unnest(p_ended, p_ended_fences) AS e(id, fence)
    WHERE p.job = ANY (ARRAY[e.id]) AND p.fence = e.fence;
    WITH reported AS (
        INSERT INTO rouse.progress AS p (job, fence, percent, step, at)
        SELECT s.id, s.fence, s.percent, s.step, at
        FROM unnest(p_reports) AS s
        CROSS JOIN LATERAL (
            SELECT FROM rouse.job AS j WHERE j.id = ANY (ARRAY[s.id]) AND j.fence = s.fence AND j.worker = p_worker) AS j
        ORDER BY s.id
        ON CONFLICT (job) DO UPDATE SET fence = excluded.fence, percent = excluded.percent, step = excluded.step, at = excluded.at
        RETURNING p.job)
    SELECT coalesce(array_agg(reported.job), '{}') INTO own_jobs FROM reported;
    IF cardinality(own_jobs) < cardinality(p_reports) THEN
        PERFORM rouse._count_refused(p_worker, ARRAY(SELECT s.id FROM unnest(p_reports) AS s WHERE NOT s.id = ANY (own_jobs)));
    END IF;
    RETURN QUERY SELECT m.id FROM unnest(own_jobs) AS m(id);
END
$$;

-- Stores the resource usage of a worker's attempts. The call contains all attempts that it reports on, so rows that it
-- does not name are deleted. Jobs that are not this worker's are ignored.
CREATE OR REPLACE FUNCTION rouse.report_usage(p_worker bigint, p_key bytea, p_usages rouse.attempt_usage[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at timestamptz := clock_timestamp();
BEGIN
    PERFORM rouse._authenticated_as_limited(p_worker, p_key);
    PERFORM set_config('synchronous_commit', 'off', true);
    -- NOT IN is never a join: with one, a plan could read the rows of all workers, in the order of their jobs.
    DELETE FROM rouse.running AS r
    WHERE r.worker = p_worker AND r.job NOT IN (SELECT s.id FROM unnest(p_usages) AS s WHERE s.id IS NOT NULL);
    INSERT INTO rouse.running AS r (job, fence, worker, cpu_us, memory_bytes, host_calls, bytes_in, bytes_out, at)
    SELECT s.id, s.fence, p_worker, abs(s.cpu_us), abs(s.memory_bytes), abs(s.host_calls), abs(s.bytes_in), abs(s.bytes_out), at
    FROM unnest(p_usages) AS s
    CROSS JOIN LATERAL (
        SELECT FROM rouse.job AS j WHERE j.id = ANY (ARRAY[s.id]) AND j.fence = s.fence AND j.worker = p_worker) AS j
    -- In the same order for all workers, so that two workers that both believe that they hold a job do not deadlock.
    ORDER BY s.id
    ON CONFLICT (job) DO UPDATE SET fence = excluded.fence, worker = excluded.worker, cpu_us = excluded.cpu_us,
        memory_bytes = excluded.memory_bytes, host_calls = excluded.host_calls, bytes_in = excluded.bytes_in,
        bytes_out = excluded.bytes_out, at = excluded.at;
END
$$;

-- True if an attempt may log this much more: 65 MiB in total, where a line counts 64 bytes in addition to its text.
-- Hosts count lines in the same way, and allow at most 64 MiB (`log_bytes` in host/src/sandbox/settable.rs), apart from
-- a few lines that report what they have dropped. Counting reads all log lines of the job, so only some calls count:
-- all that add 4 MiB, and others with a probability that is proportional to what they add. An attempt can thus exceed
-- the bound, by about 4 MiB on average. Served by log_job, in each partition.
CREATE OR REPLACE FUNCTION rouse._may_log(p_job bigint, p_attempt integer, p_bytes bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    IF random() * 4194304 > p_bytes THEN
        RETURN true;
    END IF;
    RETURN p_bytes + (SELECT coalesce(sum(pg_column_size(l.text) + 64), 0) FROM rouse.log AS l WHERE l.job = p_job AND l.attempt = p_attempt)
           <= 68157440;
END
$$;

-- Stores output and log lines of attempts of the last day. A line is cut after 16,384 characters. Returns the number of
-- lines that are stored: a worker may only write for its own attempts, running, ended or released, and no more than
-- rouse._may_log permits for each.
--
-- p_repeats: an earlier call may have stored some of the lines, because its response was lost; these are left out, and
-- count as stored. Lines of an earlier call that has not committed yet may be stored twice. Without p_repeats, only
-- rouse._may_log reads rouse.log, for some calls. Served by log_job, in each partition.
CREATE OR REPLACE FUNCTION rouse.append_log(p_worker bigint, p_key bytea, p_lines rouse.log_line[], p_repeats boolean) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at           timestamptz := clock_timestamp();
    asked        integer := cardinality(p_lines);
    -- Its own attempts, and how much the call adds to their logs at most.
    own_jobs     bigint[];
    own_attempts integer[];
    own_bytes    bigint[];
    kept         integer;
BEGIN
    PERFORM rouse._authenticated_as_limited(p_worker, p_key);
    PERFORM set_config('synchronous_commit', 'off', true);
    SELECT coalesce(array_agg(reported.id), '{}'), coalesce(array_agg(reported.attempt), '{}'), array_agg(reported.bytes)
    INTO own_jobs, own_attempts, own_bytes
    FROM (
        SELECT s.id, greatest(s.attempt, 1) AS attempt, coalesce(sum(octet_length(left(s.text, 16384)) + 64), 0) AS bytes
        FROM unnest(p_lines) AS s GROUP BY s.id, greatest(s.attempt, 1)) AS reported
    WHERE EXISTS (SELECT FROM rouse.job AS j WHERE j.id = reported.id AND j.attempt = reported.attempt AND j.worker = p_worker)
       OR EXISTS (SELECT FROM rouse.attempt AS a WHERE a.job = reported.id AND a.attempt = reported.attempt AND a.worker = p_worker)
       OR EXISTS (SELECT FROM rouse.finished AS f WHERE f.id = reported.id AND f.attempt = reported.attempt AND f.worker = p_worker)
       -- A released attempt has no row of its own.
       OR EXISTS (SELECT FROM rouse.record AS r WHERE r.job = reported.id AND r.event = 'released' AND r.attempt = reported.attempt
                                                  AND r.worker = p_worker);
    IF p_repeats THEN
        -- The inner query returns no more rows than lines were sent, so it may be searched for each line.
        p_lines := ARRAY(
            SELECT s FROM unnest(p_lines) AS s
            WHERE (s.id, greatest(s.attempt, 1), greatest(s.line, 1)) NOT IN (
                SELECT l.job, l.attempt, l.line
                FROM (
                    SELECT t.id, greatest(t.attempt, 1) AS attempt, min(greatest(t.line, 1)) AS first, max(greatest(t.line, 1)) AS last
                    FROM unnest(p_lines) AS t WHERE t.id = ANY (own_jobs) GROUP BY t.id, greatest(t.attempt, 1)) AS sent
                -- Only a lookup can serve this condition (claim.sql).
                JOIN rouse.log AS l ON l.job = ANY (ARRAY[sent.id]) AND l.attempt = sent.attempt AND l.line >= sent.first
                    AND l.line <= sent.last AND l.worker = p_worker));
    END IF;
    SELECT coalesce(array_agg(o.id), '{}'), coalesce(array_agg(o.attempt), '{}') INTO own_jobs, own_attempts
    FROM unnest(own_jobs, own_attempts, own_bytes) AS o(id, attempt, bytes) WHERE rouse._may_log(o.id, o.attempt, o.bytes);
    INSERT INTO rouse.log (job, attempt, line, worker, at, level, text)
    SELECT s.id, greatest(s.attempt, 1), greatest(s.line, 1), p_worker,
           at - least(greatest(s.age_ms, 0), 86400000) * interval '1 millisecond', s.level, left(s.text, 16384)
    FROM unnest(p_lines) AS s
    WHERE (s.id, greatest(s.attempt, 1)) IN (SELECT o.id, o.attempt FROM unnest(own_jobs, own_attempts) AS o(id, attempt));
    GET DIAGNOSTICS kept = ROW_COUNT;
    RETURN kept + asked - cardinality(p_lines);
END
$$;
