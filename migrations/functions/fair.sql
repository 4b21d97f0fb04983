-- Fair queues (rouse.queue.policy = 'drr'): the keys of a queue share its workers, whatever the number of their jobs.
--
-- The jobs of each tenant or source have a lane of their own, so that a worker can take jobs of one without reading those of others. The
-- worker decides whose turn it is (host/src/worker/turns.rs). Here are the lanes, the settings, and the limit of jobs in flight.

-- By what the lanes of a queue are divided: tenant, source, or null.
CREATE OR REPLACE FUNCTION rouse._divided_by(p_queue text) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE q.fair_key WHEN 'source' THEN 'source' WHEN 'handler' THEN NULL ELSE 'tenant' END
    FROM rouse.queue AS q WHERE q.name = p_queue AND q.policy = 'drr'
$$;

-- The lane for a job whose lane without a key is p_base: that of its tenant or source if lanes are divided by it. A lane without an open row
-- is added to the catalog, unless there are already keyed_lanes_max of these (rouse.limits). Counting them takes up to two milliseconds, so a
-- session counts again only a minute after it has found that many. Served by lane_key.
CREATE OR REPLACE FUNCTION rouse._divided_lane(
    p_base bigint, p_handler text, p_queue text, p_priority text, p_tags text[], p_divided_by text, p_tenant text, p_source text) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    own   text := p_divided_by || ':' || CASE p_divided_by WHEN 'tenant' THEN p_tenant ELSE p_source END;
    known bigint;
    most  integer;
    later text := current_setting('rouse.count_keyed_lanes_at', true);
BEGIN
    IF own IS NULL THEN
        RETURN p_base;
    END IF;
    SELECT l.id INTO known FROM rouse.lane AS l
    WHERE l.handler = p_handler AND l.queue = p_queue AND l.priority = p_priority::rouse.priority AND l.tags = p_tags AND l.key = own
      AND l.closed_at IS NULL
    LIMIT 1;
    IF FOUND THEN
        RETURN known;
    END IF;
    IF later <> '' AND later::timestamptz > clock_timestamp() THEN
        RETURN p_base;
    END IF;
    most := (SELECT l.keyed_lanes_max FROM rouse.limits AS l WHERE l.only_row);
    IF (SELECT count(*) FROM (SELECT FROM rouse.lane AS l WHERE l.key <> '' AND l.closed_at IS NULL LIMIT most) AS l) >= most THEN
        PERFORM set_config('rouse.count_keyed_lanes_at', (clock_timestamp() + interval '1 minute')::text, false);
        RETURN p_base;
    END IF;
    known := rouse._lane_id(p_handler, p_queue, p_priority, p_tags, own);
    INSERT INTO rouse.lane (id, queue, handler, priority, tags, key)
    VALUES (known, p_queue, p_handler, p_priority::rouse.priority, p_tags, own);
    RETURN known;
END
$$;

-- Copies to the lanes of a queue, or of all (null), by what they are divided. A lane that a transaction adds during a change may have the
-- old copy until rouse.maintain_lanes calls this. Reads the whole catalog.
CREATE OR REPLACE FUNCTION rouse._divide_lanes(p_queue text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE rouse.lane AS l SET divided_by = d.divided_by
    FROM (SELECT n.queue, rouse._divided_by(n.queue) AS divided_by
          FROM (SELECT DISTINCT a.queue FROM rouse.lane AS a WHERE p_queue IS NULL OR a.queue = p_queue) AS n OFFSET 0) AS d
    WHERE l.queue = d.queue AND l.key = '' AND l.divided_by IS DISTINCT FROM d.divided_by;
END
$$;

-- Applies a change of rouse.queue to its lanes. Their new positions in the catalog tell workers to read the settings again.
CREATE OR REPLACE FUNCTION rouse._queue_changed() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM jsonb_each(new.weights) AS w
               WHERE jsonb_typeof(w.value) <> 'number' OR w.key = '' OR CASE WHEN jsonb_typeof(w.value) = 'number' THEN w.value::numeric NOT BETWEEN 0.001 AND 1000 END) THEN
        RAISE EXCEPTION 'rouse.queue: weights must be an object with a number from 0.001 to 1000 for each key, not %', left(new.weights::text, 140)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'For instance {"acme": 3}.';
    END IF;
    IF octet_length(new.weights::text) > 1048576 THEN
        RAISE EXCEPTION 'rouse.queue: weights have % bytes; at most 1 MiB is allowed', octet_length(new.weights::text)
            USING ERRCODE = 'program_limit_exceeded';
    END IF;
    IF tg_op = 'INSERT' AND new.policy = 'fifo' THEN
        RETURN NULL;
    END IF;
    -- One after the other: rouse.maintain_lanes also changes many lanes. Producers add lanes meanwhile.
    LOCK TABLE rouse.lane IN SHARE UPDATE EXCLUSIVE MODE;
    PERFORM rouse._divide_lanes(new.name);
    UPDATE rouse.lane AS l SET seq = nextval('rouse.lane_seq') WHERE l.queue = new.name AND l.key = '' AND l.closed_at IS NULL;
    RETURN NULL;
