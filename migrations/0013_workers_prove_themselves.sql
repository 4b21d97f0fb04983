-- Workers prove themselves. Each life of a worker has a key of 32 random bytes, of which the database
-- keeps a hash, and each of its writes needs it: knowing a fence is not enough any more, nor
-- being able to guess an incarnation. A worker that is not heard of for 90 s is dead, and what it has
-- claimed is free at once, however long the leases.
--
-- Breaking: an older host has no key. Its jobs are taken over when their leases run out.
--
-- Errors that a host branches on have codes of their own:
--   RW001  this life of the worker is over (dead, or unregistered): register again
--   RW002  another host has taken the worker's id over with the same key: stop
--   RW003  the worker's id is taken by somebody who lives
--   RW004  there is no such worker, or this is not its key

ALTER TABLE rouse.worker
    -- sha256 of the key; null: a host of before, which can do nothing any more.
    ADD COLUMN key_hash     bytea,
    ADD COLUMN platform     text NOT NULL DEFAULT '',
    -- {"handler": {"version": …, "grants": […]}, …}
    ADD COLUMN capabilities jsonb NOT NULL DEFAULT '{}',
    -- Attempts at the same time.
    ADD COLUMN slots        integer NOT NULL DEFAULT 0,
    -- In order; none: all.
    ADD COLUMN queues       text[] NOT NULL DEFAULT '{}',
    ADD COLUMN tags         text[] NOT NULL DEFAULT '{}',
    ADD COLUMN draining_at  timestamptz,
    ADD COLUMN dead_at      timestamptz,
    ADD COLUMN stats        jsonb,
    ADD COLUMN stats_at     timestamptz,
    -- How often it has tried to write on a job that was another's.
    ADD COLUMN refused      bigint NOT NULL DEFAULT 0;
UPDATE rouse.worker SET dead_at = now() WHERE stopped_at IS NULL;
-- An id is unique among the living.
CREATE UNIQUE INDEX worker_living ON rouse.worker (worker_id) WHERE stopped_at IS NULL AND dead_at IS NULL;

-- The memory of the next attempt, bytes; null: the handler's own. Set after an attempt that ran out of it.
ALTER TABLE rouse.job ADD COLUMN memory_bytes bigint CHECK (memory_bytes > 0);
ALTER TYPE rouse.claimed ADD ATTRIBUTE memory_bytes bigint;

-- What was done to jobs and queues besides their attempts. Insert-only, one partition a day.
CREATE TABLE rouse.record (
    at      timestamptz NOT NULL,
    job     bigint,
    queue   text,
    -- released, renewed, cancelled, completed, failed, retried, rescheduled, deleted; purged, paused, resumed.
    event   text NOT NULL,
    attempt integer,
    worker  bigint,
    -- The login, where no worker did it.
    who     text,
    detail  jsonb
) PARTITION BY RANGE (at);
CREATE INDEX record_job ON rouse.record (job) WHERE job IS NOT NULL;
GRANT SELECT ON rouse.record TO rouse_observer;

-- Makes the partitions of today and the next `ahead` days (UTC). Safe to run at any time: a table is
-- created on its own and then attached, which lets inserts and reads of the others go on.
CREATE OR REPLACE FUNCTION rouse.prepare_partitions(ahead integer DEFAULT 7) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET datestyle = 'ISO' AS $$
DECLARE
    parent text;
    day    date;
    name   text;
    made   integer := 0;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('rouse.partitions', 0));
    FOREACH parent IN ARRAY ARRAY['finished', 'attempt', 'record'] LOOP
        FOR day IN SELECT d::date FROM generate_series(
            (now() AT TIME ZONE 'UTC')::date, (now() AT TIME ZONE 'UTC')::date + ahead, '1 day') AS d
        LOOP
            name := parent || '_' || to_char(day, 'YYYYMMDD');
            IF to_regclass('rouse.' || name) IS NULL THEN
                EXECUTE format('CREATE TABLE rouse.%I (LIKE rouse.%I INCLUDING CONSTRAINTS)', name, parent);
                EXECUTE format('GRANT SELECT ON rouse.%I TO rouse_observer', name);
                EXECUTE format('ALTER TABLE rouse.%I ATTACH PARTITION rouse.%I FOR VALUES FROM (%L) TO (%L)',
                    parent, name, day::timestamp AT TIME ZONE 'UTC', (day + 1)::timestamp AT TIME ZONE 'UTC');
                made := made + 1;
            END IF;
        END LOOP;
    END LOOP;
    RETURN made;
END
$$;

