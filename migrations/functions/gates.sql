-- Gates (rouse.gate): limits on how many jobs run, how often jobs start, and which jobs are enqueued at all.
--
-- A gate applies to the jobs of a queue, to those of a handler, or to all jobs, and divides them by a key: by tenant,
-- by source, by a value of the payload, or by several of these. Three kinds act when jobs are claimed:
--
--   max_concurrent  at most `max` jobs of a key run at the same time, across all workers
--   throttle        at most `max` jobs of a key start in any `period`; or, with `burst`, on average, and `burst` at
--                   once
--   batch           up to `max` jobs of a key start together, in one attempt, when that many are ready, or when the
--                   first has waited for a `period`
--
-- and two when jobs are enqueued:
--
--   singleton       while a job of a key is queued (or runs, or for a `period`), there is no other
--   debounce        a burst of jobs of a key becomes one, which starts when none has been enqueued for a `period`
--
-- The jobs of each key have a lane of their own, as those of each tenant in a fair queue, so that a claim need not read
-- jobs that it may not take. The limit on jobs in flight of fair queues is a gate of its own.

-- The value of a job for one entry of a key; null if it has none. `$.a.b` is a value of the payload; a long one is
-- replaced by its hash.
CREATE OR REPLACE FUNCTION rouse._key_value(p_by text, p_tenant text, p_source text, p_payload jsonb) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    value text;
BEGIN
    IF p_by = 'tenant' THEN
        RETURN p_tenant;
    ELSIF p_by = 'source' THEN
        RETURN p_source;
    ELSIF p_by = 'worker' THEN
        -- `worker` is not a value of the job: rouse._inbox adds it.
        RETURN NULL;
    END IF;
    value := p_payload #>> string_to_array(substr(p_by, 3), '.');
    RETURN CASE WHEN octet_length(value) > 200 THEN 'sha256:' || encode(sha256(convert_to(value, 'UTF8')), 'hex') ELSE value END;
END
$$;

-- The key of the lane of a job (rouse.lane.key) by these values; empty if it has none of them.
CREATE OR REPLACE FUNCTION rouse._lane_key(p_divided_by text[], p_tenant text, p_source text, p_payload jsonb) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN coalesce((
        SELECT jsonb_object_agg(v.by, v.value)::text
        FROM (SELECT d.by, rouse._key_value(d.by, p_tenant, p_source, p_payload) AS value FROM unnest(p_divided_by) AS d(by)) AS v
        WHERE v.value IS NOT NULL), '');
END
$$;

-- The values by which the lanes of a handler in a queue are divided: those of the queue if it is fair, `worker` if it
-- has direct dispatch, and those of gates. Null: there are none, and no gate acts when a job is enqueued. Empty: there
-- are none, but such a gate exists.
CREATE OR REPLACE FUNCTION rouse._divided_by(p_queue text, p_handler text) RETURNS text[]
LANGUAGE sql STABLE AS $$
    SELECT array_agg(DISTINCT d.by ORDER BY d.by) FILTER (WHERE d.by NOT IN ('', 'handler', 'queue'))
           || CASE WHEN count(*) > 0 THEN '{}'::text[] END
    FROM (SELECT CASE q.fair_key WHEN 'source' THEN 'source' ELSE 'tenant' END AS by
          FROM rouse.queue AS q WHERE q.name = p_queue AND q.policy = 'drr' AND q.fair_key <> 'handler'
          UNION ALL
          SELECT 'worker' FROM rouse.queue AS q WHERE q.name = p_queue AND q.dispatch <> 'shared'
          UNION ALL
          SELECT k.by FROM rouse.gate AS g CROSS JOIN LATERAL unnest(g.key) AS k(by)
          WHERE g.kind IN ('max_concurrent', 'throttle', 'batch') AND coalesce(g.queue, p_queue) = p_queue AND coalesce(g.handler, p_handler) = p_handler
          AND k.by NOT IN ('handler', 'queue')
          UNION ALL
          SELECT '' FROM rouse.gate AS g
          WHERE g.kind IN ('singleton', 'debounce') AND coalesce(g.queue, p_queue) = p_queue AND coalesce(g.handler, p_handler) = p_handler) AS d
$$;