END
$$;
CREATE OR REPLACE TRIGGER fair_share_added AFTER INSERT ON rouse.queue
    FOR EACH ROW EXECUTE FUNCTION rouse._queue_changed();
CREATE OR REPLACE TRIGGER fair_share_changed AFTER UPDATE ON rouse.queue
    FOR EACH ROW WHEN ((old.policy, old.fair_key, old.charge, old.quantum, old.weights, old.default_weight, old.starvation_s, old.max_in_flight)
                       IS DISTINCT FROM
                       (new.policy, new.fair_key, new.charge, new.quantum, new.weights, new.default_weight, new.starvation_s, new.max_in_flight))
    EXECUTE FUNCTION rouse._queue_changed();

-- Sets how a queue is shared; null: unchanged. Returns the settings. They apply to jobs that are enqueued from now on, and within seconds
-- to those that wait in lanes of their own already. Leaves a record.
--
--   policy          drr: the keys take turns, by deficit round robin; fifo: the lanes do
--   key             tenant, handler, source or tenant-and-handler; jobs without it share a key
--   quantum         jobs of a key of weight 1 in each round, 1 to 1000
--   weights         {"acme": 3, …}: weights of keys, 0.001 to 1000; replaces those that were set. A key of tenant-and-handler is acme/email.send
--   default_weight  the weight of all other keys
--   starvation      jobs that have waited this long go first, the oldest ahead; 0: none do
--   max_in_flight   running jobs of a key on all workers; 0: any number
--   charge          jobs: a job costs its key one turn; cpu: as much as the last jobs of its lane have used of the CPU, compared with others
CREATE OR REPLACE FUNCTION rouse.set_fair_share(
    queue text, INOUT policy text DEFAULT NULL, INOUT key text DEFAULT NULL, INOUT quantum integer DEFAULT NULL, INOUT weights jsonb DEFAULT NULL,
    INOUT default_weight double precision DEFAULT NULL, INOUT starvation interval DEFAULT NULL, INOUT max_in_flight integer DEFAULT NULL,
    INOUT charge text DEFAULT NULL)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at    timestamptz := clock_timestamp();
    was   rouse.queue;
    now   rouse.queue;
    wrong text;
BEGIN
    PERFORM rouse._check_queue('set_fair_share', set_fair_share.queue);
    wrong := CASE
        WHEN set_fair_share.policy NOT IN ('fifo', 'drr') THEN 'policy must be fifo or drr, not ' || quote_literal(left(set_fair_share.policy, 140))
        WHEN set_fair_share.key NOT IN ('tenant', 'handler', 'source', 'tenant-and-handler')
            THEN 'key must be tenant, handler, source or tenant-and-handler, not ' || quote_literal(left(set_fair_share.key, 140))
        WHEN set_fair_share.charge NOT IN ('jobs', 'cpu') THEN 'charge must be jobs or cpu, not ' || quote_literal(left(set_fair_share.charge, 140))
        WHEN set_fair_share.quantum NOT BETWEEN 1 AND 1000 THEN 'quantum must be 1 to 1000, not ' || set_fair_share.quantum
        WHEN jsonb_typeof(set_fair_share.weights) <> 'object'
            THEN 'weights must be an object such as {"acme": 3}, not ' || left(set_fair_share.weights::text, 140)
        WHEN set_fair_share.default_weight NOT BETWEEN 0.001 AND 1000 THEN 'default_weight must be 0.001 to 1000, not ' || set_fair_share.default_weight
        WHEN extract(epoch FROM set_fair_share.starvation) NOT BETWEEN 0 AND 31536000
            THEN 'starvation must be 0 to 365 days, not ' || set_fair_share.starvation
        WHEN set_fair_share.max_in_flight NOT BETWEEN 0 AND 1000000 THEN 'max_in_flight must be 0 to 1000000, not ' || set_fair_share.max_in_flight
    END;
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION 'rouse.set_fair_share: %', wrong USING ERRCODE = 'invalid_parameter_value', HINT = 'Leave it out to keep the setting.';
    END IF;
    -- Before the row of the queue, as rouse.maintain_lanes does.
    LOCK TABLE rouse.lane IN SHARE UPDATE EXCLUSIVE MODE;
    INSERT INTO rouse.queue (name) VALUES (set_fair_share.queue) ON CONFLICT DO NOTHING;
    SELECT * INTO was FROM rouse.queue AS q WHERE q.name = set_fair_share.queue FOR NO KEY UPDATE;
    UPDATE rouse.queue AS q
    SET policy = coalesce(set_fair_share.policy, q.policy), fair_key = coalesce(set_fair_share.key, q.fair_key),
        quantum = coalesce(set_fair_share.quantum, q.quantum), weights = coalesce(set_fair_share.weights, q.weights),
        default_weight = coalesce(set_fair_share.default_weight, q.default_weight),
        starvation_s = coalesce(ceil(extract(epoch FROM set_fair_share.starvation))::integer, q.starvation_s),
        max_in_flight = coalesce(set_fair_share.max_in_flight, q.max_in_flight), charge = coalesce(set_fair_share.charge, q.charge)
    WHERE q.name = set_fair_share.queue
    RETURNING * INTO now;
    policy := now.policy;
    key := now.fair_key;
    quantum := now.quantum;
    weights := now.weights;
    default_weight := now.default_weight;
    starvation := now.starvation_s * interval '1 second';
    max_in_flight := now.max_in_flight;
    charge := now.charge;
    IF was IS DISTINCT FROM now THEN
        PERFORM rouse._ensure_partitions(at);
        INSERT INTO rouse.record (at, queue, event, who, detail)
        VALUES (at, set_fair_share.queue, 'fair_share_set', session_user, jsonb_build_object(
            'policy', policy, 'key', key, 'quantum', quantum, 'weights', CASE WHEN octet_length(weights::text) <= 8192 THEN weights END,
            'default_weight', default_weight, 'starvation_s', now.starvation_s, 'max_in_flight', max_in_flight, 'charge', charge));
    END IF;
