-- State that handlers keep between jobs: bytes under keys, for each handler and tenant (jobs without a tenant share one
-- namespace).

-- The value under a key, for the worker that runs the job; or one row with the reason why this worker does not hold the
-- job. No row if there is no value. Served by the primary keys.
CREATE OR REPLACE FUNCTION rouse.read_state(p_worker bigint, p_key bytea, p_id bigint, p_fence bigint, p_handler text, p_name text)
RETURNS TABLE (refusal text, value bytea, version bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    job_tenant text;
BEGIN
    IF rouse._authenticated_as_limited(p_worker, p_key) THEN
        PERFORM rouse._check_handler(p_handler);
    END IF;
    SELECT coalesce(j.tenant, '') INTO job_tenant FROM rouse.job AS j WHERE j.id = p_id AND j.fence = p_fence AND j.worker = p_worker;
    IF NOT FOUND THEN
        refusal := coalesce(rouse._refusal(p_worker, p_id, p_fence), 'error');
        RETURN NEXT;
        RETURN;
    END IF;
    RETURN QUERY SELECT NULL::text, s.value, s.version FROM rouse.handler_state AS s
    WHERE s.handler = p_handler AND s.tenant = job_tenant AND s.key = p_name;
END
$$;

-- At most `p_max` keys with this prefix, in byte order, after `p_after` (null: from the first); or one row with the
-- refusal.
CREATE OR REPLACE FUNCTION rouse.state_keys(
    p_worker bigint, p_key bytea, p_id bigint, p_fence bigint, p_handler text, p_prefix text, p_after text, p_max integer)
RETURNS TABLE (refusal text, name text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    job_tenant text;
BEGIN
    IF rouse._authenticated_as_limited(p_worker, p_key) THEN
        PERFORM rouse._check_handler(p_handler);
    END IF;
    SELECT coalesce(j.tenant, '') INTO job_tenant FROM rouse.job AS j WHERE j.id = p_id AND j.fence = p_fence AND j.worker = p_worker;
    IF NOT FOUND THEN
        refusal := coalesce(rouse._refusal(p_worker, p_id, p_fence), 'error');
        RETURN NEXT;
        RETURN;
    END IF;
    RETURN QUERY SELECT NULL::text, s.key FROM rouse.handler_state AS s
    WHERE s.handler = p_handler AND s.tenant = job_tenant AND s.key >= p_prefix AND s.key > coalesce(p_after, '') AND starts_with(s.key, p_prefix)
    ORDER BY s.key LIMIT least(greatest(coalesce(p_max, 0), 0), 10000);
END
$$;

-- Serialises the writes that make a namespace larger. The lock is held until the transaction ends.
CREATE OR REPLACE FUNCTION rouse._lock_state_growth(p_handler text, p_tenant text) RETURNS void
LANGUAGE sql AS $$
    SELECT rouse._lock('state', p_handler || '/' || p_tenant)
$$;

-- Stores a value under a key, and returns the result:
--
--   refusal  the reason why this worker does not hold the job: nothing is changed
--   outcome  set; conflict: the current version is not p_expected; keys, bytes: it would exceed p_keys_max or
--            p_bytes_max; `used` is what the other keys take up; again: a concurrent write has changed the value
--
-- p_expected: the version that is expected, 0: no value, null: any. p_version is the new version, chosen at random by
-- the caller for each write: a repeated call with the same version changes nothing, because the response to the first
-- was lost.
--
-- The lock on the job keeps it from being settled or adopted until this has committed, as in rouse.record_step. The
-- quota is exact under concurrency: writes that make the namespace larger wait for each other, and compute the sum only
-- then; other writes do not take that lock, so they never wait for it while they hold the row lock. Fails with
-- lock_not_available: at once if another transaction has locked the job (as in rouse._lock_attempt), and after 250 ms
-- for each other lock. Served by the primary keys.
CREATE OR REPLACE FUNCTION rouse.write_state(
    p_worker bigint, p_key bytea, p_id bigint, p_fence bigint, p_handler text, p_name text, p_value bytea,
    p_version bigint, p_expected bigint, p_keys_max bigint, p_bytes_max bigint,
    OUT refusal text, OUT outcome text, OUT used bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '250ms' SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    size          bigint := octet_length(p_name) + octet_length(p_value);
    job_tenant    text;
    grows         boolean;
    current_entry record;
    others        record;
BEGIN
    IF rouse._authenticated_as_limited(p_worker, p_key) THEN
        PERFORM rouse._check_handler(p_handler);
    END IF;
    SELECT coalesce(j.tenant, '') INTO job_tenant FROM rouse.job AS j
    WHERE j.id = p_id AND j.fence = p_fence AND j.worker = p_worker FOR NO KEY UPDATE NOWAIT;
    IF NOT FOUND THEN
        refusal := coalesce(rouse._refusal(p_worker, p_id, p_fence), 'error');
        RETURN;
    END IF;
    p_keys_max := least(greatest(coalesce(p_keys_max, 0), 0), 10000);
    p_bytes_max := least(greatest(coalesce(p_bytes_max, 0), 0), 1073741824);
    grows := NOT EXISTS (SELECT FROM rouse.handler_state AS s
                         WHERE s.handler = p_handler AND s.tenant = job_tenant AND s.key = p_name AND s.bytes >= size);
    IF grows THEN
        PERFORM rouse._require_read_committed('a write that makes a state larger');
        PERFORM rouse._lock_state_growth(p_handler, job_tenant);
    END IF;
    SELECT s.version, s.bytes INTO current_entry FROM rouse.handler_state AS s
    WHERE s.handler = p_handler AND s.tenant = job_tenant AND s.key = p_name FOR NO KEY UPDATE;
    outcome := CASE
        WHEN current_entry.version = p_version THEN 'set'
        WHEN coalesce(current_entry.version, 0) <> p_expected THEN 'conflict'
        WHEN NOT grows AND coalesce(current_entry.bytes, 0) < size THEN 'again' END;
    IF outcome IS NOT NULL THEN
        RETURN;
    END IF;
    IF coalesce(current_entry.bytes, 0) < size THEN
        SELECT count(*) AS keys, coalesce(sum(s.bytes), 0) AS bytes INTO others FROM rouse.handler_state AS s
        WHERE s.handler = p_handler AND s.tenant = job_tenant AND s.key <> p_name;
        IF current_entry.version IS NULL AND others.keys >= p_keys_max THEN
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
    IF current_entry.version IS NULL THEN
        INSERT INTO rouse.handler_state (handler, tenant, key, value, version, set_at)
        VALUES (p_handler, job_tenant, p_name, p_value, p_version, clock_timestamp());
    ELSE
        UPDATE rouse.handler_state AS s SET value = p_value, version = p_version, set_at = clock_timestamp()
        WHERE s.handler = p_handler AND s.tenant = job_tenant AND s.key = p_name;
    END IF;
    outcome := 'set';
END
$$;

-- Removes a key, and returns whether it existed; or the reason why this worker does not hold the job. Locks like
-- rouse.write_state. If the response was lost, a repeated call returns false: it cannot recognise that the first call
-- removed the key.
CREATE OR REPLACE FUNCTION rouse.erase_state(
    p_worker bigint, p_key bytea, p_id bigint, p_fence bigint, p_handler text, p_name text, OUT refusal text, OUT was_there boolean)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '250ms' SET enable_seqscan = off SET jit = off AS $$
DECLARE
    job_tenant text;
BEGIN
    IF rouse._authenticated_as_limited(p_worker, p_key) THEN
        PERFORM rouse._check_handler(p_handler);
    END IF;
    SELECT coalesce(j.tenant, '') INTO job_tenant FROM rouse.job AS j
    WHERE j.id = p_id AND j.fence = p_fence AND j.worker = p_worker FOR NO KEY UPDATE NOWAIT;
    IF NOT FOUND THEN
        refusal := coalesce(rouse._refusal(p_worker, p_id, p_fence), 'error');
        RETURN;
    END IF;
    DELETE FROM rouse.handler_state AS s WHERE s.handler = p_handler AND s.tenant = job_tenant AND s.key = p_name;
    was_there := FOUND;
END
$$;

-- Admin action: stores a value under a key, regardless of the existing value and the quota. Running attempts see it at
-- their next read. A null tenant means the namespace of jobs without one.
CREATE OR REPLACE FUNCTION rouse.set_state(handler text, tenant text, key text, value bytea) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    at          timestamptz := clock_timestamp();
    -- 63 random bits.
    new_version bigint := hashtextextended(gen_random_uuid()::text, 0) & 9223372036854775807;
BEGIN
    IF set_state.handler IS NULL OR set_state.handler !~ '^[a-z0-9][a-z0-9_-]*([.][a-z0-9][a-z0-9_-]*)*$' OR length(set_state.handler) > 128 THEN
        RAISE EXCEPTION 'rouse.set_state: % is not a handler name', coalesce(quote_literal(left(set_state.handler, 140)), 'null')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Handler names are lower-case words joined by dots; at most 128 characters.';
    END IF;
    IF set_state.tenant = '' OR length(set_state.tenant) > 200 OR set_state.key IS NULL OR length(set_state.key) NOT BETWEEN 1 AND 200 THEN
        RAISE EXCEPTION 'rouse.set_state: key and tenant must have 1 to 200 characters; a null tenant means the jobs without one'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- No handler could read it.
    IF set_state.key ~ E'[\\x01-\\x1f\\x7f-\\x9f]' THEN
        RAISE EXCEPTION 'rouse.set_state: the key must not contain control characters' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF set_state.value IS NULL OR octet_length(set_state.value) > 16777216 THEN
        RAISE EXCEPTION 'rouse.set_state: the value must not be null and must have at most 16777216 bytes'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'rouse.delete_state deletes a key. Store large data elsewhere, and keep a reference to it.';
    END IF;
    -- A concurrent count of the keys either includes this key, or finishes first.
    PERFORM rouse._lock_state_growth(set_state.handler, coalesce(set_state.tenant, ''));
    INSERT INTO rouse.handler_state AS s (handler, tenant, key, value, version, set_at)
    VALUES (set_state.handler, coalesce(set_state.tenant, ''), set_state.key, set_state.value, new_version, at)
    ON CONFLICT ON CONSTRAINT handler_state_pkey DO UPDATE SET value = excluded.value, version = excluded.version, set_at = excluded.set_at;
    PERFORM rouse._ensure_partitions(at);
    INSERT INTO rouse.record (at, event, who, detail)
    VALUES (at, 'state_set', session_user, jsonb_strip_nulls(jsonb_build_object(
        'handler', set_state.handler, 'tenant', set_state.tenant, 'key', set_state.key)));
END
$$;

-- Admin action: deletes a key, or, if it is null, all keys of the handler for this tenant; returns their number.
CREATE OR REPLACE FUNCTION rouse.delete_state(handler text, tenant text, key text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    at      timestamptz := clock_timestamp();
    deleted bigint;
BEGIN
    -- Otherwise an empty variable of the caller would delete the state of all jobs without a tenant.
    IF delete_state.tenant = '' THEN
        RAISE EXCEPTION 'rouse.delete_state: tenant must not be empty; null means the jobs without a tenant'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    DELETE FROM rouse.handler_state AS s
    WHERE s.handler = delete_state.handler AND s.tenant = coalesce(delete_state.tenant, '')
      AND (delete_state.key IS NULL OR s.key = delete_state.key);
    GET DIAGNOSTICS deleted = ROW_COUNT;
    IF deleted > 0 THEN
        PERFORM rouse._ensure_partitions(at);
        INSERT INTO rouse.record (at, event, who, detail)
        VALUES (at, 'state_deleted', session_user, jsonb_strip_nulls(jsonb_build_object(
            'handler', delete_state.handler, 'tenant', delete_state.tenant, 'key', delete_state.key, 'keys', deleted)));
    END IF;
    RETURN deleted;
END
$$;
