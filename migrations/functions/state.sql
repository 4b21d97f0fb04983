-- What handlers keep between jobs: bytes under keys, for each handler and tenant (jobs without a tenant share one namespace).

-- What is kept under a key, for the worker that runs the job, or one row with the reason why the job is not (any more) this
-- worker's. Without a row nothing is kept there. Served by the primary keys.
CREATE OR REPLACE FUNCTION rouse.get_state(p_worker bigint, p_key bytea, p_id bigint, p_fence bigint, p_handler text, p_name text)
RETURNS TABLE (refusal text, value bytea, version bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    whose text;
BEGIN
    IF rouse._known(p_worker, p_key) THEN
        PERFORM rouse._check_handler(p_handler);
    END IF;
    SELECT coalesce(j.tenant, '') INTO whose FROM rouse.job AS j WHERE j.id = p_id AND j.fence = p_fence AND j.worker = p_worker;
    IF NOT FOUND THEN
        refusal := coalesce(rouse._refusal(p_worker, p_id, p_fence), 'error');
        RETURN NEXT;
        RETURN;
    END IF;
    RETURN QUERY SELECT NULL::text, s.value, s.version FROM rouse.handler_state AS s
    WHERE s.handler = p_handler AND s.tenant = whose AND s.key = p_name;
END
$$;

-- The keys that start so, in the order of their bytes, after this one (null: from the first), at most so many; in the same way.
CREATE OR REPLACE FUNCTION rouse.state_keys(
    p_worker bigint, p_key bytea, p_id bigint, p_fence bigint, p_handler text, p_prefix text, p_after text, p_most integer)
RETURNS TABLE (refusal text, name text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    whose text;
BEGIN
    IF rouse._known(p_worker, p_key) THEN
        PERFORM rouse._check_handler(p_handler);
    END IF;
    SELECT coalesce(j.tenant, '') INTO whose FROM rouse.job AS j WHERE j.id = p_id AND j.fence = p_fence AND j.worker = p_worker;
    IF NOT FOUND THEN
        refusal := coalesce(rouse._refusal(p_worker, p_id, p_fence), 'error');
        RETURN NEXT;
        RETURN;
    END IF;
    RETURN QUERY SELECT NULL::text, s.key FROM rouse.handler_state AS s
    WHERE s.handler = p_handler AND s.tenant = whose AND s.key >= p_prefix AND s.key > coalesce(p_after, '') AND starts_with(s.key, p_prefix)
    ORDER BY s.key LIMIT least(greatest(coalesce(p_most, 0), 0), 10000);
END
$$;

-- One at a time for each namespace: whoever makes it larger. Ends with the transaction.
CREATE OR REPLACE FUNCTION rouse._grow_state(p_handler text, p_tenant text) RETURNS void
LANGUAGE sql AS $$
    SELECT rouse._lock('state', p_handler || '/' || p_tenant)
$$;

-- Keeps a value under a key, and says what has come of it:
--
--   refusal  the reason why the job is not (any more) this worker's: nothing is changed
--   outcome  set; conflict: what is there is not p_expected; keys, bytes: it would be more than p_keys_max, p_bytes_max, of which
--            the other keys use `used`; again: somebody else has changed it meanwhile, ask again
--
-- p_expected: the version that has to be there, 0: nothing, null: whatever is there. p_version is what it has from then on, drawn by
-- the caller for each write: a second call with the same one changes nothing, as the answer to the first was lost.
--
-- The lock on the job keeps away whoever would settle it or take it over until this has committed, as with rouse.record_step. The
-- quota is exact under concurrency (where transactions are `read committed`, as they are by default): who makes the namespace larger
-- waits for the others who do, and only then sums; who does not needs no leave, and never waits for that lock with the row in
-- hand. Waits 250 ms for each lock; then the call fails with lock_not_available. Served by the primary keys.
CREATE OR REPLACE FUNCTION rouse.set_state(
    p_worker bigint, p_key bytea, p_id bigint, p_fence bigint, p_handler text, p_name text, p_value bytea,
    p_version bigint, p_expected bigint, p_keys_max bigint, p_bytes_max bigint,
    OUT refusal text, OUT outcome text, OUT used bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '250ms' SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    size   bigint := octet_length(p_name) + octet_length(p_value);
    whose  text;
    grows  boolean;
    there  record;
    others record;
BEGIN
    IF rouse._known(p_worker, p_key) THEN
        PERFORM rouse._check_handler(p_handler);
    END IF;
    SELECT coalesce(j.tenant, '') INTO whose FROM rouse.job AS j
    WHERE j.id = p_id AND j.fence = p_fence AND j.worker = p_worker FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        refusal := coalesce(rouse._refusal(p_worker, p_id, p_fence), 'error');
        RETURN;
    END IF;
    p_keys_max := least(greatest(coalesce(p_keys_max, 0), 0), 10000);
    p_bytes_max := least(greatest(coalesce(p_bytes_max, 0), 0), 1073741824);
    grows := NOT EXISTS (SELECT FROM rouse.handler_state AS s
                         WHERE s.handler = p_handler AND s.tenant = whose AND s.key = p_name AND s.bytes >= size);
    IF grows THEN
        PERFORM rouse._grow_state(p_handler, whose);
    END IF;
    SELECT s.version, s.bytes INTO there FROM rouse.handler_state AS s
    WHERE s.handler = p_handler AND s.tenant = whose AND s.key = p_name FOR NO KEY UPDATE;
    outcome := CASE
        WHEN there.version = p_version THEN 'set'
        WHEN coalesce(there.version, 0) <> p_expected THEN 'conflict'
        WHEN NOT grows AND coalesce(there.bytes, 0) < size THEN 'again' END;
    IF outcome IS NOT NULL THEN
        RETURN;
    END IF;
    IF coalesce(there.bytes, 0) < size THEN
        SELECT count(*) AS keys, coalesce(sum(s.bytes), 0) AS bytes INTO others FROM rouse.handler_state AS s
        WHERE s.handler = p_handler AND s.tenant = whose AND s.key <> p_name;
        IF there.version IS NULL AND others.keys >= p_keys_max THEN
            outcome := 'keys';
            used := others.keys;
            RETURN;
        END IF;
        IF others.bytes + size > p_bytes_max THEN
            outcome := 'bytes';
            used := others.bytes;
            RETURN;
        END IF;
    END IF;
    IF there.version IS NULL THEN
        INSERT INTO rouse.handler_state (handler, tenant, key, value, version, set_at)
        VALUES (p_handler, whose, p_name, p_value, p_version, clock_timestamp());
    ELSE
        UPDATE rouse.handler_state AS s SET value = p_value, version = p_version, set_at = clock_timestamp()
        WHERE s.handler = p_handler AND s.tenant = whose AND s.key = p_name;
    END IF;
    outcome := 'set';
END
$$;

-- Forgets what is kept under a key, and says whether there was anything; or the reason why the job is not (any more) this worker's.
-- Locks as rouse.set_state does.
CREATE OR REPLACE FUNCTION rouse.delete_state(
    p_worker bigint, p_key bytea, p_id bigint, p_fence bigint, p_handler text, p_name text, OUT refusal text, OUT was_there boolean)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '250ms' SET enable_seqscan = off SET jit = off AS $$
DECLARE
    whose text;
BEGIN
    IF rouse._known(p_worker, p_key) THEN
        PERFORM rouse._check_handler(p_handler);
    END IF;
    SELECT coalesce(j.tenant, '') INTO whose FROM rouse.job AS j
    WHERE j.id = p_id AND j.fence = p_fence AND j.worker = p_worker FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        refusal := coalesce(rouse._refusal(p_worker, p_id, p_fence), 'error');
        RETURN;
    END IF;
    DELETE FROM rouse.handler_state AS s WHERE s.handler = p_handler AND s.tenant = whose AND s.key = p_name;
    was_there := FOUND;
END
$$;

-- From outside: keeps a value under a key, whatever is there and whatever the quota. Attempts that run see it with their next read.
-- A null tenant: the namespace of jobs without one.
CREATE OR REPLACE FUNCTION rouse.put_state(handler text, tenant text, key text, value bytea) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    at    timestamptz := clock_timestamp();
    -- 63 random bits.
    drawn bigint := hashtextextended(gen_random_uuid()::text, 0) & 9223372036854775807;
BEGIN
    IF put_state.handler IS NULL OR put_state.handler !~ '^[a-z0-9][a-z0-9_-]*([.][a-z0-9][a-z0-9_-]*)*$' OR length(put_state.handler) > 128 THEN
        RAISE EXCEPTION 'rouse.put_state: % is no handler name', coalesce(quote_literal(left(put_state.handler, 140)), 'null')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Handler names are lower-case words joined by dots; at most 128 characters.';
    END IF;
    IF put_state.tenant = '' OR length(put_state.tenant) > 200 OR put_state.key IS NULL OR length(put_state.key) NOT BETWEEN 1 AND 200 THEN
        RAISE EXCEPTION 'rouse.put_state: key and tenant have 1 to 200 characters; the tenant of jobs without one is null'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- No handler could ask for it again.
    IF put_state.key ~ '[\x01-\x1f\x7f-\x9f]' THEN
        RAISE EXCEPTION 'rouse.put_state: the key has control characters' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF put_state.value IS NULL OR octet_length(put_state.value) > 16777216 THEN
        RAISE EXCEPTION 'rouse.put_state: a value has 0 to 16777216 bytes, and is not null' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- Whoever counts the keys counts this one, or goes first.
    PERFORM rouse._grow_state(put_state.handler, coalesce(put_state.tenant, ''));
    INSERT INTO rouse.handler_state AS s (handler, tenant, key, value, version, set_at)
    VALUES (put_state.handler, coalesce(put_state.tenant, ''), put_state.key, put_state.value, drawn, at)
    ON CONFLICT ON CONSTRAINT handler_state_pkey DO UPDATE SET value = excluded.value, version = excluded.version, set_at = excluded.set_at;
    PERFORM rouse._have_partitions(at);
    INSERT INTO rouse.record (at, event, who, detail)
    VALUES (at, 'state_put', session_user, jsonb_strip_nulls(jsonb_build_object(
        'handler', put_state.handler, 'tenant', put_state.tenant, 'key', put_state.key)));
END
$$;

-- From outside: forgets what is kept under a key, or, where it is null, all that the handler keeps for this tenant; says how many
-- keys that were.
CREATE OR REPLACE FUNCTION rouse.remove_state(handler text, tenant text, key text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    at   timestamptz := clock_timestamp();
    gone bigint;
BEGIN
    -- Where a variable was empty, all of the jobs without a tenant would be forgotten.
    IF remove_state.tenant = '' THEN
        RAISE EXCEPTION 'rouse.remove_state: no tenant is an empty text; the tenant of jobs without one is null'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    DELETE FROM rouse.handler_state AS s
    WHERE s.handler = remove_state.handler AND s.tenant = coalesce(remove_state.tenant, '')
      AND (remove_state.key IS NULL OR s.key = remove_state.key);
    GET DIAGNOSTICS gone = ROW_COUNT;
    IF gone > 0 THEN
        PERFORM rouse._have_partitions(at);
        INSERT INTO rouse.record (at, event, who, detail)
        VALUES (at, 'state_removed', session_user, jsonb_strip_nulls(jsonb_build_object(
            'handler', remove_state.handler, 'tenant', remove_state.tenant, 'key', remove_state.key, 'keys', gone)));
    END IF;
    RETURN gone;
END
$$;