-- Refuses everybody but a worker that lives and has this key. Served by the primary key.
CREATE FUNCTION rouse._known(p_worker bigint, p_key bytea) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    life record;
BEGIN
    PERFORM FROM rouse.worker AS w
    WHERE w.incarnation = p_worker AND w.key_hash = sha256(p_key) AND w.stopped_at IS NULL AND w.dead_at IS NULL;
    IF FOUND THEN
        RETURN;
    END IF;
    SELECT w.worker_id, w.key_hash, w.dead_at, w.stopped_at INTO life
    FROM rouse.worker AS w WHERE w.incarnation = p_worker AND w.key_hash = sha256(p_key);
    IF NOT FOUND THEN
        RAISE EXCEPTION 'rouse: there is no worker with incarnation % and this key', coalesce(p_worker::text, 'null') USING ERRCODE = 'RW004';
    END IF;
    IF EXISTS (SELECT FROM rouse.worker AS next
               WHERE next.worker_id = life.worker_id AND next.key_hash = life.key_hash AND next.incarnation > p_worker) THEN
        RAISE EXCEPTION 'rouse: another host has taken worker id % over with the same key', life.worker_id
            USING ERRCODE = 'RW002', HINT = 'Each host needs a worker id of its own.';
    END IF;
    RAISE EXCEPTION 'rouse: incarnation % of worker % is over since %', p_worker, life.worker_id, coalesce(life.dead_at, life.stopped_at)
        USING ERRCODE = 'RW001', HINT = 'Register again.';
END
$$;

-- Ends a life from outside: what it has claimed can be adopted at once, by whoever looks next.
-- Its running jobs are found by job_lease, all of whose rows are read: it happens once in a life.
CREATE FUNCTION rouse._bury(p_worker bigint) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    at     timestamptz := clock_timestamp();
    queues text[];
BEGIN
    UPDATE rouse.worker AS w SET dead_at = at WHERE w.incarnation = p_worker AND w.dead_at IS NULL AND w.stopped_at IS NULL;
    DELETE FROM rouse.sleeper AS s WHERE s.worker = p_worker;
    -- A row that somebody is changing at this moment keeps its lease, and nobody waits for it.
    WITH free AS MATERIALIZED (
        SELECT j.id FROM rouse.job AS j
        WHERE j.state = 'running' AND j.lease_until > at AND j.worker = p_worker
        FOR NO KEY UPDATE SKIP LOCKED),
    freed AS (
        UPDATE rouse.job AS j SET lease_until = at FROM free WHERE j.id = ANY (ARRAY[free.id]) RETURNING j.lane)
    SELECT array_agg(DISTINCT l.queue) INTO queues
    FROM (SELECT DISTINCT freed.lane FROM freed) AS f
    CROSS JOIN LATERAL (SELECT l.queue FROM rouse.lane AS l WHERE l.id = f.lane LIMIT 1) AS l;
    -- Without a lane: whoever hears it looks for orphans too.
    PERFORM pg_notify('rouse_wake', q) FROM unnest(queues) AS q;
    -- It may live after all, somewhere behind a broken network.
    PERFORM pg_notify('rouse_worker_' || p_worker, '');
END
$$;

DROP FUNCTION rouse.register(text, text, text, text[]);

