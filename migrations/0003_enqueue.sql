-- rouse.enqueue and rouse.enqueue_many: a job into its lane, in the caller's own transaction.
-- Functions whose name starts with _ are called by the others only, under their search_path.

-- Checks the arguments that both functions share, and returns the id of the lane that they name;
-- a lane that nobody has used before is added to the catalog.
CREATE FUNCTION rouse._lane(
    p_handler text, p_queue text, p_tenant text, p_source text, p_priority text, p_run_at timestamptz,
    p_max_attempts integer, p_tags text[]) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    known    bigint;
    required text[];
BEGIN
    IF p_handler IS NULL OR p_handler !~ '^[a-z0-9][a-z0-9_-]*([.][a-z0-9][a-z0-9_-]*)*$' OR length(p_handler) > 128 THEN
        RAISE EXCEPTION 'rouse.enqueue: % is no handler name', coalesce(quote_literal(left(p_handler, 140)), 'null')
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'Handler names are lower-case words joined by dots, such as email.send; at most 128 characters.';
    END IF;
    IF p_queue IS NULL OR p_queue !~ '^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$' THEN
        RAISE EXCEPTION 'rouse.enqueue: % is no queue name', coalesce(quote_literal(left(p_queue, 140)), 'null')
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'Queue names start with a letter or digit and have letters, digits and _ . : - ; at most 128 characters. Leave it out for the queue default.';
    END IF;
    IF p_priority IS NULL OR p_priority NOT IN ('high', 'normal', 'low') THEN
        RAISE EXCEPTION 'rouse.enqueue: priority must be high, normal or low, not %', coalesce(quote_literal(left(p_priority, 140)), 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NOT isfinite(p_run_at) THEN
        RAISE EXCEPTION 'rouse.enqueue: run_at must be a time, not %', p_run_at
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Leave it out to run the job at once.';
    END IF;
    IF p_max_attempts NOT BETWEEN 1 AND 1000 THEN
        RAISE EXCEPTION 'rouse.enqueue: max_attempts must be between 1 and 1000, not %', p_max_attempts
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Leave it out for the handler''s own.';
    END IF;
    IF p_tenant = '' OR length(p_tenant) > 200 OR p_source = '' OR length(p_source) > 200 THEN
        RAISE EXCEPTION 'rouse.enqueue: tenant and source have 1 to 200 characters, or are left out'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF p_tags IS NULL OR array_ndims(p_tags) > 1 OR cardinality(p_tags) > 16 OR array_position(p_tags, NULL) IS NOT NULL
       OR EXISTS (SELECT FROM unnest(p_tags) AS tag WHERE tag !~ '^[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}$') THEN
        RAISE EXCEPTION 'rouse.enqueue: tags is a list of at most 16 words, not %', coalesce(left(p_tags::text, 140), 'null')
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'A tag has letters, digits and _ . : - ; at most 64 characters.';
    END IF;
    IF cardinality(p_tags) > 1 THEN
        SELECT array_agg(DISTINCT tag ORDER BY tag) INTO required FROM unnest(p_tags) AS tag;
    ELSE
        required := p_tags;
    END IF;

    -- Served by lane_key.
    SELECT l.id INTO known FROM rouse.lane AS l
    WHERE l.handler = p_handler AND l.queue = p_queue AND l.priority = p_priority::rouse.priority AND l.tags = required
    LIMIT 1;
    IF known IS NULL THEN
        -- None of the parts can hold a line break, so different lanes have different texts.
        known := ('x' || encode(substr(sha256(convert_to(
            concat_ws(E'\n', p_handler, p_queue, p_priority, array_to_string(required, E'\n')), 'UTF8')), 1, 8), 'hex'))::bit(64)::bigint;
        INSERT INTO rouse.lane (id, queue, handler, priority, tags)
        VALUES (known, p_queue, p_handler, p_priority::rouse.priority, required);
    END IF;
    RETURN known;
END
$$;

-- Wakes the workers that sleep on this queue. A busy system has no sleepers and pays no NOTIFY,
-- whose lock would put all commits of the database in one line.
CREATE FUNCTION rouse._wake(p_queue text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM rouse.sleeper AS s WHERE s.queue IN (p_queue, '*') AND s.until > clock_timestamp()) THEN
        PERFORM pg_notify('rouse_wake', p_queue);
    END IF;
END
$$;

-- The payload's limit in bytes of JSON text, which is what a handler gets.
CREATE FUNCTION rouse._check_payload(p_payload jsonb, p_queue text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    bytes_max integer := coalesce((SELECT q.payload_bytes_max FROM rouse.queue AS q WHERE q.name = p_queue), 262144);
BEGIN
    IF p_payload IS NULL THEN
        RAISE EXCEPTION 'rouse.enqueue: payload must not be null'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Leave it out for {}, or give the JSON null as ''null''.';
    END IF;
    IF octet_length(p_payload::text) > bytes_max THEN
        RAISE EXCEPTION 'rouse.enqueue: the payload has % bytes; queue % allows %', octet_length(p_payload::text), p_queue, bytes_max
            USING ERRCODE = 'program_limit_exceeded',
                  HINT = 'Store large data elsewhere and enqueue a reference to it, or raise payload_bytes_max of the queue in rouse.queue.';
    END IF;
END
$$;

-- Enqueues one job and returns its id. Part of the caller's transaction: a rollback leaves
-- nothing, and no worker sees the job before the commit.
--
--   queue         which queue; the lane is (handler, queue, priority, tags)
--   tenant        whose job it is
--   source        what triggered it
--   priority      high, normal or low
--   run_at        not before this time
--   max_attempts  how often it is tried in all; null: the handler's own
--   unique_key    unique among the live jobs of the handler: where one is there, its id is returned
--                 and nothing is added
--   tags          only workers that have all of these take the job
CREATE FUNCTION rouse.enqueue(
    handler      text,
    payload      jsonb       DEFAULT '{}',
    queue        text        DEFAULT 'default',
    tenant       text        DEFAULT NULL,
    source       text        DEFAULT NULL,
    priority     text        DEFAULT 'normal',
    run_at       timestamptz DEFAULT NULL,
    max_attempts integer     DEFAULT NULL,
    unique_key   text        DEFAULT NULL,
    tags         text[]      DEFAULT '{}'
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    lane_id bigint := rouse._lane(handler, queue, tenant, source, priority, run_at, max_attempts, tags);
    at      timestamptz := clock_timestamp();
    job_id  bigint;
    their   bigint;
    slot    text;
BEGIN
    PERFORM rouse._check_payload(payload, queue);
    IF unique_key = '' OR length(unique_key) > 512 THEN
        RAISE EXCEPTION 'rouse.enqueue: unique_key has 1 to 512 characters, or is left out'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    slot := handler || '/' || unique_key;

    FOR try IN 1 .. 10 LOOP
        job_id := nextval('rouse.turn_seq');
        INSERT INTO rouse.job AS j (id, lane, turn, requested_at, available_at, max_attempts, tenant, source, unique_key, payload)
        VALUES (job_id, lane_id, CASE WHEN run_at > at THEN NULL ELSE job_id END, at, coalesce(run_at, at),
                max_attempts, tenant, source, slot, payload)
        ON CONFLICT DO NOTHING
        RETURNING id INTO job_id;
        IF job_id IS NOT NULL THEN
            PERFORM rouse._wake(queue);
            RETURN job_id;
        END IF;
        SELECT j.id INTO their FROM rouse.job AS j WHERE j.unique_key = slot;
        IF their IS NOT NULL THEN
            RETURN their;
        END IF;
        -- The other job finished between the two statements: its key is free again.
    END LOOP;
    RAISE EXCEPTION 'rouse.enqueue: unique_key % is taken and freed faster than it can be read', quote_literal(unique_key)
        USING ERRCODE = 'serialization_failure', HINT = 'Try again.';
END
$$;

-- Enqueues one job for each payload, in order, and returns their ids in the same order.
CREATE FUNCTION rouse.enqueue_many(
    handler      text,
    payloads     jsonb[],
    queue        text        DEFAULT 'default',
    tenant       text        DEFAULT NULL,
    source       text        DEFAULT NULL,
    priority     text        DEFAULT 'normal',
    run_at       timestamptz DEFAULT NULL,
    max_attempts integer     DEFAULT NULL,
    tags         text[]      DEFAULT '{}'
) RETURNS SETOF bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    lane_id   bigint := rouse._lane(handler, queue, tenant, source, priority, run_at, max_attempts, tags);
    at        timestamptz := clock_timestamp();
    bytes_max integer := coalesce((SELECT q.payload_bytes_max FROM rouse.queue AS q WHERE q.name = queue), 262144);
    wrong     bigint;
BEGIN
    IF payloads IS NULL OR array_ndims(payloads) > 1 THEN
        RAISE EXCEPTION 'rouse.enqueue_many: payloads must be a list of JSON values, not %',
            CASE WHEN payloads IS NULL THEN 'null' ELSE 'a list of lists' END
            USING ERRCODE = 'invalid_parameter_value', HINT = 'For instance ARRAY[''{"n": 1}'', ''{"n": 2}'']::jsonb[].';
    END IF;
    SELECT p.ordinality INTO wrong
    FROM unnest(payloads) WITH ORDINALITY AS p(payload)
    WHERE p.payload IS NULL OR octet_length(p.payload::text) > bytes_max
    LIMIT 1;
    IF wrong IS NOT NULL THEN
        IF payloads[array_lower(payloads, 1) + wrong::integer - 1] IS NULL THEN
            RAISE EXCEPTION 'rouse.enqueue_many: payload % is null', wrong
                USING ERRCODE = 'invalid_parameter_value', HINT = 'Nothing was enqueued.';
        END IF;
        RAISE EXCEPTION 'rouse.enqueue_many: payload % is too large; queue % allows % bytes', wrong, queue, bytes_max
            USING ERRCODE = 'program_limit_exceeded', HINT = 'Nothing was enqueued.';
    END IF;

    RETURN QUERY
    INSERT INTO rouse.job AS j (id, lane, turn, requested_at, available_at, max_attempts, tenant, source, payload)
    SELECT p.id, lane_id, CASE WHEN run_at > at THEN NULL ELSE p.id END, at, coalesce(run_at, at),
           max_attempts, tenant, source, p.payload
    FROM (SELECT nextval('rouse.turn_seq') AS id, u.payload FROM unnest(payloads) AS u(payload)) AS p
    RETURNING j.id;
    PERFORM rouse._wake(queue);
END
$$;

REVOKE ALL ON FUNCTION rouse._lane, rouse._wake, rouse._check_payload, rouse.enqueue, rouse.enqueue_many FROM PUBLIC;
GRANT EXECUTE ON FUNCTION rouse.enqueue, rouse.enqueue_many TO rouse_producer;
