-- Fair queues (rouse.queue.policy = 'drr'): the keys of a queue share its workers, whatever the number of their jobs.
--
-- The jobs of each tenant or source have a lane of their own, so that a worker can take jobs of one key without reading
-- those of others. The worker decides which key has the next turn (host/turns/src/turns.rs). This file contains the
-- settings. Lanes and the limit on jobs in flight work as they do for gates (gates.sql).

-- Applies a change to rouse.queue to the lanes of the queue, and announces it to the workers.
CREATE OR REPLACE FUNCTION rouse._queue_changed() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM jsonb_each(new.weights) AS w
               WHERE jsonb_typeof(w.value) <> 'number' OR w.key = '' OR CASE WHEN jsonb_typeof(w.value) = 'number' THEN w.value::numeric NOT BETWEEN 0.001 AND 1000 END) THEN
        RAISE EXCEPTION 'rouse.queue: weights must be an object with a number from 0.001 to 1000 for each key, not %', left(new.weights::text, 140)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'For instance {"acme": 3}.';
    END IF;
    IF octet_length(new.weights::text) > 1048576 THEN
        RAISE EXCEPTION 'rouse.queue: weights are % bytes long; at most 1 MiB is allowed', octet_length(new.weights::text)
            USING ERRCODE = 'program_limit_exceeded';
    END IF;
    IF tg_op = 'INSERT' AND new.policy = 'fifo' AND new.dispatch = 'shared' THEN
        RETURN NULL;
    END IF;
    -- Changes are made one after another, because rouse.maintain_lanes also changes many lanes. Producers may add lanes
    -- in the meantime.
    LOCK TABLE rouse.lane IN SHARE UPDATE EXCLUSIVE MODE;
    -- The change takes place between claims, as with gates (rouse._gate_changed).
    IF tg_op = 'UPDATE' AND old.max_in_flight > 0 AND (old.policy, old.fair_key) IS DISTINCT FROM (new.policy, new.fair_key) THEN
        PERFORM rouse._lock('gate', 'queue ' || new.name);
    END IF;
    PERFORM rouse._divide_lanes(new.name);
    PERFORM rouse._announce_settings(new.name);
    RETURN NULL;
END
$$;
-- No CREATE OR REPLACE: see wake.sql.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'rouse.queue'::regclass AND tgname = 'fair_share_added') THEN
        CREATE TRIGGER fair_share_added AFTER INSERT ON rouse.queue
            FOR EACH ROW EXECUTE FUNCTION rouse._queue_changed();
    END IF;
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'rouse.queue'::regclass AND tgname = 'fair_share_changed') THEN
        CREATE TRIGGER fair_share_changed AFTER UPDATE ON rouse.queue
            FOR EACH ROW WHEN (
                -- The columns one by one: a dump prints a comparison of rows in another form, which `rouse migrate`
                -- would take for a change.
                old.policy IS DISTINCT FROM new.policy
                OR old.fair_key IS DISTINCT FROM new.fair_key
                OR old.charge IS DISTINCT FROM new.charge
                OR old.quantum IS DISTINCT FROM new.quantum
                OR old.weights IS DISTINCT FROM new.weights
                OR old.default_weight IS DISTINCT FROM new.default_weight
                OR old.starvation_s IS DISTINCT FROM new.starvation_s
                OR old.max_in_flight IS DISTINCT FROM new.max_in_flight
                OR old.dispatch IS DISTINCT FROM new.dispatch)
            EXECUTE FUNCTION rouse._queue_changed();
    END IF;
END
$$;

