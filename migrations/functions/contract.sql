-- Contracts: `rouse contract publish` makes one from the input schema of each handler. A contract is a predicate that
-- every enqueue checks its payload against, and a typed function that calls rouse.enqueue.
--
-- The text of a schema comes from untrusted modules. It is never executed: the predicate is a jsonpath, a value in a
-- table, and the function contains names and constants of the schema as quoted identifiers and literals only. A
-- predicate is true only for payloads that the handler's host refuses too; what jsonpath cannot express exactly is left
-- out. Where it cannot be decided (null), the payload is accepted.
--
-- Only the owner publishes and deletes contracts: no role has the privilege to call these functions.

-- True if enqueuing for a handler without a contract is reported: rouse.limits does not silence it, and no live worker
-- has the handler.
CREATE OR REPLACE FUNCTION rouse._is_unknown(p_handler text) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    RETURN coalesce((SELECT l.unknown_handlers FROM rouse.limits AS l WHERE l.only_row), 'notice') <> 'silence'
       AND NOT coalesce(rouse._is_served(p_handler), false);
END
$$;

-- Raises an error, a notice or nothing for a handler without a contract, as rouse.limits specifies. Raises nothing if
-- no contract was published.
CREATE OR REPLACE FUNCTION rouse._report_unknown_handler(p_handler text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    removed_at timestamptz;
    message    text;
BEGIN
    IF NOT EXISTS (SELECT FROM rouse.contract AS c WHERE c.handler = '*') OR NOT rouse._is_unknown(p_handler) THEN
        RETURN;
    END IF;
    removed_at := (SELECT c.removed_at FROM rouse.contract AS c WHERE c.handler = p_handler);
    message := CASE WHEN removed_at IS NOT NULL THEN format('handler %s was removed at %s', p_handler, removed_at)
                    ELSE format('handler %s is unknown: it has no contract, and no live worker has it', p_handler) END;
    IF (SELECT l.unknown_handlers FROM rouse.limits AS l WHERE l.only_row) = 'error' THEN
        RAISE EXCEPTION 'rouse.enqueue: %', message
            USING ERRCODE = 'undefined_object',
                  HINT = 'Check the name, or publish the contract of the handler: `rouse contract publish`. unknown_handlers in rouse.limits '
                         'is error.';
    END IF;
    RAISE NOTICE 'rouse.enqueue: %', message
        USING HINT = 'Check the name: rouse.contracts lists those with a contract, `rouse handlers ls` the handlers of the fleet. '
                     'Nothing was refused; unknown_handlers in rouse.limits can be error or silence instead.';
END
$$;

-- Returns the first rule of a node of rouse.contract_version.rules that a value violates, and where; null if it
-- violates none. A node is an object:
--
--   checks      [{"refuses": a predicate, "problem": …, "shows": whether the value is part of the message}, …]
--   known       the names of all properties that are allowed; absent: any
--   properties  {name: node}
--   others      the node of each property that `listed` does not contain
--   prefix      nodes of the first items
--   items       the node of each other item
--   same        further nodes of the value itself
CREATE OR REPLACE FUNCTION rouse._find_violation(p_value jsonb, p_node jsonb, p_pointer text, OUT at text, OUT problem text)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    part record;
BEGIN
    at := p_pointer;
    FOR part IN SELECT c.rule FROM jsonb_array_elements(p_node -> 'checks') WITH ORDINALITY AS c(rule, place) ORDER BY c.place LOOP
        IF jsonb_path_match(p_value, (part.rule ->> 'refuses')::jsonpath, '{}', true) THEN
            problem := part.rule ->> 'problem';
            IF part.rule -> 'shows' = 'true' THEN
                problem := problem || ', got ' || left(p_value::text, 40);
            END IF;
            RETURN;
        END IF;
    END LOOP;
    IF jsonb_typeof(p_value) = 'object' THEN
        FOR part IN SELECT e.key, e.value FROM jsonb_each(p_value) AS e LOOP
            at := p_pointer || '/' || replace(replace(part.key, '~', '~0'), '/', '~1');
            IF NOT (p_node -> 'known') ? part.key THEN
                problem := 'unexpected property';
                RETURN;
            END IF;
            IF p_node -> 'properties' ? part.key THEN
                SELECT f.at, f.problem INTO at, problem FROM rouse._find_violation(part.value, p_node -> 'properties' -> part.key, at) AS f;
            ELSIF p_node ? 'others' AND NOT p_node -> 'listed' ? part.key THEN
                SELECT f.at, f.problem INTO at, problem FROM rouse._find_violation(part.value, p_node -> 'others', at) AS f;
            END IF;
            IF problem IS NOT NULL THEN
                RETURN;
            END IF;
        END LOOP;
    ELSIF jsonb_typeof(p_value) = 'array' AND (p_node ? 'items' OR p_node ? 'prefix') THEN
        FOR part IN
            SELECT e.value, e.place - 1 AS place, coalesce(p_node -> 'prefix' -> (e.place - 1)::integer, p_node -> 'items') AS node
            FROM jsonb_array_elements(p_value) WITH ORDINALITY AS e(value, place) ORDER BY e.place
        LOOP
            SELECT f.at, f.problem INTO at, problem FROM rouse._find_violation(part.value, part.node, p_pointer || '/' || part.place) AS f;
            IF problem IS NOT NULL THEN
                RETURN;
            END IF;
        END LOOP;
    END IF;
    FOR part IN SELECT e.node FROM jsonb_array_elements(p_node -> 'same') AS e(node) LOOP
        SELECT f.at, f.problem INTO at, problem FROM rouse._find_violation(p_value, part.node, p_pointer) AS f;
        IF problem IS NOT NULL THEN
            RETURN;
        END IF;
    END LOOP;
    at := NULL;
END
$$;

-- Raises the error for a payload that the contract of its handler refuses, based on the version that was published
-- last. `p_place`: its position in a call to rouse.enqueue_many.
CREATE OR REPLACE FUNCTION rouse._refuse_payload(p_handler text, p_payload jsonb, p_place bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    versions integer := (SELECT count(*) FROM rouse.contract_version AS v WHERE v.handler = p_handler);
    last     record;
    found    record;
BEGIN
    SELECT v.version, v.rules INTO last FROM rouse.contract_version AS v
    WHERE v.handler = p_handler ORDER BY v.published_at DESC, v.digest LIMIT 1;
    found := rouse._find_violation(p_payload, last.rules, '');
    RAISE EXCEPTION 'rouse.%: % does not match the contract of %: %',
        CASE WHEN p_place IS NULL THEN 'enqueue' ELSE 'enqueue_many' END, coalesce('payload ' || p_place, 'payload'),
        p_handler || coalesce(' at ' || left(nullif(found.at, ''), 200), ''), coalesce(found.problem, 'no version accepts it')
        USING ERRCODE = 'check_violation',
              HINT = format('Nothing was enqueued. This is the contract of version %s%s; `rouse handlers show %s --schema` shows the schema.',
                            last.version, CASE WHEN versions > 1 THEN format(', and %s more that are in use do not accept it either', versions - 1) ELSE '' END,
                            p_handler);
END
$$;

-- Checks a payload against the contract of its handler. Reports a handler without a contract.
CREATE OR REPLACE FUNCTION rouse._check_contract(p_handler text, p_payload jsonb) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    is_refused boolean;
BEGIN
    SELECT jsonb_path_match(p_payload, c.refuses, '{}', true) INTO is_refused FROM rouse.contract AS c
    WHERE c.handler = p_handler AND c.removed_at IS NULL;
    IF NOT FOUND THEN
        PERFORM rouse._report_unknown_handler(p_handler);
    ELSIF is_refused THEN
        PERFORM rouse._refuse_payload(p_handler, p_payload, NULL);
    END IF;
END
$$;

-- The same for all payloads of a call, in one statement.
CREATE OR REPLACE FUNCTION rouse._check_contract_of_many(p_handler text, p_payloads jsonb[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    refused record;
    path    jsonpath;
BEGIN
    SELECT c.refuses INTO path FROM rouse.contract AS c WHERE c.handler = p_handler AND c.removed_at IS NULL;
    IF NOT FOUND THEN
        PERFORM rouse._report_unknown_handler(p_handler);
    ELSIF path IS NOT NULL THEN
        SELECT p.payload, p.place INTO refused FROM unnest(p_payloads) WITH ORDINALITY AS p(payload, place)
        WHERE jsonb_path_match(p.payload, path, '{}', true) ORDER BY p.place LIMIT 1;
        IF FOUND THEN
            PERFORM rouse._refuse_payload(p_handler, refused.payload, refused.place);
        END IF;
    END IF;
END
$$;

-- Published contracts: the typed function of each handler, and its versions, the last one first.
CREATE OR REPLACE VIEW rouse.contracts AS
SELECT c.handler, format('%I.%I', c.function_schema, c.function_name) AS function, c.parameters, c.refuses IS NOT NULL AS checked,
       c.removed_at, c.published_at, c.published_by,
       (SELECT jsonb_agg(jsonb_build_object('version', v.version, 'digest', v.digest, 'modules', v.modules, 'published_at', v.published_at)
                         ORDER BY v.published_at DESC, v.digest)
        FROM rouse.contract_version AS v WHERE v.handler = c.handler) AS versions
FROM rouse.contract AS c
WHERE c.handler <> '*';

-- True if a live worker serves the handler from one of these modules; with null: from any.
CREATE OR REPLACE FUNCTION rouse._is_module_served(p_handler text, p_modules text[]) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN EXISTS (SELECT FROM rouse.handlers AS h
                   WHERE h.handler = p_handler AND (p_modules IS NULL OR regexp_replace(h.sha256, '^sha256:', '') = ANY (p_modules)));
END
$$;

-- The name of the typed function of a handler: dots and hyphens become underscores. A name that is too long, or that
-- another handler's function has, ends in a part of the handler's SHA-256 instead. A function keeps its name.
CREATE OR REPLACE FUNCTION rouse._function_name(p_handler text, p_schema name) RETURNS name
LANGUAGE plpgsql STABLE AS $$
DECLARE
    plain text := translate(p_handler, '.-', '__');
    kept  name := (SELECT c.function_name FROM rouse.contract AS c WHERE c.handler = p_handler AND c.function_schema = p_schema);
BEGIN
    IF kept IS NOT NULL THEN
        RETURN kept;
    END IF;
    IF length(plain) > 63 OR EXISTS (
        SELECT FROM rouse.contract AS c WHERE c.function_schema = p_schema AND c.function_name = plain AND c.handler <> p_handler) THEN
        plain := left(plain, 54) || '_' || left(encode(sha256(convert_to(p_handler, 'UTF8')), 'hex'), 8);
    END IF;
    RETURN plain;
END
$$;

-- The function of this name in this schema; null if there is none. There is at most one: rouse._put_function does not
-- add a second.
CREATE OR REPLACE FUNCTION rouse._function_of(p_schema name, p_name name) RETURNS oid
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT p.oid FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
            WHERE n.nspname = p_schema AND p.proname = p_name LIMIT 1);
END
$$;

-- The statement that creates the typed function of a handler. `p_contract` as for rouse.publish_contracts; every name
-- and constant in it is quoted, and only listed types are accepted.
CREATE OR REPLACE FUNCTION rouse._function_definition(p_schema name, p_name name, p_contract jsonb) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    options CONSTANT text := $options$rouse_queue text DEFAULT 'default', rouse_tenant text DEFAULT NULL, rouse_source text DEFAULT NULL, rouse_priority text DEFAULT 'normal', rouse_run_at timestamptz DEFAULT NULL, rouse_max_attempts integer DEFAULT NULL, rouse_unique_key text DEFAULT NULL, rouse_tags text[] DEFAULT '{}', rouse_grants jsonb DEFAULT NULL, rouse_lease interval DEFAULT NULL, rouse_timeout interval DEFAULT NULL, rouse_job_timeout interval DEFAULT NULL, rouse_after jsonb DEFAULT NULL$options$;
    names   CONSTANT text[] := '{queue,tenant,source,priority,run_at,max_attempts,unique_key,tags,grants,lease,timeout,job_timeout,after}';
    types   CONSTANT text[] := '{text,bigint,numeric,"double precision",boolean,timestamptz,date,uuid,jsonb,text[],bigint[],"double precision[]",boolean[],timestamptz[],date[],uuid[]}';
    is_whole boolean := jsonb_typeof(p_contract -> 'payload_type') = 'string';
    entry   record;
    args    text := '';
    members text := '';
    payload text;
    count   integer := 0;
    body    text;
BEGIN
    FOR entry IN
        SELECT p.name, p.type, p.required, p.fallback
        FROM jsonb_array_elements(CASE WHEN is_whole THEN jsonb_build_array(jsonb_build_object('name', 'payload', 'type', p_contract -> 'payload_type', 'required', true))
                                       ELSE p_contract -> 'parameters' END) WITH ORDINALITY AS e(parameter, place)
        CROSS JOIN LATERAL (SELECT e.parameter ->> 'name' AS name, e.parameter ->> 'type' AS type, e.parameter ->> 'default' AS fallback,
                                   coalesce((e.parameter -> 'required')::boolean, false) AS required) AS p
        ORDER BY e.place
    LOOP
        count := count + 1;
        IF count + cardinality(names) > 100 THEN
            RAISE EXCEPTION 'rouse.publish_contracts: a function may have at most % parameters', 100 - cardinality(names)
                USING ERRCODE = 'too_many_arguments';
        END IF;
        IF coalesce(entry.name, '') = '' OR octet_length(entry.name) > 63 OR starts_with(entry.name, 'rouse_') THEN
            RAISE EXCEPTION 'rouse.publish_contracts: % is not a parameter name', quote_nullable(left(entry.name, 140))
                USING ERRCODE = 'invalid_parameter_value', HINT = 'Names are 1 to 63 bytes long and do not start with rouse_.';
        END IF;
        IF NOT coalesce(entry.type = ANY (types), false) THEN
            RAISE EXCEPTION 'rouse.publish_contracts: % is not a parameter type', quote_nullable(left(entry.type, 140))
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
        IF octet_length(entry.fallback) > 1024 THEN
            RAISE EXCEPTION 'rouse.publish_contracts: the default of % is longer than 1024 bytes', quote_literal(entry.name)
                USING ERRCODE = 'program_limit_exceeded';
        END IF;
        args := args || format('%I %s%s, ', entry.name, entry.type,
            CASE WHEN entry.required THEN '' WHEN entry.fallback IS NULL THEN ' DEFAULT NULL' ELSE format(' DEFAULT %L::%s', entry.fallback, entry.type) END);
        members := members || format('%s(%L::pg_catalog.text, %s)', CASE WHEN count > 1 THEN ', ' ELSE '' END, entry.name,
            CASE WHEN entry.required THEN format($f$COALESCE(pg_catalog.to_jsonb($%s), 'null')$f$, count) ELSE format('pg_catalog.to_jsonb($%s)', count) END);
    END LOOP;
    payload := CASE
        WHEN is_whole THEN 'COALESCE(pg_catalog.to_jsonb($1), ''null'')'
        WHEN count = 0 THEN $p$'{}'::pg_catalog.jsonb$p$
        ELSE format($p$COALESCE((SELECT pg_catalog.jsonb_object_agg(p.name, p.value) FILTER (WHERE p.value IS NOT NULL) FROM (VALUES %s) AS p(name, value)), '{}')$p$, members) END;
    -- A function p with a parameter `name` would also have a variable p.name.
    body := format(E'#variable_conflict use_column\nBEGIN\n    RETURN rouse.enqueue(handler => %L, payload => %s', p_contract ->> 'handler', payload);
    FOR number IN 1 .. cardinality(names) LOOP
        body := body || format(', %I => $%s', names[number], count + number);
    END LOOP;
    RETURN format(E'CREATE OR REPLACE FUNCTION %I.%I(%s%s) RETURNS bigint LANGUAGE plpgsql AS %L', p_schema, p_name, args, options, body || E');\nEND');
END
$$;

-- Creates or replaces the typed function of a contract and its comment. Privileges that were granted on the function
-- are kept.
CREATE OR REPLACE FUNCTION rouse._put_function(p_schema name, p_name name, p_definition text, p_comment text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    old    oid := rouse._function_of(p_schema, p_name);
    put    oid;
    rights aclitem[] := (SELECT p.proacl FROM pg_proc AS p WHERE p.oid = old);
    entry  record;
BEGIN
    IF old IS NOT NULL THEN
        EXECUTE format('DROP FUNCTION %s', old::regprocedure);
    END IF;
    EXECUTE p_definition;
    put := rouse._function_of(p_schema, p_name);
    EXECUTE format('COMMENT ON FUNCTION %s IS %L', put::regprocedure, left(p_comment, 4000));
    EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', put::regprocedure);
    EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO rouse_enqueuer, rouse_producer, rouse_operator', put::regprocedure);
    FOR entry IN
        SELECT a.grantee, a.is_grantable FROM aclexplode(rights) AS a
        WHERE a.privilege_type = 'EXECUTE' AND (a.grantee = 0 OR EXISTS (SELECT FROM pg_roles AS r WHERE r.oid = a.grantee AND r.rolname <> current_user))
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s%s', put::regprocedure,
            CASE entry.grantee WHEN 0 THEN 'PUBLIC' ELSE entry.grantee::regrole::text END, CASE WHEN entry.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END);
    END LOOP;
END
$$;

-- Replaces the typed function of a removed handler by one with the same parameters that raises an error.
CREATE OR REPLACE FUNCTION rouse._close_function(p_schema name, p_name name, p_handler text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    old oid := rouse._function_of(p_schema, p_name);
BEGIN
    IF old IS NOT NULL THEN
        EXECUTE format('CREATE OR REPLACE FUNCTION %I.%I(%s) RETURNS bigint LANGUAGE plpgsql AS %L', p_schema, p_name, pg_get_function_arguments(old),
            -- Not as the format of RAISE: the name of the schema may contain a percent sign.
            format(E'BEGIN\n    RAISE EXCEPTION USING MESSAGE = %L, ERRCODE = %L, HINT = %L;\nEND',
                   format('%s.%s: handler %s was removed: no worker has it', p_schema, p_name, p_handler), 'undefined_object',
                   format('`rouse contract publish` with its module brings it back; `rouse contract delete %s` deletes this function.', p_handler)));
        EXECUTE format('COMMENT ON FUNCTION %s IS %L', old::regprocedure, format('Handler %s was removed: this function raises an error.', p_handler));
    END IF;
END
$$;

-- Publishes the contract of one handler, and returns the changes.
CREATE OR REPLACE FUNCTION rouse._publish_contract(p_contract jsonb, p_schema name) RETURNS jsonb
LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    name       text := p_contract ->> 'handler';
    was        rouse.contract := (SELECT c FROM rouse.contract AS c WHERE c.handler = name);
    module     text := p_contract ->> 'sha256';
    version    text := left(p_contract ->> 'version', 255);
    digest     text := encode(sha256(convert_to(p_contract ->> 'schema', 'UTF8')), 'hex');
    is_known   boolean := EXISTS (SELECT FROM rouse.contract_version AS v WHERE v.handler = name AND v.digest = digest);
    called     name := rouse._function_name(name, p_schema);
    definition text;
    remark     text := left(coalesce(p_contract ->> 'comment', ''), 4000);
    parameters jsonb := coalesce(nullif(p_contract -> 'parameters', 'null'), '[]');
    combined   text;
    ended      integer;
    has_changed boolean;
    fields     jsonb;
BEGIN
    IF name IS NULL OR name !~ '^[a-z0-9][a-z0-9_-]*([.][a-z0-9][a-z0-9_-]*)*$' OR length(name) > 128 THEN
        RAISE EXCEPTION 'rouse.publish_contracts: % is not a handler name', quote_nullable(left(name, 140)) USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF module IS NULL OR module !~ '^[0-9a-f]{64}$' OR version IS NULL THEN
        RAISE EXCEPTION 'rouse.publish_contracts: the contract of % lacks the version or the SHA-256 of its module', name
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    definition := rouse._function_definition(p_schema, called, p_contract);
    IF (was.handler IS NULL OR (was.function_schema, was.function_name) IS DISTINCT FROM (p_schema, called)) AND rouse._function_of(p_schema, called) IS NOT NULL THEN
        RAISE EXCEPTION 'rouse.publish_contracts: function %.% already exists, and does not belong to a contract', quote_ident(p_schema), quote_ident(called)
            USING ERRCODE = 'duplicate_function', HINT = 'Rename it, or publish to another schema (--schema).';
    END IF;

    INSERT INTO rouse.contract_version AS v (handler, digest, version, modules, schema, refuses, rules, published_at)
    VALUES (name, digest, version, ARRAY[module], (p_contract ->> 'schema')::json, p_contract ->> 'refuses', p_contract -> 'rules', clock_timestamp())
    ON CONFLICT ON CONSTRAINT contract_version_pkey DO UPDATE
    SET version = excluded.version, refuses = excluded.refuses, rules = excluded.rules, published_at = excluded.published_at,
        modules = ARRAY(SELECT m FROM unnest(v.modules) AS m WHERE m <> module AND rouse._is_module_served(name, ARRAY[m])) || module;
    -- Versions that a live worker still serves are kept.
    DELETE FROM rouse.contract_version AS v WHERE v.handler = name AND v.digest <> digest AND NOT rouse._is_module_served(name, v.modules);
    GET DIAGNOSTICS ended = ROW_COUNT;
    SELECT CASE WHEN bool_and(v.refuses IS NOT NULL) THEN 'strict ' || string_agg('(' || v.refuses || ')', ' && ' ORDER BY v.published_at DESC, v.digest) END
    INTO combined FROM rouse.contract_version AS v WHERE v.handler = name;

    INSERT INTO rouse.contract AS c (handler, refuses, function_schema, function_name, parameters, definition, comment, published_at)
    VALUES (name, combined::jsonpath, p_schema, called, parameters, definition, remark, clock_timestamp())
    ON CONFLICT ON CONSTRAINT contract_pkey DO UPDATE
    SET refuses = excluded.refuses, removed_at = NULL, function_schema = p_schema, function_name = called, parameters = excluded.parameters,
        definition = excluded.definition, comment = excluded.comment, published_at = excluded.published_at, published_by = excluded.published_by;
    has_changed := was.handler IS NULL OR was.removed_at IS NOT NULL OR (was.definition, was.comment) <> (definition, remark)
        OR rouse._function_of(p_schema, called) IS NULL;
    IF was.function_schema <> p_schema AND rouse._function_of(was.function_schema, was.function_name) IS NOT NULL THEN
        EXECUTE format('DROP FUNCTION %s', rouse._function_of(was.function_schema, was.function_name)::regprocedure);
    END IF;
    IF has_changed THEN
        PERFORM rouse._put_function(p_schema, called, definition, remark);
    END IF;

    fields := CASE WHEN was.handler IS NOT NULL THEN (
        SELECT coalesce(jsonb_agg(format('%s%s', CASE WHEN o.value IS NULL THEN '+' WHEN n.value IS NULL THEN '-' ELSE '~' END, coalesce(n.value, o.value) ->> 'name')
                                  ORDER BY coalesce(n.value, o.value) ->> 'name'), '[]')
        FROM jsonb_array_elements(was.parameters) AS o FULL JOIN jsonb_array_elements(parameters) AS n ON n.value ->> 'name' = o.value ->> 'name'
        WHERE n.value IS DISTINCT FROM o.value) ELSE '[]' END;
    RETURN jsonb_build_object('handler', name, 'function', format('%I.%I', p_schema, called), 'version', version, 'fields', fields,
        'change', CASE WHEN was.handler IS NULL THEN 'new' WHEN has_changed OR NOT is_known OR ended > 0 THEN 'changed' ELSE 'unchanged' END,
        'versions', (SELECT count(*) FROM rouse.contract_version AS v WHERE v.handler = name), 'versions_ended', ended);
EXCEPTION
    WHEN OTHERS THEN
        DECLARE
            message text;
            hint    text;
        BEGIN
            GET STACKED DIAGNOSTICS message = MESSAGE_TEXT, hint = PG_EXCEPTION_HINT;
            RAISE EXCEPTION 'rouse.publish_contracts: handler %: %', quote_nullable(left(name, 140)), regexp_replace(message, '^rouse[.]publish_contracts: ', '')
                USING ERRCODE = SQLSTATE, HINT = hint;
        END;
END
$$;

-- Publishes contracts in one transaction, and returns the changes, as a list of {"handler", "change", "function",
-- "version", "fields", "versions", "versions_ended"}.
--
--   contracts      [{"handler", "version", "sha256": of its module, "schema": its text, "refuses": a predicate or null,
--                  "rules", "comment", "parameters": [{"name", "type", "required", "default"}, …], or "payload_type":
--                  for a payload that is passed as a whole}, …]
--   schema         where the typed functions are; the owner needs the privilege to create functions there
--   complete       true: contracts of all other handlers that no live worker has are removed
CREATE OR REPLACE FUNCTION rouse.publish_contracts(contracts jsonb, schema name DEFAULT 'jobs', complete boolean DEFAULT false) RETURNS jsonb
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    changes jsonb := '[]';
    entry   record;
    served  boolean;
BEGIN
    IF schema = 'rouse' OR schema = 'information_schema' OR starts_with(schema, 'pg_') OR schema = '' THEN
        RAISE EXCEPTION 'rouse.publish_contracts: the typed functions cannot be in schema %', quote_nullable(schema)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Choose a schema of your own, such as jobs.';
    END IF;
    IF NOT EXISTS (SELECT FROM pg_namespace AS n WHERE n.nspname = schema) THEN
        RAISE EXCEPTION 'rouse.publish_contracts: there is no schema %', quote_nullable(schema)
            USING ERRCODE = 'invalid_schema_name', HINT = format('CREATE SCHEMA %I AUTHORIZATION rouse_owner', schema);
    END IF;
    -- Publications run one after another; readers do not wait.
    LOCK TABLE rouse.contract IN SHARE ROW EXCLUSIVE MODE;
    FOR entry IN SELECT e.contract FROM jsonb_array_elements(contracts) AS e(contract) ORDER BY e.contract ->> 'handler' COLLATE "C" LOOP
        changes := changes || rouse._publish_contract(entry.contract, schema);
    END LOOP;
    IF complete THEN
        FOR entry IN
            SELECT c.handler, c.function_schema, c.function_name FROM rouse.contract AS c
            WHERE c.handler <> '*' AND c.removed_at IS NULL
              AND NOT EXISTS (SELECT FROM jsonb_array_elements(contracts) AS e(contract) WHERE e.contract ->> 'handler' = c.handler)
            ORDER BY c.handler
        LOOP
            served := rouse._is_module_served(entry.handler, NULL);
            IF NOT served THEN
                UPDATE rouse.contract AS c SET removed_at = clock_timestamp() WHERE c.handler = entry.handler;
                PERFORM rouse._close_function(entry.function_schema, entry.function_name, entry.handler);
            END IF;
            changes := changes || jsonb_build_object('handler', entry.handler, 'change', CASE WHEN served THEN 'kept' ELSE 'removed' END,
                'function', format('%I.%I', entry.function_schema, entry.function_name), 'fields', '[]'::jsonb);
        END LOOP;
    END IF;
    PERFORM rouse._mark_contracts();
    RETURN changes;
END
$$;

-- The copy of the contract of a handler in its lanes. If only other handlers have a contract, the copy is true for
-- every payload: then rouse._report_unknown_handler decides each time. Served by contract_pkey.
CREATE OR REPLACE FUNCTION rouse._contract_of_lane(p_handler text) RETURNS jsonpath
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT CASE WHEN c.handler = '*' OR c.removed_at IS NOT NULL THEN '1 == 1' ELSE c.refuses END
            FROM rouse.contract AS c WHERE c.handler = ANY (ARRAY[p_handler, '*']) ORDER BY c.handler = '*' LIMIT 1);
END
$$;

-- Copies contracts to the lanes whose copy differs: after each change, and in rouse.maintain_lanes, because a lane that
-- a transaction adds while contracts are published may have an old copy. Such a copy may let payloads pass that the
-- host refuses later; it never refuses a payload wrongly, because rouse._check_contract decides. Reads the whole
-- catalog.
CREATE OR REPLACE FUNCTION rouse._copy_contracts() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE rouse.lane AS l SET refuses = c.refuses
    FROM (SELECT h.handler, rouse._contract_of_lane(h.handler) AS refuses FROM (SELECT DISTINCT n.handler FROM rouse.lane AS n) AS h OFFSET 0) AS c
    -- Producers read the copy of the lane without a key.
    WHERE l.handler = c.handler AND l.key = '' AND l.refuses::text IS DISTINCT FROM c.refuses::text;
END
$$;

-- Keeps the row '*' while there is any other row, and keeps the copies in the lanes up to date.
CREATE OR REPLACE FUNCTION rouse._mark_contracts() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM rouse.contract AS c WHERE c.handler <> '*') THEN
        INSERT INTO rouse.contract (handler) VALUES ('*') ON CONFLICT DO NOTHING;
    ELSE
        DELETE FROM rouse.contract AS c WHERE c.handler = '*';
    END IF;
    -- Calls run one after another, because rouse.maintain_lanes also changes many lanes. Producers may add lanes in the
    -- meantime.
    LOCK TABLE rouse.lane IN SHARE UPDATE EXCLUSIVE MODE;
    PERFORM rouse._copy_contracts();
END
$$;

-- Deletes the contracts of these handlers, or of all (null), with their functions, and returns the handlers that had
-- one.
CREATE OR REPLACE FUNCTION rouse.delete_contracts(handlers text[]) RETURNS SETOF text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
    entry record;
BEGIN
    LOCK TABLE rouse.contract IN SHARE ROW EXCLUSIVE MODE;
    FOR entry IN
        SELECT c.handler, rouse._function_of(c.function_schema, c.function_name) AS function FROM rouse.contract AS c
        WHERE c.handler <> '*' AND (handlers IS NULL OR c.handler = ANY (handlers)) ORDER BY c.handler
    LOOP
        IF entry.function IS NOT NULL THEN
            EXECUTE format('DROP FUNCTION %s', entry.function::regprocedure);
        END IF;
        DELETE FROM rouse.contract AS c WHERE c.handler = entry.handler;
        DELETE FROM rouse.contract_version AS v WHERE v.handler = entry.handler;
        RETURN NEXT entry.handler;
    END LOOP;
    PERFORM rouse._mark_contracts();
END
$$;
