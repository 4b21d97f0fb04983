-- A claim brings no more payload than a host has room for, whatever the jobs before it looked like.
--
-- A worker that finishes thousands of small jobs a second claims as many ahead, and knows what a job
-- weighs only once it has claimed some. The first 1,200 jobs of 1 MiB behind them came in one answer:
-- 2.7 GB of memory in the host, and ten seconds in which it ran nothing.

-- Claims up to `wanted` jobs from these lanes, in the order given, each lane from its cursor on; no
-- more after the one with which their payloads reach 8 MiB (PREFETCH_BYTES_MAX of the host).
-- Safe under concurrency: rows that another claim has locked are skipped, and a row that was
-- claimed meanwhile is checked again under its lock. Served by job_ready, then by the primary key.
-- The commit does not wait for the disk: a claim that a server crash forgets is only made again.
--
-- What is too much is locked until this commits, and otherwise left as it was. The size is what the
-- table keeps, because the payload itself would have to be read for its own; one that is compressed
-- counts 16 times (JSON shrinks to a quarter or an eighth, and at the most to a ninetieth).
CREATE OR REPLACE FUNCTION rouse.claim(
    p_worker bigint, p_fence bigint, p_lanes bigint[], p_cursors bigint[], p_lease_ms bigint[], p_wanted integer)
RETURNS SETOF rouse.claimed
LANGUAGE plpgsql SECURITY DEFINER ROWS 100
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at timestamptz := clock_timestamp();
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    RETURN QUERY
    WITH picked AS MATERIALIZED (
        SELECT found.id, found.lease_ms
        FROM (
            SELECT ready.id, wanted.lease_ms, ready.bytes, sum(ready.bytes) OVER (ROWS UNBOUNDED PRECEDING) AS bytes_so_far
            FROM unnest(p_lanes, p_cursors, p_lease_ms) AS wanted(lane, after, lease_ms)
            CROSS JOIN LATERAL (
                SELECT j.id, CASE WHEN pg_column_compression(j.payload) IS NULL THEN pg_column_size(j.payload)
                                  ELSE 16 * least(pg_column_size(j.payload), 1048576) END AS bytes
                FROM rouse.job AS j
                WHERE j.lane = wanted.lane AND j.turn > wanted.after AND j.state = 'queued' AND j.turn IS NOT NULL
                ORDER BY j.turn LIMIT p_wanted FOR NO KEY UPDATE SKIP LOCKED) AS ready
            LIMIT p_wanted) AS found
        WHERE found.bytes_so_far - found.bytes < 8388608)
    UPDATE rouse.job AS j
    SET state = 'running', attempt = j.attempt + 1, fence = p_fence, worker = p_worker,
        claimed_at = at, lease_until = at + picked.lease_ms * interval '1 millisecond'
    FROM picked WHERE j.id = ANY (ARRAY[picked.id])
    RETURNING j.id, j.lane, j.turn, j.attempt, j.lost, j.max_attempts, j.tenant, j.source, j.requested_at, j.claimed_at, j.payload;
END
$$;
