-- Workers: registration, heartbeats, challenges.
--
-- Each incarnation of a worker has a key of 32 random bytes, of which the database stores a hash. Each of its writes
-- requires the key: knowing a fence or guessing an incarnation is not enough. A worker without a heartbeat for 90 s is
-- dead, and its claims are free at once, regardless of their leases. By then its host has stopped its attempts
-- (host/src/worker/leases.rs), and it starts over if it comes back.
--
-- Errors that a host handles have their own codes:
--   RW001  this incarnation of the worker has ended (dead, or unregistered): register again
--   RW002  another host has taken over the worker id with the same key: stop
--   RW003  a live host has the worker id
--   RW004  the worker does not exist, or this is not its key, or another login registered it
--   RW005  two hosts share this worker id and its key: configure different ones
--   RW006  the login may not make the call (logins.sql)
-- Errors for operators:
--   P0002  the worker does not exist
--   55000  the state of the worker does not allow the action

-- Copies a worker to rouse.live_worker, or deletes it there when it has ended. TRUNCATE fires no trigger for each row,
-- so it has a trigger of its own.
CREATE OR REPLACE FUNCTION rouse._copy_live_worker() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF TG_OP = 'TRUNCATE' THEN
        DELETE FROM rouse.live_worker;
        RETURN NULL;
    END IF;
    IF TG_OP <> 'INSERT' THEN
        DELETE FROM rouse.live_worker AS l WHERE l.worker = OLD.incarnation;
    END IF;
    IF TG_OP <> 'DELETE' AND NEW.stopped_at IS NULL AND NEW.dead_at IS NULL THEN
        INSERT INTO rouse.live_worker (worker, worker_id, key_hash, draining, handlers, parked, queues, tags, login, limited)
        VALUES (NEW.incarnation, NEW.worker_id, NEW.key_hash, NEW.draining_at IS NOT NULL, NEW.handlers, NEW.parked, NEW.queues, NEW.tags,
                NEW.login, NEW.limited);
    END IF;
    RETURN NULL;
END
$$;
DO $$
BEGIN
    IF (SELECT count(*) FROM pg_trigger
        WHERE tgrelid = 'rouse.worker'::regclass AND tgenabled = 'O'
          AND tgname IN ('live_worker_comes_or_goes', 'live_worker_changes', 'live_workers_go')) < 3 THEN
        -- One of the triggers may have been missing or disabled for a while.
        LOCK TABLE rouse.worker IN SHARE ROW EXCLUSIVE MODE;
        DELETE FROM rouse.live_worker;
        INSERT INTO rouse.live_worker (worker, worker_id, key_hash, draining, handlers, parked, queues, tags, login, limited)
        SELECT w.incarnation, w.worker_id, w.key_hash, w.draining_at IS NOT NULL, w.handlers, w.parked, w.queues, w.tags, w.login, w.limited
        FROM rouse.worker AS w WHERE coalesce(w.stopped_at, w.dead_at) IS NULL;
    END IF;
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'rouse.worker'::regclass AND tgname = 'live_worker_comes_or_goes') THEN
        CREATE TRIGGER live_worker_comes_or_goes AFTER INSERT OR DELETE ON rouse.worker
            FOR EACH ROW EXECUTE FUNCTION rouse._copy_live_worker();
    END IF;
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'rouse.worker'::regclass AND tgname = 'live_workers_go') THEN
        CREATE TRIGGER live_workers_go AFTER TRUNCATE ON rouse.worker EXECUTE FUNCTION rouse._copy_live_worker();
    END IF;
    -- The trigger does not fire for a heartbeat that changes nothing.
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'rouse.worker'::regclass AND tgname = 'live_worker_changes') THEN
        CREATE TRIGGER live_worker_changes AFTER UPDATE ON rouse.worker
            FOR EACH ROW WHEN (
                (coalesce(OLD.stopped_at, OLD.dead_at) IS NULL) <> (coalesce(NEW.stopped_at, NEW.dead_at) IS NULL)
                OR (OLD.draining_at IS NULL) <> (NEW.draining_at IS NULL) OR OLD.key_hash IS DISTINCT FROM NEW.key_hash
                OR OLD.worker_id <> NEW.worker_id OR OLD.login <> NEW.login OR OLD.limited <> NEW.limited
                OR OLD.handlers <> NEW.handlers OR OLD.parked <> NEW.parked OR OLD.queues <> NEW.queues OR OLD.tags <> NEW.tags)
            EXECUTE FUNCTION rouse._copy_live_worker();
    END IF;
END
$$;

-- Authenticates a live worker by its key and login; rejects all other calls. Returns whether the login is limited
-- (rouse.worker_login). `p_any_login`: by its key alone. Served by the primary keys.
CREATE OR REPLACE FUNCTION rouse._authenticated_as_limited(p_worker bigint, p_key bytea, p_any_login boolean DEFAULT false) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    worker_row record;
    is_limited boolean;