-- Copies the values by which lanes are divided to the lanes of a queue, or of all queues (null). A lane that a
-- transaction adds during a change may have the old copy until rouse.maintain_lanes calls this. Reads the whole
-- catalog.
CREATE OR REPLACE FUNCTION rouse._divide_lanes(p_queue text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE rouse.lane AS l SET divided_by = d.divided_by
    FROM (SELECT n.queue, n.handler, rouse._divided_by(n.queue, n.handler) AS divided_by
          FROM (SELECT DISTINCT a.queue, a.handler FROM rouse.lane AS a WHERE p_queue IS NULL OR a.queue = p_queue) AS n OFFSET 0) AS d
    WHERE l.queue = d.queue AND l.handler = d.handler AND l.key = '' AND l.divided_by IS DISTINCT FROM d.divided_by;
END
$$;

-- Tells workers to read the settings of a queue again, or those of all queues (null): moves rows of open lanes to the
-- end of the catalog. These are the lanes without a key; and the last lane in any case, because jobs may be left only
-- in lanes with keys: the others are closed a day after they were added. Reads the whole catalog.
CREATE OR REPLACE FUNCTION rouse._announce_settings(p_queue text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE rouse.lane AS l SET seq = nextval('rouse.lane_seq')
    WHERE l.closed_at IS NULL
      AND (l.key = '' AND (p_queue IS NULL OR l.queue = p_queue)
           -- Not an inbox, whose row a recovery may have locked.
           OR l.seq = (SELECT max(o.seq) FROM rouse.lane AS o WHERE o.closed_at IS NULL AND o.worker IS NULL));
END
$$;

-- True if an entry of lane_key has space for this lane. It has at most 2,704 bytes, of which lengths and padding take
-- up to 64 in addition to 8 for each tag. Sixteen tags of 128 characters leave space for a key of 256 bytes.
CREATE OR REPLACE FUNCTION rouse._fits_catalog(p_handler text, p_queue text, p_tags text[], p_key text) RETURNS boolean
-- STABLE, as array_to_string is: inlined.
LANGUAGE sql STABLE AS $$
    SELECT octet_length(p_key) <= 256
        OR octet_length(p_handler) + octet_length(p_queue) + octet_length(array_to_string(p_tags, '')) + 8 * cardinality(p_tags)
           + octet_length(p_key) <= 2600
$$;

-- The lane for a job whose lane without a key is p_base: that of its key if lanes are divided. A lane without an open
-- row is added to the catalog, unless there are already keyed_lanes_max such lanes (rouse.limits): then all further
-- keys share one lane, `*`, until that lane has had no job for a day, so that no key ever has two lanes. Keys that are
-- too long for the catalog always share that lane. With direct dispatch, it returns the inbox of a worker for this
-- lane. Served by lane_key.
CREATE OR REPLACE FUNCTION rouse._divided_lane(
    p_base bigint, p_handler text, p_queue text, p_priority text, p_tags text[], p_divided_by text[], p_tenant text, p_source text,
    p_payload jsonb) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    own   text;
    asked text;
    known bigint;
BEGIN
    IF p_divided_by IS NULL THEN
        RETURN p_base;
    END IF;
    IF 'worker' = ANY (p_divided_by) THEN
        RETURN rouse._inbox(
            rouse._divided_lane(p_base, p_handler, p_queue, p_priority, p_tags, array_remove(p_divided_by, 'worker'), p_tenant, p_source, p_payload),
            p_handler, p_queue, p_priority, p_tags, p_tenant, p_source, p_payload);
    END IF;
    own := rouse._lane_key(p_divided_by, p_tenant, p_source, p_payload);
    IF own = '' THEN
        RETURN p_base;
    END IF;
    IF NOT rouse._fits_catalog(p_handler, p_queue, p_tags, own) THEN
        own := '*';
    END IF;
    -- Each key is looked up separately: with a list of keys, a plan that was made while there were few lanes reads all
    -- lanes of the handler.
    FOREACH asked IN ARRAY ARRAY[own, '*'] LOOP
        SELECT min(l.id) INTO known FROM rouse.lane AS l
        WHERE l.handler = p_handler AND l.queue = p_queue AND l.priority = p_priority::rouse.priority AND l.tags = p_tags AND l.key = asked
          AND l.closed_at IS NULL;
        IF known IS NOT NULL THEN
            RETURN known;
        END IF;
    END LOOP;
    IF NOT rouse._has_room_for_keyed_lane(false) THEN
        own := '*';
    END IF;
    known := rouse._lane_id(p_handler, p_queue, p_priority, p_tags, own);
    INSERT INTO rouse.lane (id, queue, handler, priority, tags, key)
    VALUES (known, p_queue, p_handler, p_priority::rouse.priority, p_tags, own);
    RETURN known;
END
$$;

-- True if there are fewer than keyed_lanes_max lanes with keys (rouse.limits), or fewer than that many inboxes: these
-- are counted separately, because each worker has some for each key. Counting lanes takes up to two milliseconds, so a
-- session that has reached the limit counts again only after a minute. If that time is further ahead, the clock has
-- been set back, and the session counts at once.
CREATE OR REPLACE FUNCTION rouse._has_room_for_keyed_lane(p_is_inbox boolean) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    allowed integer;
    setting text := CASE WHEN p_is_inbox THEN 'rouse.count_inboxes_at' ELSE 'rouse.count_keyed_lanes_at' END;
    -- Seconds since 1970: the text of a time depends on settings of the session, which may change.
    later   text := current_setting(setting, true);
BEGIN
    IF later <> '' AND later::double precision - date_part('epoch', clock_timestamp()) BETWEEN 0 AND 60 THEN
        RETURN false;
    END IF;
    allowed := (SELECT l.keyed_lanes_max FROM rouse.limits AS l WHERE l.only_row);
    IF (SELECT count(*) FROM (
            SELECT FROM rouse.lane AS l WHERE l.key <> '' AND l.closed_at IS NULL AND (l.worker IS NOT NULL) = p_is_inbox LIMIT allowed) AS l) < allowed THEN
        RETURN true;
    END IF;
    PERFORM set_config(setting, (date_part('epoch', clock_timestamp()) + 60)::text, false);
    RETURN false;
END
$$;

-- The gates of rouse.gate that act in claims, and the limits on jobs in flight of fair queues.
CREATE OR REPLACE FUNCTION rouse._claim_gates() RETURNS TABLE (
    name text, kind text, queue text, handler text, key text[], max integer, period_ms bigint, burst integer)
LANGUAGE sql STABLE AS $$
    SELECT g.name, g.kind, g.queue, g.handler, g.key, g.max, g.period_ms, g.burst
    FROM rouse.gate AS g WHERE g.kind IN ('max_concurrent', 'throttle', 'batch')
    UNION ALL
    -- No gate of rouse.gate can have such a name.
    SELECT 'queue ' || q.name, 'max_concurrent', q.name, NULL,
           CASE q.fair_key WHEN 'tenant-and-handler' THEN '{tenant,handler}'::text[] ELSE ARRAY[q.fair_key] END, q.max_in_flight, NULL, NULL
    FROM rouse.queue AS q WHERE q.policy = 'drr' AND q.max_in_flight > 0
$$;

-- A value by which a gate divides the jobs of a lane. Empty if the jobs do not have it, or share the lane of further
-- keys, or were enqueued before the lane was divided by it. p_key of the lane is JSON, or * for shared lanes. Inlined.
CREATE OR REPLACE FUNCTION rouse._lane_value(p_by text, p_queue text, p_handler text, p_key text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE p_by WHEN 'queue' THEN p_queue WHEN 'handler' THEN p_handler
           ELSE CASE WHEN p_key IN ('', '*') THEN '' ELSE coalesce(p_key::jsonb ->> p_by, '') END END
$$;

-- The key of a gate for the jobs of a lane: one value, or two values after the length of the first. The cast makes it
-- immutable, so that Postgres inlines it.
CREATE OR REPLACE FUNCTION rouse._gate_key(p_gate text[], p_queue text, p_handler text, p_key text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_gate[2] IS NOT NULL
        THEN length(rouse._lane_value(p_gate[1], p_queue, p_handler, p_key))::text || ':' || rouse._lane_value(p_gate[1], p_queue, p_handler, p_key)
             || rouse._lane_value(p_gate[2], p_queue, p_handler, p_key)
        WHEN p_gate[1] IS NOT NULL THEN rouse._lane_value(p_gate[1], p_queue, p_handler, p_key)
        ELSE '' END
$$;

-- The values of a key of a gate that acts in claims, in the order of the gate; empty for the single key of a gate
-- without values.
CREATE OR REPLACE FUNCTION rouse._gate_key_values(p_gate text[], p_key text) RETURNS text[]
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE cardinality(p_gate)
        WHEN 0 THEN '{}'
        WHEN 1 THEN ARRAY[p_key]
        ELSE (SELECT ARRAY[left(k.both, k.first), substr(k.both, k.first + 1)]
              FROM (SELECT substr(p_key, strpos(p_key, ':') + 1) AS both, substring(p_key FROM '^([0-9]{1,4}):')::integer AS first) AS k) END
$$;

-- The queues and handlers of the gates that a lane may be behind; empty: those of all. Gates are joined by these values
-- rather than compared with each lane, which would cost lanes times gates. Inlined.
CREATE OR REPLACE FUNCTION rouse._scopes(p_queue text, p_handler text) RETURNS TABLE (queue text, handler text)
LANGUAGE sql IMMUTABLE ROWS 4 AS $$
    VALUES (p_queue, p_handler), (p_queue, ''), ('', p_handler), ('', '')
$$;

-- Each running job behind these gates has a lease that ends at this time or later. While a transaction is open all
-- day, job_lease keeps an entry for each job that has ended since; those of leases that ended earlier are not read.
-- After the clock was set back, new leases may end earlier, so all are read. Served by lease_floor_pkey.
CREATE OR REPLACE FUNCTION rouse._lease_floor(p_gates text[], p_at timestamptz) RETURNS timestamptz
-- In PL/pgSQL, which plans it once.
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (
        SELECT min(coalesce((
            SELECT f.lease_until FROM rouse.lease_floor AS f WHERE f.gate = u.gate AND f.lease_until <= p_at - interval '30 s'), '-infinity'))
        FROM unnest(p_gates) AS u(gate));
END
$$;

-- rouse._lease_floor for a claim, which holds the locks of these gates. A floor of more than two minutes ago is raised
-- to a minute ago, or to the first lease that ended in between and whose job is still running behind one of the gates:
-- such an orphan, if no worker adopts it, keeps the floor where it is. Each entry is read once. No job can appear below
-- the floor later: no other claim through these gates is in progress, and adoptions and renewals change rows that are
-- running already. Served by job_lease and lane_id.
CREATE OR REPLACE FUNCTION rouse._raise_lease_floor(p_gates text[], p_at timestamptz) RETURNS timestamptz
LANGUAGE plpgsql AS $$
DECLARE
    oldest timestamptz := rouse._lease_floor(p_gates, p_at);
    newer  timestamptz := p_at - interval '1 minute';
BEGIN
    IF oldest >= newer - interval '1 minute' THEN
        RETURN oldest;
    END IF;
    newer := coalesce((
        SELECT j.lease_until FROM rouse.job AS j
        WHERE j.state = 'running' AND j.lease_until >= oldest AND j.lease_until < newer
          AND EXISTS (
              SELECT FROM (SELECT a.queue, a.handler FROM rouse.lane AS a WHERE a.id = j.lane LIMIT 1) AS l, rouse._claim_gates() AS g
              WHERE g.name = ANY (p_gates) AND coalesce(g.queue, l.queue) = l.queue AND coalesce(g.handler, l.handler) = l.handler
              OFFSET 0)
        ORDER BY j.lease_until LIMIT 1), newer);
    IF newer > oldest THEN
        -- Also replaces times from before the clock was set back, which would be trusted again once it has passed them.
        INSERT INTO rouse.lease_floor AS f (gate, lease_until) SELECT u.gate, newer FROM unnest(p_gates) AS u(gate)
        ON CONFLICT (gate) DO UPDATE SET lease_until = excluded.lease_until;
    END IF;
    RETURN newer;
END
$$;

-- The number of running jobs of each key of these gates, whose leases end at p_since (rouse._lease_floor) or later.
-- All running jobs count, including those whose lease has ended: they are adopted, or fail. Served by job_lease and
-- lane_id.
CREATE OR REPLACE FUNCTION rouse._in_flight(p_gates text[], p_since timestamptz) RETURNS TABLE (gate text, key text, jobs integer)
-- In PL/pgSQL, which plans it once.
LANGUAGE plpgsql ROWS 500 AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH gates AS MATERIALIZED (SELECT * FROM rouse._claim_gates() AS g WHERE g.kind = 'max_concurrent' AND g.name = ANY (p_gates))
    SELECT g.name, rouse._gate_key(g.key, l.queue, l.handler, l.key), sum(r.jobs)::integer
    FROM (SELECT j.lane, count(*) AS jobs FROM rouse.job AS j
          WHERE j.state = 'running' AND j.lease_until >= p_since GROUP BY j.lane) AS r
    CROSS JOIN LATERAL (SELECT a.queue, a.handler, a.key FROM rouse.lane AS a WHERE a.id = r.lane LIMIT 1) AS l
    CROSS JOIN LATERAL rouse._scopes(l.queue, l.handler) AS s
    JOIN gates AS g ON coalesce(g.queue, '') = s.queue AND coalesce(g.handler, '') = s.handler
    GROUP BY 1, 2;
END
$$;

-- The number of jobs of a key that may start now, and if that is 0, the number of milliseconds after which one may.
-- Without a burst, at most `p_max` start in any period: p_starts has the last starts; starts more than a period ahead
-- do not count, because they mean that the clock has been set back. With a burst, p_until is the time at which the
-- bucket is full again; it does not count if an empty bucket would be full in half of the time until then, for the same
-- reason.
CREATE OR REPLACE FUNCTION rouse._tokens(
    p_max integer, p_period_ms bigint, p_burst integer, p_starts timestamptz[], p_until timestamptz, p_at timestamptz)
RETURNS TABLE (tokens integer, wait_ms bigint)
-- Inlined.
LANGUAGE sql IMMUTABLE ROWS 1 AS $$
    SELECT t.tokens, CASE WHEN t.tokens = 0 THEN greatest(ceil(t.wait), 1)::bigint END
    FROM (SELECT CASE WHEN p_burst IS NULL
                      THEN greatest(p_max - (SELECT count(*) FROM unnest(p_starts) AS s(at) WHERE s.at > b.since AND s.at <= b.until), 0)
                      WHEN b.behind > 2 * p_burst THEN p_burst
                      ELSE greatest(floor(p_burst - b.behind + 1e-6), 0) END::integer AS tokens,
                 CASE WHEN p_burst IS NULL
                      THEN p_period_ms + date_part('epoch', p_starts[cardinality(p_starts) - p_max + 1] - p_at) * 1000
                      ELSE (b.behind - p_burst + 1) * p_period_ms / p_max END AS wait
          -- `behind`: the number of starts by which the bucket is short of being full. OFFSET 0: evaluated once, not at
          -- each use, and not for each start.
          FROM (SELECT p_at - p_period_ms * interval '1 millisecond' AS since, p_at + p_period_ms * interval '1 millisecond' AS until,
                       CASE WHEN p_until > p_at THEN date_part('epoch', p_until - p_at) * 1000 * p_max / p_period_ms ELSE 0 END AS behind
                OFFSET 0) AS b
          OFFSET 0) AS t
$$;

-- The number of these jobs that make batches, by the times since which they are ready, in the order of their turns: the
-- jobs of all full batches, or all jobs if one of the others has waited for the period (null: they do not wait).
-- `wait_ms`: the time until the next look for the others; null: there are none. It is the time after which the batch
-- will be full if jobs keep arriving at the same rate, but 10 ms to 5 s, and at most the rest of the period.
CREATE OR REPLACE FUNCTION rouse._batch_room(
    p_ready timestamptz[], p_max integer, p_period_ms bigint, p_at timestamptz, OUT room integer, OUT wait_ms bigint)
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    others integer := cardinality(p_ready) % p_max;
    waited double precision;
BEGIN
    room := cardinality(p_ready);
    waited := extract(epoch FROM p_at - (SELECT min(o.at) FROM unnest(p_ready[room - others + 1:]) AS o(at))) * 1000;
    -- A job that was enqueued after p_at may lie slightly in the future. More than 10 s mean that the clock has been
    -- set back: then the jobs do not wait.
    IF waited > -10000 AND waited < p_period_ms THEN
        room := room - others;
        waited := greatest(waited, 0);
        wait_ms := ceil(least(p_period_ms - waited, greatest(least((p_max - others) * waited / others, 5000), 10)));
    END IF;
END
$$;

-- The number of ready jobs of a lane after this turn that make batches, and `wait_ms`, as in rouse._batch_room. `size`:
-- the number of jobs that one attempt takes; 1 if some of them cannot share an attempt with others, because of their
-- tenant or of limits of their own. Served by job_ready.
CREATE OR REPLACE FUNCTION rouse._batches(
    p_lane bigint, p_after bigint, p_max integer, p_period_ms bigint, p_wanted integer, p_at timestamptz,
    OUT room integer, OUT wait_ms bigint, OUT size integer)
LANGUAGE plpgsql AS $$
DECLARE
    ready timestamptz[];
BEGIN
    SELECT coalesce(array_agg(r.available_at ORDER BY r.turn), '{}'),
           CASE WHEN bool_or(r.is_alone) OR min(r.tenant) <> max(r.tenant) OR count(r.tenant) NOT IN (0, count(*)) THEN 1 ELSE p_max END
    INTO ready, size
    FROM (SELECT j.turn, j.available_at, j.tenant,
                 j.grants IS NOT NULL OR j.memory_bytes IS NOT NULL OR j.lease_ms IS NOT NULL OR j.timeout_ms IS NOT NULL OR j.uncounted > 0 AS is_alone
          FROM rouse.job AS j
          WHERE j.lane = p_lane AND j.turn > p_after AND j.state = 'queued' AND j.turn IS NOT NULL
          ORDER BY j.turn LIMIT least(greatest(p_wanted, p_max), 20000)) AS r;
    SELECT b.room, b.wait_ms INTO room, wait_ms FROM rouse._batch_room(ready, p_max, p_period_ms, p_at) AS b;
END
$$;

-- Takes the locks of these gates; several names may share a lock. Each transaction that takes several locks takes them
-- in this order, so that two transactions never wait for each other.
CREATE OR REPLACE FUNCTION rouse._lock_gates(p_names text[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM rouse._lock('gate', n.gate)
    FROM (SELECT u.gate FROM unnest(p_names) AS u(gate) ORDER BY hashtextextended(u.gate, 0) & 1023, u.gate OFFSET 0) AS n;
END
$$;

-- Restricts a claim to what gates permit: the same orders, each with at most as many jobs (`max`) as all gates of its
-- lane permit. If several lanes have the same key, the first ones that have ready jobs (of p_sources, after p_after as
-- in rouse.claim_bound; null: of any) get what is left. Jobs that another transaction has locked do not count there:
-- the claim could not take them, and other lanes would get none for as long as they are locked. So the jobs that count
-- are locked here. The same applies to the batches that are wanted, and locked jobs do not make a batch full. Lanes
-- that p_lanes (null: none) leaves out, and those in shards that p_worker has not leased, get nothing, and are null in
-- `lanes` (null: there are none). Waits for other claims through the same gates, so that two claims never use the same
-- room: `at`, the time of the claim, is read after that wait, and the counts stay exact until the caller commits.
-- `gated`: the lanes behind gates that count this claim, or that it may close, for rouse._charge_gates; null: no gate
-- acts. `wanted`: the number of jobs that may be claimed; p_in_batches: p_wanted batches, the jobs of as many attempts.
-- Waits up to 5 s for a lock; after that, the claim fails with lock_not_available. This is a third of the time that a
-- host waits for a response (RESPONSE_TIMEOUT in host/src/store.rs). A claim that waited longer would still be waiting
-- when the host tries again, and each try would add a session as long as a transaction that has changed the gate stays
-- open. Served by lane_id, queue_capped, gate_claims, gate_key_pkey, job_lease, job_ready and job_source.
CREATE OR REPLACE FUNCTION rouse._within_gates(
    p_worker bigint, p_orders rouse.claim_order[], p_lanes bigint[], p_sources text[], p_after bigint[], p_wanted integer,
    p_in_batches boolean,
    OUT orders rouse.claim_order[], OUT lanes bigint[], OUT gated rouse.gated_lane[], OUT at timestamptz,
    OUT wanted integer)
-- Unlike its callers, it joins lists that have no index. It joins them by hashes, whatever sizes the planner expects.
LANGUAGE plpgsql SET enable_hashjoin = on SET enable_nestloop = off SET lock_timeout = '5s' AS $$
#variable_conflict use_column
DECLARE
    -- The gates of these lanes whose locks this claim holds; later, without the limits that the claim cannot reach.
    names   text[];
    -- Those that count running jobs, and the time at which the first of their leases ends, or an earlier one.
    counted text[];
    since   timestamptz;
    -- The maximum number of jobs that this claim may take.
    whole   integer := CASE WHEN p_in_batches THEN 20000 ELSE coalesce(p_wanted, 20000) END;
    -- The number of running jobs by gate and key.
    running jsonb;
    -- The pairs of an order and a gate that may have less room than the claim wants; groups are numbered by gate and
    -- key. A batch belongs to one lane, whose id is its key here.
    pairs   record;
    -- By group: the room that is left.
    rooms   integer[];
    waits   bigint[];
    sizes   integer[];
    -- By order: the number of its ready jobs, if another one has the same key.
    ready   integer[];
    mosts   integer[];
    -- By pair: the room that its group had left when its lane had its turn.
    lefts   integer[];
    pair    integer := 1;
    first   integer;
    most    integer;
    size    integer;
    -- The number of jobs of a lane that are not locked. If they are fewer than expected: the times since which they are
    -- ready, and the batches that they make.
    free    integer;
    times   timestamptz[];
    again   record;
    -- The number of jobs that this claim has locked so far.
    locked  integer := 0;
    -- The number of batches that may still be claimed.
    batches integer := p_wanted;
BEGIN
    orders := p_orders;
    wanted := p_wanted;
    names := ARRAY(
        SELECT DISTINCT g.name
        FROM (SELECT DISTINCT l.queue, l.handler
              FROM ROWS FROM (unnest(p_orders), unnest(p_lanes)) AS o(lane, after, lease_ms, max, waited_ms, permitted)
              CROSS JOIN LATERAL (SELECT a.queue, a.handler FROM rouse.lane AS a WHERE a.id = o.lane LIMIT 1) AS l
              WHERE p_lanes IS NULL OR o.permitted IS NOT NULL) AS l
        CROSS JOIN LATERAL rouse._scopes(l.queue, l.handler) AS s
        JOIN rouse._claim_gates() AS g ON coalesce(g.queue, '') = s.queue AND coalesce(g.handler, '') = s.handler
        WHERE g.kind <> 'batch' OR p_in_batches OR g.period_ms IS NOT NULL AND p_sources IS NULL);
    IF names <> '{}' THEN
        PERFORM rouse._require_read_committed('a claim through gates');
        PERFORM rouse._lock_gates(names);
    END IF;
    -- The leases of shards are locked before any job, because a transaction that has changed the shards may wait for a
    -- job; and after the waits for other claims, so that no lease is locked during these.
    PERFORM FROM rouse.queue AS q WHERE q.shards > 0;
    IF FOUND THEN
        p_lanes := rouse._in_own_shards(p_worker, coalesce(
            p_lanes, ARRAY(SELECT o.lane FROM unnest(p_orders) WITH ORDINALITY AS o ORDER BY o.ordinality)));
    END IF;
    lanes := p_lanes;
    at := clock_timestamp();
    IF names = '{}' THEN
        RETURN;
    END IF;
    -- After this point, each statement has a snapshot that is newer than the locks. So the kinds, the keys and the
    -- lanes of these gates are read only now, and do not change afterwards; gates that were added to these lanes in the
    -- meantime do not count this claim.
    counted := ARRAY(SELECT g.name FROM rouse._claim_gates() AS g WHERE g.kind = 'max_concurrent' AND g.name = ANY (names));
    IF counted <> '{}' THEN
        since := rouse._raise_lease_floor(counted, at);
    END IF;
    -- A limit that is higher than the number of all running jobs plus those that this claim may take cannot be reached
    -- by any key.
    names := ARRAY(
        WITH gates AS MATERIALIZED (
            SELECT g.name, g.kind, g.max FROM rouse._claim_gates() AS g JOIN unnest(names) AS n(name) ON n.name = g.name)
        SELECT g.name FROM gates AS g
        WHERE g.kind <> 'max_concurrent' OR g.max <= whole
           -- A scalar subquery: counted once, not for each gate.
           OR g.max <= whole + (
               SELECT count(*) FROM (
                   SELECT FROM rouse.job AS j WHERE j.state = 'running' AND j.lease_until >= since
                   LIMIT (SELECT coalesce(max(m.max), 0) FROM gates AS m WHERE m.kind = 'max_concurrent')) AS r));
    IF counted && names THEN
        running := (SELECT jsonb_object_agg(r.gate || E'\n' || r.key, r.jobs) FROM rouse._in_flight(names, since) AS r);
    END IF;
    WITH pairs AS MATERIALIZED (
        SELECT o.place, o.lane, o.after, o.max AS most, g.name AS gate, g.kind, g.max, g.period_ms, g.burst, k.key,
               (dense_rank() OVER (ORDER BY g.name COLLATE "C", k.key COLLATE "C"))::integer AS number,
               row_number() OVER (PARTITION BY g.name COLLATE "C", k.key COLLATE "C" ORDER BY o.place) AS nth
        FROM ROWS FROM (unnest(p_orders), unnest(p_lanes)) WITH ORDINALITY AS o(lane, after, lease_ms, max, waited_ms, permitted, place)
        CROSS JOIN LATERAL (SELECT a.queue, a.handler, a.key FROM rouse.lane AS a WHERE a.id = o.lane LIMIT 1) AS l
        CROSS JOIN LATERAL rouse._scopes(l.queue, l.handler) AS s
        JOIN (SELECT c.* FROM rouse._claim_gates() AS c JOIN unnest(names) AS n(name) ON n.name = c.name) AS g
            ON coalesce(g.queue, '') = s.queue AND coalesce(g.handler, '') = s.handler
        CROSS JOIN LATERAL (
            SELECT CASE g.kind WHEN 'batch' THEN o.lane::text ELSE rouse._gate_key(g.key, l.queue, l.handler, l.key) END AS key
            -- Evaluated once, not at each use.
            OFFSET 0) AS k
        -- Jobs that are claimed by source do not form batches.
        WHERE (g.kind <> 'batch' OR p_in_batches OR g.period_ms IS NOT NULL AND p_sources IS NULL)
          -- The other lanes get none.
          AND (p_lanes IS NULL OR o.permitted IS NOT NULL)),
    -- Once for each group: many lanes may share the key of a throttle, which has up to a thousand starts.
    groups AS MATERIALIZED (
        SELECT p.number,
               CASE p.kind
                   WHEN 'max_concurrent' THEN greatest(p.max - coalesce((running ->> (p.gate || E'\n' || p.key))::integer, 0), 0)
                   ELSE coalesce(t.tokens, b.room) END AS room,
               coalesce(t.wait_ms, b.wait_ms) AS wait_ms, b.size, p.max, p.period_ms
        FROM pairs AS p
        -- Lookups instead of joins, whose plan would depend on estimates.
        LEFT JOIN LATERAL (
            SELECT a.starts, a.until FROM rouse.gate_key AS a WHERE p.kind = 'throttle' AND a.gate = p.gate AND a.key = p.key LIMIT 1) AS u ON true
        -- Conditions of these joins would be checked after the calls.
        LEFT JOIN LATERAL (
            SELECT c.tokens, c.wait_ms FROM rouse._tokens(p.max, p.period_ms, p.burst, u.starts, u.until, at) AS c
            WHERE p.kind = 'throttle' OFFSET 0) AS t ON true
        LEFT JOIN LATERAL (
            SELECT c.room, c.wait_ms, c.size
            FROM rouse._batches(p.lane, p.after, p.max, p.period_ms, CASE WHEN p_in_batches THEN p.most ELSE least(p.most, p_wanted) END, at) AS c
            WHERE p.kind = 'batch' OFFSET 0) AS b ON true
        WHERE p.nth = 1),
    numbered AS MATERIALIZED (
        SELECT p.place, p.lane, p.gate, p.kind, p.key, p.number, p.nth, g.room
        FROM pairs AS p JOIN groups AS g ON g.number = p.number ORDER BY p.place, p.number)
    -- In the order of `numbered`: sorted once, not for each list. Therefore, none of these aggregates may have an order
    -- of its own: the planner would sort their common input by that order.
    SELECT array_agg(p.place) AS places, array_agg(p.number) AS numbers, array_agg(p.gate) AS gates, array_agg(p.key) AS keys,
           array_agg(p.kind) AS kinds, array_agg(p.lane) AS lanes, bool_or(p.nth > 1) AS is_shared,
           ARRAY(SELECT g.room FROM groups AS g ORDER BY g.number) AS rooms,
           ARRAY(SELECT g.wait_ms FROM groups AS g ORDER BY g.number) AS waits,
           ARRAY(SELECT g.size FROM groups AS g ORDER BY g.number) AS sizes,
           ARRAY(SELECT g.max FROM groups AS g ORDER BY g.number) AS maxes,
           ARRAY(SELECT g.period_ms FROM groups AS g ORDER BY g.number) AS periods,
           -- Gates with more room than the claim wants only count it.
           ARRAY(SELECT ROW(p.lane, p.gate, p.key, NULL, NULL)::rouse.gated_lane FROM numbered AS p WHERE p.kind = 'throttle' AND p.room > whole) AS open
    INTO pairs
    FROM numbered AS p WHERE p.room <= whole;
    -- Read now, so that it is not before the end of any job that was not counted.
    at := clock_timestamp();
    IF pairs.places IS NULL THEN
        gated := nullif(pairs.open, '{}');
        RETURN;
    END IF;
    rooms := pairs.rooms;
    waits := pairs.waits;
    sizes := pairs.sizes;
    mosts := ARRAY(SELECT o.max FROM unnest(p_orders) AS o);
    -- Lanes that share a key get only what they can use.
    IF pairs.is_shared THEN
        ready := ARRAY(
            SELECT CASE WHEN s.is_shared THEN (
                   CASE WHEN p_sources IS NULL THEN (SELECT count(*)::integer FROM (
                       SELECT FROM rouse.job AS j
                       WHERE j.lane = CASE WHEN p_lanes IS NULL THEN o.lane ELSE p_lanes[o.place] END AND j.turn > o.after
                         AND j.state = 'queued' AND j.turn IS NOT NULL
                       ORDER BY j.turn LIMIT least(coalesce(o.max, p_wanted), CASE WHEN NOT p_in_batches THEN p_wanted END, s.room)) AS r)
                   ELSE (SELECT count(*)::integer FROM unnest(p_sources) WITH ORDINALITY AS bound(source, place) CROSS JOIN LATERAL (
                       SELECT FROM rouse.job AS j
                       WHERE (j.lane, j.source, j.turn) > (
                                 o.lane, bound.source,
                                 coalesce(p_after[(o.place - 1) * cardinality(p_sources) + bound.place], '-9223372036854775808'::bigint))
                         AND (j.lane, j.source, j.turn) <= (o.lane, bound.source, 9223372036854775807)
                         AND j.state = 'queued' AND j.turn IS NOT NULL AND j.source IS NOT NULL
                       ORDER BY j.lane, j.source, j.turn LIMIT least(p_wanted, s.room)) AS r) END) END
            FROM unnest(p_orders) WITH ORDINALITY AS o(lane, after, lease_ms, max, waited_ms, place)
            LEFT JOIN (
                SELECT c.place, bool_or(c.sharing > 1) AS is_shared, min(c.room) AS room
                FROM (SELECT u.place, rooms[u.number] AS room, count(*) OVER (PARTITION BY u.number) AS sharing
                      FROM ROWS FROM (unnest(pairs.places), unnest(pairs.numbers)) AS u(place, number)) AS c
                GROUP BY c.place) AS s ON s.place = o.place
            ORDER BY o.place);
    END IF;
    IF p_in_batches THEN
        wanted := 0;
    ELSIF NOT pairs.is_shared THEN
        -- Each group has one lane, so no lane leaves less room for another.
        mosts := ARRAY(
            SELECT least(o.max, g.room)
            FROM unnest(p_orders) WITH ORDINALITY AS o(lane, after, lease_ms, max, waited_ms, place)
            LEFT JOIN (
                SELECT u.place, min(rooms[u.number]) AS room FROM ROWS FROM (unnest(pairs.places), unnest(pairs.numbers)) AS u(place, number)
                GROUP BY u.place) AS g ON g.place = o.place
            ORDER BY o.place);
        lefts := ARRAY(SELECT rooms[u.number] FROM unnest(pairs.numbers) WITH ORDINALITY AS u(number, pair) ORDER BY u.pair);
        pair := cardinality(pairs.places) + 1;
    END IF;
    WHILE pair <= cardinality(pairs.places) LOOP
        first := pair;
        most := least(mosts[pairs.places[first]], ready[pairs.places[first]]);
        size := NULL;
        WHILE pairs.places[pair] = pairs.places[first] LOOP
            most := least(most, rooms[pairs.numbers[pair]]);
            size := least(size, sizes[pairs.numbers[pair]]);
            lefts[pair] := rooms[pairs.numbers[pair]];
            pair := pair + 1;
        END LOOP;
        IF p_in_batches AND size IS NOT NULL THEN
            most := least(most, batches * size);
        END IF;
        -- The claim takes no more than `whole`, in this order.
        IF most > 0 AND locked < whole AND (p_in_batches OR ready[pairs.places[first]] IS NOT NULL) THEN
            IF p_sources IS NULL THEN
                PERFORM FROM rouse.job AS j
                WHERE j.lane = pairs.lanes[first] AND j.turn > (p_orders[pairs.places[first]]).after
                  AND j.state = 'queued' AND j.turn IS NOT NULL
                ORDER BY j.turn LIMIT most FOR NO KEY UPDATE SKIP LOCKED;
            ELSE
                PERFORM FROM unnest(p_sources) WITH ORDINALITY AS bound(source, place) CROSS JOIN LATERAL (
                    SELECT j.id FROM rouse.job AS j
                    WHERE (j.lane, j.source, j.turn) > (
                              pairs.lanes[first], bound.source,
                              coalesce(p_after[(pairs.places[first] - 1) * cardinality(p_sources) + bound.place], '-9223372036854775808'::bigint))
                      AND (j.lane, j.source, j.turn) <= (pairs.lanes[first], bound.source, 9223372036854775807)
                      AND j.state = 'queued' AND j.turn IS NOT NULL AND j.source IS NOT NULL
                    ORDER BY j.lane, j.source, j.turn LIMIT most FOR NO KEY UPDATE SKIP LOCKED) AS j
                LIMIT most;
            END IF;
            GET DIAGNOSTICS free = ROW_COUNT;
            locked := locked + free;
            -- Without the jobs that others have locked, a batch may not be full.
            IF p_in_batches AND free < most THEN
                SELECT coalesce(array_agg(l.available_at ORDER BY l.turn), '{}') INTO times
                FROM (
                    SELECT j.turn, j.available_at FROM rouse.job AS j
                    WHERE j.lane = pairs.lanes[first] AND j.turn > (p_orders[pairs.places[first]]).after
                      AND j.state = 'queued' AND j.turn IS NOT NULL
                    ORDER BY j.turn LIMIT free FOR NO KEY UPDATE SKIP LOCKED) AS l;
                FOR i IN first .. pair - 1 LOOP
                    CONTINUE WHEN pairs.kinds[i] <> 'batch';
                    SELECT b.room, b.wait_ms INTO again
                    FROM rouse._batch_room(times, pairs.maxes[pairs.numbers[i]], pairs.periods[pairs.numbers[i]], at) AS b;
                    rooms[pairs.numbers[i]] := again.room;
                    waits[pairs.numbers[i]] := again.wait_ms;
                    lefts[i] := again.room;
                    most := least(most, again.room);
                END LOOP;
            END IF;
            most := least(most, free);
        END IF;
        IF p_in_batches AND size IS NOT NULL THEN
            batches := batches - (most + size - 1) / size;
            wanted := wanted + most;
        END IF;
        mosts[pairs.places[first]] := most;
        IF ready[pairs.places[first]] IS NOT NULL THEN
            FOR i IN first .. pair - 1 LOOP
                rooms[pairs.numbers[i]] := rooms[pairs.numbers[i]] - most;
            END LOOP;
        END IF;
    END LOOP;
    orders := ARRAY(
        SELECT ROW(o.lane, o.after, o.lease_ms, mosts[o.place], o.waited_ms)::rouse.claim_order
        FROM unnest(p_orders) WITH ORDINALITY AS o(lane, after, lease_ms, max, waited_ms, place) ORDER BY o.place);
    gated := pairs.open || ARRAY(
        SELECT ROW(u.lane, u.gate, u.key, CASE WHEN u.kind <> 'throttle' THEN u.room END, waits[u.number])::rouse.gated_lane
        FROM ROWS FROM (unnest(pairs.lanes), unnest(pairs.gates), unnest(pairs.keys), unnest(pairs.numbers), unnest(pairs.kinds), unnest(lefts))
             AS u(lane, gate, key, number, kind, room)
        -- Without jobs that wait, a batch closes no lane.
        WHERE u.kind <> 'batch' OR waits[u.number] IS NOT NULL);
END
$$;

-- Charges the throttles for the jobs that were claimed at this time; `p_lanes` contains the lane of each job. Returns
-- the lanes from which no job may start now, with the gates that have no room: for each lane, a row for each number of
-- milliseconds that this lasts (null: until a job of the key has ended). Waits up to 5 s for a change to the gate,
-- which also changes its keys. Served by gate_key_pkey.
CREATE OR REPLACE FUNCTION rouse._charge_gates(p_gated rouse.gated_lane[], p_lanes bigint[], p_at timestamptz)
RETURNS TABLE (lane bigint, wait_ms bigint, gates text[])
-- Joins by hashes, for the reason given at rouse._within_gates.
LANGUAGE plpgsql SET enable_hashjoin = on SET enable_nestloop = off SET lock_timeout = '5s' AS $$
#variable_conflict use_column
BEGIN
    IF p_lanes IS NOT NULL AND EXISTS (SELECT FROM unnest(p_gated) AS t WHERE t.room IS NULL) THEN
        -- After a server crash, these starts still count, whether or not the jobs have run.
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    RETURN QUERY
    WITH gated AS MATERIALIZED (
        SELECT t.lane, t.gate, t.key, t.room, t.wait_ms, coalesce(c.jobs, 0) AS jobs
        FROM unnest(p_gated) AS t
        LEFT JOIN (SELECT c.lane, count(*) AS jobs FROM unnest(p_lanes) AS c(lane) GROUP BY c.lane) AS c ON c.lane = t.lane),
    charged AS (
        INSERT INTO rouse.gate_key AS k (gate, key, starts, until)
        SELECT u.gate, u.key, CASE WHEN g.burst IS NULL THEN array_fill(p_at, ARRAY[u.starts]) END,
               p_at + CASE WHEN g.burst IS NULL THEN 1 ELSE u.starts::double precision / g.max END * g.period_ms * interval '1 millisecond'
        FROM (SELECT t.gate, t.key, sum(t.jobs)::integer AS starts FROM gated AS t WHERE t.room IS NULL AND t.jobs > 0 GROUP BY t.gate, t.key) AS u
        JOIN rouse.gate AS g ON g.name = u.gate AND g.kind = 'throttle'
        ON CONFLICT (gate, key) DO UPDATE
        SET starts = CASE WHEN excluded.starts IS NOT NULL THEN (
                SELECT array_agg(s.at ORDER BY s.n)
                FROM unnest(k.starts || excluded.starts) WITH ORDINALITY AS s(at, n),
                     -- With the collation of k.gate, the primary key could not serve the condition.
                     (SELECT g.period_ms * interval '1 millisecond' AS period FROM rouse.gate AS g WHERE g.name = k.gate COLLATE "default") AS g
                WHERE s.at > p_at - g.period AND s.at <= p_at + g.period) END,
            until = CASE WHEN excluded.starts IS NOT NULL THEN excluded.until ELSE excluded.until + (
                SELECT CASE WHEN k.until > p_at AND k.until <= p_at + 2 * g.burst::double precision / g.max * g.period_ms * interval '1 millisecond'
                       THEN k.until - p_at ELSE '0' END
                FROM rouse.gate AS g WHERE g.name = k.gate COLLATE "default") END
        RETURNING k.gate, k.key, k.starts, k.until),
    -- The keys that have no room for another start.
    used_up AS (
        SELECT c.gate, c.key, t.wait_ms
        FROM charged AS c JOIN rouse.gate AS g ON g.name = c.gate
        CROSS JOIN LATERAL rouse._tokens(g.max, g.period_ms, g.burst, c.starts, c.until, p_at) AS t
        WHERE t.wait_ms IS NOT NULL)
    SELECT t.lane, coalesce(l.wait_ms, t.wait_ms), array_agg(t.gate)
    FROM gated AS t LEFT JOIN used_up AS l ON l.gate = t.gate AND l.key = t.key
    WHERE CASE WHEN t.room IS NULL THEN coalesce(l.wait_ms, t.wait_ms) IS NOT NULL ELSE t.jobs >= t.room END
    GROUP BY t.lane, coalesce(l.wait_ms, t.wait_ms);
END
$$;

-- The key of a gate for a job that is being enqueued: a JSON array of its tenant, as with unique keys, and of the
-- values of the gate.
CREATE OR REPLACE FUNCTION rouse._gate_key_of_job(
    p_gate text[], p_queue text, p_handler text, p_tenant text, p_source text, p_payload jsonb) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN (
        SELECT jsonb_agg(CASE g.by WHEN 'queue' THEN p_queue WHEN 'handler' THEN p_handler
                         ELSE rouse._key_value(g.by, p_tenant, p_source, p_payload) END ORDER BY g.n)::text
        FROM unnest('{tenant}' || array_remove(p_gate, 'tenant')) WITH ORDINALITY AS g(by, n));
END
$$;

-- Passes a job that is being enqueued through the gates that act on enqueues, in the order of their names. `live`: the
-- job that it gives way to; null: none, and it is enqueued, not before `run_at`; if it is not enqueued in the end, the
-- caller opens the gates again (rouse._open_gates). `passed`: their rows as they were before; a new row names this job.
-- `replaced`: the caller has to give that job the arguments of this one, and make it due at `run_at`. Jobs of other
-- tenants do not count, as with unique keys. `p_may_refuse`: a gate may raise an error; otherwise such a job gives way
-- as well. Waits for a transaction that is enqueuing the same key. Served by gate_enqueues, gate_key_pkey and the
-- primary key of rouse.job.
CREATE OR REPLACE FUNCTION rouse._pass_gates(
    p_id bigint, p_queue text, p_handler text, p_tenant text, p_source text, p_payload jsonb, p_at timestamptz, p_may_refuse boolean,
    INOUT run_at timestamptz, OUT live bigint, OUT replaced boolean, OUT passed rouse.gate_key[])
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    gate  rouse.gate;
    held  rouse.gate_key;
    was   rouse.job;
    own   text;
    rest  interval;
    taken boolean;
    now   timestamptz;
BEGIN
    FOR gate IN
        SELECT * FROM rouse.gate AS g
        WHERE g.kind IN ('singleton', 'debounce') AND g.handler = p_handler AND coalesce(g.queue, p_queue) = p_queue ORDER BY g.name
    LOOP
        own := rouse._gate_key_of_job(gate.key, p_queue, p_handler, p_tenant, p_source, p_payload);
        rest := coalesce(gate.period_ms, 0) * interval '1 millisecond';
        -- Locks the row, or adds it. An update would lock it too, but would leave an old version, which a transaction
        -- that is open all day keeps, with each enqueue that gives way.
        LOOP
            SELECT * INTO held FROM rouse.gate_key AS k WHERE k.gate = gate.name AND k.key = own FOR NO KEY UPDATE;
            EXIT WHEN FOUND;
            INSERT INTO rouse.gate_key AS k (gate, key, job, since, until) VALUES (gate.name, own, p_id, p_at, p_at + rest)
            ON CONFLICT DO NOTHING
            RETURNING * INTO held;
            EXIT WHEN FOUND;
        END LOOP;
        -- Later than the time of every enqueue that had the row before, unless the clock has been set back. An enqueue
        -- that lies more than a period in the future does not count.
        now := clock_timestamp();
        was := NULL;
        taken := false;
        IF held.job <> p_id THEN
            SELECT * INTO was FROM rouse.job AS j WHERE j.id = held.job;
            -- Only a job that may be replaced is locked: the settlement of a running one may wait for this transaction.
            IF (gate.on_conflict = 'replace' OR gate.edge = 'trailing') AND was.state = 'queued' AND was.attempt = 0 AND was.blockers IS NULL THEN
                SELECT * INTO was FROM rouse.job AS j WHERE j.id = held.job FOR NO KEY UPDATE;
            END IF;
            taken := CASE
                WHEN gate.edge = 'leading'
                    THEN p_at < least(held.until, held.since + gate.max_wait_ms * interval '1 millisecond') AND held.until <= now + 2 * rest
                -- A job that has started, or waits for others, stays as it is.
                WHEN gate.kind = 'debounce' OR gate.on_conflict = 'replace' THEN was.state = 'queued' AND was.attempt = 0 AND was.blockers IS NULL
                WHEN gate.during = 'queued' THEN was.state = 'queued'
                WHEN gate.during = 'running' THEN was.id IS NOT NULL
                ELSE p_at < held.until AND held.since <= now + rest END;
        END IF;
        IF taken IS NOT TRUE THEN
            IF held.job <> p_id THEN
                UPDATE rouse.gate_key AS k SET job = p_id, since = p_at, until = p_at + rest WHERE k.gate = gate.name AND k.key = own;
            END IF;
            IF gate.edge = 'trailing' THEN
                run_at := greatest(run_at, p_at + least(rest, gate.max_wait_ms * interval '1 millisecond'));
            END IF;
            passed := array_append(passed, held);
            CONTINUE;
        END IF;
        IF gate.on_conflict = 'refuse' AND p_may_refuse THEN
            RAISE EXCEPTION 'rouse.enqueue: gate % is closed: it has let job % of handler % through', gate.name, held.job, p_handler
                USING ERRCODE = 'RW009',
                      HINT = CASE gate.during WHEN 'queued' THEN 'It opens when that job starts or ends.'
                             WHEN 'running' THEN 'It opens when that job has ended.' ELSE format('It opens at %s.', held.until) END;
        END IF;
        live := held.job;
        PERFORM rouse._open_gates(p_id, passed);
        replaced := gate.on_conflict = 'replace' OR gate.edge = 'trailing';
        IF gate.edge = 'leading' THEN
            UPDATE rouse.gate_key AS k SET since = least(k.since, now), until = p_at + rest WHERE k.gate = gate.name AND k.key = own;
        ELSIF gate.edge = 'trailing' THEN
            run_at := greatest(run_at, least(p_at + rest, held.since + gate.max_wait_ms * interval '1 millisecond'));
            UPDATE rouse.gate_key AS k SET since = least(k.since, now), until = run_at WHERE k.gate = gate.name AND k.key = own;
        END IF;
        RETURN;
    END LOOP;
END
$$;

-- Reopens gates that have let through a job that is not enqueued after all. `p_passed`: their rows as they were before.
-- Such a row may name a running job, which keeps others out again once it waits for its retry.
CREATE OR REPLACE FUNCTION rouse._open_gates(p_id bigint, p_passed rouse.gate_key[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    was rouse.gate_key;
BEGIN
    IF p_passed IS NULL THEN
        RETURN;
    END IF;
    FOREACH was IN ARRAY p_passed LOOP
        IF was.job = p_id THEN
            DELETE FROM rouse.gate_key AS k WHERE k.gate = was.gate AND k.key = was.key AND k.job = p_id;
        ELSE
            UPDATE rouse.gate_key AS k SET job = was.job, since = was.since, until = was.until
            WHERE k.gate = was.gate AND k.key = was.key AND k.job = p_id;
        END IF;
    END LOOP;
END
$$;

-- Gives a queued job, which the caller has locked, the arguments of a newer one of the same tenant that a gate has
-- merged with it. The queued job keeps its unique key, its job timeout, and the jobs that wait for it.
CREATE OR REPLACE FUNCTION rouse._replace_queued(
    p_id bigint, p_lane bigint, p_payload jsonb, p_bytes integer, p_source text, p_max_attempts integer, p_grants jsonb,
    p_lease_ms bigint, p_timeout_ms bigint, p_at timestamptz, p_run_at timestamptz, p_trace text) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    stored_at timestamptz := rouse._payload_at(p_bytes, p_at);
    is_due    boolean := coalesce(p_run_at, p_at) <= p_at;
    was       rouse.job := (SELECT j FROM rouse.job AS j WHERE j.id = p_id);
BEGIN
    IF stored_at IS NOT NULL THEN
        INSERT INTO rouse.payload (job, payload, kept_at) VALUES (p_id, p_payload::text, stored_at);
    END IF;
    -- With direct dispatch, another worker may have been chosen. A job that was due stays in its inbox: in another one,
    -- it would be the last, and with enough newer ones it would never start. A hash chooses another worker only for
    -- another key, or because workers have come or gone.
    IF is_due AND was.turn IS NOT NULL AND was.lane <> p_lane AND rouse._shared_lane(was.lane) = rouse._shared_lane(p_lane)
       AND NOT EXISTS (
           SELECT FROM rouse.queue AS q
           WHERE q.dispatch = 'hash' AND q.name = (SELECT l.queue FROM rouse.lane AS l WHERE l.id = p_lane LIMIT 1)) THEN
        p_lane := was.lane;
    END IF;
    UPDATE rouse.job AS j
    SET payload = CASE WHEN stored_at IS NULL THEN p_payload END, payload_at = stored_at,
        bytes = p_bytes + rouse._other_bytes(j.tenant, p_source, p_grants, p_trace), trace = p_trace, source = p_source, max_attempts = p_max_attempts,
        grants = p_grants, lease_ms = p_lease_ms, timeout_ms = p_timeout_ms, lane = p_lane,
        -- A job that was due keeps its turn.
        turn = CASE WHEN NOT is_due THEN NULL WHEN j.lane = p_lane AND j.turn IS NOT NULL THEN j.turn ELSE nextval('rouse.turn_seq') END,
        available_at = CASE WHEN is_due THEN least(j.available_at, p_at) ELSE p_run_at END
    WHERE j.id = p_id;
    IF NOT is_due OR was.turn IS NULL OR was.lane <> p_lane THEN
        PERFORM rouse._notify(p_lane, is_due, p_at);
    END IF;
END
$$;

-- Applies a change to rouse.gate to the values by which lanes are divided, and announces it to the workers.
CREATE OR REPLACE FUNCTION rouse._gate_changed() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    -- Changes are made one after another, because rouse.maintain_lanes also changes many lanes. Producers may add lanes
    -- in the meantime.
    LOCK TABLE rouse.lane IN SHARE UPDATE EXCLUSIVE MODE;
    PERFORM rouse._divide_lanes(NULL);
    PERFORM rouse._announce_settings(NULL);
    -- The change takes place between claims: each claim uses the gate that it read while it held the lock.
    IF tg_op = 'UPDATE' AND (old.queue, old.handler) IS DISTINCT FROM (new.queue, new.handler) THEN
        PERFORM rouse._lock('gate', old.name);
    END IF;
    IF tg_op = 'DELETE' OR tg_op = 'UPDATE' AND (old.kind, old.key) IS DISTINCT FROM (new.kind, new.key) THEN
        PERFORM rouse._lock('gate', old.name);
        DELETE FROM rouse.gate_key AS k WHERE k.gate = old.name;
        DELETE FROM rouse.lease_floor AS f WHERE f.gate = old.name;
    ELSIF tg_op = 'UPDATE' AND new.kind = 'throttle' AND (old.burst IS NULL) <> (new.burst IS NULL) THEN
        PERFORM rouse._lock('gate', old.name);
        -- The times of the last starts are not known, or no longer count: starts that are still within the period count
        -- as having just been made.
        UPDATE rouse.gate_key AS k
        SET starts = CASE WHEN new.burst IS NULL THEN array_fill(clock_timestamp(), ARRAY[new.max]) END,
            until = clock_timestamp() + new.period_ms * interval '1 millisecond' * CASE WHEN new.burst IS NULL THEN 1 ELSE new.burst::double precision / new.max END
        WHERE k.gate = new.name AND k.until > clock_timestamp();
    ELSIF tg_op = 'UPDATE' AND new.kind = 'throttle' AND new.burst IS NOT NULL
          AND (old.max, old.period_ms, old.burst) IS DISTINCT FROM (new.max, new.period_ms, new.burst) THEN
        PERFORM rouse._lock('gate', old.name);
        -- The bucket is as many starts short of being full as before, at the new rate, but no more than the new burst.
        UPDATE rouse.gate_key AS k
        SET until = clock_timestamp() + least(
            (k.until - clock_timestamp()) * (old.max::double precision * new.period_ms / (new.max::double precision * old.period_ms)),
            new.burst::double precision / new.max * new.period_ms * interval '1 millisecond')
        WHERE k.gate = new.name AND k.until > clock_timestamp();
    ELSIF tg_op = 'UPDATE' AND new.kind = 'throttle' AND new.period_ms <> old.period_ms THEN
        PERFORM rouse._lock('gate', old.name);
        -- The starts of the last period count for the new one.
        UPDATE rouse.gate_key AS k
        SET until = k.until + (new.period_ms - old.period_ms) * interval '1 millisecond'
        WHERE k.gate = new.name;
    ELSIF tg_op = 'UPDATE' AND new.kind = 'singleton' AND new.period_ms IS DISTINCT FROM old.period_ms THEN
        -- A key is closed for the new period, from the enqueue of its last job.
        UPDATE rouse.gate_key AS k
        SET until = k.since + coalesce(new.period_ms, 0) * interval '1 millisecond'
        WHERE k.gate = new.name;
    ELSIF tg_op = 'UPDATE' AND new.kind = 'debounce' AND new.period_ms < old.period_ms THEN
        -- Bursts end within the new period. A later end would be taken for one from before the clock was set back.
        UPDATE rouse.gate_key AS k
        SET until = least(k.until, clock_timestamp() + new.period_ms * interval '1 millisecond')
        WHERE k.gate = new.name AND k.until > clock_timestamp();
    END IF;
    RETURN NULL;
END
$$;
-- No CREATE OR REPLACE: see wake.sql.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'rouse.gate'::regclass AND tgname = 'gate_changed') THEN
        CREATE TRIGGER gate_changed AFTER INSERT OR UPDATE OR DELETE ON rouse.gate
            FOR EACH ROW EXECUTE FUNCTION rouse._gate_changed();
    END IF;
END
$$;

-- The reason why these settings are not valid for a gate; null: they are valid.
CREATE OR REPLACE FUNCTION rouse._gate_problem(p_gate rouse.gate) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        -- Long enough for the name of a handler and a kind.
        WHEN p_gate.name !~ '^[a-z0-9][a-z0-9_./-]{0,159}$'
            THEN 'name must consist of lower-case letters, digits and _ . / -, not ' || quote_literal(left(p_gate.name, 140))
        WHEN p_gate.kind NOT IN ('max_concurrent', 'throttle', 'batch', 'singleton', 'debounce')
            THEN 'kind must be max_concurrent, throttle, batch, singleton or debounce, not ' || quote_literal(left(p_gate.kind, 140))
        WHEN p_gate.queue !~ '^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$' THEN quote_literal(left(p_gate.queue, 140)) || ' is not a queue name'
        WHEN p_gate.handler !~ '^[a-z0-9][a-z0-9_-]*([.][a-z0-9][a-z0-9_-]*)*$' OR length(p_gate.handler) > 128
            THEN quote_literal(left(p_gate.handler, 140)) || ' is not a handler name'
        WHEN p_gate.kind = 'batch' AND ('tenant' <> ALL (p_gate.key) OR cardinality(p_gate.key) > 2)
            THEN 'the key of a batch has tenant and at most one more, not ' || left(p_gate.key::text, 140)
        WHEN cardinality(p_gate.key) > 2 OR array_position(p_gate.key, NULL) IS NOT NULL OR p_gate.key[1] = p_gate.key[2]
            OR EXISTS (SELECT FROM unnest(p_gate.key) AS k(by)
                       WHERE k.by NOT IN ('tenant', 'source', 'handler', 'queue') AND k.by !~ '^[$]([.][A-Za-z0-9_-]{1,64}){1,8}$')
            THEN 'key must be at most two of tenant, source, handler, queue and paths of the payload such as $.customer.id, not '
                 || left(p_gate.key::text, 140)
        WHEN p_gate.kind IN ('batch', 'singleton', 'debounce') AND p_gate.handler IS NULL THEN p_gate.kind || ' needs a handler'
        -- A setting without an effect is a mistake.
        WHEN p_gate.max IS NOT NULL AND p_gate.kind NOT IN ('max_concurrent', 'throttle', 'batch') THEN p_gate.kind || ' has no max'
        WHEN p_gate.period_ms IS NOT NULL AND p_gate.kind = 'max_concurrent' THEN p_gate.kind || ' has no period'
        WHEN p_gate.burst IS NOT NULL AND p_gate.kind <> 'throttle' THEN p_gate.kind || ' has no burst'
        WHEN p_gate.during IS NOT NULL AND p_gate.kind <> 'singleton' THEN p_gate.kind || ' has no during'
        WHEN p_gate.on_conflict IS NOT NULL AND p_gate.kind <> 'singleton' THEN p_gate.kind || ' has no on_conflict'
        WHEN p_gate.edge IS NOT NULL AND p_gate.kind <> 'debounce' THEN p_gate.kind || ' has no edge'
        WHEN p_gate.max_wait_ms IS NOT NULL AND p_gate.kind <> 'debounce' THEN p_gate.kind || ' has no max_wait'
        WHEN p_gate.kind IN ('max_concurrent', 'throttle') AND coalesce(p_gate.max, 0) NOT BETWEEN 1 AND 1000000
            THEN 'max must be 1 to 1000000, not ' || coalesce(p_gate.max::text, 'null')
        WHEN p_gate.kind = 'batch' AND coalesce(p_gate.max, 0) NOT BETWEEN 1 AND 1000
            THEN 'max must be 1 to 1000, not ' || coalesce(p_gate.max::text, 'null')
        WHEN p_gate.kind = 'throttle' AND p_gate.burst IS NULL AND p_gate.max > 1000
            THEN 'without a burst, max must be 1 to 1000, not ' || p_gate.max
        WHEN p_gate.kind = 'throttle' AND p_gate.burst NOT BETWEEN 1 AND 1000000 THEN 'burst must be 1 to 1000000, not ' || p_gate.burst
        WHEN p_gate.kind = 'singleton' AND coalesce(p_gate.during, '') NOT IN ('queued', 'running', 'period')
            THEN 'during must be queued, running or period, not ' || coalesce(quote_literal(left(p_gate.during, 140)), 'null')
        WHEN p_gate.period_ms IS NOT NULL AND p_gate.during <> 'period' THEN 'a singleton has a period only if during is period'
        WHEN (p_gate.kind IN ('throttle', 'debounce') OR p_gate.during = 'period' OR p_gate.period_ms IS NOT NULL)
             AND coalesce(p_gate.period_ms, 0) NOT BETWEEN 1 AND 2592000000
            THEN 'period must be 1 millisecond to 30 days, not ' || coalesce((p_gate.period_ms * interval '1 millisecond')::text, 'null')
        WHEN p_gate.kind = 'singleton' AND coalesce(p_gate.on_conflict, '') NOT IN ('keep', 'replace', 'refuse')
            THEN 'on_conflict must be keep, replace or refuse, not ' || coalesce(quote_literal(left(p_gate.on_conflict, 140)), 'null')
        WHEN p_gate.on_conflict = 'replace' AND p_gate.during <> 'queued' THEN 'a job is replaced only while it is queued: leave out during'
        WHEN p_gate.kind = 'debounce' AND coalesce(p_gate.edge, '') NOT IN ('trailing', 'leading')
            THEN 'edge must be trailing or leading, not ' || coalesce(quote_literal(left(p_gate.edge, 140)), 'null')
        WHEN p_gate.max_wait_ms NOT BETWEEN p_gate.period_ms AND 2592000000
            THEN 'max_wait must be at least the period, and at most 30 days, not ' || p_gate.max_wait_ms * interval '1 millisecond'
    END
$$;

-- Sets a gate, and replaces one of the same name. Arguments that are left out have their defaults. It applies at once;
-- the division by a new key applies to jobs that are enqueued after the change, and jobs that already wait share a key.
-- Leaves a record.
--
--   kind         max_concurrent, throttle, batch, singleton or debounce
--   handler      its jobs only; null: those of all handlers. batch, singleton and debounce need one
--   queue        the jobs of this queue only; null: of all queues
--   key          each of its values has a limit of its own: up to two of tenant, source, handler, queue, and paths of
--                the payload such as $.customer.id; empty: there is one limit. Jobs without the value share one. batch:
--                tenant, which may be omitted, and at most one more
--   max          max_concurrent: running jobs of a key; throttle: starts of a key in a period; 1 to 1,000,000. batch:
--                jobs of one attempt; 1 to 1,000
--   period       throttle, debounce, and a singleton with during => 'period': 1 ms to 30 days. batch: the time that the
--                first job waits for others; null: it does not wait
--   burst        throttle: the number of jobs that may start at once after a pause, at an average of `max` in a period.
--                Null: never more than `max` (up to 1,000) in any period
--   during       singleton: queued (while the job waits, for its first start or a retry; default), running (until it
--                has ended) or period (starting when it is enqueued)
--   on_conflict  singleton: keep (the id of the earlier job is returned, and nothing is enqueued; default), replace
--                (the same, and the earlier job gets the arguments of the new job; one that has started, or waits for
--                others, does not count) or refuse (an error)
--   edge         debounce: trailing (the last one of a burst runs, when none has been enqueued for a period; default)
--                or leading (the first one runs, at once)
--   max_wait     debounce: the maximum duration of a burst; null: no limit
CREATE OR REPLACE FUNCTION rouse.set_gate(
    name text, kind text, handler text DEFAULT NULL, queue text DEFAULT NULL, key text[] DEFAULT '{}', max integer DEFAULT NULL,
    period interval DEFAULT NULL, burst integer DEFAULT NULL, during text DEFAULT NULL, on_conflict text DEFAULT NULL, edge text DEFAULT NULL,
    max_wait interval DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM rouse._set_gate(ROW(
        name, kind, queue, handler,
        ARRAY(SELECT 'tenant' WHERE kind = 'batch' AND 'tenant' <> ALL (key)
              UNION ALL (SELECT k.by FROM unnest(key) WITH ORDINALITY AS k(by, place) ORDER BY k.place)), max, extract(epoch FROM period) * 1000, burst,
        CASE kind WHEN 'singleton' THEN coalesce(during, 'queued') ELSE during END,
        CASE kind WHEN 'singleton' THEN coalesce(on_conflict, 'keep') ELSE on_conflict END,
        CASE kind WHEN 'debounce' THEN coalesce(edge, 'trailing') ELSE edge END, extract(epoch FROM max_wait) * 1000, NULL)::rouse.gate);
END
$$;

CREATE OR REPLACE FUNCTION rouse._set_gate(p_gate rouse.gate) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    at      timestamptz := clock_timestamp();
    problem text := rouse._gate_problem(p_gate);
    was     rouse.gate;
BEGIN
    IF p_gate.name IS NULL OR p_gate.kind IS NULL OR problem IS NOT NULL THEN
        RAISE EXCEPTION 'rouse.set_gate: %', coalesce(problem, 'name and kind must not be null')
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = CASE WHEN problem LIKE '% has no %' THEN 'Leave out the settings that its kind does not have. ' ELSE '' END ||
                         'For instance rouse.set_gate(''customers'', ''max_concurrent'', key => ''{tenant}'', max => 5).';
    END IF;
    LOCK TABLE rouse.lane IN SHARE UPDATE EXCLUSIVE MODE;
    SELECT * INTO was FROM rouse.gate AS g WHERE g.name = p_gate.name FOR NO KEY UPDATE;
    IF NOT FOUND AND (SELECT count(*) FROM rouse.gate) >= (SELECT l.gates_max FROM rouse.limits AS l) THEN
        RAISE EXCEPTION 'rouse.set_gate: there are already % gates, the maximum', (SELECT l.gates_max FROM rouse.limits AS l)
            USING ERRCODE = 'program_limit_exceeded', HINT = 'One gate has a limit for each key. Use keys instead of gates, or raise gates_max in rouse.limits.';
    END IF;
    IF was IS NOT DISTINCT FROM p_gate THEN
        RETURN;
    END IF;
    INSERT INTO rouse.gate SELECT p_gate.*
    ON CONFLICT ON CONSTRAINT gate_pkey DO UPDATE
    SET kind = excluded.kind, queue = excluded.queue, handler = excluded.handler, key = excluded.key, max = excluded.max,
        period_ms = excluded.period_ms, burst = excluded.burst, during = excluded.during, on_conflict = excluded.on_conflict, edge = excluded.edge,
        max_wait_ms = excluded.max_wait_ms, declared_by = excluded.declared_by;
    PERFORM rouse._ensure_partitions(at);
    INSERT INTO rouse.record (at, queue, event, who, detail)
    VALUES (at, p_gate.queue, 'gate_set', session_user, jsonb_strip_nulls(to_jsonb(p_gate)));
END
$$;

-- Deletes a gate, and returns whether there was one. A gate that a module declares comes back with the next worker that
-- has the module. Leaves a record.
CREATE OR REPLACE FUNCTION rouse.delete_gate(name text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at  timestamptz := clock_timestamp();
    was rouse.gate;
BEGIN
    LOCK TABLE rouse.lane IN SHARE UPDATE EXCLUSIVE MODE;
    DELETE FROM rouse.gate AS g WHERE g.name = delete_gate.name RETURNING * INTO was;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM rouse._ensure_partitions(at);
    INSERT INTO rouse.record (at, queue, event, who, detail) VALUES (at, was.queue, 'gate_deleted', session_user, jsonb_build_object('name', was.name));
    RETURN true;
END
$$;

-- The rows of rouse.gate that a handler gets from the gates of its module, in the order of their names:
-- `<handler>/<kind>`, and `.2`, `.3` … for further ones of a kind. Leaves out those whose name is already that of a
-- gate that an operator has set.
CREATE OR REPLACE FUNCTION rouse._declared_gates(p_handler text, p_gates jsonb) RETURNS SETOF rouse.gate
LANGUAGE sql STABLE AS $$
    SELECT d.name, d.kind, NULL, p_handler, coalesce(d.key, '{}'), d.max, d.period_ms, d.burst, d.during, d.on_conflict, d.edge, d.max_wait_ms, p_handler
    FROM (SELECT g.*, p_handler || '/' || g.kind
                      || coalesce('.' || nullif(row_number() OVER (PARTITION BY g.kind ORDER BY e.place), 1), '') AS name
          FROM jsonb_array_elements(p_gates) WITH ORDINALITY AS e(gate, place)
          CROSS JOIN LATERAL jsonb_to_record(e.gate) AS g(
              kind text, key text[], max integer, period_ms bigint, burst integer, during text, on_conflict text, edge text, max_wait_ms bigint)) AS d
    WHERE NOT EXISTS (SELECT FROM rouse.gate AS o WHERE o.name = d.name AND o.declared_by IS NULL)
    ORDER BY d.name
$$;

-- Sets the gates that the module of a handler declares, and deletes those that it declared before. `p_gates`: a list of
-- at most 8 objects with columns of rouse.gate. The last call decides. Gates that an operator has set stay as they are.
-- Returns whether it has changed a gate; if not, it writes nothing and takes no lock, because hosts call this whenever
-- they start. Otherwise it waits up to 5 s for other changes to gates. Leaves a record for each change.
CREATE OR REPLACE FUNCTION rouse.declare_gates(p_worker bigint, p_key bytea, p_handler text, p_gates jsonb) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' SET enable_seqscan = off SET jit = off AS $$
BEGIN
    -- Such a gate applies to all queues. A login that is limited to some queues may be permitted all handlers, but must
    -- not limit the jobs of other queues.
    IF rouse._authenticated_as_limited(p_worker, p_key) AND NOT EXISTS (
        SELECT FROM rouse._limits() AS l
        WHERE rouse._matches_any(p_handler, l.handlers) AND ('*' = ANY (l.queues) OR NOT '*' = ANY (l.handlers))) THEN
        RAISE EXCEPTION 'rouse.declare_gates: login % may not set gates of handler %', session_user, coalesce(quote_literal(left(p_handler, 140)), 'null')
            USING ERRCODE = 'RW006', HINT = 'It needs all queues, or a list of handlers, in rouse.worker_login.';
    END IF;
    IF p_handler IS NULL OR (CASE jsonb_typeof(p_gates) WHEN 'array' THEN jsonb_array_length(p_gates) > 8 ELSE true END) THEN
        RAISE EXCEPTION 'rouse.declare_gates: expected a handler and an array of at most 8 gates' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF ARRAY(SELECT g FROM rouse.gate AS g WHERE g.declared_by = p_handler ORDER BY g.name)
       = ARRAY(SELECT d FROM rouse._declared_gates(p_handler, p_gates) AS d) THEN
        RETURN false;
    END IF;
    -- The same lock as for every change to gates, so that the statements below see what an operator sets during the
    -- wait.
    LOCK TABLE rouse.lane IN SHARE UPDATE EXCLUSIVE MODE;
    -- All locks at once: the changes below would take them in a different order from claims.
    PERFORM rouse._lock_gates(ARRAY(
        SELECT g.name FROM rouse.gate AS g WHERE g.declared_by = p_handler
        UNION SELECT d.name FROM rouse._declared_gates(p_handler, p_gates) AS d));
    -- First, deletions that make room for others.
    PERFORM rouse.delete_gate(g.name) FROM rouse.gate AS g
    WHERE g.declared_by = p_handler AND NOT EXISTS (SELECT FROM rouse._declared_gates(p_handler, p_gates) AS d WHERE d.name = g.name);
    PERFORM rouse._set_gate(d) FROM rouse._declared_gates(p_handler, p_gates) AS d;
    RETURN true;
END
$$;

-- Deletes the keys of gates that no longer have an effect (rouse.gate_key). Reads the next 10,000 keys after p_after,
-- {gate, key}; null: from the first. `reached` is the last one read, or null if there are no more. It waits for neither
-- producers nor claims, and holds the locks of the deleted keys until it commits. Served by the primary keys.
CREATE OR REPLACE FUNCTION rouse.maintain_gate_keys(p_worker bigint, p_key bytea, p_after text[], OUT reached text[], OUT deleted integer)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s'
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    at      timestamptz := clock_timestamp();
    gates   text[];
    keys    text[];
    last    integer;
    -- The rows of those that have no effect.
    useless tid[];
BEGIN
    PERFORM rouse._authenticated_as_limited(p_worker, p_key);
    SELECT array_agg(k.gate), array_agg(k.key) INTO gates, keys
    FROM (SELECT k.gate, k.key FROM rouse.gate_key AS k
          WHERE (k.gate, k.key) > (coalesce(p_after[1], ''), coalesce(p_after[2], ''))
          ORDER BY k.gate, k.key LIMIT 10000) AS k;
    last := cardinality(gates);
    IF last = 10000 THEN
        reached := ARRAY[gates[last], keys[last]];
    END IF;
    -- Locks them, without waiting for producers. The plan does not depend on statistics: nothing is joined, and
    -- OFFSET 0 keeps the condition about the job from becoming a join.
    useless := ARRAY(
        SELECT k.ctid FROM rouse.gate_key AS k
        WHERE (k.gate, k.key) > (coalesce(p_after[1], ''), coalesce(p_after[2], '')) AND (k.gate, k.key) <= (gates[last], keys[last])
          AND k.until < at AND NOT EXISTS (SELECT FROM rouse.job AS j WHERE j.id = k.job OFFSET 0)
        ORDER BY k.gate, k.key FOR UPDATE SKIP LOCKED);
    -- Again, with a new snapshot: a producer may have renewed a key before it was locked, and the old snapshot does not
    -- contain its job.
    DELETE FROM rouse.gate_key AS k
    WHERE k.ctid = ANY (useless) AND k.until < at AND NOT EXISTS (SELECT FROM rouse.job AS j WHERE j.id = k.job OFFSET 0);
    GET DIAGNOSTICS deleted = ROW_COUNT;
END
$$;
