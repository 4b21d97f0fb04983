-- Shards (rouse.queue.shards): the lanes of a queue are divided among its workers, so that no two workers with the same
-- handlers and tags claim from the same lane.
--
-- A lane belongs to a shard by its id. A worker leases its share of the shards, and renews the lease every second. If
-- the worker dies, its lease ends, and the others take over its shards.
--
-- No claim of a worker commits after another worker has leased its shard, because the claim locks the worker's lease
-- (rouse.shard_lease) until it commits, and everything that takes a shard from a worker locks the same row first:
--
--   claim                 FOR KEY SHARE, and only if the lease has not ended
--   renewal               an update of the worker's own row: claims and renewals do not wait for each other
--   giving up shards      locks the row FOR UPDATE, unless a claim holds it: then the next call tries again
--   end of a lease        deletes the row, unless a claim holds it: then the next call tries again
--   leaving a queue       deletes the worker's own row; waits for its claims
--   new number of shards  deletes all rows of the queue; waits for all claims
--
-- Shards are taken, and leases added, by one call at a time for each queue: the one that holds the lock of the queue.
-- The calls of other workers do not wait for it: they only renew their leases, and divide the queue in a later call. So
-- no call waits for a lock that the call of another worker holds.
--
-- Workers with the same handlers and tags divide all shards among themselves, independently of workers with others. So
-- no lane is without a worker that can serve it, but workers with different handlers or tags may share a lane.

-- The shard of a lane. The same as shard_of (host/src/job/shard.rs). Ids of lanes are hashes.
CREATE OR REPLACE FUNCTION rouse._shard_of(p_lane bigint, p_shards integer) RETURNS integer
LANGUAGE sql IMMUTABLE AS $$
    SELECT abs(p_lane % p_shards)::integer
$$;

-- The lanes in the same order, with null instead of those in shards that the worker has not leased. Inboxes
-- (direct.sql) do not belong to a shard: only their worker claims from them. No other worker can lease the worker's
-- shards until the caller commits. Waits up to 5 s for a change to the shards, as rouse._within_gates does. Served by
-- shard_lease_worker, shard_worker, lane_id and primary keys.
CREATE OR REPLACE FUNCTION rouse._in_own_shards(p_worker bigint, p_lanes bigint[]) RETURNS bigint[]
LANGUAGE plpgsql SET lock_timeout = '5s' AS $$
DECLARE
    at   timestamptz := clock_timestamp();
    held text[];
BEGIN
    -- Ordered by `until`, so that Postgres reads shard_lease_worker, in which the old versions of a row come before the
    -- range that is read.
    held := ARRAY(SELECT s.queue FROM rouse.shard_lease AS s WHERE s.worker = p_worker AND s.until > at ORDER BY s.until FOR KEY SHARE);
    -- A new snapshot, after the locks.
    RETURN (
        WITH sharded AS MATERIALIZED (
            SELECT q.name, q.shards, ARRAY(
                SELECT s.shard FROM rouse.shard AS s WHERE s.worker = p_worker AND s.queue = q.name AND q.name = ANY (held)) AS own
            FROM rouse.queue AS q WHERE q.shards > 0)
        SELECT array_agg(CASE WHEN q.name IS NULL OR l.worker IS NOT NULL OR rouse._shard_of(asked.lane, q.shards) = ANY (q.own) THEN asked.lane END
                         ORDER BY asked.place)
        FROM unnest(p_lanes) WITH ORDINALITY AS asked(lane, place)
        LEFT JOIN LATERAL (SELECT l.queue, l.worker FROM rouse.lane AS l WHERE l.id = asked.lane LIMIT 1) AS l ON true
        LEFT JOIN sharded AS q ON q.name = l.queue);
END
$$;