BEGIN
    SELECT l.limited INTO is_limited FROM rouse.live_worker AS l
    WHERE l.worker = p_worker AND l.key_hash = sha256(p_key) AND (l.login = session_user OR p_any_login);
    IF FOUND THEN
        RETURN is_limited;
    END IF;
    SELECT w.worker_id, w.key_hash, w.dead_at, w.stopped_at INTO worker_row
    FROM rouse.worker AS w WHERE w.incarnation = p_worker AND w.key_hash = sha256(p_key) AND (w.login = session_user OR p_any_login);
    IF NOT FOUND THEN
        RAISE EXCEPTION 'rouse: no worker has incarnation % and this key', coalesce(p_worker::text, 'null') USING ERRCODE = 'RW004';
    END IF;
    IF EXISTS (SELECT FROM rouse.worker AS next
               WHERE next.worker_id = worker_row.worker_id AND next.key_hash = worker_row.key_hash AND next.incarnation > p_worker) THEN
        RAISE EXCEPTION 'rouse: another host has taken over worker id % with the same key', worker_row.worker_id
            USING ERRCODE = 'RW002', HINT = 'Each host needs its own worker id.';
    END IF;
    RAISE EXCEPTION 'rouse: incarnation % of worker % ended at %', p_worker, worker_row.worker_id, coalesce(worker_row.dead_at, worker_row.stopped_at)
        USING ERRCODE = 'RW001', HINT = 'Register again.';
END
$$;

