-- `grants => '{"state": false}'`: a job that leaves nothing of its handler's state (SPEC row B9). A host of before this does not understand it, and lets such
-- a job fail as denied.

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
                SELECT FROM jsonb_array_elements_text(entry.value) AS host
                WHERE host !~ '^([*]|([*][.])?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?|\[?[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*\]?)$') THEN
                wrong := 'a list of hosts such as api.example.com or *.example.com, without scheme and port';
            ELSIF entry.key = 'dirs' AND EXISTS (
                SELECT FROM jsonb_array_elements_text(entry.value) AS dir WHERE dir !~ '^/') THEN
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