-- Registers one life of a worker. Its id is unique among the living: one who has the key of the holder takes
-- the id over at once, others once the holder has not been heard of for 90 s (SPEC rows A1, A2).
--
--   key           32 bytes, random for each life or pinned by the operator
--   capabilities  {"handler": {"version": …, "grants": […]}, …}
--   slots         attempts at the same time
--   queues        the queues that it serves, in order; none: all
--   tags          jobs that require others are not for it
CREATE FUNCTION rouse.register(
    p_worker_id text, p_key bytea, p_hostname text, p_platform text, p_version text,
    p_capabilities jsonb, p_slots integer, p_queues text[], p_tags text[],
    OUT incarnation bigint, OUT heartbeat_ms bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at     timestamptz := clock_timestamp();
    holder record;
BEGIN
    IF p_worker_id IS NULL OR p_worker_id !~ '^[A-Za-z0-9_-]{1,64}$' THEN
        RAISE EXCEPTION 'rouse.register: % is no worker id', coalesce(quote_literal(left(p_worker_id, 80)), 'null')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'At most 64 letters, digits, - and _.';
    END IF;
    IF p_key IS NULL OR octet_length(p_key) <> 32 THEN
        RAISE EXCEPTION 'rouse.register: a key has 32 bytes, not %', coalesce(octet_length(p_key)::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM rouse._check_capabilities(p_capabilities);
    -- One at a time for each id.
    PERFORM pg_advisory_xact_lock(hashtextextended('rouse.register ' || p_worker_id, 0));
    SELECT w.incarnation, w.key_hash, w.hostname, w.seen_at INTO holder
    FROM rouse.worker AS w WHERE w.worker_id = p_worker_id AND w.stopped_at IS NULL AND w.dead_at IS NULL;
    IF FOUND THEN
        IF holder.key_hash IS DISTINCT FROM sha256(p_key) AND holder.seen_at > at - interval '90 seconds' THEN
            RAISE EXCEPTION 'rouse.register: worker id % is taken by a host that lives (%, heard of % s ago)',
                p_worker_id, holder.hostname, round(extract(epoch FROM at - holder.seen_at))
                USING ERRCODE = 'RW003',
                      HINT = 'Choose another id. If that host is gone, its id is free 90 s after its last heartbeat, or at once for a host that has its key (worker_key_file).';
        END IF;
        PERFORM rouse._bury(holder.incarnation);
    END IF;
    INSERT INTO rouse.worker AS w (worker_id, key_hash, hostname, platform, version, handlers, capabilities, slots, queues, tags)
    VALUES (p_worker_id, sha256(p_key), p_hostname, p_platform, p_version,
            ARRAY(SELECT jsonb_object_keys(p_capabilities)), p_capabilities, p_slots, p_queues, p_tags)
    RETURNING w.incarnation INTO incarnation;
    heartbeat_ms := 30000;
END
$$;

CREATE FUNCTION rouse._check_capabilities(p_capabilities jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF p_capabilities IS NULL OR jsonb_typeof(p_capabilities) <> 'object'
       OR EXISTS (SELECT FROM jsonb_each(p_capabilities) AS c
                  WHERE c.key !~ '^[a-z0-9][a-z0-9_-]*([.][a-z0-9][a-z0-9_-]*)*$' OR length(c.key) > 128
                     OR jsonb_typeof(c.value) <> 'object') THEN
        RAISE EXCEPTION 'rouse.register: capabilities must be an object with an object for each handler, not %',
            coalesce(left(p_capabilities::text, 140), 'null') USING ERRCODE = 'invalid_parameter_value';
    END IF;
END
$$;

DROP FUNCTION rouse.heartbeat(bigint, text[]);

-- Says that the worker lives, what it can run, how it fares (SPEC row A2) and whether it takes no more jobs;
-- and buries those of whom nothing was heard for 90 s. Returns how many those were.
CREATE FUNCTION rouse.heartbeat(p_worker bigint, p_key bytea, p_capabilities jsonb, p_stats jsonb, p_draining boolean)
RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at     timestamptz := clock_timestamp();
    gone   bigint;
    buried integer := 0;
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    PERFORM rouse._check_capabilities(p_capabilities);
    UPDATE rouse.worker AS w
    SET seen_at = at, handlers = ARRAY(SELECT jsonb_object_keys(p_capabilities)), capabilities = p_capabilities,
        stats = p_stats, stats_at = at,
        draining_at = CASE WHEN p_draining THEN coalesce(w.draining_at, at) END
    WHERE w.incarnation = p_worker;
    -- Whoever is being buried by another at this moment is left to that one. Served by worker_living.
    FOR gone IN
        SELECT w.incarnation FROM rouse.worker AS w
        WHERE w.stopped_at IS NULL AND w.dead_at IS NULL AND w.seen_at < at - interval '90 seconds'
        ORDER BY w.worker_id FOR UPDATE SKIP LOCKED
    LOOP
        PERFORM rouse._bury(gone);
        buried := buried + 1;
    END LOOP;
    RETURN buried;
END
$$;

DROP FUNCTION rouse.unregister(bigint);

-- Says that the worker has stopped. What it still has is free at once.
CREATE FUNCTION rouse.unregister(p_worker bigint, p_key bytea) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    PERFORM rouse._bury(p_worker);
    UPDATE rouse.worker AS w SET stopped_at = w.dead_at, dead_at = NULL WHERE w.incarnation = p_worker;
END
$$;

DROP FUNCTION rouse.sleep(bigint, text[], bigint);

-- From now on, for so long, the worker wants to be notified for these queues ('*': for any).
CREATE FUNCTION rouse.sleep(p_worker bigint, p_key bytea, p_queues text[], p_for_ms bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    PERFORM set_config('synchronous_commit', 'off', true);
    INSERT INTO rouse.sleeper AS s (worker, queue, until)
    SELECT p_worker, q, clock_timestamp() + p_for_ms * interval '1 millisecond' FROM unnest(p_queues) AS q
    ON CONFLICT (queue, worker) DO UPDATE SET until = excluded.until;
END
$$;

DROP FUNCTION rouse.awake(bigint);

-- The worker is busy: nobody needs to notify it.
CREATE FUNCTION rouse.awake(p_worker bigint, p_key bytea) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    PERFORM set_config('synchronous_commit', 'off', true);
    DELETE FROM rouse.sleeper AS s WHERE s.worker = p_worker OR s.until < clock_timestamp() - interval '1 hour';
END
$$;

DROP FUNCTION rouse.claim(bigint, bigint, bigint[], bigint[], bigint[], integer);

-- Claims up to `wanted` jobs from these lanes, in the order given, each lane from its cursor on; no
-- more after the one with which their payloads reach 8 MiB (PREFETCH_BYTES_MAX of the host).
-- Safe under concurrency: rows that another claim has locked are skipped, and a row that was
-- claimed meanwhile is checked again under its lock. Served by job_ready, then by the primary key.
-- The commit does not wait for the disk: a claim that a server crash forgets is only made again.
--
-- What is too much is locked until this commits, and otherwise left as it was. The size is what the
-- table keeps, because the payload itself would have to be read for its own; one that is compressed
-- counts 16 times (JSON shrinks to a quarter or an eighth, and at the most to a ninetieth).
CREATE FUNCTION rouse.claim(
    p_worker bigint, p_key bytea, p_fence bigint, p_lanes bigint[], p_cursors bigint[], p_lease_ms bigint[], p_wanted integer)
RETURNS SETOF rouse.claimed
LANGUAGE plpgsql SECURITY DEFINER ROWS 100
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at timestamptz := clock_timestamp();
BEGIN
    PERFORM rouse._known(p_worker, p_key);
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
    RETURNING j.id, j.lane, j.turn, j.attempt, j.lost, j.max_attempts, j.tenant, j.source, j.requested_at, j.claimed_at, j.payload, j.memory_bytes;
END
$$;

DROP FUNCTION rouse.promote(integer, bigint);

-- Gives scheduled jobs and retries that are due a fresh turn, at most `most` of them, and says how
-- many, and in how many milliseconds the next one is due (null: none waits). A job that is due and
-- locked by somebody else is left to a later call: it does not count as the next one, because
-- whoever waits for that would wait for no time at all. `within_ms`: only jobs that became due within
-- the last so many milliseconds are looked for; null: all. Served by job_due.
CREATE FUNCTION rouse.promote(p_worker bigint, p_key bytea, p_most integer, p_within_ms bigint, OUT promoted integer, OUT next_due_ms bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at    timestamptz := clock_timestamp();
    since timestamptz := coalesce(at - p_within_ms * interval '1 millisecond', '-infinity');
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    PERFORM set_config('synchronous_commit', 'off', true);
    WITH due AS MATERIALIZED (
        SELECT j.id FROM rouse.job AS j
        WHERE j.state = 'queued' AND j.turn IS NULL AND j.available_at > since AND j.available_at <= at
        ORDER BY j.available_at LIMIT p_most FOR NO KEY UPDATE SKIP LOCKED),
    moved AS (
        UPDATE rouse.job AS j SET turn = nextval('rouse.turn_seq') FROM due
        WHERE j.id = ANY (ARRAY[due.id]) RETURNING 1)
    SELECT count(*) INTO promoted FROM moved;
    IF promoted = p_most THEN
        next_due_ms := 0;
        RETURN;
    END IF;
    SELECT greatest(0, ceil(extract(epoch FROM j.available_at - clock_timestamp()) * 1000))::bigint INTO next_due_ms
    FROM rouse.job AS j
    WHERE j.state = 'queued' AND j.turn IS NULL AND j.available_at > at
    ORDER BY j.available_at LIMIT 1;
END
$$;

DROP FUNCTION rouse._settle(bigint[], bigint[], rouse.state[], bigint[], jsonb[], jsonb[], bigint[]);

-- Settles attempts, one per position of the lists, and returns the ids of those that were accepted.
-- The others had lost their lease: nothing was changed for them.
--
--   p_worker      only jobs that this worker has claimed; null: whoever's
--   p_states      succeeded, failed, timed_out, cancelled: the job's final state;
--                 queued with an error: retry after p_delays_ms; queued without: the claim is
--                 given back, and the attempt does not count
--   p_retry_at    retry then instead
--   p_memory      bytes for the next attempt; null: as they were
--   p_started_us  microseconds from the claim to the real start; null: it never started
--
-- Served by the primary key of rouse.job. The insert into rouse.finished goes to today's partition.
CREATE FUNCTION rouse._settle(
    p_worker bigint, p_ids bigint[], p_fences bigint[], p_states rouse.state[], p_started_us bigint[],
    p_results jsonb[], p_errors jsonb[], p_delays_ms bigint[], p_retry_at timestamptz[], p_memory bigint[])
RETURNS SETOF bigint
LANGUAGE plpgsql ROWS 100 AS $$
DECLARE
    at       timestamptz := clock_timestamp();
    released bigint[];
    lanes    bigint[];
BEGIN
    RETURN QUERY
    WITH gone AS (
        DELETE FROM rouse.job AS j
        USING unnest(p_ids, p_fences, p_states, p_started_us, p_results, p_errors) AS s(id, fence, state, started_us, result, error)
        WHERE j.id = ANY (ARRAY[s.id]) AND j.fence = s.fence AND s.state <> 'queued' AND (p_worker IS NULL OR j.worker = p_worker)
        RETURNING j.id, j.lane, j.worker, j.retried_from, j.requested_at, j.available_at, j.claimed_at,
                  j.claimed_at + s.started_us * interval '1 microsecond' AS started_at,
                  j.attempt, j.lost, j.max_attempts, s.state, j.tenant, j.source, j.unique_key, j.payload, s.result, s.error)
    INSERT INTO rouse.finished AS f (id, lane, worker, retried_from, requested_at, available_at, claimed_at, started_at, finished_at,
                                attempt, lost, max_attempts, state, tenant, source, unique_key, payload, result, error)
    SELECT g.id, g.lane, g.worker, g.retried_from, g.requested_at, g.available_at, g.claimed_at, g.started_at, at,
           g.attempt, g.lost, g.max_attempts, g.state, g.tenant, g.source, g.unique_key, g.payload, g.result, g.error
    FROM gone AS g
    RETURNING f.id;

    IF NOT ('queued' = ANY (p_states)) THEN
        RETURN;
    END IF;

    -- Retries: the attempt is kept, and the job waits for its time without a turn.
    RETURN QUERY
    WITH back AS (
        UPDATE rouse.job AS j
        SET state = 'queued', turn = NULL, fence = NULL, worker = NULL, claimed_at = NULL, lease_until = NULL,
            available_at = coalesce(s.retry_at, at + s.delay_ms * interval '1 millisecond'),
            memory_bytes = coalesce(s.memory, j.memory_bytes)
        FROM unnest(p_ids, p_fences, p_states, p_started_us, p_errors, p_delays_ms, p_retry_at, p_memory)
                 AS s(id, fence, state, started_us, error, delay_ms, retry_at, memory),
             rouse.job AS was
        WHERE j.id = ANY (ARRAY[s.id]) AND j.fence = s.fence AND s.state = 'queued' AND s.error IS NOT NULL
          AND (p_worker IS NULL OR j.worker = p_worker) AND was.id = ANY (ARRAY[s.id])
        RETURNING j.id, j.attempt, was.worker, was.claimed_at, s.started_us, s.error)
    INSERT INTO rouse.attempt AS a (job, attempt, lost, worker, claimed_at, started_at, ended_at, error)
    SELECT b.id, b.attempt, false, b.worker, b.claimed_at, b.claimed_at + b.started_us * interval '1 microsecond', at, b.error
    FROM back AS b
    RETURNING a.job;

    -- Claims given back: as if the claim had never been made, but for a record. Each is ready at once, for
    -- whoever sleeps.
    WITH back AS (
        UPDATE rouse.job AS j
        SET state = 'queued', attempt = j.attempt - 1, fence = NULL, worker = NULL, claimed_at = NULL, lease_until = NULL,
            turn = nextval('rouse.turn_seq')
        FROM unnest(p_ids, p_fences, p_states, p_errors) AS s(id, fence, state, error), rouse.job AS was
        WHERE j.id = ANY (ARRAY[s.id]) AND j.fence = s.fence AND s.state = 'queued' AND s.error IS NULL
          AND (p_worker IS NULL OR j.worker = p_worker) AND was.id = ANY (ARRAY[s.id])
        RETURNING j.id, j.lane, was.attempt, was.worker),
    kept AS (
        INSERT INTO rouse.record (at, job, event, attempt, worker)
        SELECT at, b.id, 'released', b.attempt, b.worker FROM back AS b)
    SELECT array_agg(b.id), array_agg(DISTINCT b.lane) INTO released, lanes FROM back AS b;
    -- The lock by which commits spare each other the same notification is one for each lane, and the server
    -- has room for some thousands of locks: for many lanes none is taken.
    PERFORM rouse._notify(l.lane, true, CASE WHEN cardinality(lanes) <= 32 THEN at ELSE '-infinity' END)
    FROM unnest(lanes) AS l(lane);
    RETURN QUERY SELECT r.id FROM unnest(released) AS r(id);
END
$$;

-- Counts attempts of a worker to write on jobs that another has claimed. Not those that it has lost
-- to a later claim by itself.
CREATE FUNCTION rouse._count_refused(p_worker bigint, p_ids bigint[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    others bigint := (SELECT count(*) FROM unnest(p_ids) AS a(id)
                      JOIN rouse.job AS j ON j.id = ANY (ARRAY[a.id]) WHERE j.worker <> p_worker);
BEGIN
    IF others > 0 THEN
        UPDATE rouse.worker AS w SET refused = w.refused + others WHERE w.incarnation = p_worker;
    END IF;
END
$$;

DROP FUNCTION rouse.settle(bigint[], bigint[], rouse.state[], bigint[], jsonb[], jsonb[], bigint[], boolean);

-- rouse._settle for workers: returns the ids that were accepted, and those that are locked.
-- A row that somebody else has locked (a cancellation whose transaction is still open) fails the
-- call after 250 ms; the worker then calls again with p_skip_locked, which leaves such rows out
-- and says so. An id that is not returned at all has lost its lease, or was never this worker's: of
-- that the worker's row keeps count.
CREATE FUNCTION rouse.settle(
    p_worker bigint, p_key bytea, p_ids bigint[], p_fences bigint[], p_states rouse.state[], p_started_us bigint[],
    p_results jsonb[], p_errors jsonb[], p_delays_ms bigint[], p_retry_at timestamptz[],
    p_memory bigint[], p_skip_locked boolean)
RETURNS TABLE (id bigint, locked boolean)
LANGUAGE plpgsql SECURITY DEFINER ROWS 100
SET search_path = pg_catalog, pg_temp SET lock_timeout = '250ms' SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    free bigint[];
    done bigint[];
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    IF p_skip_locked THEN
        SELECT coalesce(array_agg(mine.id), '{}') INTO free
        FROM unnest(p_ids, p_fences) AS s(id, fence)
        CROSS JOIN LATERAL (
            SELECT j.id FROM rouse.job AS j
            WHERE j.id = s.id AND j.fence = s.fence FOR UPDATE SKIP LOCKED) AS mine;
        RETURN QUERY
        SELECT j.id, true FROM unnest(p_ids, p_fences) AS s(id, fence)
        JOIN rouse.job AS j ON j.id = ANY (ARRAY[s.id]) AND j.fence = s.fence
        WHERE NOT s.id = ANY (free);
        -- A null fence fits no job.
        SELECT array_agg(CASE WHEN s.id = ANY (free) THEN s.fence END ORDER BY s.ordinality) INTO p_fences
        FROM unnest(p_ids, p_fences) WITH ORDINALITY AS s(id, fence);
    END IF;
    done := ARRAY(SELECT s.id FROM rouse._settle(
        p_worker, p_ids, p_fences, p_states, p_started_us, p_results, p_errors, p_delays_ms, p_retry_at, p_memory) AS s(id));
    IF cardinality(done) < cardinality(p_ids) THEN
        PERFORM rouse._count_refused(p_worker, ARRAY(SELECT a.id FROM unnest(p_ids) AS a(id) WHERE NOT a.id = ANY (done)));
    END IF;
    RETURN QUERY SELECT d.id, false FROM unnest(done) AS d(id);
END
$$;

DROP FUNCTION rouse.renew(bigint[], bigint[], bigint[]);

-- Extends leases. Answers for each job: null where it was extended, 'busy' where somebody is
-- changing it at this moment (ask again), else the reason why it is this worker's no more
-- (the words of the abort reasons). Locks nothing that it would have to wait for. Each renewal leaves a
-- record (SPEC row H6).
CREATE FUNCTION rouse.renew(p_worker bigint, p_key bytea, p_ids bigint[], p_fences bigint[], p_lease_ms bigint[])
RETURNS TABLE (id bigint, refusal text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at      timestamptz := clock_timestamp();
    renewed bigint[];
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    PERFORM set_config('synchronous_commit', 'off', true);
    WITH mine AS MATERIALIZED (
        SELECT j.id, asked.lease_ms
        FROM unnest(p_ids, p_fences, p_lease_ms) AS asked(id, fence, lease_ms)
        CROSS JOIN LATERAL (
            SELECT j.id FROM rouse.job AS j
            WHERE j.id = asked.id AND j.fence = asked.fence AND j.worker = p_worker
            FOR NO KEY UPDATE SKIP LOCKED) AS j),
    extended AS (
        UPDATE rouse.job AS j SET lease_until = at + mine.lease_ms * interval '1 millisecond'
        FROM mine WHERE j.id = ANY (ARRAY[mine.id]) RETURNING j.id, j.attempt),
    kept AS (
        INSERT INTO rouse.record (at, job, event, attempt, worker)
        SELECT at, e.id, 'renewed', e.attempt, p_worker FROM extended AS e)
    SELECT coalesce(array_agg(extended.id), '{}') INTO renewed FROM extended;

    RETURN QUERY
    SELECT asked.id, CASE
        WHEN asked.id = ANY (renewed) THEN NULL
        WHEN j.fence = asked.fence AND j.worker = p_worker THEN 'busy'
        WHEN j.id IS NOT NULL THEN 'taken_by_another_worker'
        WHEN f.state = 'cancelled' THEN 'cancelled'
        WHEN f.state IS NOT NULL THEN 'already_completed'
        ELSE 'not_found' END
    FROM unnest(p_ids, p_fences) AS asked(id, fence)
    LEFT JOIN rouse.job AS j ON j.id = ANY (ARRAY[asked.id])
    LEFT JOIN LATERAL (
        SELECT f.state FROM rouse.finished AS f WHERE j.id IS NULL AND f.id = ANY (ARRAY[asked.id])) AS f ON true;
END
$$;

DROP FUNCTION rouse.adopt(bigint, bigint, bigint[], bigint[], integer, integer, bigint);

-- Takes over jobs whose lease has run out: up to `p_wanted` are claimed at once, ahead of everything
-- queued. A job's first loss is taken up like that; after a later one it waits (10 s, doubled
-- each time); a job that was lost p_lost_max times fails, because it probably kills its workers.
-- `within_ms`: only leases that ran out within the last so many
-- milliseconds are looked for; null: all. Served by job_lease. Rows that somebody else holds locked are skipped.
CREATE FUNCTION rouse.adopt(
    p_worker bigint, p_key bytea, p_fence bigint, p_lanes bigint[], p_lease_ms bigint[], p_wanted integer, p_lost_max integer,
    p_within_ms bigint)
RETURNS SETOF rouse.claimed
LANGUAGE plpgsql SECURITY DEFINER ROWS 10
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at     timestamptz := clock_timestamp();
    since  timestamptz := coalesce(at - p_within_ms * interval '1 millisecond', '-infinity');
    orphan record;
    why    jsonb;
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    FOR orphan IN
        SELECT j.id, j.fence, j.attempt, j.lost, j.worker, j.claimed_at, asked.lease_ms, w.worker_id
        FROM rouse.job AS j
        JOIN unnest(p_lanes, p_lease_ms) AS asked(lane, lease_ms) ON asked.lane = j.lane
        LEFT JOIN rouse.worker AS w ON w.incarnation = ANY (ARRAY[j.worker])
        WHERE j.state = 'running' AND j.lease_until > since AND j.lease_until < at
        ORDER BY j.lease_until LIMIT p_wanted
        FOR NO KEY UPDATE OF j SKIP LOCKED
    LOOP
        -- A hint for the old owner, if it still lives.
        PERFORM pg_notify('rouse_worker_' || orphan.worker, orphan.id::text);
        why := jsonb_build_object('kind', 'lost', 'message', format(
            'worker %s (incarnation %s) did not renew its lease', coalesce(orphan.worker_id, 'unknown'), orphan.worker));
        IF orphan.lost + 1 >= p_lost_max THEN
            why := why || jsonb_build_object('message', format(
                'the job was lost with its worker %s times; it probably kills the worker', orphan.lost + 1));
            UPDATE rouse.job AS j SET lost = j.lost + 1 WHERE j.id = orphan.id;
            PERFORM rouse._settle(NULL, ARRAY[orphan.id], ARRAY[orphan.fence], ARRAY['failed'::rouse.state], ARRAY[NULL]::bigint[],
                ARRAY[NULL]::jsonb[], ARRAY[why], ARRAY[NULL]::bigint[], ARRAY[NULL]::timestamptz[], ARRAY[NULL]::bigint[]);
            CONTINUE;
        END IF;
        INSERT INTO rouse.attempt (job, attempt, lost, worker, claimed_at, started_at, ended_at, error)
        VALUES (orphan.id, orphan.attempt, true, orphan.worker, orphan.claimed_at, NULL, at, why);
        IF orphan.lost = 0 THEN
            RETURN QUERY
            UPDATE rouse.job AS j
            SET attempt = j.attempt + 1, lost = j.lost + 1, fence = p_fence, worker = p_worker, claimed_at = at,
                lease_until = at + orphan.lease_ms * interval '1 millisecond', turn = nextval('rouse.turn_seq')
            WHERE j.id = orphan.id
            RETURNING j.id, j.lane, j.turn, j.attempt, j.lost, j.max_attempts, j.tenant, j.source, j.requested_at, j.claimed_at, j.payload, j.memory_bytes;
        ELSE
            UPDATE rouse.job AS j
            SET state = 'queued', turn = NULL, fence = NULL, worker = NULL, claimed_at = NULL, lease_until = NULL, lost = j.lost + 1,
                available_at = at + 10 * 2 ^ (orphan.lost - 1) * interval '1 second'
            WHERE j.id = orphan.id;
        END IF;
    END LOOP;
END
$$;

-- Cancels a job, queued or running. True: it is cancelled now, by this call or by an earlier one.
-- False: it had finished otherwise, or there is no such job (any more). A running job is settled
-- through the fence, and its worker is told: whatever its attempt still returns is refused.
CREATE OR REPLACE FUNCTION rouse.cancel(id bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at   timestamptz := clock_timestamp();
    live record;
BEGIN
    IF cancel.id IS NULL THEN
        RAISE EXCEPTION 'rouse.cancel: id must not be null' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT j.state, j.fence, j.worker INTO live FROM rouse.job AS j WHERE j.id = cancel.id FOR UPDATE;
    IF NOT FOUND THEN
        RETURN coalesce((SELECT f.state = 'cancelled' FROM rouse.finished AS f WHERE f.id = cancel.id LIMIT 1), false);
    END IF;
    -- Where no worker has run for a week, nobody has made today's partition.
    IF to_regclass('rouse.finished_' || to_char(at AT TIME ZONE 'UTC', 'YYYYMMDD')) IS NULL THEN
        PERFORM rouse.prepare_partitions();
    END IF;
    IF live.state = 'running' THEN
        PERFORM rouse._settle(NULL, ARRAY[cancel.id], ARRAY[live.fence], ARRAY['cancelled'::rouse.state], ARRAY[NULL]::bigint[],
            ARRAY[NULL]::jsonb[], ARRAY[NULL]::jsonb[], ARRAY[NULL]::bigint[], ARRAY[NULL]::timestamptz[], ARRAY[NULL]::bigint[]);
        PERFORM pg_notify('rouse_worker_' || live.worker, cancel.id::text);
    ELSE
        WITH gone AS (DELETE FROM rouse.job AS j WHERE j.id = cancel.id RETURNING j.*)
        INSERT INTO rouse.finished (id, lane, retried_from, requested_at, available_at, finished_at,
                                    attempt, lost, max_attempts, state, tenant, source, unique_key, payload)
        SELECT g.id, g.lane, g.retried_from, g.requested_at, g.available_at, at,
               g.attempt, g.lost, g.max_attempts, 'cancelled', g.tenant, g.source, g.unique_key, g.payload
        FROM gone AS g;
    END IF;
    RETURN true;
END
$$;

-- Drops the partitions whose last day is more than `keep` ago, and says how many, and how many
-- were in use: those are dropped by a later call. Dropping waits for nobody for more than 50 ms,
-- because whoever settles a job queues behind it meanwhile. And once something was dropped, it waits
-- once at most: the locks of a drop are held until the commit, so that settlements queue behind all
-- that it waits for afterwards. The rest is left to a later call.
CREATE OR REPLACE FUNCTION rouse.drop_partitions(keep interval, OUT dropped integer, OUT in_use integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET datestyle = 'ISO' SET lock_timeout = '50ms' AS $$
DECLARE
    old record;
BEGIN
    dropped := 0;
    in_use := 0;
    IF keep IS NULL OR keep < '1 day' THEN
        RAISE EXCEPTION 'rouse.drop_partitions: keep must be at least one day, not %', coalesce(keep::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NOT pg_try_advisory_xact_lock(hashtextextended('rouse.partitions', 0)) THEN
        RETURN;
    END IF;
    FOR old IN
        -- The names are read as dates only once it is known that they are those of partitions: Postgres
        -- may look at them in any order otherwise, and not every table of a database ends in a date.
        WITH partition AS MATERIALIZED (
            SELECT c.relname
            FROM pg_inherits AS i
            JOIN pg_class AS c ON c.oid = i.inhrelid
            WHERE i.inhparent IN ('rouse.finished'::regclass, 'rouse.attempt'::regclass, 'rouse.record'::regclass))
        SELECT p.relname FROM partition AS p
        WHERE to_date(right(p.relname, 8), 'YYYYMMDD') + 1 <= ((now() - keep) AT TIME ZONE 'UTC')::date
        ORDER BY p.relname
    LOOP
        BEGIN
            EXECUTE format('DROP TABLE rouse.%I', old.relname);
            dropped := dropped + 1;
        EXCEPTION
            WHEN lock_not_available THEN
                in_use := in_use + 1;
                EXIT WHEN dropped > 0;
        END;
    END LOOP;
END
$$;

-- rouse.drop_partitions for workers.
CREATE FUNCTION rouse.drop_partitions(p_worker bigint, p_key bytea, p_keep interval, OUT dropped integer, OUT in_use integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    SELECT d.dropped, d.in_use INTO dropped, in_use FROM rouse.drop_partitions(p_keep) AS d;
END
$$;
REVOKE ALL ON FUNCTION rouse.drop_partitions(interval) FROM rouse_worker;

-- Every life of every worker, the dead ones too. Stats are shown for 120 s (SPEC row A2).
CREATE VIEW rouse.workers AS
SELECT w.worker_id, w.incarnation,
       CASE WHEN w.stopped_at IS NOT NULL THEN 'unregistered'
            WHEN w.dead_at IS NOT NULL OR w.seen_at < now() - interval '90 seconds' THEN 'dead'
            WHEN w.draining_at IS NOT NULL THEN 'draining'
            ELSE 'active' END AS state,
       w.hostname, w.platform, w.version, w.slots, w.queues, w.tags, w.handlers, w.capabilities,
       w.registered_at, w.seen_at, w.draining_at, coalesce(w.stopped_at, w.dead_at) AS ended_at,
       CASE WHEN w.stats_at > now() - interval '120 seconds' THEN w.stats END AS stats, w.refused
FROM rouse.worker AS w;
GRANT SELECT ON rouse.workers TO rouse_worker, rouse_observer;

-- A key's hash is nobody's business.
REVOKE SELECT ON rouse.worker FROM rouse_worker, rouse_observer;
GRANT SELECT (worker_id, incarnation, hostname, platform, version, handlers, capabilities, slots, queues, tags,
              registered_at, seen_at, draining_at, dead_at, stopped_at, stats, stats_at, refused)
    ON rouse.worker TO rouse_worker, rouse_observer;

REVOKE ALL ON FUNCTION rouse._known, rouse._bury, rouse._check_capabilities, rouse._count_refused, rouse._settle,
    rouse.register, rouse.heartbeat, rouse.unregister, rouse.sleep, rouse.awake, rouse.claim, rouse.promote,
    rouse.settle, rouse.renew, rouse.adopt, rouse.drop_partitions(bigint, bytea, interval) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION rouse.register, rouse.heartbeat, rouse.unregister, rouse.sleep, rouse.awake, rouse.claim,
    rouse.promote, rouse.settle, rouse.renew, rouse.adopt, rouse.drop_partitions(bigint, bytea, interval) TO rouse_worker;

SELECT rouse.prepare_partitions();
