-- How a worker finds work. Each function reads through indexes, whatever the statistics say.

-- The lanes in the same order, with null instead of those whose queue is paused. Served by lane_id and queue_paused.
CREATE OR REPLACE FUNCTION rouse._not_paused(p_lanes bigint[]) RETURNS bigint[]
LANGUAGE sql STABLE AS $$
    SELECT array_agg(CASE WHEN q.name IS NULL THEN asked.lane END ORDER BY asked.place)
    FROM unnest(p_lanes) WITH ORDINALITY AS asked(lane, place)
    LEFT JOIN LATERAL (SELECT l.queue FROM rouse.lane AS l WHERE l.id = asked.lane LIMIT 1) AS l ON true
    LEFT JOIN rouse.queue AS q ON q.name = l.queue AND q.paused_at IS NOT NULL
$$;

-- Reports whether there is work for a worker: one read, which locks no rows and never waits. Paused queues have no
-- work.
--
--   lanes, cursors      ready: those of these lanes that have a ready job after their cursor (served by
--                       job_ready)
--   catalog_after       catalog_changed: the positions of the rows of the catalog of lanes after this one do not add
--                       up to `catalog_sum`: rows were added, removed or moved (served by its primary key)
--   orphaned_since      orphans: a lease has ended, at this time or later; null: at any time (served by
--                       job_lease)
--   due_since           due: a job that became due after this time waits for its turn; null: at any time (served
--                       by job_due); deadlines: a deadline has passed since this time (rouse.enforce_deadlines;
--                       served by deadline_due); releases: one has been pending for a second since this time
--                       (rouse.continue_releases; served by pending_release_due)
--   next_due_ms         milliseconds until the next scheduled job or retry is due; null: there is none
--   looked_at           the time up to which leases and due jobs were checked
--   turn                the last assigned turn
--   paused              the queues that are paused: their lanes were not read, and may have jobs
--   writers             transactions of this database that have written and are in progress, or prepared: their jobs
--                       are not visible yet; null unless p_writers is given, because it reads all sessions of the
--                       server. p_writers: the result of the last call; empty if there was none
--
-- Sorts nothing: otherwise, if the statistics say that no job waits, a plan could read and sort all that do
-- (job_waiting).
CREATE OR REPLACE FUNCTION rouse.peek(
    p_lanes bigint[], p_cursors bigint[], p_catalog_after bigint, p_catalog_sum bigint,
    p_orphaned_since timestamptz, p_due_since timestamptz, p_writers bigint[],
    OUT ready bigint[], OUT catalog_changed boolean, OUT orphans boolean, OUT due boolean, OUT next_due_ms bigint, OUT looked_at timestamptz,
    OUT turn bigint, OUT writers bigint[], OUT releases boolean, OUT deadlines boolean, OUT paused text[])
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off AS $$
DECLARE
    at             timestamptz := clock_timestamp();
    orphaned_since timestamptz := coalesce(p_orphaned_since, '-infinity');
    due_since      timestamptz := coalesce(p_due_since, '-infinity');
    next_at        timestamptz;
    deadline_at    timestamptz;
    -- The snapshot of this call sees neither this transaction nor any later one.
    unseen         bigint := pg_snapshot_xmax(pg_current_snapshot())::text::bigint;