-- Sets how a queue is shared; null: unchanged. Returns the settings. They apply to jobs that are enqueued after the
-- change, and within seconds to those that already wait in lanes of their own. Leaves a record.
--
--   policy          drr: the keys take turns, by deficit round robin; fifo: the lanes do
--   key             tenant, handler, source or tenant-and-handler; jobs without it share a key
--   quantum         jobs of a key of weight 1 in each round, 1 to 1000
--   weights         {"acme": 3, …}: weights of keys, 0.001 to 1000; replaces those that were set. A key of
--                   tenant-and-handler is acme/email.send
--   default_weight  the weight of all other keys
--   starvation      jobs that have waited this long go first, starting with the oldest; 0: never
--   max_in_flight   running jobs of a key on all workers; 0: any number
--   charge          jobs: a job costs its key one turn; cpu: as much CPU time as the last jobs of its lane have used,
--                   compared with others
CREATE OR REPLACE FUNCTION rouse.set_fair_share(
    queue text, INOUT policy text DEFAULT NULL, INOUT key text DEFAULT NULL, INOUT quantum integer DEFAULT NULL, INOUT weights jsonb DEFAULT NULL,
    INOUT default_weight double precision DEFAULT NULL, INOUT starvation interval DEFAULT NULL, INOUT max_in_flight integer DEFAULT NULL,
    INOUT charge text DEFAULT NULL)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at      timestamptz := clock_timestamp();
    was     rouse.queue;
    now     rouse.queue;
    problem text;
BEGIN
    PERFORM rouse._check_queue('set_fair_share', set_fair_share.queue);
    problem := CASE
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
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION 'rouse.set_fair_share: %', problem USING ERRCODE = 'invalid_parameter_value', HINT = 'Leave it out to keep the setting.';
    END IF;
    -- Locked before the row of the queue, as in rouse.maintain_lanes.
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
            'default_weight', default_weight, 'starvation_ms', now.starvation_s * 1000::bigint, 'max_in_flight', max_in_flight, 'charge', charge));
    END IF;
END
$$;

-- rouse.set_fair_share, called by a worker whose settings declare a fair share. A limited worker may do so for its own
-- queues only. It adds no queue if there are already lanes_max of them, because nothing removes them. Waits up to 5 s
-- for other changes to queues and gates, as rouse.declare_gates does.
CREATE OR REPLACE FUNCTION rouse.declare_fair_share(
    p_worker bigint, p_key bytea, p_queue text, p_policy text, p_fair_key text, p_quantum integer, p_weights jsonb,
    p_default_weight double precision, p_starvation interval, p_max_in_flight integer, p_charge text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' SET enable_seqscan = off SET jit = off AS $$
DECLARE
    is_limited boolean := rouse._authenticated_as_limited(p_worker, p_key);
    most       integer;
BEGIN
    IF is_limited AND rouse._permitted_queues(p_worker, ARRAY[p_queue]) IS NULL THEN
        RAISE EXCEPTION 'rouse.declare_fair_share: login % may not serve queue %', session_user, quote_literal(left(p_queue, 140))
            USING ERRCODE = 'RW006', HINT = 'Its queues are listed in rouse.worker_login.';
    END IF;
    -- The same bound as in rouse._queue_changed, which checks it only after the weights have been written.
    PERFORM rouse._check_size('declare_fair_share', octet_length(p_weights::text), 1048576);
    IF is_limited AND NOT EXISTS (SELECT FROM rouse.queue AS q WHERE q.name = p_queue) THEN
        SELECT l.lanes_max INTO most FROM rouse.limits AS l WHERE l.only_row;
        IF (SELECT count(*) FROM (SELECT FROM rouse.queue AS q LIMIT most) AS q) >= most THEN
            RAISE EXCEPTION 'rouse.declare_fair_share: queue % cannot be added: there are already % queues', quote_literal(left(p_queue, 140)), most
                USING ERRCODE = 'program_limit_exceeded', HINT = 'Let an operator set its fair share, or raise lanes_max in rouse.limits.';
        END IF;
    END IF;
    PERFORM rouse.set_fair_share(p_queue, p_policy, p_fair_key, p_quantum, p_weights, p_default_weight, p_starvation, p_max_in_flight, p_charge);
END
$$;

-- The name of a key, for display and in weights. The same as FairShare::key_of (host/src/job/fair.rs).
CREATE OR REPLACE FUNCTION rouse._fair_name(p_fair_key text, p_handler text, p_key text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE p_fair_key
        WHEN 'handler' THEN p_handler
        WHEN 'source' THEN rouse._lane_value('source', NULL, p_handler, p_key)
        ELSE rouse._lane_value('tenant', NULL, p_handler, p_key) || CASE WHEN p_fair_key = 'tenant-and-handler' THEN '/' || p_handler ELSE '' END END
$$;
