-- Schedules that modules declare: `#[handler(schedule = "…")]`. A host reports them in its capabilities if its operator
-- allows this. Any host creates and deletes them, based on the reports of all live workers (host/src/job/declared.rs),
-- so that hosts with different modules agree. Such a schedule has the name of its handler.

-- Lists the handlers for which a live worker reports a schedule, or for which one was created:
--
--   workers  the live workers that have the handler, [{"incarnation", "version", "schedule"}, …]; null: none
--   current  its schedule, {"version", "cron", "time_zone"}; null: it has none
--
-- Leaves out handlers for which a login has created a schedule. Reads all capabilities, which may be megabytes, only of
-- workers that have such a handler and declare no schedule for it: their module may have a newer version.
CREATE OR REPLACE FUNCTION rouse.module_schedules(p_worker bigint, p_key bytea) RETURNS TABLE (handler text, workers jsonb, current jsonb)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    PERFORM rouse._authenticated_as_limited(p_worker, p_key);
    RETURN QUERY
    WITH created AS MATERIALIZED (
        SELECT s.name, jsonb_build_object('version', s.module_version, 'cron', s.cron, 'time_zone', s.time_zone) AS current
        FROM rouse.schedule AS s WHERE s.module_version IS NOT NULL),
    live AS MATERIALIZED (
        SELECT w.incarnation, w.limited, w.login, w.handlers, d.declared
        FROM rouse.live_worker AS v
        CROSS JOIN LATERAL (
            SELECT n.incarnation, n.limited, n.login, n.handlers, n.schedules FROM rouse.worker AS n
            WHERE n.incarnation = v.worker ORDER BY n.seen_at DESC LIMIT 1) AS w
        CROSS JOIN LATERAL (
            SELECT coalesce(jsonb_object_agg(s.value ->> 'key', s.value -> 'value'), '{}') AS declared
            FROM jsonb_array_elements(w.schedules) AS s) AS d
        WHERE v.worker > 0),
    scheduled AS MATERIALIZED (
        SELECT coalesce(jsonb_object_agg(n.name, true), '{}') AS names
        FROM (SELECT k.name FROM live AS l CROSS JOIN LATERAL jsonb_object_keys(l.declared) AS k(name)
              UNION SELECT c.name FROM created AS c) AS n),
    reported AS MATERIALIZED (
        SELECT l.incarnation, l.limited, l.login, d.key AS handler, d.value AS capability
        FROM live AS l CROSS JOIN LATERAL jsonb_each(l.declared) AS d
        UNION ALL
        SELECT l.incarnation, l.limited, l.login, c.key, c.value
        FROM scheduled AS s CROSS JOIN live AS l
        CROSS JOIN LATERAL (
            SELECT w.capabilities FROM rouse.worker AS w
            WHERE w.incarnation = l.incarnation AND s.names <> '{}'
              AND EXISTS (SELECT FROM unnest(l.handlers) AS h(name) WHERE s.names ? h.name AND NOT l.declared ? h.name)
            ORDER BY w.seen_at DESC LIMIT 1) AS its
        CROSS JOIN LATERAL jsonb_each(its.capabilities) AS c
        WHERE s.names ? c.key AND NOT l.declared ? c.key),
    by_handler AS MATERIALIZED (
        SELECT r.handler, bool_or(r.capability ? 'schedule') AS is_scheduled,
               jsonb_agg(jsonb_build_object('incarnation', r.incarnation, 'version', r.capability ->> 'version',
                                            'schedule', r.capability -> 'schedule')) AS workers
        FROM reported AS r
        -- Workers of a limited login report only schedules of its own handlers.
        WHERE NOT r.limited OR EXISTS (
            SELECT FROM rouse.worker_login AS l
            WHERE l.login = to_regrole(quote_ident(r.login)) AND rouse._matches_any(r.handler, l.handlers) AND rouse._matches_any('default', l.queues))
        GROUP BY r.handler)
    SELECT coalesce(h.handler, c.name), h.workers, c.current
    FROM by_handler AS h FULL JOIN created AS c ON c.name = h.handler
    WHERE (h.is_scheduled OR c.name IS NOT NULL)
      AND NOT EXISTS (SELECT FROM rouse.schedule AS s WHERE s.name = coalesce(h.handler, c.name) AND s.module_version IS NULL);
END
$$;