BEGIN
    looked_at := at;
    paused := ARRAY(SELECT q.name FROM rouse.queue AS q WHERE q.paused_at IS NOT NULL);
    IF paused <> '{}' THEN
        p_lanes := rouse._not_paused(p_lanes);
    END IF;
    -- Read before the transactions, so that those with earlier turns are among them.
    turn := (SELECT s.last_value FROM rouse.turn_seq AS s);
    -- Read after the snapshot of the rows. A transaction of p_writers that ended in between is among them, because its
    -- rows were not seen. Others count as ended: the next two peeks of a sweep see their rows. Not pg_snapshot_xip,
    -- which lacks transactions that are newer than all ended ones.
    IF p_writers IS NOT NULL THEN
        writers := ARRAY(
            SELECT a.backend_xid::text::bigint FROM pg_stat_get_activity(NULL) AS a
            WHERE a.backend_xid IS NOT NULL AND a.datid = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
            UNION ALL
            SELECT p.transaction::text::bigint FROM pg_prepared_xacts AS p WHERE p.database = current_database()
            UNION
            -- The transaction ids of sessions have 32 bits, those of snapshots 64. The id nearest to `unseen` is meant.
            SELECT w.id FROM unnest(p_writers) AS w(id)
            WHERE NOT pg_visible_in_snapshot(
                greatest(unseen + ((w.id - unseen + 2147483648) & 4294967295) - 2147483648, 3)::text::xid8, pg_current_snapshot()));
    END IF;
    SELECT coalesce(array_agg(asked.lane), '{}') INTO ready
    FROM unnest(p_lanes, p_cursors) AS asked(lane, after)
    CROSS JOIN LATERAL (
        SELECT FROM rouse.job AS j
        WHERE j.lane = asked.lane AND j.turn > asked.after AND j.state = 'queued' AND j.turn IS NOT NULL
        ORDER BY j.turn LIMIT 1) AS first_job;
    catalog_changed := (SELECT coalesce(sum(l.seq), 0) FROM rouse.lane AS l WHERE l.seq > p_catalog_after) <> p_catalog_sum;
    IF paused <> '{}' THEN
        orphans := EXISTS (
            SELECT FROM rouse.job AS j
            WHERE j.state = 'running' AND j.lease_until >= orphaned_since AND j.lease_until < at
              AND (rouse._not_paused(ARRAY[j.lane]))[1] IS NOT NULL
            ORDER BY j.lease_until LIMIT 1);
    ELSE
        orphans := EXISTS (
            SELECT FROM rouse.job AS j
            WHERE j.state = 'running' AND j.lease_until >= orphaned_since AND j.lease_until < at
            ORDER BY j.lease_until LIMIT 1);
    END IF;
    SELECT j.available_at INTO next_at
    FROM rouse.job AS j
    WHERE j.state = 'queued' AND j.turn IS NULL AND j.blockers IS NULL AND j.available_at > due_since
    ORDER BY j.available_at LIMIT 1;
    due := coalesce(next_at <= at, false);
    releases := EXISTS (
        SELECT FROM rouse.pending_release AS p
        WHERE p.try_at > due_since - interval '1 second' AND p.try_at < at - interval '1 second' ORDER BY p.try_at LIMIT 1);
    SELECT d.try_at INTO deadline_at FROM rouse.deadline AS d WHERE d.try_at > due_since ORDER BY d.try_at LIMIT 1;
    deadlines := coalesce(deadline_at <= at, false);
    -- GREATEST would turn null into 0, and the worker would never wait.
    IF next_at IS NOT NULL THEN
        next_due_ms := greatest(0, ceil(extract(epoch FROM next_at - clock_timestamp()) * 1000))::bigint;
    END IF;
END
$$;

