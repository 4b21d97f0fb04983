-- Deadlines: a job that was enqueued with a job timeout fails if it has not ended when the timeout expires.
--
-- Its deadline is a row of rouse.deadline, because few jobs have one: claims and settlements neither read nor write it.
-- When a job ends earlier, its row stays until the deadline, and is then deleted.

-- A duration as text: '3 days', '1 hour 30 minutes', '0.5 seconds'.
CREATE OR REPLACE FUNCTION rouse._format_duration(p_ms bigint) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp SET intervalstyle = 'postgres_verbose' AS $$
    SELECT replace(replace(substr(justify_hours(p_ms * interval '1 millisecond')::text, 3), 'min', 'minute'), 'sec', 'second')
$$;

-- Adds the deadlines of new jobs: p_ms after their run_at, or after p_at, the time at which they are enqueued, if that
-- is later.
CREATE OR REPLACE FUNCTION rouse._add_deadlines(p_jobs bigint[], p_run_at timestamptz, p_at timestamptz, p_ms bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    -- Kept within the range of timestamps.
    passes_at timestamptz := least(greatest(p_run_at, p_at), timestamptz '290000-01-01 00:00+00') + p_ms * interval '1 millisecond';
BEGIN
    INSERT INTO rouse.deadline (job, deadline_at, try_at, timeout_ms) SELECT made.id, passes_at, passes_at, p_ms FROM unnest(p_jobs) AS made(id);
END
$$;

-- Ends jobs whose deadline has passed, the earliest deadlines first: each fails, whatever its state, as if rouse.fail
-- had ended it. Also deletes the deadlines of jobs that ended earlier. Any worker may call it, until a call has handled
-- none. Never waits for the lock of a job: a locked job is tried again after a second, and then at growing intervals,
-- as in rouse.continue_releases.
--
--   p_max    the maximum number of deadlines, at most 1,000. A call that has ended jobs for 100 ms, or has 64 KiB to
--            report, leaves the others to the next one
--   p_since  only deadlines that passed after this time; null: all. While a transaction stays open, the index keeps
--            what was handled since then, and a call for all of them reads that again
--   handled  the number of deadlines that were handled: their jobs have ended, or are locked
--   next_ms  the number of milliseconds until the next deadline; null: there is none
--   looked_at  the time up to which it has handled deadlines
--   ended    the jobs that it has ended, [{"job", "handler", "attempt", "error"}, …]; for a limited login, only those
--            that it serves
--
-- Safe with any number of callers: a deadline is locked when it is handled, and a deadline that another call has locked
-- is left to that call. The report is small, because it is sent before the commit (claim.sql). Served by deadline_due
-- and the primary keys.
CREATE OR REPLACE FUNCTION rouse.enforce_deadlines(
    p_worker bigint, p_key bytea, p_max integer, p_since timestamptz DEFAULT NULL,
    OUT handled integer, OUT next_ms bigint, OUT looked_at timestamptz, OUT ended jsonb)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '250ms' SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    limited  boolean := rouse._authenticated_as_limited(p_worker, p_key);
    at       timestamptz := clock_timestamp();
    since    timestamptz := coalesce(p_since, '-infinity');
    due      bigint[];
    deadline record;
    live     record;
    error    jsonb;
BEGIN
    looked_at := at;
    due := ARRAY(
        SELECT d.job FROM rouse.deadline AS d
        WHERE d.try_at > since AND d.try_at <= at ORDER BY d.try_at LIMIT least(greatest(coalesce(p_max, 0), 1), 1000));
    DELETE FROM rouse.deadline AS d USING (
        SELECT d.job FROM unnest(due) AS passed(job) JOIN rouse.deadline AS d ON d.job = ANY (ARRAY[passed.job])
        WHERE NOT EXISTS (SELECT FROM rouse.job AS j WHERE j.id = ANY (ARRAY[passed.job]))
        FOR UPDATE OF d SKIP LOCKED) AS over
    WHERE d.job = ANY (ARRAY[over.job]);
    GET DIAGNOSTICS handled = ROW_COUNT;
    ended := '[]';
    FOR deadline IN
        SELECT d.job, d.deadline_at, d.timeout_ms
        FROM unnest(due) AS passed(job) JOIN rouse.deadline AS d ON d.job = ANY (ARRAY[passed.job]) ORDER BY d.deadline_at
    LOOP
        EXIT WHEN handled > 0 AND (clock_timestamp() > at + interval '100 milliseconds' OR pg_column_size(ended) > 65536);
        PERFORM FROM rouse.deadline AS d WHERE d.job = deadline.job AND d.try_at <= at FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        handled := handled + 1;
        SELECT j.attempt, l.handler, l.queue INTO live
        FROM rouse.job AS j CROSS JOIN LATERAL (SELECT l.handler, l.queue FROM rouse.lane AS l WHERE l.id = j.lane LIMIT 1) AS l
        WHERE j.id = deadline.job FOR UPDATE OF j SKIP LOCKED;
        IF NOT FOUND THEN
            UPDATE rouse.deadline AS d
            SET try_at = at + least(greatest((at - deadline.deadline_at) / 10, interval '1 second'), interval '1 minute')
            WHERE d.job = deadline.job;
            CONTINUE;
        END IF;
        error := jsonb_build_object('kind', 'job_timeout', 'message', format(
            'the job had not ended within %s, the job timeout that it was enqueued with', rouse._format_duration(deadline.timeout_ms)));
        PERFORM rouse._end(deadline.job, 'failed', NULL, error, 'failed', jsonb_build_object('deadline_at', deadline.deadline_at), p_worker);
        DELETE FROM rouse.deadline AS d WHERE d.job = deadline.job;
        IF NOT limited OR rouse._may_fire(live.queue, live.handler) THEN
            ended := ended || jsonb_build_object('job', deadline.job, 'handler', live.handler, 'attempt', live.attempt, 'error', error);
        END IF;
    END LOOP;
    SELECT greatest(0, ceil(extract(epoch FROM d.try_at - clock_timestamp()) * 1000))::bigint INTO next_ms
    FROM rouse.deadline AS d WHERE d.try_at > at ORDER BY d.try_at LIMIT 1;
END
$$;
