-- History is immutable: triggers reject UPDATE, DELETE and TRUNCATE on rouse.finished, rouse.payload, rouse.attempt,
-- rouse.step and rouse.record, even by their owner. Old partitions are dropped (partitions.sql), which fires no
-- trigger. Inserts have no extra cost.

-- Rejects changes to history, unless this transaction has called rouse.unlock_history. The record of that call always
-- remains: it can neither be changed nor deleted, and rouse.record is never truncated.
CREATE OR REPLACE FUNCTION rouse._keep_history() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    is_record boolean := TG_TABLE_NAME = 'record' OR starts_with(TG_TABLE_NAME, 'record_');
BEGIN
    IF is_record AND (TG_OP = 'TRUNCATE' OR to_jsonb(OLD) ->> 'event' = 'history_unlocked') THEN
        RAISE EXCEPTION 'rouse: % on rouse.% is not allowed: the record of rouse.unlock_history must remain', TG_OP, TG_TABLE_NAME
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    IF nullif(current_setting('rouse.history_unlocked', true), '') IS DISTINCT FROM pg_current_xact_id()::text THEN
        RAISE EXCEPTION 'rouse: % on rouse.% is not allowed: history is immutable', TG_OP, TG_TABLE_NAME
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'SELECT rouse.unlock_history(''why'') allows it until the end of the transaction, and is recorded. '
                         'Old days are dropped automatically (keep_days of rouse.limits), or by rouse.drop_partitions.';
    END IF;
    RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END;
END
$$;

-- The login of an admin action, and the user of the dashboard on whose behalf it acted.
CREATE OR REPLACE FUNCTION rouse._by(p_who text, p_reader text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT p_who || coalesce(' for ' || p_reader, '')
$$;

-- Allows this transaction to change history, and records the login and the reason. For the owner: other roles lack the
-- privileges on the tables anyway.
CREATE OR REPLACE FUNCTION rouse.unlock_history(reason text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at timestamptz := clock_timestamp();
BEGIN
    IF length(trim(coalesce(reason, ''))) NOT BETWEEN 1 AND 1000 THEN
        RAISE EXCEPTION 'rouse.unlock_history: reason must have 1 to 1000 characters' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM rouse._ensure_partitions(at);
    INSERT INTO rouse.record (at, event, who, detail)
    VALUES (at, 'history_unlocked', session_user, jsonb_build_object('reason', trim(reason)));
    PERFORM set_config('rouse.history_unlocked', pg_current_xact_id()::text, true);
END
$$;

-- Partitions inherit row triggers, but not TRUNCATE triggers: rouse.prepare_partitions creates those. No CREATE OR
-- REPLACE: see wake.sql.
DO $$
DECLARE
    parent text;
BEGIN
    FOREACH parent IN ARRAY ARRAY['finished', 'payload', 'attempt', 'step', 'record'] LOOP
        IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = format('rouse.%I', parent)::regclass AND tgname = 'keep_rows') THEN
            EXECUTE format('CREATE TRIGGER keep_rows BEFORE UPDATE OR DELETE ON rouse.%I FOR EACH ROW EXECUTE FUNCTION rouse._keep_history()', parent);
        END IF;
        IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = format('rouse.%I', parent)::regclass AND tgname = 'keep_table') THEN
            EXECUTE format('CREATE TRIGGER keep_table BEFORE TRUNCATE ON rouse.%I EXECUTE FUNCTION rouse._keep_history()', parent);
        END IF;
    END LOOP;
END
$$;

-- The events since a time, the newest first: ended jobs and attempts, and other events (records). Returns up to `max`
-- rows. Filtered by queue, handler or `who` (a login or a user of the dashboard) if given; only admin actions have a
-- `who`. A job is listed with its end, which includes the time of its request; live jobs are not listed.
--
-- The next page starts after the event at the time `before` with the key `before_key`. Many events may have the same
-- time, such as the jobs of a purge; the key distinguishes them: the job, whether it is an end, an attempt or a record,
-- and the number of the attempt or the id of the record. Without a key, events at that time are left out.
--
-- Searches backwards from `before` in spans of one second, four, sixteen …, until there are enough rows: a page reads
-- the events of at most about five times its span, however far back `since` is. Served by finished_at, attempt_ended
-- and record_at.
CREATE OR REPLACE FUNCTION rouse.audit(
    since timestamptz, before timestamptz DEFAULT 'infinity', queue text DEFAULT NULL, handler text DEFAULT NULL, who text DEFAULT NULL,
    max integer DEFAULT 1000, before_key text DEFAULT NULL)
RETURNS TABLE (at timestamptz, event text, job bigint, queue_name text, handler_name text, attempt integer, worker text, by text, detail jsonb, key text)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    upto       timestamptz := coalesce(audit.before, 'infinity');
    -- Below all keys, unless the caller continues after one.
    upto_key   bigint[] := '{}';
    starts     timestamptz := least(audit.before, clock_timestamp());
    span       interval := '1 second';
    span_rows  bigint;
    total_rows bigint := 0;
