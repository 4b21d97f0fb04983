-- Priorities with ageing: which lanes have jobs that have waited so long that they go ahead of newer ones of
-- higher priority (SPEC row H5). Asked once a second at most, by workers that have more to do than they can.
--
-- What this does to a database with live jobs: nothing but make a function.

-- Of these lanes, those whose next job has waited for `p_wait_ms`, the one that has waited longest first, and how
-- many of the next `p_most` jobs have. A job waits from its run_at on, and after a failure from its retry on.
-- One read: locks nothing. Served by job_ready.
CREATE FUNCTION rouse.overdue(p_lanes bigint[], p_cursors bigint[], p_wait_ms bigint, p_most integer)
RETURNS TABLE (lane bigint, jobs integer)
LANGUAGE plpgsql STABLE SECURITY DEFINER ROWS 10
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    since timestamptz := clock_timestamp() - p_wait_ms * interval '1 millisecond';
BEGIN
    RETURN QUERY
    SELECT asked.lane, (
        SELECT count(*)::integer
        FROM (SELECT j.available_at FROM rouse.job AS j
              WHERE j.lane = asked.lane AND j.turn > asked.after AND j.state = 'queued' AND j.turn IS NOT NULL
              ORDER BY j.turn LIMIT p_most) AS next
        WHERE next.available_at <= since)
    FROM unnest(p_lanes, p_cursors) AS asked(lane, after)
    CROSS JOIN LATERAL (
        SELECT j.available_at FROM rouse.job AS j
        WHERE j.lane = asked.lane AND j.turn > asked.after AND j.state = 'queued' AND j.turn IS NOT NULL
        ORDER BY j.turn LIMIT 1) AS first
    WHERE first.available_at <= since
    ORDER BY first.available_at;
END
$$;
REVOKE ALL ON FUNCTION rouse.overdue FROM PUBLIC;
GRANT EXECUTE ON FUNCTION rouse.overdue TO rouse_worker;