END
$$;

-- rouse.set_fair_share by a worker whose settings say so. A limited worker does so for its own queues only.
CREATE OR REPLACE FUNCTION rouse.declare_fair_share(
    p_worker bigint, p_key bytea, p_queue text, p_policy text, p_fair_key text, p_quantum integer, p_weights jsonb,
    p_default_weight double precision, p_starvation interval, p_max_in_flight integer, p_charge text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF rouse._known(p_worker, p_key) AND rouse._permitted_queues(p_worker, ARRAY[p_queue]) IS NULL THEN
        RAISE EXCEPTION 'rouse.declare_fair_share: login % may not serve queue %', session_user, quote_literal(left(p_queue, 140))
            USING ERRCODE = 'RW006', HINT = 'Its queues are listed in rouse.worker_login.';
    END IF;
    PERFORM rouse.set_fair_share(p_queue, p_policy, p_fair_key, p_quantum, p_weights, p_default_weight, p_starvation, p_max_in_flight, p_charge);
END
$$;

-- What the key of a lane is counted under: the queue and the key by which it is fair.
CREATE OR REPLACE FUNCTION rouse._fair_group(p_queue text, p_fair_key text, p_handler text, p_key text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT concat_ws(E'\n', p_queue,
        CASE WHEN p_fair_key IN ('handler', 'tenant-and-handler') THEN p_handler END,
        -- A lane may still be divided as it was before.
        CASE WHEN starts_with(p_key, CASE p_fair_key WHEN 'source' THEN 'source:' WHEN 'handler' THEN NULL ELSE 'tenant:' END) THEN p_key END)
$$;

-- The name of a key, for people and in weights. The same as FairShare::key_of (host/src/job/fair.rs).
CREATE OR REPLACE FUNCTION rouse._fair_name(p_fair_key text, p_handler text, p_key text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE p_fair_key
        WHEN 'handler' THEN p_handler
        WHEN 'source' THEN CASE WHEN starts_with(p_key, 'source:') THEN substr(p_key, 8) ELSE '' END
        ELSE CASE WHEN starts_with(p_key, 'tenant:') THEN substr(p_key, 8) ELSE '' END
             || CASE WHEN p_fair_key = 'tenant-and-handler' THEN '/' || p_handler ELSE '' END END
$$;

-- The number of running jobs of each key in queues with max_in_flight; `key` is that of rouse._fair_group. All running jobs count, also those whose lease has ended: they are adopted, or fail. Served by job_lease, lane_id and
-- queue_capped.
CREATE OR REPLACE FUNCTION rouse._in_flight() RETURNS TABLE (key text, jobs bigint)
LANGUAGE sql VOLATILE AS $$
    SELECT rouse._fair_group(l.queue, q.fair_key, l.handler, l.key), sum(r.jobs)::bigint
    FROM (SELECT j.lane, count(*) AS jobs FROM rouse.job AS j WHERE j.state = 'running' AND j.lease_until > '-infinity' GROUP BY j.lane) AS r
    CROSS JOIN LATERAL (SELECT a.queue, a.handler, a.key FROM rouse.lane AS a WHERE a.id = r.lane LIMIT 1) AS l
    JOIN rouse.queue AS q ON q.name = l.queue AND q.policy = 'drr' AND q.max_in_flight > 0
    GROUP BY 1
$$;

-- Restricts a claim to what max_in_flight of fair queues permits: the same orders, each with at most as many jobs (`most`) as its key may
-- still start. If several lanes have the same key, the first ones that have ready jobs get what is left. Lanes that p_lanes (null: none)
-- leaves out get nothing. Waits for other claims from these queues, so that two never count the same room.
-- Served by lane_id, queue_capped and job_ready.
CREATE OR REPLACE FUNCTION rouse._within_caps(p_orders rouse.claim_order[], p_lanes bigint[], p_wanted integer) RETURNS rouse.claim_order[]
LANGUAGE plpgsql AS $$
DECLARE
    capped  record;
    running jsonb;
BEGIN
    SELECT array_agg(l.name ORDER BY o.place) AS queues, array_agg(l.max_in_flight ORDER BY o.place) AS caps,
           array_agg(rouse._fair_group(l.name, l.fair_key, l.handler, l.key) ORDER BY o.place) AS keys
    INTO capped
    FROM unnest(p_orders) WITH ORDINALITY AS o(lane, after, lease_ms, most, waited_ms, place)
    LEFT JOIN LATERAL (
        SELECT q.name, q.max_in_flight, q.fair_key, a.handler, a.key
        FROM (SELECT b.queue, b.handler, b.key FROM rouse.lane AS b WHERE b.id = o.lane LIMIT 1) AS a
        JOIN rouse.queue AS q ON q.name = a.queue AND q.policy = 'drr' AND q.max_in_flight > 0) AS l ON true;
    -- In the order of the locks, which names may share.
    PERFORM rouse._lock('in_flight', n.name)
    FROM (SELECT DISTINCT u.name, hashtextextended(u.name, 0) & 1023 AS slot FROM unnest(capped.queues) AS u(name)
          WHERE u.name IS NOT NULL ORDER BY 2, 1 OFFSET 0) AS n;
    IF NOT FOUND THEN
        RETURN p_orders;
    END IF;
    -- A new snapshot, after the locks.
    running := (SELECT jsonb_object_agg(f.key, f.jobs) FROM rouse._in_flight() AS f WHERE f.key = ANY (capped.keys));
    RETURN (
        WITH rooms AS MATERIALIZED (
            SELECT u.*, greatest(0, u.cap - coalesce((running ->> u.key)::bigint, 0)) AS room
            FROM ROWS FROM (unnest(p_orders), unnest(capped.caps), unnest(capped.keys)) WITH ORDINALITY
                 AS u(lane, after, lease_ms, most, waited_ms, cap, key, place)),
        ready AS MATERIALIZED (
            SELECT r.*, CASE WHEN r.cap IS NOT NULL THEN (
                SELECT count(*) FROM (
                    SELECT FROM rouse.job AS j
                    WHERE j.lane = CASE WHEN p_lanes IS NULL THEN r.lane ELSE p_lanes[r.place] END AND j.turn > r.after
                      AND j.state = 'queued' AND j.turn IS NOT NULL
                    ORDER BY j.turn LIMIT least(coalesce(r.most, p_wanted), p_wanted, r.room)) AS ready) END AS jobs
            FROM rooms AS r)
        SELECT array_agg(ROW(o.lane, o.after, o.lease_ms,
                   CASE WHEN o.cap IS NULL THEN o.most ELSE least(o.jobs, greatest(0, o.room - o.before)) END,
                   o.waited_ms)::rouse.claim_order ORDER BY o.place)
        FROM (SELECT e.*, coalesce(sum(e.jobs) OVER (PARTITION BY e.key ORDER BY e.place ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS before
              FROM ready AS e) AS o);
END
$$;

-- The same for rouse.claim_bound: null for lanes whose key is full, and for all but the first lane of a key; and how many jobs may be claimed
-- from those that are left.
CREATE OR REPLACE FUNCTION rouse._bound_within_caps(INOUT p_lanes bigint[], INOUT p_wanted integer)
LANGUAGE plpgsql AS $$
DECLARE
    orders  rouse.claim_order[];
    allowed rouse.claim_order[];
BEGIN
    orders := ARRAY(SELECT ROW(u.lane, 0, 0, NULL, NULL)::rouse.claim_order FROM unnest(p_lanes) WITH ORDINALITY AS u(lane, place) ORDER BY u.place);
    allowed := rouse._within_caps(orders, NULL, p_wanted);
    SELECT array_agg(CASE WHEN a.most > 0 OR a.most IS NULL THEN a.lane END ORDER BY a.place), coalesce(min(a.most) FILTER (WHERE a.most > 0), p_wanted)
    INTO p_lanes, p_wanted
    FROM unnest(allowed) WITH ORDINALITY AS a(lane, after, lease_ms, most, waited_ms, place);
END
$$;