BEGIN
    IF audit.since IS NULL THEN
        RAISE EXCEPTION 'rouse.audit: since must not be null' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF audit.max IS NULL OR audit.max NOT BETWEEN 1 AND 100000 THEN
        RAISE EXCEPTION 'rouse.audit: max must be 1 to 100000, not %', coalesce(audit.max::text, 'null') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF audit.before_key IS NOT NULL THEN
        IF audit.before_key !~ '^-?[0-9]{1,19}([.][0-9]{1,19}){2}$' THEN
            RAISE EXCEPTION 'rouse.audit: before_key must be the key of an event, such as 4711.1.0, not %', quote_literal(left(audit.before_key, 140))
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
        upto_key := string_to_array(audit.before_key, '.')::bigint[];
    END IF;
    LOOP
        starts := CASE WHEN span > interval '1 year' THEN audit.since ELSE greatest(audit.since, starts - span) END;
        RETURN QUERY
        SELECT p.at, p.event, p.job, p.queue, p.handler, p.attempt, w.worker_id, p.who,
               CASE p.key[2]
                   WHEN 1 THEN jsonb_strip_nulls(jsonb_build_object(
                       'requested_at', p.requested_at, 'claimed_at', p.claimed_at, 'started_at', p.started_at, 'tenant', p.tenant, 'source', p.source,
                       'payload_bytes', octet_length(rouse._payload(p.job, p.payload, p.payload_at)::text), 'sha256', encode(p.digest, 'hex'),
                       'kind', p.error -> 'kind', 'message', left(p.error ->> 'message', 200)))
                   WHEN 2 THEN jsonb_strip_nulls(jsonb_build_object(
                       'claimed_at', p.claimed_at, 'started_at', p.started_at, 'sha256', encode(p.digest, 'hex'),
                       'kind', coalesce(p.error, p.wait) -> 'kind', 'message', left(p.error ->> 'message', 200)))
                   ELSE p.detail END,
               array_to_string(p.key, '.')
        FROM (
            SELECT e.at, e.key, e.event, e.job, coalesce(e.queue, l.queue) AS queue, coalesce(e.handler, l.handler) AS handler, e.attempt, e.worker, e.who,
                   e.requested_at, e.claimed_at, e.started_at, e.tenant, e.source, e.payload, e.payload_at, e.digest, e.error, e.wait, e.detail
            FROM (
                SELECT f.finished_at AS at, ARRAY[f.id, 1, 0] AS key, f.state::text AS event, f.id AS job, f.lane, NULL::text AS queue, f.handler,
                       nullif(f.attempt, 0) AS attempt, f.worker, NULL::text AS who, f.requested_at, f.claimed_at, f.started_at, f.tenant, f.source,
                       f.payload, f.payload_at, f.digest, f.error, NULL::jsonb AS wait, NULL::jsonb AS detail
                FROM rouse.finished AS f
                WHERE f.finished_at >= starts AND f.finished_at <= upto AND audit.who IS NULL
                UNION ALL
                SELECT a.ended_at, ARRAY[a.job, 2, a.attempt], CASE WHEN a.lost THEN 'lost' WHEN a.wait IS NOT NULL THEN 'suspended' ELSE 'attempt_failed' END,
                       a.job, a.lane, NULL, a.handler, a.attempt, a.worker, NULL, NULL, a.claimed_at, a.started_at, NULL, NULL,
                       NULL, NULL, a.digest, a.error, a.wait, NULL
                FROM rouse.attempt AS a
                WHERE a.ended_at >= starts AND a.ended_at <= upto AND audit.who IS NULL
                UNION ALL
                SELECT r.at, ARRAY[coalesce(r.job, 0), 3, r.id], r.event, r.job, NULL, r.queue, NULL, nullif(r.attempt, 0), r.worker,
                       rouse._by(r.who, r.reader), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, r.detail
                FROM rouse.record AS r
                WHERE r.at >= starts AND r.at <= upto AND (audit.who IS NULL OR audit.who IN (r.who, r.reader))) AS e
            -- Subqueries in CASE: a join would search all partitions for each row, even one that has its lane.
            LEFT JOIN LATERAL (
                SELECT l.queue, l.handler FROM rouse.lane AS l
                WHERE l.id = CASE WHEN e.lane IS NOT NULL THEN e.lane
                                  ELSE coalesce((SELECT j.lane FROM rouse.job AS j WHERE j.id = e.job),
                                                (SELECT f.lane FROM rouse.finished AS f WHERE f.id = e.job LIMIT 1)) END
                LIMIT 1) AS l ON true
            WHERE (e.at, e.key) < (upto, upto_key)
              AND (audit.queue IS NULL OR coalesce(e.queue, l.queue) = audit.queue)
              AND (audit.handler IS NULL OR coalesce(e.handler, l.handler) = audit.handler)
            ORDER BY e.at DESC, e.key DESC LIMIT audit.max - total_rows) AS p
        LEFT JOIN rouse.worker AS w ON w.incarnation = p.worker
        ORDER BY p.at DESC, p.key DESC;
        GET DIAGNOSTICS span_rows = ROW_COUNT;
        total_rows := total_rows + span_rows;
        EXIT WHEN total_rows >= audit.max OR starts <= audit.since;
        upto := starts;
        upto_key := '{}';
        span := span * 4;
    END LOOP;
END
$$;