-- Takes a worker's share of the shards of a queue, or gives up what exceeds it, and adds a lease if the worker has
-- none. Returns whether it has one. The caller holds the lock of the queue. Served by shard_lease_queue,
-- shard_lease_worker and primary keys.
CREATE OR REPLACE FUNCTION rouse._divide_shards(p_worker bigint, p_queue text, p_serves bigint, p_lease_ms bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    at     timestamptz := clock_timestamp();
    -- Read in a new snapshot, after the caller took the lock.
    shards integer := (SELECT q.shards FROM rouse.queue AS q WHERE q.name = p_queue);
    -- Ordered by `until`, so that Postgres reads shard_lease_queue, in which the old versions of a row come before the
    -- range that is read.
    live   bigint[] := ARRAY(SELECT s.worker FROM rouse.shard_lease AS s WHERE s.queue = p_queue AND s.until > at ORDER BY s.until);
    -- Those that were renewed before the clock was set back.
    ahead  CURSOR FOR
        SELECT s.worker FROM rouse.shard_lease AS s
        WHERE s.queue = p_queue AND s.until > at + 2 * p_lease_ms * interval '1 millisecond'
        ORDER BY s.until FOR NO KEY UPDATE SKIP LOCKED;
    ended  bigint;
    wanted integer;
    held   integer;
BEGIN
    IF shards = 0 THEN
        RETURN false;
    END IF;
    -- They count as renewed now: their workers may be alive or dead.
    FOR lease IN ahead LOOP
        UPDATE rouse.shard_lease SET until = at + p_lease_ms * interval '1 millisecond' WHERE CURRENT OF ahead;
    END LOOP;
    -- The leases that have ended, found by their shards. Leases without shards do not matter.
    FOR ended IN
        SELECT DISTINCT s.worker FROM rouse.shard AS s WHERE s.queue = p_queue AND s.worker <> ALL (live)
        UNION
        SELECT p_worker WHERE p_worker <> ALL (live)
    LOOP
        PERFORM FROM rouse.shard_lease AS s WHERE s.worker = ended AND s.queue = p_queue AND s.until <= at FOR UPDATE SKIP LOCKED;
        IF FOUND THEN
            DELETE FROM rouse.shard_lease AS s WHERE s.worker = ended AND s.queue = p_queue;
        END IF;
    END LOOP;
    IF p_worker <> ALL (live) THEN
        INSERT INTO rouse.shard_lease (worker, queue, serves, until)
        VALUES (p_worker, p_queue, p_serves, at + p_lease_ms * interval '1 millisecond')
        ON CONFLICT DO NOTHING;
        -- A claim of this worker still locks its lease, which has ended.
        IF NOT FOUND THEN
            RETURN false;
        END IF;
    END IF;
    SELECT shards / count(*) + (count(*) FILTER (WHERE l.worker < p_worker) < shards % count(*))::integer INTO wanted
    FROM (SELECT s.worker, s.serves FROM rouse.shard_lease AS s WHERE s.queue = p_queue AND s.until > at ORDER BY s.until) AS l
    WHERE l.serves = p_serves;
    held := (SELECT count(*) FROM rouse.shard AS s WHERE s.worker = p_worker AND s.queue = p_queue);
    IF held > wanted THEN
        PERFORM FROM rouse.shard_lease AS s
        WHERE s.worker = p_worker AND s.until > at AND s.queue = p_queue ORDER BY s.until FOR UPDATE SKIP LOCKED;
        IF FOUND THEN
            DELETE FROM rouse.shard AS s
            WHERE s.worker = p_worker AND s.queue = p_queue AND s.shard IN (
                SELECT o.shard FROM rouse.shard AS o WHERE o.worker = p_worker AND o.queue = p_queue ORDER BY o.shard OFFSET wanted);
        END IF;
    ELSIF held < wanted THEN
        INSERT INTO rouse.shard (queue, serves, shard, worker)
        SELECT p_queue, p_serves, n.shard, p_worker
        FROM generate_series(0, shards - 1) AS n(shard)
        WHERE NOT EXISTS (SELECT FROM rouse.shard AS s WHERE s.queue = p_queue AND s.serves = p_serves AND s.shard = n.shard)
        ORDER BY n.shard
        LIMIT wanted - held;
    END IF;
    RETURN true;
END
$$;

-- Leases shards of these queues for five seconds, or renews the lease, and gives up the shards of all other queues.
-- Returns the shards that the worker has now, for each of these queues that has shards.
--
-- The shares of workers differ by at most one shard; the workers that registered first have the larger ones. A worker
-- that has more than its share gives up the shards with the highest numbers. A worker that has fewer takes free shards,
-- which may become available only after the next calls of the others.
--
-- `p_serves` is a hash of what the worker can run. Waits only for the worker's own claims (if it leaves a queue), and
-- for rouse.set_shards. Served by shard_lease_worker, shard_worker and primary keys.
CREATE OR REPLACE FUNCTION rouse.lease_shards(p_worker bigint, p_key bytea, p_queues text[], p_serves bigint)
RETURNS TABLE (queue text, shards integer, own integer[], lease_ms bigint)
LANGUAGE plpgsql SECURITY DEFINER ROWS 1
SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s' SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at     timestamptz := clock_timestamp();
    leased text[] := '{}';
    -- Ordered by `until`, as in rouse._in_own_shards.
    held   CURSOR FOR
        SELECT s.queue, s.serves FROM rouse.shard_lease AS s WHERE s.worker = p_worker AND s.until > at ORDER BY s.until FOR NO KEY UPDATE;
BEGIN
    IF rouse._authenticated_as_limited(p_worker, p_key) THEN
        p_queues := rouse._permitted_queues(p_worker, p_queues);
        -- The workers of a limited login divide the shards among themselves, because its limits may exclude some lanes.
        p_serves := hashtextextended(session_user, p_serves);
    END IF;
    lease_ms := 5000;
    p_queues := coalesce(p_queues, '{}');
    PERFORM set_config('synchronous_commit', 'off', true);
    -- Changed at the cursor: a lookup by the primary key would read all versions of the row that an old transaction
    -- keeps.
    FOR lease IN held LOOP
        IF lease.queue = ANY (p_queues) AND lease.serves = p_serves THEN
            UPDATE rouse.shard_lease SET until = at + lease_ms * interval '1 millisecond' WHERE CURRENT OF held;
            leased := leased || lease.queue;
        ELSE
            DELETE FROM rouse.shard_lease WHERE CURRENT OF held;
        END IF;
    END LOOP;
    FOR queue IN SELECT q.name FROM rouse.queue AS q WHERE q.name = ANY (p_queues) AND q.shards > 0 ORDER BY q.name LOOP
        IF rouse._try_lock('shards', lease_shards.queue) THEN
            IF rouse._divide_shards(p_worker, lease_shards.queue, p_serves, lease_ms) THEN
                leased := leased || lease_shards.queue;
            END IF;
        END IF;
        SELECT q.shards INTO shards FROM rouse.queue AS q WHERE q.name = lease_shards.queue;
        CONTINUE WHEN shards = 0;
        own := ARRAY(
            SELECT s.shard FROM rouse.shard AS s
            WHERE s.worker = p_worker AND s.queue = lease_shards.queue AND lease_shards.queue = ANY (leased) ORDER BY s.shard);
        RETURN NEXT;
    END LOOP;
END
$$;

-- Divides the lanes of a queue into this many shards, 2 to 1024; 0: all workers serve all lanes. Workers lease new
-- shards within seconds. A claim that is in progress when a queue gets its first shards may still claim from any lane.
-- Leaves a record.
CREATE OR REPLACE FUNCTION rouse.set_shards(queue text, shards integer) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at  timestamptz := clock_timestamp();
    was integer;
BEGIN
    PERFORM rouse._check_queue('set_shards', set_shards.queue);
    IF set_shards.shards IS NULL OR set_shards.shards <> 0 AND set_shards.shards NOT BETWEEN 2 AND 1024 THEN
        RAISE EXCEPTION 'rouse.set_shards: shards must be 2 to 1024, or 0 for none, not %', coalesce(set_shards.shards::text, 'null')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Several times the number of workers is a good choice.';
    END IF;
    -- Locked before the row of the queue, as in rouse.maintain_lanes.
    LOCK TABLE rouse.lane IN SHARE UPDATE EXCLUSIVE MODE;
    PERFORM rouse._lock('shards', set_shards.queue);
    INSERT INTO rouse.queue (name) VALUES (set_shards.queue) ON CONFLICT DO NOTHING;
    SELECT q.shards INTO was FROM rouse.queue AS q WHERE q.name = set_shards.queue FOR NO KEY UPDATE;
    IF was = set_shards.shards THEN
        RETURN;
    END IF;
    UPDATE rouse.queue AS q SET shards = set_shards.shards WHERE q.name = set_shards.queue;
    DELETE FROM rouse.shard_lease AS s WHERE s.queue = set_shards.queue;
    PERFORM rouse._announce_settings(set_shards.queue);
    PERFORM rouse._ensure_partitions(at);
    INSERT INTO rouse.record (at, queue, event, who, detail)
    VALUES (at, set_shards.queue, 'shards_set', session_user, jsonb_build_object('shards', set_shards.shards));
END
$$;
