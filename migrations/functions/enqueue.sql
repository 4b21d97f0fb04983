-- rouse.enqueue and rouse.enqueue_many: a job into its lane, in the caller's own transaction.
--
-- Both look their lane up through its index, whatever the statistics say (enable_seqscan): a session that had made its plan while the
-- catalog had a page or two would go on reading all of it when it has 10,000 rows.

-- Checks the arguments that both functions share, and returns the id of the lane that they name;
-- a lane that nobody has used before is added to the catalog.
CREATE OR REPLACE FUNCTION rouse._lane(
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

-- The payload's limit in bytes of JSON text, which is what a handler gets.
CREATE OR REPLACE FUNCTION rouse._check_payload(p_payload jsonb, p_queue text) RETURNS void
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

-- True for what a host takes as a pattern of hosts: *, a name, *. before a name, an address; an address of version 6 may stand in brackets.
CREATE OR REPLACE FUNCTION rouse._is_host_pattern(p_text text) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    name text := regexp_replace(p_text, '^[*][.]', '');
BEGIN
    IF p_text = '*' OR p_text ~ '^((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)([.](?!$)|$)){4}$' THEN
        RETURN true;
    END IF;
    IF p_text ~ ':' THEN
        BEGIN
            RETURN p_text ~ '^([[][0-9A-Fa-f:]+(\d+[.]\d+[.]\d+[.]\d+)?[]]|[0-9A-Fa-f:]+(\d+[.]\d+[.]\d+[.]\d+)?)$' AND family(btrim(p_text, '[]')::inet) = 6;
        EXCEPTION
            WHEN invalid_text_representation THEN
                RETURN false;
        END;
    END IF;
    -- Names end in no number, which would be an address in disguise.
    RETURN length(rtrim(name, '.')) <= 253
       AND name ~ '^([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?([.]|$))+$'
       AND name !~* '(^|[.])(\d+|0x[0-9a-f]*)[.]?$';
END
$$;

-- Refuses grants that no host would keep to, so that the mistake shows where it is made. Whether names and hosts exist is not
-- looked at: what the handler does not have, the job does not get.
CREATE OR REPLACE FUNCTION rouse._check_grants(p_grants jsonb) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    entry record;
    wrong text;
BEGIN
    IF jsonb_typeof(p_grants) <> 'object' THEN
        RAISE EXCEPTION 'rouse.enqueue: grants must be an object, not %', left(p_grants::text, 140)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'For instance {"http": ["api.example.com"], "memory_mb": 32}. Leave it out for all that the handler has.';
    END IF;
    IF octet_length(p_grants::text) > 8192 THEN
        RAISE EXCEPTION 'rouse.enqueue: grants have % bytes; 8192 are allowed', octet_length(p_grants::text)
            USING ERRCODE = 'program_limit_exceeded';
    END IF;
    FOR entry IN SELECT g.key, g.value FROM jsonb_each(p_grants) AS g LOOP
        IF entry.key IN ('http', 'secrets', 'dirs', 'env') THEN
            IF jsonb_typeof(entry.value) <> 'array'
               OR jsonb_path_exists(entry.value, 'strict $[*] ? (@.type() != "string")') THEN
                wrong := 'a list of texts';
            ELSIF entry.key = 'http' AND EXISTS (
                SELECT FROM jsonb_array_elements_text(entry.value) AS host WHERE NOT rouse._is_host_pattern(host)) THEN
                wrong := 'a list of hosts such as api.example.com or *.example.com, without scheme and port';
            ELSIF entry.key = 'dirs' AND EXISTS (
                SELECT FROM jsonb_array_elements_text(entry.value) AS dir WHERE dir !~ '^(/|(/[^/:]+)+)(:read|:read-write)?$') THEN
                wrong := 'a list of paths as the handler sees them, such as /photos or /out:read';
            END IF;
        ELSIF entry.key = 'state' THEN
            IF entry.value <> 'false' THEN
                wrong := 'false, which leaves the job no state';
            END IF;
        ELSIF entry.key = 'memory_mb' THEN
            IF jsonb_typeof(entry.value) <> 'number' OR entry.value::text !~ '^[0-9]{1,4}$' OR entry.value = '0' THEN
                wrong := 'a whole number of MiB, 1 to 9999';
            END IF;
        ELSIF entry.key IN ('cpu', 'timeout') THEN
            IF jsonb_typeof(entry.value) <> 'string' OR entry.value #>> '{}' !~ '^0*[1-9][0-9]{0,8}(ms|s|m|h|d)$' THEN
                wrong := 'a duration above zero such as "500ms", "90s", "5m", "1h" or "1d"';
            END IF;
        ELSE
            RAISE EXCEPTION 'rouse.enqueue: grants have no key %', quote_literal(left(entry.key, 140))
                USING ERRCODE = 'invalid_parameter_value',
                      HINT = 'The keys are http, secrets, dirs, env, state, memory_mb, cpu and timeout.';
        END IF;
        IF wrong IS NOT NULL THEN
            RAISE EXCEPTION 'rouse.enqueue: % of grants must be %, not %', entry.key, wrong, left(entry.value::text, 140)
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
    END LOOP;
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
--   grants        less than the handler may do: {"http": hosts, "secrets": names, "dirs": paths, "env": names, "memory_mb": …,
--                 "cpu": …, "timeout": …}; of a list that is there, what it does not name is taken away
CREATE OR REPLACE FUNCTION rouse.enqueue(
    handler      text,
    payload      jsonb       DEFAULT '{}',
    queue        text        DEFAULT 'default',
    tenant       text        DEFAULT NULL,
    source       text        DEFAULT NULL,
    priority     text        DEFAULT 'normal',
    run_at       timestamptz DEFAULT NULL,
    max_attempts integer     DEFAULT NULL,
    unique_key   text        DEFAULT NULL,
    tags         text[]      DEFAULT '{}',
    grants       jsonb       DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_variable
DECLARE
    at        timestamptz := clock_timestamp();
    bytes     integer := octet_length(payload::text);
    bytes_max integer := 1024;
    valid     boolean := true;
    lane_id   bigint;
    job_id    bigint := nextval('rouse.turn_seq');
    their     bigint;
    slot      text;
BEGIN
    -- A condition is prepared anew in each transaction that comes to it, whether its parts are needed or
    -- not. So one that most calls do not need stands in a branch that they do not enter.
    IF bytes > bytes_max THEN
        bytes_max := coalesce((SELECT q.payload_bytes_max FROM rouse.queue AS q WHERE q.name = queue), 262144);
    END IF;
    IF coalesce(tenant, source, unique_key) IS NOT NULL OR run_at IS NOT NULL OR max_attempts IS NOT NULL OR grants IS NOT NULL THEN
        IF grants IS NOT NULL THEN
            PERFORM rouse._check_grants(grants);
        END IF;
        valid := (run_at IS NULL OR isfinite(run_at))
            AND (max_attempts IS NULL OR max_attempts BETWEEN 1 AND 1000)
            AND (tenant IS NULL OR length(tenant) BETWEEN 1 AND 200)
            AND (source IS NULL OR length(source) BETWEEN 1 AND 200)
            AND (unique_key IS NULL OR length(unique_key) BETWEEN 1 AND 512);
    END IF;
    -- What the catalog has is valid: where the lane is known, its parts need no checks of their own.
    IF valid AND bytes <= bytes_max AND priority IN ('high', 'normal', 'low') THEN
        IF unique_key IS NULL THEN
            -- Served by lane_key.
            INSERT INTO rouse.job AS j (id, lane, turn, requested_at, available_at, max_attempts, tenant, source, payload, wake, grants)
            SELECT job_id, l.id, CASE WHEN run_at > at THEN NULL ELSE job_id END, at, coalesce(run_at, at),
                   max_attempts, tenant, source, payload, true, grants
            FROM rouse.lane AS l
            WHERE l.handler = handler AND l.queue = queue AND l.priority = priority::rouse.priority AND l.tags = tags
            LIMIT 1;
            IF FOUND THEN
                RETURN job_id;
            END IF;
        ELSE
            SELECT l.id INTO lane_id FROM rouse.lane AS l
            WHERE l.handler = handler AND l.queue = queue AND l.priority = priority::rouse.priority AND l.tags = tags
            LIMIT 1;
        END IF;
    END IF;
    IF lane_id IS NULL THEN
        -- Something is new, or wrong: all checks, in their order.
        lane_id := rouse._lane(handler, queue, tenant, source, priority, run_at, max_attempts, tags);
        PERFORM rouse._check_payload(payload, queue);
        IF unique_key = '' OR length(unique_key) > 512 THEN
            RAISE EXCEPTION 'rouse.enqueue: unique_key has 1 to 512 characters, or is left out'
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
    END IF;
    slot := handler || '/' || unique_key;

    FOR try IN 1 .. 10 LOOP
        INSERT INTO rouse.job AS j (id, lane, turn, requested_at, available_at, max_attempts, tenant, source, unique_key, payload, wake, grants)
        VALUES (job_id, lane_id, CASE WHEN run_at > at THEN NULL ELSE job_id END, at, coalesce(run_at, at),
                max_attempts, tenant, source, slot, payload, true, grants)
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            RETURN job_id;
        END IF;
        SELECT j.id INTO their FROM rouse.job AS j WHERE j.unique_key = slot;
        IF FOUND THEN
            RETURN their;
        END IF;
        -- The other job finished between the two statements: its key is free again.
    END LOOP;
    RAISE EXCEPTION 'rouse.enqueue: unique_key % is taken and freed faster than it can be read', quote_literal(unique_key)
        USING ERRCODE = 'serialization_failure', HINT = 'Try again.';
END
$$;

-- Enqueues one job for each payload, in order, and returns their ids in the same order.
CREATE OR REPLACE FUNCTION rouse.enqueue_many(
    handler      text,
    payloads     jsonb[],
    queue        text        DEFAULT 'default',
    tenant       text        DEFAULT NULL,
    source       text        DEFAULT NULL,
    priority     text        DEFAULT 'normal',
    run_at       timestamptz DEFAULT NULL,
    max_attempts integer     DEFAULT NULL,
    tags         text[]      DEFAULT '{}',
    grants       jsonb       DEFAULT NULL
) RETURNS SETOF bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
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

    IF grants IS NOT NULL THEN
        PERFORM rouse._check_grants(grants);
    END IF;
    RETURN QUERY
    INSERT INTO rouse.job AS j (id, lane, turn, requested_at, available_at, max_attempts, tenant, source, payload, wake, grants)
    SELECT p.id, lane_id, CASE WHEN run_at > at THEN NULL ELSE p.id END, at, coalesce(run_at, at),
           max_attempts, tenant, source, p.payload, CASE WHEN p.place = cardinality(payloads) THEN true END, grants
    FROM (SELECT nextval('rouse.turn_seq') AS id, u.payload, u.place
          FROM unnest(payloads) WITH ORDINALITY AS u(payload, place)) AS p
    RETURNING j.id;
END
$$;