-- Counts refused writes of a worker to jobs that another worker has claimed, except jobs that it has lost to a later
-- claim.
CREATE OR REPLACE FUNCTION rouse._count_refused(p_worker bigint, p_ids bigint[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    others bigint := (SELECT count(*) FROM unnest(p_ids) AS a(id)
                      JOIN rouse.job AS j ON j.id = ANY (ARRAY[a.id]) WHERE j.worker <> p_worker);
BEGIN
    IF others > 0 THEN
        UPDATE rouse.worker AS w SET refused = w.refused + others WHERE w.incarnation = p_worker;
    END IF;
END
$$;

-- Flags the worker for each of these attempts that reached its run timeout and whose outcome was accepted: one write
-- for the batch, or none if there is no such attempt. With `p_skip_locked`, a locked row of rouse.worker is skipped, so
-- that an outcome does not wait for it twice.
CREATE OR REPLACE FUNCTION rouse._flag_timeouts(p_worker bigint, p_settlements rouse.settlement[], p_accepted bigint[], p_skip_locked boolean) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    at    timestamptz := clock_timestamp();
    count bigint;
    last  bigint;
    lane  bigint;
BEGIN
    SELECT count(*), (array_agg(s.id ORDER BY s.ordinality DESC))[1] INTO count, last
    FROM unnest(p_settlements) WITH ORDINALITY AS s
    WHERE s.error ->> 'kind' = 'timed_out' AND s.id = ANY (p_accepted);
    IF count = 0 THEN
        RETURN;
    END IF;
    IF p_skip_locked THEN
        PERFORM FROM rouse.worker AS w WHERE w.incarnation = p_worker FOR NO KEY UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            RETURN;
        END IF;
    END IF;
    SELECT j.lane INTO lane FROM rouse.job AS j WHERE j.id = last;
    IF NOT FOUND THEN
        SELECT f.lane INTO lane FROM rouse.finished AS f WHERE f.id = last LIMIT 1;
    END IF;
    UPDATE rouse.worker AS w
    SET timeouts = w.timeouts + count, timed_out_since = coalesce(w.timed_out_since, at), timed_out_at = at, timed_out_job = last,
        timed_out_handler = (SELECT l.handler FROM rouse.lane AS l WHERE l.id = lane LIMIT 1)
    WHERE w.incarnation = p_worker;
END
$$;

-- A host serves at most 10,000 handlers (host/src/sandbox/catalog).
CREATE OR REPLACE FUNCTION rouse._check_handler_count(p_capabilities jsonb) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    count bigint := (SELECT count(*) FROM jsonb_object_keys(p_capabilities));
BEGIN
    IF count > 10000 THEN
        RAISE EXCEPTION 'rouse.register: capabilities have % handlers; at most 10000 are allowed', count USING ERRCODE = 'program_limit_exceeded';
    END IF;
END
$$;

-- The total size is checked first, because the other checks read every handler. It allows 10,000 handlers with names of
-- 128 characters and capabilities of 400 bytes.
CREATE OR REPLACE FUNCTION rouse._check_capabilities(p_capabilities jsonb) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    problem text;
BEGIN
    PERFORM rouse._check_size('register', pg_column_size(p_capabilities), 8388608);
    IF p_capabilities IS NULL OR jsonb_typeof(p_capabilities) <> 'object'
       OR EXISTS (SELECT FROM jsonb_each(p_capabilities) AS c WHERE jsonb_typeof(c.value) <> 'object') THEN
        RAISE EXCEPTION 'rouse.register: capabilities must be an object with an object for each handler, not %',
            coalesce(left(p_capabilities::text, 140), 'null') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT c.key INTO problem FROM jsonb_each(p_capabilities) AS c
    WHERE c.key !~ '^[a-z0-9][a-z0-9_-]*([.][a-z0-9][a-z0-9_-]*)*$' OR length(c.key) > 128 LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'rouse.register: capabilities: % is not a handler name', quote_literal(left(problem, 140))
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Lower-case words (also with digits, - and _) joined by dots, at most 128 characters.';
    END IF;
    PERFORM rouse._check_handler_count(p_capabilities);
    SELECT format('capabilities of handler %s: %s', c.key, of.problem) INTO problem
    FROM jsonb_each(p_capabilities) AS c
    CROSS JOIN LATERAL (SELECT CASE
        WHEN jsonb_typeof(c.value -> 'version') NOT IN ('string', 'null') OR length(c.value ->> 'version') > 255
            THEN 'version must be a string of at most 255 characters'
        WHEN jsonb_typeof(c.value -> 'sha256') <> 'string' OR c.value ->> 'sha256' !~ '^(sha256:)?[0-9a-f]{64}$'
            THEN 'sha256 must be 64 hexadecimal digits'
        WHEN jsonb_typeof(c.value -> 'grants') <> 'array' OR jsonb_path_exists(c.value, '$.grants[*] ? (@.type() != "string")')
            THEN 'grants must be an array of strings'
        WHEN jsonb_typeof(c.value -> 'max_attempts') NOT IN ('number', 'null') THEN 'max_attempts must be a number'
        WHEN jsonb_typeof(c.value -> 'concurrency') NOT IN ('number', 'null') OR c.value ->> 'concurrency' !~ '^[1-9][0-9]{0,6}$'
            THEN 'concurrency must be a whole number from 1 to 9999999'
        WHEN jsonb_typeof(c.value -> 'schedule') NOT IN ('object', 'null') THEN 'schedule must be an object'
        WHEN jsonb_typeof(c.value -> 'payload_keys') NOT IN ('array', 'null') THEN 'payload_keys must be an array'
        WHEN jsonb_typeof(c.value -> 'parked') NOT IN ('string', 'null') OR length(c.value ->> 'parked') > 4096
            THEN 'parked must be a string of at most 4096 characters'
    END AS problem) AS of
    WHERE of.problem IS NOT NULL
    LIMIT 1;
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION 'rouse.register: %', problem USING ERRCODE = 'invalid_parameter_value';
    END IF;
END
$$;

-- An object without its keys whose value is null; any other value unchanged.
CREATE OR REPLACE FUNCTION rouse._without_nulls(p_value jsonb) RETURNS jsonb
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE jsonb_typeof(p_value) WHEN 'object' THEN
        (SELECT coalesce(jsonb_object_agg(e.key, e.value), '{}') FROM jsonb_each(p_value) AS e WHERE jsonb_typeof(e.value) <> 'null')
        ELSE p_value END
$$;

-- The capabilities of a worker after a heartbeat has reported these changes: by handler, null for one that the worker
-- no longer has. Those that have not changed are not checked again, except for their number and their size.
CREATE OR REPLACE FUNCTION rouse._change_capabilities(p_before jsonb, p_changes jsonb) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
    changed jsonb;
BEGIN
    -- After a heartbeat that got no response, the changes are all capabilities, and names of handlers that may be gone.
    PERFORM rouse._check_size('heartbeat', pg_column_size(p_changes), 16777216);
    PERFORM rouse._check_capabilities(rouse._without_nulls(p_changes));
    changed := rouse._without_nulls(p_before || p_changes);
    PERFORM rouse._check_size('heartbeat', pg_column_size(changed), 8388608);
    PERFORM rouse._check_handler_count(changed);
    RETURN changed;
END
$$;

-- The handlers that are parked, of those that a worker has registered.
CREATE OR REPLACE FUNCTION rouse._parked(p_capabilities jsonb) RETURNS text[]
LANGUAGE sql IMMUTABLE AS $$
    SELECT ARRAY(SELECT c.key FROM jsonb_each(p_capabilities) AS c WHERE c.value ->> 'parked' IS NOT NULL)
$$;

-- True for a count, or for null.
CREATE OR REPLACE FUNCTION rouse._is_count(p_value jsonb) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(p_value::text ~ '^([0-9]{1,15}|null)$', true)
$$;

-- The statistics of a worker are an object of at most 64 KiB. The statistics of all workers are added up by queue: a
-- value that is not a number, or a missing queue, would make the statement fail for all of them.
CREATE OR REPLACE FUNCTION rouse._check_stats(p_name text, p_stats jsonb) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    problem text;
BEGIN
    PERFORM rouse._check_size(p_name, pg_column_size(p_stats), 65536);
    IF jsonb_typeof(p_stats) <> 'object' THEN
        RAISE EXCEPTION 'rouse.%: stats must be an object, not %', p_name, left(p_stats::text, 140) USING ERRCODE = 'invalid_parameter_value';
    END IF;
    problem := CASE
        WHEN NOT rouse._is_count(p_stats -> 'failed') THEN 'failed must be a count'
        WHEN jsonb_typeof(p_stats -> 'fair') <> 'array' THEN 'fair must be an array'
    END;
    IF problem IS NULL AND p_stats ? 'fair' THEN
        SELECT of.problem INTO problem
        FROM jsonb_array_elements(p_stats -> 'fair') AS f
        LEFT JOIN LATERAL jsonb_array_elements(CASE jsonb_typeof(f.value -> 'keys') WHEN 'array' THEN f.value -> 'keys' END) AS k ON true
        CROSS JOIN LATERAL (SELECT CASE
            WHEN jsonb_typeof(f.value -> 'keys') <> 'array' THEN 'keys must be an array'
            WHEN NOT (rouse._is_count(f.value -> 'rounds') AND rouse._is_count(f.value -> 'promotions')) THEN 'rounds and promotions must be counts'
            WHEN NOT (rouse._is_count(k.value -> 'selected') AND rouse._is_count(k.value -> 'deferred') AND rouse._is_count(k.value -> 'promotions'))
                THEN 'selected, deferred and promotions of a key must be counts'
            -- A number that is too small for double precision would also be an error.
            WHEN (k.value -> 'deficit')::text !~ '^(-?[0-9]{1,15}([.][0-9]{1,255})?|null)$' THEN 'deficit must be a number'
            WHEN jsonb_typeof(f.value -> 'queue') IS DISTINCT FROM 'string' THEN 'queue must be a string'
        END AS problem) AS of
        WHERE of.problem IS NOT NULL
        LIMIT 1;
    END IF;
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION 'rouse.%: stats: %', p_name, problem USING ERRCODE = 'invalid_parameter_value';
    END IF;
END
$$;

-- Expires a worker: its claims can be adopted shortly afterwards. Its leases end 50 ms from now, usually after this
-- commits: a claim checks the leases that have ended since the previous check (rouse.claim). If the commit takes
-- longer, the next sweep finds the orphans. Its inboxes are emptied (direct.sql). Served by job_lease, all of whose
-- rows are read; this happens once per incarnation.
CREATE OR REPLACE FUNCTION rouse._expire_worker(p_worker bigint) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    at     timestamptz := clock_timestamp();
    queues text[];
BEGIN
    -- The condition is that of rouse._authenticated_as_limited. Of its capabilities, which may be megabytes, only the
    -- names of its handlers are kept (rouse.backlog).
    UPDATE rouse.worker AS w SET dead_at = at, capabilities = '{}'
    WHERE w.incarnation = p_worker AND coalesce(w.stopped_at, w.dead_at) IS NULL;
    DELETE FROM rouse.sleeper AS s
    WHERE (s.worker, s.until) > (p_worker, at) AND (s.worker, s.until) <= (p_worker, 'infinity'::timestamptz);
    -- Its shards are free. A lease that one of its claims holds expires on its own, so that nothing waits.
    WITH free AS MATERIALIZED (SELECT s.queue FROM rouse.shard_lease AS s WHERE s.worker = p_worker FOR UPDATE SKIP LOCKED)
    DELETE FROM rouse.shard_lease AS s USING free AS f WHERE s.worker = p_worker AND s.queue = f.queue;
    -- A row that another session is changing keeps its lease, so that nothing waits.
    WITH free AS MATERIALIZED (
        SELECT j.id FROM rouse.job AS j
        WHERE j.state = 'running' AND j.lease_until > at + interval '50 ms' AND j.worker = p_worker
        FOR NO KEY UPDATE SKIP LOCKED),
    freed AS (
        UPDATE rouse.job AS j SET lease_until = at + interval '50 ms' FROM free WHERE j.id = ANY (ARRAY[free.id]) RETURNING j.lane)
    SELECT array_agg(DISTINCT l.queue) INTO queues
    FROM (SELECT DISTINCT freed.lane FROM freed) AS f
    CROSS JOIN LATERAL (SELECT l.queue FROM rouse.lane AS l WHERE l.id = f.lane LIMIT 1) AS l;
    -- Without a lane: a worker that receives it looks for orphans too.
    PERFORM rouse._hint('rouse_wake', q) FROM unnest(queues) AS q;
    PERFORM rouse._empty_inboxes(p_worker);
    -- It may still be alive, behind a broken network.
    PERFORM rouse._hint('rouse_worker_' || p_worker, '');
END
$$;

-- Registers an incarnation of a worker. Its id is unique among live workers. A host that has the key of the holder, and
-- the same login, takes over the id at once; other hosts can take it 90 s after the last heartbeat of the holder. If
-- the last heartbeat is more than 10 s in the future, the clock has been set back, and the holder may be alive or dead.
-- It counts as alive, because a live worker would otherwise lose its attempts: the heartbeat then counts as sent now,
-- and `incarnation` is null: call again. An error would undo this. rouse.forget_worker has the same rule.
--
-- Two hosts that share an id and a key would take the id from each other for as long as their supervisors restart them,
-- and each takeover costs every running job an attempt. So the replaced host reports that it was still alive
-- (rouse.outlived). After that, the id stays with its holder for 10 minutes, as long as it sends heartbeats. A report
-- that is more than 10 minutes in the future does not count, because then the clock has been set back. Waits for locks
-- as a heartbeat does. Served by worker_replaced.
--
--   key           32 bytes, random for each incarnation or pinned by the operator
--   capabilities  {"handler": {"version": …, "grants": […]}, …}
--   slots         the maximum number of concurrent attempts
--   queues        the queues that it serves, in order; empty: all
--   tags          it gets no jobs that require other tags; a word, or key=value
--   stats         as in a heartbeat; null: none yet
CREATE OR REPLACE FUNCTION rouse.register(
    p_worker_id text, p_key bytea, p_hostname text, p_platform text, p_version text,
    p_capabilities jsonb, p_slots integer, p_queues text[], p_tags text[], p_stats jsonb DEFAULT NULL,
    OUT incarnation bigint, OUT heartbeat_ms bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s'
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at         timestamptz;
    holder     record;
    flag       record;
    is_limited boolean;
    is_live    boolean;
BEGIN
    IF p_worker_id IS NULL OR p_worker_id !~ '^[A-Za-z0-9_-]{1,64}$' THEN
        RAISE EXCEPTION 'rouse.register: % is not a worker id', coalesce(quote_literal(left(p_worker_id, 80)), 'null')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'At most 64 letters, digits, - and _.';
    END IF;
    IF p_key IS NULL OR octet_length(p_key) <> 32 THEN
        RAISE EXCEPTION 'rouse.register: a key is 32 bytes long, not %', coalesce(octet_length(p_key)::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM rouse._check_worker(p_hostname, p_platform, p_version, p_slots, p_queues, p_tags);
    PERFORM rouse._check_capabilities(p_capabilities);
    PERFORM rouse._check_stats('register', p_stats);
    is_limited := rouse._admit(p_worker_id, p_queues, p_tags);
    -- One registration at a time for each id.
    PERFORM rouse._lock('register', p_worker_id);
    -- Locked, so that a heartbeat that has not committed yet counts. The condition applies after a wait too.
    SELECT w.incarnation, w.key_hash, w.hostname, w.seen_at, w.login INTO holder
    FROM rouse.live_worker AS l CROSS JOIN LATERAL (
        SELECT n.incarnation, n.key_hash, n.hostname, n.seen_at, n.login FROM rouse.worker AS n
        WHERE n.incarnation = l.worker AND coalesce(n.stopped_at, n.dead_at) IS NULL ORDER BY n.seen_at DESC LIMIT 1 FOR UPDATE) AS w
    WHERE l.worker_id = p_worker_id;
    at := clock_timestamp();
    IF holder.incarnation IS NOT NULL THEN
        IF holder.seen_at > at + interval '10 seconds' THEN
            UPDATE rouse.worker AS w SET seen_at = at WHERE w.incarnation = holder.incarnation;
            RETURN;
        END IF;
        is_live := holder.seen_at > at - interval '90 seconds';
        IF is_live AND (holder.key_hash IS DISTINCT FROM sha256(p_key) OR holder.login <> session_user) THEN
            RAISE EXCEPTION 'rouse.register: worker id % is taken by a live host (%, last heartbeat % s ago)',
                p_worker_id, holder.hostname, greatest(round(extract(epoch FROM at - holder.seen_at)), 0)
                USING ERRCODE = 'RW003',
                      HINT = 'Choose another id. If that host is gone, its id is free 90 s after its last heartbeat, or at once for a host that has its key (worker_key_file).';
        END IF;
        IF is_live AND EXISTS (
            SELECT FROM rouse.worker AS w
            WHERE w.worker_id = p_worker_id AND w.replaced_at IS NOT NULL
              AND w.outlived_at > at - interval '10 minutes' AND w.outlived_at <= at + interval '10 minutes')
        THEN
            RAISE EXCEPTION 'rouse.register: two hosts share worker id % and its key; it is held by the one on % (last heartbeat % s ago)',
                p_worker_id, holder.hostname, greatest(round(extract(epoch FROM at - holder.seen_at)), 0)
                USING ERRCODE = 'RW005',
                      HINT = 'Give each host its own worker id (worker_id) and key file (worker_key_file). If that host is gone, its id is free 90 s after its last heartbeat.';
        END IF;
        PERFORM rouse._expire_worker(holder.incarnation);
        -- A host with another key, which has taken the id of a dead one, does not share it.
        UPDATE rouse.worker AS w SET replaced_at = at
        WHERE w.incarnation = holder.incarnation AND w.key_hash = sha256(p_key);
    ELSE
        -- Somebody has deleted the row of a live worker with its triggers disabled.
        DELETE FROM rouse.live_worker AS l
        WHERE l.worker_id = p_worker_id
          AND NOT EXISTS (SELECT FROM rouse.worker AS w WHERE w.incarnation = l.worker OFFSET 0);
    END IF;
    -- The timeout flag carries over to new incarnations until it is cleared.
    SELECT w.timeouts, w.timed_out_since, w.timed_out_at, w.timed_out_job, w.timed_out_handler INTO flag
    FROM rouse.worker AS w WHERE w.worker_id = p_worker_id AND w.forgotten_at IS NULL ORDER BY w.incarnation DESC LIMIT 1;
    incarnation := nextval('rouse.worker_incarnation_seq');
    PERFORM FROM rouse.worker AS w WHERE w.incarnation = register.incarnation LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'rouse.register: incarnation % was already assigned: its sequence is behind the rows of rouse.worker', incarnation
            USING ERRCODE = 'unique_violation',
                  HINT = 'As rouse_owner: SELECT setval(''rouse.worker_incarnation_seq'', max(incarnation)) FROM rouse.worker.';
    END IF;
    INSERT INTO rouse.worker (incarnation, worker_id, key_hash, hostname, platform, version, handlers, parked, capabilities, slots, queues, tags, limited,
                              stats, stats_at, timeouts, timed_out_since, timed_out_at, timed_out_job, timed_out_handler)
    OVERRIDING SYSTEM VALUE
    VALUES (register.incarnation, p_worker_id, sha256(p_key), p_hostname, p_platform, p_version,
            ARRAY(SELECT jsonb_object_keys(p_capabilities)), rouse._parked(p_capabilities), p_capabilities, p_slots, p_queues, p_tags, is_limited,
            p_stats, CASE WHEN p_stats IS NOT NULL THEN at END,
            coalesce(flag.timeouts, 0), flag.timed_out_since, flag.timed_out_at, flag.timed_out_job, flag.timed_out_handler);
    heartbeat_ms := 30000;
END
$$;

-- Reports that a host is still alive although this incarnation of its worker has ended: it was declared dead, or
-- replaced by another host. The attempts that it lost because of that do not count as crashes (rouse._crashes). Has no
-- effect on a live incarnation. Waits for locks as a heartbeat does.
CREATE OR REPLACE FUNCTION rouse.outlived(p_worker bigint, p_key bytea) RETURNS void
-- In PL/pgSQL: the error of a lock then names the function with its schema (StoreError::waits_for in
-- host/src/store/error.rs).
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' SET enable_seqscan = off SET jit = off AS $$
BEGIN
    UPDATE rouse.worker AS w SET outlived_at = clock_timestamp()
    WHERE w.incarnation = p_worker AND w.key_hash = sha256(p_key) AND w.login = session_user AND (w.dead_at IS NOT NULL OR w.stopped_at IS NOT NULL);
END
$$;

-- Reports that the worker is alive, the changes to its capabilities (rouse._change_capabilities; null: none), its
-- statistics, and whether it is draining; and expires workers without a heartbeat for 90 s. Returns the number of
-- expired workers, the number of attempts in the worker's own timeout flag, and the number of heartbeats that have
-- changed its capabilities. If a failover has lost an accepted change, this is not the number that the host expects.
-- Waits up to 5 s for a lock, because rouse.clear_timeouts locks the row of the worker. This is a third of the time that
-- a host waits for a response (RESPONSE_TIMEOUT in host/src/store.rs). A call that waited longer would still be waiting
-- when the host tries again, and each try would add a session.
CREATE OR REPLACE FUNCTION rouse.heartbeat(
    p_worker bigint, p_key bytea, p_changes jsonb, p_stats jsonb, p_draining boolean,
    OUT expired integer, OUT timeouts bigint, OUT changes bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s'
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    at      timestamptz := clock_timestamp();
    changed jsonb;
    -- The newest version of the row of a worker. Old ones are not read.
    own     tid;
    other   bigint;
    last    record;
BEGIN
    expired := 0;
    PERFORM rouse._authenticated_as_limited(p_worker, p_key);
    PERFORM rouse._check_stats('heartbeat', p_stats);
    SELECT w.ctid INTO own FROM rouse.worker AS w WHERE w.incarnation = p_worker ORDER BY w.seen_at DESC LIMIT 1 FOR UPDATE;
    IF p_changes IS NOT NULL THEN
        SELECT w.capabilities INTO changed FROM rouse.worker AS w WHERE w.ctid = own AND coalesce(w.stopped_at, w.dead_at) IS NULL;
        changed := rouse._change_capabilities(changed, p_changes);
        -- Postgres computes `schedules` in each statement that sets `capabilities`.
        UPDATE rouse.worker AS w
        SET handlers = ARRAY(SELECT jsonb_object_keys(changed)), parked = rouse._parked(changed), capabilities = changed,
            changes = w.changes + 1
        WHERE w.ctid = own AND coalesce(w.stopped_at, w.dead_at) IS NULL
        RETURNING w.ctid INTO own;
    END IF;
    UPDATE rouse.worker AS w
    SET seen_at = at, stats = p_stats, stats_at = at,
        draining_at = CASE WHEN p_draining THEN coalesce(w.draining_at, at) END
    WHERE w.ctid = own AND coalesce(w.stopped_at, w.dead_at) IS NULL
    RETURNING w.timeouts, w.changes INTO timeouts, changes;
    IF NOT FOUND THEN
        -- The incarnation ended while the call waited for its row.
        PERFORM rouse._authenticated_as_limited(p_worker, p_key);
        -- Or only rouse.live_worker still has it, because somebody has deleted its row with the triggers disabled.
        RAISE EXCEPTION 'rouse: no worker has incarnation % and this key', p_worker USING ERRCODE = 'RW004';
    END IF;
    IF p_draining THEN
        PERFORM rouse._empty_inboxes(p_worker);
    END IF;
    -- Other workers whose last heartbeat is too old, or in the future. The call may have waited until now.
    at := clock_timestamp();
    FOR other IN
        SELECT l.worker FROM rouse.live_worker AS l
        WHERE l.worker > 0 AND (
            SELECT w.seen_at BETWEEN at - interval '90 seconds' AND at + interval '10 seconds' FROM rouse.worker AS w
            WHERE w.incarnation = l.worker ORDER BY w.seen_at DESC LIMIT 1) IS NOT TRUE
        ORDER BY l.worker_id
    LOOP
        -- Workers that another session is expiring are left to that session.
        SELECT w.seen_at, w.ctid AS row INTO last FROM rouse.worker AS w
        WHERE w.incarnation = other AND coalesce(w.stopped_at, w.dead_at) IS NULL ORDER BY w.seen_at DESC LIMIT 1 FOR UPDATE SKIP LOCKED;
        IF last.seen_at > at + interval '10 seconds' THEN
            -- The clock has been set back since: the heartbeat counts as sent now. Otherwise, a dead worker would count
            -- as alive for as long as the clock was set back.
            UPDATE rouse.worker AS w SET seen_at = at WHERE w.ctid = last.row;
        ELSIF last.seen_at < at - interval '90 seconds' THEN
            PERFORM rouse._expire_worker(other);
            expired := expired + 1;
        END IF;
    END LOOP;
END
$$;

-- Reports that the worker has stopped. Its remaining claims are free at once. Waits for locks as a heartbeat does.
CREATE OR REPLACE FUNCTION rouse.unregister(p_worker bigint, p_key bytea) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' SET enable_seqscan = off SET jit = off AS $$
BEGIN
    PERFORM rouse._authenticated_as_limited(p_worker, p_key);
    PERFORM rouse._expire_worker(p_worker);
    UPDATE rouse.worker AS w SET stopped_at = w.dead_at, dead_at = NULL WHERE w.incarnation = p_worker;
END
$$;

-- Deletes the rows of ended incarnations that are older than all history that could refer to them: of those that were
-- forgotten, and of those whose worker has started again since. A worker cannot be forgotten while it is alive, so a
-- worker with a fixed id would otherwise leave a row for each start. Reads all rows of rouse.worker; running jobs are
-- found by job_lease.
CREATE OR REPLACE FUNCTION rouse._delete_old_workers() RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    kept_from timestamptz;
    ended     bigint[];
BEGIN
    SELECT min(p.first_day)::timestamp AT TIME ZONE 'UTC' INTO kept_from FROM rouse._partitions() AS p WHERE p.parent IN ('finished', 'attempt', 'record');
    -- Waits for no other transaction. NOT IN is never a join, so the rows are not compared with each other.
    ended := ARRAY(
        SELECT w.incarnation FROM rouse.worker AS w
        WHERE coalesce(w.forgotten_at, w.stopped_at, w.dead_at) < kept_from
          AND (w.forgotten_at IS NOT NULL OR w.incarnation NOT IN (SELECT max(n.incarnation) FROM rouse.worker AS n GROUP BY n.worker_id))
        FOR UPDATE SKIP LOCKED);
    IF ended <> '{}' THEN
        DELETE FROM rouse.worker AS w
        WHERE w.incarnation = ANY (ended) AND NOT EXISTS (
            SELECT FROM rouse.job AS j WHERE j.state = 'running' AND j.lease_until > '-infinity' AND j.worker = w.incarnation);
    END IF;
END
$$;

-- Removes the ended incarnations of a worker from listings, and returns their number. Refused while one of them is
-- alive. If its last heartbeat is more than 10 s in the future, the clock has been set back, and it counts as alive, as
-- in rouse.register: the heartbeat then counts as sent now, nothing is removed, and the result is null: call again. An
-- error would undo this. Everything that ended incarnations have reported is deleted at once; the rows are deleted once
-- they are older than all history (rouse._delete_old_workers).
CREATE OR REPLACE FUNCTION rouse.forget_worker(worker_id text) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET datestyle = 'ISO'
SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at        timestamptz;
    holder    record;
    forgotten integer;
BEGIN
    -- The lock of rouse.register: no incarnation of this id can start in the meantime.
    PERFORM rouse._lock('register', forget_worker.worker_id);
    -- As in rouse.register.
    SELECT w.incarnation, w.hostname, w.seen_at INTO holder
    FROM rouse.live_worker AS l CROSS JOIN LATERAL (
        SELECT n.incarnation, n.hostname, n.seen_at FROM rouse.worker AS n
        WHERE n.incarnation = l.worker AND coalesce(n.stopped_at, n.dead_at) IS NULL ORDER BY n.seen_at DESC LIMIT 1 FOR UPDATE) AS w
    WHERE l.worker_id = forget_worker.worker_id;
    at := clock_timestamp();
    IF holder.incarnation IS NOT NULL THEN
        IF holder.seen_at > at + interval '10 seconds' THEN
            UPDATE rouse.worker AS w SET seen_at = at WHERE w.incarnation = holder.incarnation;
            RAISE NOTICE
                'rouse.forget_worker: the last heartbeat of worker % was dated in the future; it counts as sent now',
                forget_worker.worker_id
                USING HINT = 'Call again. If the worker is gone, it counts as dead in 90 s.';
            RETURN NULL;
        END IF;
        IF holder.seen_at > at - interval '90 seconds' THEN
            RAISE EXCEPTION 'rouse.forget_worker: worker % is alive (%, last heartbeat % s ago)', forget_worker.worker_id, holder.hostname,
                greatest(round(extract(epoch FROM at - holder.seen_at)), 0)
                USING ERRCODE = 'object_not_in_prerequisite_state',
                      HINT = 'Stop it first. If it is gone, it counts as dead 90 s after its last heartbeat.';
        END IF;
        PERFORM rouse._expire_worker(holder.incarnation);
    END IF;
    -- From the newest, which is the holder, to the oldest, as in rouse.clear_timeouts, so that two calls never wait for
    -- each other.
    PERFORM FROM rouse.worker AS w
    WHERE w.worker_id = forget_worker.worker_id AND w.forgotten_at IS NULL ORDER BY w.incarnation DESC FOR UPDATE;
    UPDATE rouse.worker AS w
    SET forgotten_at = at, key_hash = NULL, hostname = '', platform = '', version = '', slots = 0, refused = 0,
        timeouts = 0, timed_out_since = NULL, timed_out_at = NULL, timed_out_job = NULL, timed_out_handler = NULL,
        handlers = '{}', parked = '{}', capabilities = '{}', queues = '{}', tags = '{}', stats = NULL, stats_at = NULL
    WHERE w.worker_id = forget_worker.worker_id AND w.forgotten_at IS NULL;
    GET DIAGNOSTICS forgotten = ROW_COUNT;
    IF forgotten = 0 THEN
        RAISE EXCEPTION 'rouse.forget_worker: worker % does not exist', coalesce(quote_literal(left(forget_worker.worker_id, 80)), 'null')
            USING ERRCODE = 'no_data_found', HINT = 'SELECT worker_id FROM rouse.workers lists those that can be forgotten.';
    END IF;
    PERFORM rouse._ensure_partitions(at);
    INSERT INTO rouse.record (at, event, who, detail)
    VALUES (at, 'forgotten', session_user, jsonb_build_object('worker_id', forget_worker.worker_id, 'incarnations', forgotten));
    PERFORM rouse._delete_old_workers();
    RETURN forgotten;
END
$$;

-- Clears the timeout flag of all incarnations of a worker, and returns the number of incarnations that had it. Leaves a
-- record.
CREATE OR REPLACE FUNCTION rouse.clear_timeouts(worker_id text) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at      timestamptz := clock_timestamp();
    cleared integer;
    seen    bigint;
BEGIN
    PERFORM FROM rouse.worker AS w WHERE w.worker_id = clear_timeouts.worker_id AND w.forgotten_at IS NULL;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'rouse.clear_timeouts: worker % does not exist', coalesce(quote_literal(left(clear_timeouts.worker_id, 80)), 'null')
            USING ERRCODE = 'no_data_found', HINT = 'SELECT worker_id, timeouts FROM rouse.workers lists them.';
    END IF;
    WITH flagged AS (
        SELECT w.incarnation, w.timeouts FROM rouse.worker AS w
        WHERE w.worker_id = clear_timeouts.worker_id AND w.timed_out_since IS NOT NULL
        -- In the order of rouse.forget_worker.
        ORDER BY w.incarnation DESC FOR NO KEY UPDATE),
    done AS (
        UPDATE rouse.worker AS w
        SET timeouts = 0, timed_out_since = NULL, timed_out_at = NULL, timed_out_job = NULL, timed_out_handler = NULL
        FROM flagged AS f WHERE w.incarnation = f.incarnation)
    -- The count carries over from one incarnation to the next.
    SELECT count(*), max(f.timeouts) INTO cleared, seen FROM flagged AS f;
    IF cleared > 0 THEN
        PERFORM rouse._ensure_partitions(at);
        INSERT INTO rouse.record (at, event, who, detail)
        VALUES (at, 'timeouts_cleared', session_user,
                jsonb_build_object('worker_id', clear_timeouts.worker_id, 'incarnations', cleared, 'timeouts', seen));
    END IF;
    RETURN cleared;
END
$$;

-- Challenges a live worker to prove that it has the module of the handler; returns the unguessable nonce that its
-- answer will quote. The worker is notified at once if it is listening; otherwise it reads the challenge at its next
-- heartbeat. About 100 challenges of a worker may be open at a time (concurrent calls may slightly exceed this number).
-- Each call deletes up to 100 challenges that are older than a day. Served by the keys of rouse.live_worker and
-- rouse.worker, challenge_open and challenge_asked.
CREATE OR REPLACE FUNCTION rouse.challenge(worker_id text, handler text) RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at        timestamptz := clock_timestamp();
    target    bigint;
    pending   bigint;
    new_nonce uuid;
BEGIN
    IF challenge.handler IS NULL OR challenge.handler !~ '^[a-z0-9][a-z0-9_-]*([.][a-z0-9][a-z0-9_-]*)*$' OR length(challenge.handler) > 128 THEN
        RAISE EXCEPTION 'rouse.challenge: % is not a handler name', coalesce(quote_literal(left(challenge.handler, 140)), 'null')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Handler names are lower-case words joined by dots; at most 128 characters.';
    END IF;
    SELECT w.incarnation INTO target
    FROM rouse.live_worker AS l CROSS JOIN LATERAL (
        SELECT * FROM rouse.worker AS n WHERE n.incarnation = l.worker ORDER BY n.seen_at DESC LIMIT 1) AS w
    WHERE l.worker_id = challenge.worker_id AND w.seen_at >= at - interval '90 seconds';
    IF NOT FOUND THEN
        RAISE EXCEPTION 'rouse.challenge: worker % is not alive', coalesce(quote_literal(left(challenge.worker_id, 80)), 'null')
            USING ERRCODE = 'no_data_found', HINT = 'SELECT worker_id FROM rouse.workers WHERE state IN (''active'', ''draining'') lists those that are.';
    END IF;
    DELETE FROM rouse.challenge AS c WHERE c.nonce = ANY (ARRAY(
        SELECT o.nonce FROM rouse.challenge AS o WHERE o.asked_at < at - interval '1 day'
        ORDER BY o.asked_at LIMIT 100 FOR UPDATE SKIP LOCKED));
    -- Challenges that the worker can still see; see rouse.challenges.
    SELECT count(*) INTO pending FROM (
        SELECT FROM rouse.challenge AS c
        WHERE c.worker = target AND c.answered_at IS NULL AND c.asked_at > at - interval '10 minutes' LIMIT 100) AS c;
    IF pending >= 100 THEN
        RAISE EXCEPTION 'rouse.challenge: worker % has 100 unanswered challenges of the last 10 minutes', challenge.worker_id
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'Try again when it has answered, or 10 minutes after they were created.';
    END IF;
    INSERT INTO rouse.challenge AS c (worker, handler) VALUES (target, challenge.handler) RETURNING c.nonce INTO new_nonce;
    PERFORM rouse._hint('rouse_worker_' || target, 'challenge');
    RETURN new_nonce;
END
$$;

-- The answer to a challenge; null if there is no answer yet, or no such challenge.
CREATE OR REPLACE FUNCTION rouse.challenge_answer(nonce uuid) RETURNS jsonb
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT c.answer FROM rouse.challenge AS c WHERE c.nonce = challenge_answer.nonce
$$;

-- The open challenges of this incarnation, without those that are too old to wait for. Served by challenge_open.
CREATE OR REPLACE FUNCTION rouse.challenges(p_worker bigint, p_key bytea) RETURNS TABLE (nonce uuid, handler text)
LANGUAGE plpgsql SECURITY DEFINER ROWS 10 SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    PERFORM rouse._authenticated_as_limited(p_worker, p_key);
    RETURN QUERY
    SELECT c.nonce, c.handler FROM rouse.challenge AS c
    WHERE c.worker = p_worker AND c.answered_at IS NULL AND c.asked_at > clock_timestamp() - interval '10 minutes'
    ORDER BY c.asked_at LIMIT 10;
END
$$;

-- Answers a challenge, once. Returns false if the challenge is not this worker's, or has already been answered.
CREATE OR REPLACE FUNCTION rouse.answer_challenge(p_worker bigint, p_key bytea, p_nonce uuid, p_answer jsonb) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
BEGIN
    PERFORM rouse._authenticated_as_limited(p_worker, p_key);
    PERFORM rouse._check_size('answer_challenge', pg_column_size(p_answer), 65536);
    UPDATE rouse.challenge AS c SET answer = p_answer, answered_at = clock_timestamp()
    WHERE c.nonce = p_nonce AND c.worker = p_worker AND c.answered_at IS NULL;
    RETURN FOUND;
END
$$;