-- The lanes of the ready jobs whose ids come after `p_after` and are among the last `p_max`; and the last id that was
-- assigned before the read. If `p_after` is null, returns only that id. For workers that have other jobs to claim in
-- the meantime. Served by the primary key; `p_max` also limits the number of rows that are read although they are not
-- visible yet, or no longer visible.
CREATE OR REPLACE FUNCTION rouse.newest_lanes(p_after bigint, p_max integer, OUT lanes bigint[], OUT last bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
BEGIN
    last := (SELECT s.last_value FROM rouse.turn_seq AS s);
    lanes := ARRAY(
        SELECT DISTINCT n.lane
        -- OFFSET 0: otherwise, the conditions outside would move inside, and the planner would choose to read all ready
        -- jobs (job_ready).
        FROM (SELECT j.lane, j.state, j.turn FROM rouse.job AS j WHERE j.id > greatest(p_after, last - p_max) AND p_after IS NOT NULL ORDER BY j.id OFFSET 0) AS n
        WHERE n.state = 'queued' AND n.turn IS NOT NULL);
    PERFORM FROM rouse.queue AS q WHERE q.paused_at IS NOT NULL;
    IF FOUND THEN
        lanes := coalesce(array_remove(rouse._not_paused(lanes), NULL), '{}');
    END IF;
END
$$;

-- Gives due scheduled jobs and retries a new turn, at most `p_max` of them, and returns their number, and the number of
-- milliseconds until the next one is due (null: there is none). A due job that is locked is left to a later call: it
-- does not count as the next one, because the worker would then not wait at all. `left_at`: the time at which the first
-- of those was due; null if there is none, or if `p_max` jobs were promoted. `p_since`: only jobs that became due after
-- this time; null: all. `ids`: the promoted jobs, with `p_with_ids`. Served by job_due. Like rouse.peek, it sorts
-- nothing.
CREATE OR REPLACE FUNCTION rouse.promote(
    p_worker bigint, p_key bytea, p_max integer, p_since timestamptz, p_with_ids boolean DEFAULT false,
    OUT promoted integer, OUT next_due_ms bigint, OUT ids bigint[], OUT left_at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off AS $$
DECLARE
    at    timestamptz := clock_timestamp();
    since timestamptz := coalesce(p_since, '-infinity');
BEGIN
    PERFORM rouse._authenticated_as_limited(p_worker, p_key);
    p_max := least(greatest(coalesce(p_max, 0), 0), 20000);
    PERFORM set_config('synchronous_commit', 'off', true);
    WITH due AS MATERIALIZED (
        SELECT j.id FROM rouse.job AS j
        WHERE j.state = 'queued' AND j.turn IS NULL AND j.blockers IS NULL AND j.available_at > since AND j.available_at <= at
        ORDER BY j.available_at LIMIT p_max FOR NO KEY UPDATE SKIP LOCKED),
    moved AS (
        UPDATE rouse.job AS j SET turn = nextval('rouse.turn_seq') FROM due
        WHERE j.id = ANY (ARRAY[due.id]) RETURNING j.id)
    SELECT count(*), CASE WHEN p_with_ids THEN array_agg(moved.id) END INTO promoted, ids FROM moved;
    IF promoted = p_max THEN
        next_due_ms := 0;
        RETURN;
    END IF;
    SELECT j.available_at INTO left_at
    FROM rouse.job AS j
    WHERE j.state = 'queued' AND j.turn IS NULL AND j.blockers IS NULL AND j.available_at > since AND j.available_at <= at
    ORDER BY j.available_at LIMIT 1;
    SELECT greatest(0, ceil(extract(epoch FROM j.available_at - clock_timestamp()) * 1000))::bigint INTO next_due_ms
    FROM rouse.job AS j
    WHERE j.state = 'queued' AND j.turn IS NULL AND j.blockers IS NULL AND j.available_at > at
    ORDER BY j.available_at LIMIT 1;
END
$$;

-- The lanes whose next job has waited for `p_wait_ms`, or will have within `p_ahead_ms`, the longest wait first: the
-- number of milliseconds until it will have waited that long (zero or negative if it has), and the number of the next
-- `p_max` jobs of which the same is true. The wait of a job starts at its run_at, and after a failure at its retry. One
-- read, which locks no rows. Served by job_ready.
CREATE OR REPLACE FUNCTION rouse.overdue(p_lanes bigint[], p_cursors bigint[], p_wait_ms bigint, p_ahead_ms bigint, p_max integer)
RETURNS TABLE (lane bigint, in_ms bigint, jobs integer)
LANGUAGE plpgsql STABLE SECURITY DEFINER ROWS 10
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    since timestamptz := clock_timestamp() - p_wait_ms * interval '1 millisecond';
    until timestamptz := since + p_ahead_ms * interval '1 millisecond';
BEGIN
    RETURN QUERY
    SELECT asked.lane, ceil(extract(epoch FROM first.available_at - since) * 1000)::bigint, (
        SELECT count(*)::integer
        FROM (SELECT j.available_at FROM rouse.job AS j
              WHERE j.lane = asked.lane AND j.turn > asked.after AND j.state = 'queued' AND j.turn IS NOT NULL
              ORDER BY j.turn LIMIT p_max) AS next
        WHERE next.available_at <= until)
    FROM unnest(p_lanes, p_cursors) AS asked(lane, after)
    CROSS JOIN LATERAL (
        SELECT j.available_at FROM rouse.job AS j
        WHERE j.lane = asked.lane AND j.turn > asked.after AND j.state = 'queued' AND j.turn IS NOT NULL
        ORDER BY j.turn LIMIT 1) AS first
    WHERE first.available_at <= until
    ORDER BY first.available_at;
END
$$;

-- The jobs that remain in a queue, for each handler and list of required tags: ready; due (scheduled jobs that are due,
-- and orphans); scheduled for later or waiting for other jobs, and the number of those that have been tried before
-- (`retries`); running here (`mine`) and elsewhere. The last two are computed if `p_running` is true, and require
-- reading all running jobs, of all queues. Ready and waiting jobs are counted as in rouse.depth: up to 10,000 for each
-- lane, and up to about a million in total; if there are more, `at_least` is true. Due jobs are all counted, because
-- the caller continues until there are none: they are read for all queues, because any worker promotes them at its next
-- peek. Served by job_ready, job_waiting, job_due and job_lease, after one read of the catalog of lanes.
CREATE OR REPLACE FUNCTION rouse.remaining(p_queue text, p_worker bigint, p_running boolean)
RETURNS TABLE (handler text, tags text[], ready bigint, due bigint, scheduled bigint, retries bigint, mine bigint, others bigint, at_least boolean)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_mergejoin = off SET enable_sort = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at   timestamptz := clock_timestamp();
    -- Leases that have ended come first in the index.
    upto timestamptz := CASE WHEN p_running THEN 'infinity' ELSE at END;
BEGIN
    RETURN QUERY
    WITH running AS MATERIALIZED (
        SELECT r.lane,
               count(*) FILTER (WHERE r.lease_until < at) AS orphans,
               count(*) FILTER (WHERE r.lease_until >= at AND r.worker = p_worker) AS mine,
               count(*) FILTER (WHERE r.lease_until >= at AND r.worker IS DISTINCT FROM p_worker) AS others
        FROM (SELECT j.lane, j.worker, j.lease_until FROM rouse.job AS j
              WHERE j.state = 'running' AND j.lease_until > '-infinity' AND j.lease_until < upto
              ORDER BY j.lease_until LIMIT 100000) AS r
        GROUP BY r.lane),
    due AS MATERIALIZED (
        -- In this order and without sorting: only job_due provides that, and it contains nothing that is scheduled for
        -- later.
        SELECT d.lane, count(*) AS jobs
        FROM (SELECT j.lane FROM rouse.job AS j
              WHERE j.state = 'queued' AND j.turn IS NULL AND j.blockers IS NULL AND j.available_at <= at
              ORDER BY j.available_at) AS d
        GROUP BY d.lane),
    -- As in rouse.depth, but lanes with few jobs are counted again.
    lanes AS MATERIALIZED (
        SELECT l.id, l.handler, l.tags, ready.jobs AS ready, waiting.jobs AS waiting
        FROM (SELECT DISTINCT ON (l.id) l.id, l.handler, l.tags
              FROM rouse.lane AS l WHERE l.queue = p_queue ORDER BY l.id) AS l
        CROSS JOIN LATERAL (
            SELECT count(*) AS jobs FROM (
                SELECT FROM rouse.job AS j WHERE j.lane = l.id AND j.state = 'queued' AND j.turn IS NOT NULL
                ORDER BY j.turn LIMIT 101) AS j) AS ready
        CROSS JOIN LATERAL (
            SELECT count(*) AS jobs FROM (
                SELECT FROM rouse.job AS j
                WHERE j.lane >= l.id AND j.lane <= l.id AND j.state = 'queued' AND j.turn IS NULL
                ORDER BY j.lane LIMIT 101) AS j) AS waiting),
    counted AS MATERIALIZED (
        SELECT rouse._counted_per_lane(
                   count(*) FILTER (WHERE l.ready > 100) + count(*) FILTER (WHERE l.waiting > 100)) AS jobs
        FROM lanes AS l)
    SELECT l.handler, l.tags, sum(least(ready.jobs, c.jobs))::bigint,
           sum(coalesce(due.jobs, 0) + coalesce(running.orphans, 0))::bigint,
           sum(least(waiting.later, c.jobs))::bigint, sum(least(waiting.retries, c.jobs))::bigint,
           sum(coalesce(running.mine, 0))::bigint, sum(coalesce(running.others, 0))::bigint,
           bool_or(ready.jobs > c.jobs OR waiting.jobs > c.jobs)
    FROM lanes AS l
    CROSS JOIN LATERAL (
        SELECT count(*) AS jobs FROM (
            SELECT FROM rouse.job AS j WHERE j.lane = l.id AND j.state = 'queued' AND j.turn IS NOT NULL
            ORDER BY j.turn LIMIT (SELECT c.jobs + 1 FROM counted AS c)) AS j) AS ready
    CROSS JOIN LATERAL (
        SELECT count(*) AS jobs, count(*) FILTER (WHERE j.available_at > at OR j.blockers IS NOT NULL) AS later,
               count(*) FILTER (WHERE j.available_at > at AND j.attempt > 0) AS retries
        -- A range of one lane, in the order of lanes and without sorting: only job_waiting provides that. `=` implies
        -- no order, and a plan that is made while the table is small could use job_due instead.
        FROM (SELECT j.available_at, j.attempt, j.blockers FROM rouse.job AS j
              WHERE j.lane >= l.id AND j.lane <= l.id AND j.state = 'queued' AND j.turn IS NULL
              ORDER BY j.lane LIMIT (SELECT c.jobs + 1 FROM counted AS c)) AS j) AS waiting
    -- FULL: a plan that was made for few lanes could compare each lane with each of these rows for a left join. The
    -- rows of other queues have no lane here.
    FULL JOIN due ON due.lane = l.id
    FULL JOIN running ON running.lane = l.id
    CROSS JOIN counted AS c
    GROUP BY l.handler, l.tags
    HAVING count(l.id) > 0 AND (sum(ready.jobs + waiting.jobs + coalesce(due.jobs, 0)) > 0 OR count(running.lane) > 0)
    ORDER BY l.handler, l.tags;
END
$$;

-- The number of jobs of a queue from these sources, ready, due, or orphaned, by handler and required tags. Counted as
-- in rouse.remaining. Served by job_source, job_due and job_lease.
CREATE OR REPLACE FUNCTION rouse.remaining_bound(p_queue text, p_sources text[])
RETURNS TABLE (handler text, tags text[], jobs bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_mergejoin = off
SET enable_sort = off SET enable_incremental_sort = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at timestamptz := clock_timestamp();
BEGIN
    RETURN QUERY
    WITH soon AS MATERIALIZED (
        SELECT s.lane, count(*) AS jobs
        FROM (
            (SELECT j.lane, j.source FROM rouse.job AS j
             WHERE j.state = 'queued' AND j.turn IS NULL AND j.blockers IS NULL AND j.available_at <= at
             ORDER BY j.available_at)
            UNION ALL
            (SELECT j.lane, j.source FROM rouse.job AS j
             WHERE j.state = 'running' AND j.lease_until > '-infinity' AND j.lease_until < at
             ORDER BY j.lease_until)) AS s
        WHERE s.source = ANY (p_sources)
        GROUP BY s.lane)
    SELECT l.handler, l.tags, sum(ready.jobs + coalesce(soon.jobs, 0))::bigint
    FROM (SELECT DISTINCT ON (l.id) l.id, l.handler, l.tags FROM rouse.lane AS l WHERE l.queue = p_queue ORDER BY l.id) AS l
    CROSS JOIN LATERAL (
        SELECT count(*) AS jobs FROM (
            SELECT FROM unnest(p_sources) AS bound(source)
            CROSS JOIN LATERAL (
                SELECT FROM rouse.job AS j
                WHERE j.lane >= l.id AND j.lane <= l.id AND j.source >= bound.source AND j.source <= bound.source
                  AND j.state = 'queued' AND j.turn IS NOT NULL
                ORDER BY j.lane, j.source, j.turn LIMIT 10000) AS j
            LIMIT 10000) AS j) AS ready
    -- As in rouse.remaining.
    FULL JOIN soon ON soon.lane = l.id
    GROUP BY l.handler, l.tags
    HAVING count(l.id) > 0 AND sum(ready.jobs + coalesce(soon.jobs, 0)) > 0;
END
$$;