-- Raises an error if this worker's login may not change the schedule of this handler.
CREATE OR REPLACE FUNCTION rouse._check_declares(p_worker bigint, p_key bytea, p_handler text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF rouse._authenticated_as_limited(p_worker, p_key) AND NOT rouse._may_fire('default', p_handler) THEN
        RAISE EXCEPTION 'rouse: login % may not change the schedule of handler %', session_user, coalesce(quote_literal(left(p_handler, 140)), 'null')
            USING ERRCODE = 'RW006', HINT = 'Its handlers and queues are listed in rouse.worker_login.';
    END IF;
END
$$;

-- The login of a live worker that declares exactly this schedule: preferably the login of the schedule (null: it has
-- none yet), then one without limits; null: no live worker declares it. Reads the capabilities of one worker after the
-- other, up to the first that declares it: they may have several megabytes each. Served by the primary keys.
CREATE OR REPLACE FUNCTION rouse._declaring_login(p_schedule rouse.schedule) RETURNS name
LANGUAGE plpgsql STABLE AS $$
DECLARE
    live record;
BEGIN
    FOR live IN
        SELECT w.worker, w.login FROM rouse.live_worker AS w
        WHERE w.worker > 0
          -- As in rouse.module_schedules.
          AND (NOT w.limited OR EXISTS (
              SELECT FROM rouse.worker_login AS l
              WHERE l.login = to_regrole(quote_ident(w.login)) AND rouse._matches_any(p_schedule.handler, l.handlers)
                AND rouse._matches_any('default', l.queues)))
        ORDER BY (w.login = p_schedule.login) DESC NULLS LAST, w.limited, w.worker DESC
    LOOP
        -- LIMIT: otherwise, the capabilities would be read for each condition.
        PERFORM FROM (
            SELECT w.capabilities -> p_schedule.handler AS handler FROM rouse.worker AS w
            WHERE w.incarnation = live.worker ORDER BY w.seen_at DESC LIMIT 1) AS its
        WHERE coalesce(its.handler ->> 'version', '') = p_schedule.module_version
          AND its.handler -> 'schedule' ->> 'cron' = p_schedule.cron
          AND coalesce(its.handler -> 'schedule' ->> 'time_zone', 'UTC') = p_schedule.time_zone;
        IF FOUND THEN
            RETURN live.login;
        END IF;
    END LOOP;
    RETURN NULL;
END
$$;

-- Rejects a job of a module's schedule that would give way to the job p_id, if the login that declares the schedule is
-- limited and its workers could not run that job. The limits of that login apply instead of those of the caller,
-- because any host fires the schedule. If several logins declare it, or none does now, the limits of the login to which
-- the schedule belongs apply. A login that no longer exists, or has another name, permits nothing. Served by the
-- primary keys.
CREATE OR REPLACE FUNCTION rouse._check_merged_run(p_schedule text, p_id bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    its    rouse.schedule;
    role   regrole;
    limits rouse.worker_login;
BEGIN
    SELECT * INTO its FROM rouse.schedule AS s WHERE s.name = p_schedule;
    role := to_regrole(quote_ident(coalesce(rouse._declaring_login(its), its.login)));
    IF role IS NULL THEN
        RAISE EXCEPTION 'rouse: schedule % may not use job %, with which a gate would merge its job: the login that declared it does not exist',
            p_schedule, p_id
            USING ERRCODE = 'invalid_parameter_value', HINT = 'The schedule may use the job once a live worker declares the schedule again.';
    END IF;
    SELECT * INTO limits FROM rouse.worker_login AS l WHERE l.login = role;
    IF FOUND THEN
        PERFORM rouse._check_merged_within(limits, p_id, NULL);
    END IF;
END
$$;

-- Creates or replaces the schedule of a handler as its module declares it. Returns created, replaced or unchanged;
-- foreign, if a login has created a schedule of this name, which is kept; or undeclared, if no live worker declares
-- exactly this schedule, for instance because it has ended since the caller read its declaration. The schedule belongs
-- to the login of a worker that declares it, preferably one without limits. Its jobs have the payload {} and are in the
-- queue default.
CREATE OR REPLACE FUNCTION rouse.put_module_schedule(
    p_worker bigint, p_key bytea, p_handler text, p_version text, p_cron text, p_time_zone text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    wanted rouse.schedule;
BEGIN
    PERFORM rouse._check_declares(p_worker, p_key, p_handler);
    PERFORM rouse._check_schedule_name(p_handler);
    wanted.name := p_handler;
    wanted.handler := p_handler;
    wanted.payload := '{}';
    wanted.queue := 'default';
    wanted.priority := 'normal';
    wanted.tags := '{}';
    wanted.cron := rouse._check_cron(p_cron);
    PERFORM rouse._check_time_zone(p_time_zone);
    wanted.time_zone := p_time_zone;
    wanted.overlap := 'skip';
    wanted.catch_up := 'one';
    wanted.jitter := interval '0';
    wanted.module_version := left(coalesce(p_version, ''), 255);
    wanted.login := rouse._declaring_login(wanted);
    IF wanted.login IS NULL THEN
        RETURN 'undeclared';
    END IF;
    PERFORM rouse._check_schedule(wanted);
    RETURN rouse._put_schedule(wanted);
END
$$;

-- Deletes the schedule of a handler whose module no longer declares it. Returns whether it existed.
CREATE OR REPLACE FUNCTION rouse.delete_module_schedule(p_worker bigint, p_key bytea, p_handler text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
BEGIN
    PERFORM rouse._check_declares(p_worker, p_key, p_handler);
    PERFORM FROM rouse.schedule AS s WHERE s.name = p_handler AND s.module_version IS NOT NULL FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM rouse._delete_schedule(p_handler);
    RETURN true;
END
$$;
