-- Schedules: each enqueues a job whenever it is due.
--
-- SQL cannot read cron expressions: a host computes the due times of a schedule and writes the next ones to its row.
-- Any host fires what is due: it lists the due schedules (rouse.due_schedules), decides the outcome of each due time
-- (host/src/job/firing.rs), and writes that (rouse.fire_schedules in fire.sql) if the row has not changed since. A due
-- time never has two jobs (schedule_run_due).

-- Rejects a null name, and a name that no schedule can have.
CREATE OR REPLACE FUNCTION rouse._check_schedule_name(p_name text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF p_name IS NULL OR p_name !~ '^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$' THEN
        RAISE EXCEPTION 'rouse.schedule: % is not a schedule name', coalesce(quote_literal(left(p_name, 140)), 'null')
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'Names start with a letter or digit and contain letters, digits and _ . : - ; at most 128 characters.';
    END IF;
END
$$;

-- Checks what SQL can check of a cron expression, and returns it with single spaces. Only a host can tell whether the
-- fields are valid.
CREATE OR REPLACE FUNCTION rouse._check_cron(p_cron text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    fields text[] := regexp_split_to_array(btrim(p_cron, E' \t\r\n'), '[[:space:]]+');
BEGIN
    IF p_cron IS NULL OR length(p_cron) > 200 OR cardinality(fields) NOT BETWEEN 5 AND 6
       OR EXISTS (SELECT FROM unnest(fields) AS field WHERE field !~ '^[0-9A-Za-z*/,?#-]+$') THEN
        RAISE EXCEPTION 'rouse.schedule: % is not a cron expression', coalesce(quote_literal(left(p_cron, 140)), 'null')
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'It has five fields: minute, hour, day of the month, month, day of the week; or six, with seconds first. '
                         'For instance ''0 3 * * *'', which is 3:00 every day.';
    END IF;
    RETURN array_to_string(fields, ' ');
END
$$;

-- Rejects a time zone that Postgres does not know. For most names, Postgres finds the file of the zone. Other names
-- could be abbreviations or rules, which hosts do not know; for them, this reads the names of all zones, which takes
-- about ten milliseconds.
CREATE OR REPLACE FUNCTION rouse._check_time_zone(p_name text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF p_name = 'UTC' THEN
        RETURN;
    ELSIF p_name ~ '^[A-Za-z_]+(/[A-Za-z_]+)+$' THEN
        BEGIN
            PERFORM now() AT TIME ZONE p_name;
            RETURN;
        EXCEPTION
            WHEN invalid_parameter_value THEN NULL;
        END;
    ELSIF EXISTS (SELECT FROM pg_timezone_names AS z WHERE z.name = p_name) THEN
        RETURN;
    END IF;
    RAISE EXCEPTION 'rouse.schedule: % is not a time zone', coalesce(quote_literal(left(p_name, 140)), 'null')
        USING ERRCODE = 'invalid_parameter_value', HINT = 'Names are those of pg_timezone_names, such as Europe/Berlin or UTC.';
END
$$;

-- Rejects a schedule that could not enqueue a job. Adds the lane of its jobs to the catalog.
CREATE OR REPLACE FUNCTION rouse._check_schedule(p_schedule rouse.schedule) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    problem text;
BEGIN
    PERFORM rouse._lane(p_schedule.handler, p_schedule.queue, p_schedule.tenant, p_schedule.source, p_schedule.priority::text, NULL,
                        p_schedule.max_attempts, p_schedule.tags, p_schedule.payload);
    PERFORM rouse._time_ms('lease', p_schedule.lease), rouse._time_ms('timeout', p_schedule.timeout),
            rouse._time_ms('job_timeout', p_schedule.job_timeout);
    IF p_schedule.grants IS NOT NULL THEN
        PERFORM rouse._check_grants(p_schedule.grants);
    END IF;
    problem := CASE
        WHEN p_schedule.overlap IS NULL OR p_schedule.overlap NOT IN ('skip', 'queue', 'allow', 'cancel')
            THEN format('overlap must be skip, queue, allow or cancel, not %s', coalesce(quote_literal(left(p_schedule.overlap, 140)), 'null'))
        WHEN p_schedule.catch_up IS NULL OR p_schedule.catch_up NOT IN ('none', 'one', 'all')
            THEN format('catch_up must be none, one or all, not %s', coalesce(quote_literal(left(p_schedule.catch_up, 140)), 'null'))
        WHEN p_schedule.catch_up_window NOT BETWEEN interval '1 second' AND interval '3660 days'
            THEN format('catch_up_window must be between 1 second and 3660 days, not %s', p_schedule.catch_up_window)
        WHEN extract(epoch FROM p_schedule.jitter) NOT BETWEEN 0 AND 86400
            THEN format('jitter must be between 0 and 1 day, not %s', p_schedule.jitter)
        WHEN length(p_schedule.due_key) NOT BETWEEN 1 AND 128 THEN 'due_key must have 1 to 128 characters'
        WHEN p_schedule.due_key IS NOT NULL AND jsonb_typeof(p_schedule.payload) <> 'object'
            THEN 'with due_key, the payload must be an object' END;
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION 'rouse.schedule: %', problem USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- With the due time, whose text always has the same length.
    PERFORM rouse._check_payload(octet_length(rouse._due_payload(p_schedule, now())::text), p_schedule.queue);
END
$$;

-- The part of a schedule that its creator decides.
CREATE OR REPLACE FUNCTION rouse._definition(p_schedule rouse.schedule) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT to_jsonb(p_schedule)
        - '{module_version,login,created_at,changed_at,paused_at,revision,handled_until,next_at,upcoming,error,last_job}'::text[]
$$;

-- Wakes the hosts: the time of their next look may have changed.
CREATE OR REPLACE FUNCTION rouse._wake_for_schedules() RETURNS void
LANGUAGE sql AS $$
    SELECT rouse._hint('rouse_wake', '*schedules')
$$;

-- Leaves a record of an action on a schedule.
CREATE OR REPLACE FUNCTION rouse._record_schedule(
    p_event text, p_name text, p_at timestamptz, p_job bigint DEFAULT NULL, p_detail jsonb DEFAULT '{}') RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM rouse._ensure_partitions(p_at);
    INSERT INTO rouse.record (at, job, event, who, detail)
    VALUES (p_at, p_job, p_event, session_user, jsonb_build_object('schedule', p_name) || p_detail);
END
$$;

-- Writes a schedule, which the caller has checked, and returns created, replaced or unchanged. The schedule of a
-- module, whose `login` the caller has set, never replaces one that a login has created (`foreign`). If its due times
-- change, they count from now; otherwise, times that are already due are not lost.
CREATE OR REPLACE FUNCTION rouse._put_schedule(p_schedule rouse.schedule) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    at      timestamptz := clock_timestamp();
    was     rouse.schedule;
    changed jsonb;
    moved   boolean;
BEGIN
    LOOP
        SELECT * INTO was FROM rouse.schedule AS s WHERE s.name = p_schedule.name FOR UPDATE;
        EXIT WHEN FOUND;
        IF (SELECT count(*) FROM rouse.schedule) >= (SELECT l.schedules_max FROM rouse.limits AS l WHERE l.only_row) THEN
            RAISE EXCEPTION 'rouse.schedule: there are already % schedules, the maximum', (SELECT l.schedules_max FROM rouse.limits AS l WHERE l.only_row)
                USING ERRCODE = 'program_limit_exceeded', HINT = 'Delete some, or raise schedules_max in rouse.limits.';
        END IF;
        p_schedule.created_at := at;
        p_schedule.changed_at := at;
        p_schedule.handled_until := at;
        p_schedule.revision := nextval('rouse.turn_seq');
        p_schedule.login := coalesce(p_schedule.login, session_user);
        p_schedule.upcoming := '{}';
        INSERT INTO rouse.schedule SELECT (p_schedule).* ON CONFLICT DO NOTHING;
        IF FOUND THEN
            PERFORM rouse._record_schedule('schedule_created', p_schedule.name, at, NULL,
                jsonb_build_object('cron', p_schedule.cron, 'time_zone', p_schedule.time_zone));
            PERFORM rouse._wake_for_schedules();
            RETURN 'created';
        END IF;
    END LOOP;
    IF p_schedule.module_version IS NULL THEN
        PERFORM rouse._check_owner(was);
    ELSIF was.module_version IS NULL THEN
        RETURN 'foreign';
    END IF;
    changed := (
        SELECT jsonb_agg(d.key ORDER BY d.key) FROM jsonb_each(rouse._definition(p_schedule)) AS d
        WHERE d.value IS DISTINCT FROM rouse._definition(was) -> d.key);
    IF changed IS NULL AND p_schedule.module_version IS NOT DISTINCT FROM was.module_version THEN
        -- The workers that declare it may have another login now.
        UPDATE rouse.schedule AS s SET login = p_schedule.login
        WHERE s.name = p_schedule.name AND p_schedule.module_version IS NOT NULL AND s.login <> p_schedule.login;
        RETURN 'unchanged';
    END IF;
    moved := (was.cron, was.time_zone) IS DISTINCT FROM (p_schedule.cron, p_schedule.time_zone);
    UPDATE rouse.schedule AS s
    SET handler = p_schedule.handler, payload = p_schedule.payload, queue = p_schedule.queue, tenant = p_schedule.tenant,
        source = p_schedule.source, priority = p_schedule.priority, max_attempts = p_schedule.max_attempts, tags = p_schedule.tags,
        grants = p_schedule.grants, lease = p_schedule.lease, timeout = p_schedule.timeout, job_timeout = p_schedule.job_timeout,
        due_key = p_schedule.due_key, cron = p_schedule.cron, time_zone = p_schedule.time_zone, overlap = p_schedule.overlap, catch_up = p_schedule.catch_up,
        catch_up_window = p_schedule.catch_up_window, jitter = p_schedule.jitter, module_version = p_schedule.module_version,
        login = CASE WHEN p_schedule.module_version IS NOT NULL THEN p_schedule.login WHEN was.module_version IS NOT NULL THEN session_user
                ELSE s.login END,
        changed_at = at, revision = nextval('rouse.turn_seq'),
        handled_until = CASE WHEN moved THEN at ELSE s.handled_until END,
        next_at = CASE WHEN moved THEN NULL ELSE s.next_at END,
        upcoming = CASE WHEN moved THEN '{}' ELSE s.upcoming END,
        error = CASE WHEN moved THEN NULL ELSE s.error END
    WHERE s.name = p_schedule.name;
    PERFORM rouse._record_schedule('schedule_replaced', p_schedule.name, at, NULL, jsonb_build_object('changed', coalesce(changed, '[]')));
    PERFORM rouse._wake_for_schedules();
    RETURN 'replaced';
END
$$;

-- Producers manage the schedules that their login has created; operators and the owner manage all of them.
CREATE OR REPLACE FUNCTION rouse._check_owner(p_schedule rouse.schedule) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF p_schedule.login <> session_user
       AND NOT pg_has_role(session_user, 'rouse_operator', 'usage') AND NOT pg_has_role(session_user, 'rouse_owner', 'usage') THEN
        RAISE EXCEPTION 'rouse: login % may not change schedule %, which belongs to login %', session_user, p_schedule.name, p_schedule.login
            USING ERRCODE = 'insufficient_privilege', HINT = 'A login with the role rouse_operator may change all schedules.';
    END IF;
END
$$;

-- Creates or replaces the schedule `name`, in the caller's transaction, and returns created, replaced, or unchanged if
-- it was the same before. A null argument means its default. A paused schedule stays paused.
--
--   cron             five fields: minute, hour, day of the month, month, day of the week; or six, with seconds first
--   time_zone        the time zone of these fields, by its IANA name
--   overlap          if the previous job is live when the next one is due: skip the new one, queue it behind that one
--                    (one at a time), allow both, or cancel the previous one
--   catch_up         due times that are more than a minute old before a host handles them are missed: none of them gets
--                    a job, or one (the latest, unless a later one is due), or all
--   catch_up_window  older missed due times get no job; null: all do, whatever their age
--   jitter           each job starts up to this much later, by an amount that depends on schedule and due time only
--   due_key          the key of the payload that gets the due time, as text in UTC; null: none
--   source           of its jobs; null: 'schedule:' and the name, and the payload is checked against the contract of
--                    the handler
-- The other arguments are those of rouse.enqueue.
CREATE OR REPLACE FUNCTION rouse.schedule(
    name            text,
    handler         text,
    payload         jsonb    DEFAULT '{}',
    cron            text     DEFAULT NULL,
    time_zone       text     DEFAULT 'UTC',
    overlap         text     DEFAULT 'skip',
    catch_up        text     DEFAULT 'one',
    catch_up_window interval DEFAULT NULL,
    jitter          interval DEFAULT NULL,
    queue           text     DEFAULT 'default',
    tenant          text     DEFAULT NULL,
    source          text     DEFAULT NULL,
    priority        text     DEFAULT 'normal',
    max_attempts    integer  DEFAULT NULL,
    tags            text[]   DEFAULT '{}',
    grants          jsonb    DEFAULT NULL,
    lease           interval DEFAULT NULL,
    timeout         interval DEFAULT NULL,
    job_timeout     interval DEFAULT NULL,
    due_key         text     DEFAULT NULL
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_variable
DECLARE
    wanted rouse.schedule;
BEGIN
    PERFORM rouse._check_schedule_name(name);
    IF coalesce(priority, 'normal') NOT IN ('high', 'normal', 'low') THEN
        RAISE EXCEPTION 'rouse.schedule: priority must be high, normal or low, not %', quote_literal(left(priority, 140))
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    wanted.name := name;
    wanted.handler := handler;
    wanted.payload := coalesce(payload, '{}');
    wanted.queue := coalesce(queue, 'default');
    wanted.tenant := tenant;
    wanted.source := source;
    wanted.priority := coalesce(priority, 'normal');
    wanted.max_attempts := max_attempts;
    wanted.tags := coalesce(tags, '{}');
    wanted.grants := grants;
    wanted.lease := lease;
    wanted.timeout := timeout;
    wanted.job_timeout := job_timeout;
    wanted.due_key := due_key;
    wanted.cron := rouse._check_cron(cron);
    wanted.time_zone := coalesce(time_zone, 'UTC');
    PERFORM rouse._check_time_zone(wanted.time_zone);
    wanted.overlap := coalesce(overlap, 'skip');
    wanted.catch_up := coalesce(catch_up, 'one');
    wanted.catch_up_window := catch_up_window;
    wanted.jitter := coalesce(jitter, interval '0');
    PERFORM rouse._check_schedule(wanted);
    -- A source that the caller sets may be bound to another handler.
    IF source IS NULL THEN
        PERFORM rouse._check_contract(wanted.handler, rouse._due_payload(wanted, now()));
    END IF;
    RETURN rouse._put_schedule(wanted);
END
$$;

-- Checks that the caller may change a schedule, locks it and returns it. Raises an error if it does not exist.
CREATE OR REPLACE FUNCTION rouse._lock_schedule(p_name text) RETURNS rouse.schedule
LANGUAGE plpgsql AS $$
DECLARE
    was rouse.schedule;
BEGIN
    SELECT * INTO was FROM rouse.schedule AS s WHERE s.name = p_name FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'rouse: schedule % does not exist', coalesce(quote_literal(left(p_name, 140)), 'null')
            USING ERRCODE = 'no_data_found', HINT = 'SELECT name FROM rouse.schedules lists them.';
    END IF;
    PERFORM rouse._check_owner(was);
    RETURN was;
END
$$;

-- Deletes a schedule, and returns whether it existed. Jobs that it has enqueued stay; an unfinished backfill ends.
CREATE OR REPLACE FUNCTION rouse.unschedule(name text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    was rouse.schedule;
BEGIN
    SELECT * INTO was FROM rouse.schedule AS s WHERE s.name = unschedule.name FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM rouse._check_owner(was);
    IF was.module_version IS NOT NULL THEN
        RAISE EXCEPTION 'rouse: schedule % cannot be deleted: the module of handler % declares it', was.name, was.handler
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = format('SELECT rouse.pause_schedule(%L) stops it. '
                                'Without schedule = true for the handler in rouse.toml, the hosts delete it.', was.name);
    END IF;
    PERFORM rouse._delete_schedule(was.name);
    RETURN true;
END
$$;

CREATE OR REPLACE FUNCTION rouse._delete_schedule(p_name text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM rouse.schedule AS s WHERE s.name = p_name;
    UPDATE rouse.backfill AS b SET finished_at = clock_timestamp(), error = 'the schedule was deleted'
    WHERE b.schedule = p_name AND b.finished_at IS NULL;
    PERFORM rouse._record_schedule('schedule_deleted', p_name, clock_timestamp());
END
$$;

-- Pauses a schedule, and returns the time at which it was paused. Nothing is enqueued for times that are due while it
-- is paused; jobs that were already enqueued still run.
CREATE OR REPLACE FUNCTION rouse.pause_schedule(name text) RETURNS timestamptz
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    was rouse.schedule := rouse._lock_schedule(pause_schedule.name);
    at  timestamptz := clock_timestamp();
BEGIN
    IF was.paused_at IS NULL THEN
        UPDATE rouse.schedule AS s SET paused_at = at, revision = nextval('rouse.turn_seq') WHERE s.name = was.name;
        PERFORM rouse._record_schedule('schedule_paused', was.name, at);
    END IF;
    RETURN coalesce(was.paused_at, at);
END
$$;

-- Resumes a paused schedule, and returns whether it was paused. Due times in between are not caught up; a backfill can
-- enqueue jobs for them.
CREATE OR REPLACE FUNCTION rouse.resume_schedule(name text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    was rouse.schedule := rouse._lock_schedule(resume_schedule.name);
    at  timestamptz := clock_timestamp();
BEGIN
    IF was.paused_at IS NULL THEN
        RETURN false;
    END IF;
    UPDATE rouse.schedule AS s
    SET paused_at = NULL, next_at = NULL, upcoming = '{}', handled_until = greatest(at, s.handled_until), revision = nextval('rouse.turn_seq')
    WHERE s.name = was.name;
    PERFORM rouse._record_schedule('schedule_resumed', was.name, at, NULL, jsonb_build_object('paused_at', was.paused_at));
    PERFORM rouse._wake_for_schedules();
    RETURN true;
END
$$;

-- The payload of a job of a schedule for a due time.
CREATE OR REPLACE FUNCTION rouse._due_payload(p_schedule rouse.schedule, p_due_at timestamptz) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN (p_schedule).due_key IS NULL THEN (p_schedule).payload
        ELSE (p_schedule).payload
             || jsonb_build_object((p_schedule).due_key, to_char(p_due_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')) END
$$;

-- Enqueues a job of a schedule as `p_id`, and returns its id, or that of the job with which a gate merges it.
CREATE OR REPLACE FUNCTION rouse._enqueue_of(
    p_schedule rouse.schedule, p_id bigint, p_payload jsonb, p_run_at timestamptz, p_after jsonb) RETURNS bigint
LANGUAGE plpgsql AS $$
BEGIN
    RETURN (SELECT e.id FROM rouse._enqueue(
        p_id, p_schedule.handler, p_payload, octet_length(p_payload::text), NULL, p_schedule.queue, p_schedule.tenant,
        -- With the collation of the name, all comparisons in rouse._enqueue would have it, and no index would serve
        -- them.
        coalesce(p_schedule.source, 'schedule:' || p_schedule.name COLLATE "default"), p_schedule.priority::text, p_run_at, p_schedule.max_attempts, NULL,
        p_schedule.tags, p_schedule.grants, p_schedule.lease, p_schedule.timeout, p_schedule.job_timeout, p_after, NULL, NULL, NULL, NULL, false,
        p_module_schedule => CASE WHEN p_schedule.module_version IS NOT NULL THEN p_schedule.name COLLATE "default" END) AS e);
END
$$;

-- Enqueues a job of a schedule for a due time, at `p_run_at` at the earliest, after `p_after`, and returns its id; null
-- if the due time has a job already. Without a due time, it is enqueued in any case. First cancels the live job
-- `p_replaces`, which the caller has locked. If a gate merges the new job with an earlier one, the id is that of the
-- earlier one; the schedule of a module may not use every job (rouse._check_merged_run). If the earlier one has ended,
-- nothing would run in place of `p_replaces`: then that job is not cancelled, and the due time is skipped. Served by
-- schedule_run_due and the primary key of rouse.job.
CREATE OR REPLACE FUNCTION rouse._enqueue_run(
    p_schedule rouse.schedule, p_due_at timestamptz, p_outcome text, p_run_at timestamptz, p_after jsonb, p_at timestamptz,
    p_replaces bigint DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    made    bigint := nextval('rouse.turn_seq');
    merged  bigint;
    run     bigint;
    payload jsonb := rouse._due_payload(p_schedule, coalesce(p_due_at, p_at));
BEGIN
    INSERT INTO rouse.schedule_run (schedule, due_at, at, outcome, job) VALUES (p_schedule.name, p_due_at, p_at, p_outcome, made)
    ON CONFLICT (schedule, due_at) WHERE job IS NOT NULL DO NOTHING
    RETURNING id INTO run;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF p_replaces IS NULL THEN
        merged := rouse._enqueue_of(p_schedule, made, payload, p_run_at, p_after);
    ELSE
        BEGIN
            -- Before the new job is enqueued: otherwise, a gate could merge that one with this one.
            PERFORM rouse._end(p_replaces, 'cancelled', NULL, NULL, 'cancelled', jsonb_build_object('schedule', p_schedule.name));
            merged := rouse._enqueue_of(p_schedule, made, payload, p_run_at, p_after);
            PERFORM FROM rouse.job AS j WHERE j.id = merged;
            IF NOT FOUND THEN
                RAISE EXCEPTION USING ERRCODE = 'RKEPT', MESSAGE = 'a gate keeps the new job out';
            END IF;
        EXCEPTION
            WHEN SQLSTATE 'RKEPT' THEN
                UPDATE rouse.schedule_run AS r SET job = NULL, outcome = 'skipped' WHERE r.id = run;
                RETURN NULL;
        END;
    END IF;
    IF merged <> made THEN
        UPDATE rouse.schedule_run AS r SET job = merged WHERE r.id = run;
    END IF;
    RETURN merged;
END
$$;

-- Enqueues a job of a schedule now and returns its id, even if the schedule is not due, is paused, or has a live job.
-- While the previous job is live, the new one does not take its place: otherwise, once the new one had ended, the next
-- due time would not see the previous one.
CREATE OR REPLACE FUNCTION rouse.run_schedule(name text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    was rouse.schedule := rouse._lock_schedule(run_schedule.name);
    at  timestamptz := clock_timestamp();
    job bigint := rouse._enqueue_run(was, NULL, 'manual', NULL, NULL, at);
BEGIN
    UPDATE rouse.schedule AS s
    SET last_job = CASE WHEN rouse._previous_job(was.last_job) IS NULL THEN job ELSE s.last_job END, revision = nextval('rouse.turn_seq')
    WHERE s.name = was.name;
    PERFORM rouse._record_schedule('schedule_run', was.name, at, job);
    RETURN job;
END
$$;

-- Requests jobs for the due times of a schedule from `since` up to, but not including, `before`, both in the past, and
-- returns the id of the backfill. Hosts enqueue them, the oldest first. Due times that already have a job do not get
-- another; overlap and jitter do not apply. A backfill with more than 10,000 due times enqueues nothing and shows an
-- error.
CREATE OR REPLACE FUNCTION rouse.backfill_schedule(name text, since timestamptz, before timestamptz) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    was rouse.schedule := rouse._lock_schedule(backfill_schedule.name);
    at  timestamptz := clock_timestamp();
    id  bigint;
BEGIN
    IF NOT coalesce(isfinite(backfill_schedule.since) AND backfill_schedule.since < backfill_schedule.before
                    AND backfill_schedule.before <= at, false)
       OR backfill_schedule.since < '1970-01-01Z' THEN
        RAISE EXCEPTION 'rouse.backfill_schedule: since must be earlier than before, and both in the past, not % and %',
            coalesce(backfill_schedule.since::text, 'null'), coalesce(backfill_schedule.before::text, 'null')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'A backfill covers the due times from since (inclusive) to before (exclusive).';
    END IF;
    IF (SELECT count(*) FROM rouse.backfill AS b WHERE b.schedule = was.name AND b.finished_at IS NULL) >= 10 THEN
        RAISE EXCEPTION 'rouse: schedule % already has 10 unfinished backfills', was.name
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Wait until a host has finished them.';
    END IF;
    INSERT INTO rouse.backfill AS b (schedule, cron, time_zone, since, before, requested_at, who)
    VALUES (was.name, was.cron, was.time_zone, backfill_schedule.since, backfill_schedule.before, at, session_user)
    RETURNING b.id INTO id;
    PERFORM rouse._record_schedule('schedule_backfilled', was.name, at, NULL,
        jsonb_build_object('backfill', id, 'since', backfill_schedule.since, 'before', backfill_schedule.before));
    PERFORM rouse._wake_for_schedules();
    RETURN id;
END
$$;

-- Every schedule, with its next five due times and the outcomes of the last five. `state`: active; paused; error:
-- nothing is enqueued, for the reason in `error`. `last_runs`: [{"due_at", "at", "outcome", "job", "state", "error"},
-- …], the latest first; `state` is that of the job. `backfills`: those that are not finished, and the last one that is.
-- Served by schedule_run_last and backfill_schedule.
CREATE OR REPLACE VIEW rouse.schedules AS
SELECT s.name, s.handler, s.cron, s.time_zone,
       CASE WHEN s.paused_at IS NOT NULL THEN 'paused' WHEN s.error IS NOT NULL THEN 'error' ELSE 'active' END AS state,
       CASE WHEN s.paused_at IS NULL AND isfinite(s.next_at) THEN s.next_at END AS next_at,
       CASE WHEN s.paused_at IS NULL THEN s.upcoming ELSE '{}' END AS upcoming,
       r.last_runs, s.last_job, s.error, s.overlap, s.catch_up, s.catch_up_window, s.jitter, s.payload, s.due_key,
       s.queue, s.tenant, coalesce(s.source, 'schedule:' || s.name) AS source, s.priority, s.max_attempts, s.tags, s.grants, s.lease, s.timeout,
       s.job_timeout, s.module_version, s.login, s.created_at, s.changed_at, s.paused_at, s.handled_until, b.backfills
FROM rouse.schedule AS s
CROSS JOIN LATERAL (
    SELECT coalesce(jsonb_agg(jsonb_strip_nulls(jsonb_build_object(
               'due_at', r.due_at, 'at', r.at, 'outcome', r.outcome, 'job', r.job, 'error', r.error,
               'state', coalesce((SELECT j.state FROM rouse.job AS j WHERE j.id = r.job),
                                 (SELECT f.state FROM rouse.finished AS f WHERE f.id = r.job LIMIT 1)))) ORDER BY r.id DESC), '[]') AS last_runs
    FROM (SELECT * FROM rouse.schedule_run AS r WHERE r.schedule = s.name ORDER BY r.id DESC LIMIT 5) AS r) AS r
CROSS JOIN LATERAL (
    SELECT coalesce(jsonb_agg(jsonb_strip_nulls(jsonb_build_object(
               'id', b.id, 'since', b.since, 'before', b.before, 'handled_until', b.handled_until, 'enqueued', b.enqueued,
               'requested_at', b.requested_at, 'who', b.who, 'finished_at', b.finished_at, 'error', b.error)) ORDER BY b.id DESC), '[]') AS backfills
    FROM (SELECT *, row_number() OVER (PARTITION BY b.finished_at IS NULL ORDER BY b.id DESC) AS n
          FROM rouse.backfill AS b WHERE b.schedule = s.name) AS b
    WHERE b.finished_at IS NULL OR b.n = 1) AS b;
