-- Workers: registration, heartbeats, challenges.
--
-- Each life of a worker has a key of 32 random bytes, of which the database keeps a hash, and each of its writes needs it: knowing a
-- fence is not enough, nor guessing an incarnation. A worker that is not heard of for 90 s is dead, and what it has claimed is free at
-- once, however long the leases.
--
-- Errors that a host branches on have codes of their own:
--   RW001  this life of the worker is over (dead, or unregistered): register again
--   RW002  another host has taken the worker's id over with the same key: stop
--   RW003  the worker's id is taken by somebody who lives
--   RW004  there is no such worker, or this is not its key, or another login registered it
--   RW005  two hosts share this worker id and its key: configure them apart
--   RW006  the login may not do that (logins.sql)
-- To operators:
--   P0002  there is no such worker
--   55000  the worker is not in a state for that

-- Refuses everybody but a worker that lives, has this key, and was registered by this login. Returns whether the login is limited
-- (rouse.worker_login). Served by the primary key.
CREATE OR REPLACE FUNCTION rouse._known(p_worker bigint, p_key bytea) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    life       record;
    is_limited boolean;
BEGIN
    SELECT w.limited INTO is_limited FROM rouse.worker AS w
    WHERE w.incarnation = p_worker AND w.key_hash = sha256(p_key) AND w.stopped_at IS NULL AND w.dead_at IS NULL AND w.login = session_user;
    IF FOUND THEN
        RETURN is_limited;
    END IF;
    SELECT w.worker_id, w.key_hash, w.dead_at, w.stopped_at INTO life
    FROM rouse.worker AS w WHERE w.incarnation = p_worker AND w.key_hash = sha256(p_key) AND w.login = session_user;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'rouse: there is no worker with incarnation % and this key', coalesce(p_worker::text, 'null') USING ERRCODE = 'RW004';
    END IF;
    IF EXISTS (SELECT FROM rouse.worker AS next
               WHERE next.worker_id = life.worker_id AND next.key_hash = life.key_hash AND next.incarnation > p_worker) THEN
        RAISE EXCEPTION 'rouse: another host has taken worker id % over with the same key', life.worker_id
            USING ERRCODE = 'RW002', HINT = 'Each host needs a worker id of its own.';
    END IF;
    RAISE EXCEPTION 'rouse: incarnation % of worker % is over since %', p_worker, life.worker_id, coalesce(life.dead_at, life.stopped_at)
        USING ERRCODE = 'RW001', HINT = 'Register again.';
END
$$;

-- Counts attempts of a worker to write on jobs that another has claimed. Not those that it has lost
-- to a later claim by itself.
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

-- Flags the worker with the attempts among these that ran into their run timeout, whose outcomes were accepted: one write
-- for the batch, and none where there is no such attempt. With `skip_locked`, a row of rouse.worker that somebody holds is left as it
-- is: an outcome does not wait for it twice.
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

-- A host serves 10,000 handlers at most (host/src/sandbox/catalog), with names of 128 characters and less than 400 bytes for each.
CREATE OR REPLACE FUNCTION rouse._check_capabilities(p_capabilities jsonb) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    wrong text;
BEGIN
    IF p_capabilities IS NULL OR jsonb_typeof(p_capabilities) <> 'object'
       OR EXISTS (SELECT FROM jsonb_each(p_capabilities) AS c WHERE jsonb_typeof(c.value) <> 'object') THEN
        RAISE EXCEPTION 'rouse.register: capabilities must be an object with an object for each handler, not %',
            coalesce(left(p_capabilities::text, 140), 'null') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT c.key INTO wrong FROM jsonb_each(p_capabilities) AS c
    WHERE c.key !~ '^[a-z0-9][a-z0-9_-]*([.][a-z0-9][a-z0-9_-]*)*$' OR length(c.key) > 128 LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'rouse.register: capabilities: % is not a handler name', quote_literal(left(wrong, 140))
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Lower-case words (also with digits, - and _) joined by dots, at most 128 characters.';
    END IF;
    PERFORM rouse._check_size('register', pg_column_size(p_capabilities), 8388608);
    SELECT format('capabilities of handler %s: %s', c.key, of.wrong) INTO wrong
    FROM jsonb_each(p_capabilities) AS c
    CROSS JOIN LATERAL (SELECT CASE
        WHEN jsonb_typeof(c.value -> 'version') NOT IN ('string', 'null') OR length(c.value ->> 'version') > 255
            THEN 'version must be a text of at most 255 characters'
        WHEN jsonb_typeof(c.value -> 'sha256') <> 'string' OR c.value ->> 'sha256' !~ '^(sha256:)?[0-9a-f]{64}$'
            THEN 'sha256 must be 64 hexadecimal digits'
        WHEN jsonb_typeof(c.value -> 'grants') <> 'array' OR jsonb_path_exists(c.value, '$.grants[*] ? (@.type() != "string")')
            THEN 'grants must be a list of texts'
        WHEN jsonb_typeof(c.value -> 'max_attempts') NOT IN ('number', 'null') THEN 'max_attempts must be a number'
        WHEN jsonb_typeof(c.value -> 'payload_keys') NOT IN ('array', 'null') THEN 'payload_keys must be a list'
    END AS wrong) AS of
    WHERE of.wrong IS NOT NULL
    LIMIT 1;
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION 'rouse.register: %', wrong USING ERRCODE = 'invalid_parameter_value';
    END IF;
END
$$;

-- How a worker fares is an object of at most 64 KiB.
CREATE OR REPLACE FUNCTION rouse._check_stats(p_name text, p_stats jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF jsonb_typeof(p_stats) <> 'object' THEN
        RAISE EXCEPTION 'rouse.%: stats must be an object, not %', p_name, left(p_stats::text, 140) USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM rouse._check_size(p_name, pg_column_size(p_stats), 65536);
END
$$;

-- Ends a life from outside: what it has claimed can be adopted in a moment, by whoever looks next. Its leases end 50 ms
-- from now, as a rule after this commits: a claim looks at the leases that have ended since the last one (rouse.claim). Where the commit takes
-- longer, the orphans are found by the next sweep.
-- Its running jobs are found by job_lease, all of whose rows are read: it happens once in a life.
CREATE OR REPLACE FUNCTION rouse._expire_worker(p_worker bigint) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    at     timestamptz := clock_timestamp();
    queues text[];
BEGIN
    UPDATE rouse.worker AS w SET dead_at = at WHERE w.incarnation = p_worker AND w.dead_at IS NULL AND w.stopped_at IS NULL;
    DELETE FROM rouse.sleeper AS s WHERE s.worker = p_worker;
    -- A row that somebody is changing at this moment keeps its lease, and nobody waits for it.
    WITH free AS MATERIALIZED (
        SELECT j.id FROM rouse.job AS j
        WHERE j.state = 'running' AND j.lease_until > at + interval '50 ms' AND j.worker = p_worker
        FOR NO KEY UPDATE SKIP LOCKED),
    freed AS (
        UPDATE rouse.job AS j SET lease_until = at + interval '50 ms' FROM free WHERE j.id = ANY (ARRAY[free.id]) RETURNING j.lane)
    SELECT array_agg(DISTINCT l.queue) INTO queues
    FROM (SELECT DISTINCT freed.lane FROM freed) AS f
    CROSS JOIN LATERAL (SELECT l.queue FROM rouse.lane AS l WHERE l.id = f.lane LIMIT 1) AS l;
    -- Without a lane: whoever hears it looks for orphans too.
    PERFORM rouse._hint('rouse_wake', q) FROM unnest(queues) AS q;
    -- It may live after all, somewhere behind a broken network.
    PERFORM rouse._hint('rouse_worker_' || p_worker, '');
END
$$;

-- Registers one life of a worker. Its id is unique among the living: one who has the key of the holder takes
-- the id over at once, from the same login, others once the holder has not been heard of for 90 s.
--
-- Two hosts that share an id and a key would take it from each other for as long as their supervisors restart them, and each takeover
-- costs every running job an attempt. The one that was replaced says that it still lived (rouse.outlived). From then on, for 10 minutes,
-- the id stays with its holder while that one is heard of. Served by worker_replaced.
--
--   key           32 bytes, random for each life or pinned by the operator
--   capabilities  {"handler": {"version": …, "grants": […]}, …}
--   slots         attempts at the same time
--   queues        the queues that it serves, in order; none: all
--   tags          jobs that require others are not for it; a word, or key=value
--   stats         as with a heartbeat; null: none yet
CREATE OR REPLACE FUNCTION rouse.register(
    p_worker_id text, p_key bytea, p_hostname text, p_platform text, p_version text,
    p_capabilities jsonb, p_slots integer, p_queues text[], p_tags text[], p_stats jsonb DEFAULT NULL,
    OUT incarnation bigint, OUT heartbeat_ms bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at         timestamptz := clock_timestamp();
    holder     record;
    flag       record;
    is_limited boolean;
BEGIN
    IF p_worker_id IS NULL OR p_worker_id !~ '^[A-Za-z0-9_-]{1,64}$' THEN
        RAISE EXCEPTION 'rouse.register: % is no worker id', coalesce(quote_literal(left(p_worker_id, 80)), 'null')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'At most 64 letters, digits, - and _.';
    END IF;
    IF p_key IS NULL OR octet_length(p_key) <> 32 THEN
        RAISE EXCEPTION 'rouse.register: a key has 32 bytes, not %', coalesce(octet_length(p_key)::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM rouse._check_worker(p_hostname, p_platform, p_version, p_slots, p_queues, p_tags);
    PERFORM rouse._check_capabilities(p_capabilities);
    PERFORM rouse._check_stats('register', p_stats);
    is_limited := rouse._admit(p_worker_id, p_queues, p_tags);
    -- One at a time for each id.
    PERFORM rouse._lock('register', p_worker_id);
    SELECT w.incarnation, w.key_hash, w.hostname, w.seen_at, w.login INTO holder
    FROM rouse.worker AS w WHERE w.worker_id = p_worker_id AND w.stopped_at IS NULL AND w.dead_at IS NULL;
    IF FOUND THEN
        IF (holder.key_hash IS DISTINCT FROM sha256(p_key) OR holder.login <> session_user) AND holder.seen_at > at - interval '90 seconds' THEN
            RAISE EXCEPTION 'rouse.register: worker id % is taken by a host that lives (%, heard of % s ago)',
                p_worker_id, holder.hostname, round(extract(epoch FROM at - holder.seen_at))
                USING ERRCODE = 'RW003',
                      HINT = 'Choose another id. If that host is gone, its id is free 90 s after its last heartbeat, or at once for a host that has its key (worker_key_file).';
        END IF;
        IF holder.seen_at > at - interval '90 seconds' AND EXISTS (
            SELECT FROM rouse.worker AS w WHERE w.worker_id = p_worker_id AND w.replaced_at IS NOT NULL AND w.outlived_at > at - interval '10 minutes')
        THEN
            RAISE EXCEPTION 'rouse.register: two hosts share worker id % and its key; the one on % has it (heard of % s ago)',
                p_worker_id, holder.hostname, round(extract(epoch FROM at - holder.seen_at))
                USING ERRCODE = 'RW005',
                      HINT = 'Give each host a worker id (worker_id) and a key file (worker_key_file) of its own. If that host is gone, its id is free 90 s after its last heartbeat.';
        END IF;
        PERFORM rouse._expire_worker(holder.incarnation);
        UPDATE rouse.worker AS w SET replaced_at = at WHERE w.incarnation = holder.incarnation;
    END IF;
    -- The timeout flag goes on from life to life, until somebody clears it.
    SELECT w.timeouts, w.timed_out_since, w.timed_out_at, w.timed_out_job, w.timed_out_handler INTO flag
    FROM rouse.worker AS w WHERE w.worker_id = p_worker_id AND w.forgotten_at IS NULL ORDER BY w.incarnation DESC LIMIT 1;
    INSERT INTO rouse.worker AS w (worker_id, key_hash, hostname, platform, version, handlers, capabilities, slots, queues, tags, limited,
                                   stats, stats_at, timeouts, timed_out_since, timed_out_at, timed_out_job, timed_out_handler)
    VALUES (p_worker_id, sha256(p_key), p_hostname, p_platform, p_version,
            ARRAY(SELECT jsonb_object_keys(p_capabilities)), p_capabilities, p_slots, p_queues, p_tags, is_limited,
            p_stats, CASE WHEN p_stats IS NOT NULL THEN at END,
            coalesce(flag.timeouts, 0), flag.timed_out_since, flag.timed_out_at, flag.timed_out_job, flag.timed_out_handler)
    RETURNING w.incarnation INTO incarnation;
    heartbeat_ms := 30000;
END
$$;

-- Says that a host still lives although this life of its worker is over: it was declared dead, or replaced by another host. What it has
-- lost thereby, it has not lost in a crash (rouse._crashes). Of a life that goes on nothing changes.
CREATE OR REPLACE FUNCTION rouse.outlived(p_worker bigint, p_key bytea) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    UPDATE rouse.worker AS w SET outlived_at = clock_timestamp()
    WHERE w.incarnation = p_worker AND w.key_hash = sha256(p_key) AND w.login = session_user AND (w.dead_at IS NOT NULL OR w.stopped_at IS NOT NULL)
$$;

-- Says that the worker lives, what it can run (null: what it could run before), how it fares and whether it takes no
-- more jobs; and expires those of whom nothing was heard for 90 s. Returns how many those were, and the worker's own timeout flag: how
-- many attempts it is for.
CREATE OR REPLACE FUNCTION rouse.heartbeat(
    p_worker bigint, p_key bytea, p_capabilities jsonb, p_stats jsonb, p_draining boolean, OUT expired integer, OUT timeouts bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at     timestamptz := clock_timestamp();
    gone   bigint;
BEGIN
    expired := 0;
    PERFORM rouse._known(p_worker, p_key);
    IF p_capabilities IS NOT NULL THEN
        PERFORM rouse._check_capabilities(p_capabilities);
    END IF;
    PERFORM rouse._check_stats('heartbeat', p_stats);
    UPDATE rouse.worker AS w
    SET seen_at = at,
        handlers = CASE WHEN p_capabilities IS NULL THEN w.handlers ELSE ARRAY(SELECT jsonb_object_keys(p_capabilities)) END,
        capabilities = coalesce(p_capabilities, w.capabilities),
        stats = p_stats, stats_at = at,
        draining_at = CASE WHEN p_draining THEN coalesce(w.draining_at, at) END
    WHERE w.incarnation = p_worker
    RETURNING w.timeouts INTO timeouts;
    -- Whoever is being expired by another at this moment is left to that one. Served by worker_living.
    FOR gone IN
        SELECT w.incarnation FROM rouse.worker AS w
        WHERE w.stopped_at IS NULL AND w.dead_at IS NULL AND w.seen_at < at - interval '90 seconds'
        ORDER BY w.worker_id FOR UPDATE SKIP LOCKED
    LOOP
        PERFORM rouse._expire_worker(gone);
        expired := expired + 1;
    END LOOP;
END
$$;

-- Says that the worker has stopped. What it still has is free at once.
CREATE OR REPLACE FUNCTION rouse.unregister(p_worker bigint, p_key bytea) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    PERFORM rouse._expire_worker(p_worker);
    UPDATE rouse.worker AS w SET stopped_at = w.dead_at, dead_at = NULL WHERE w.incarnation = p_worker;
END
$$;

-- Takes the ended lives of a worker off the list, and says how many they were. Refused while one lives.
-- What it has said of itself goes at once. Rows go for good, by a later call, once they are older than everything that is
-- kept: until then the history of jobs names them. Jobs that run are found by job_lease.
CREATE OR REPLACE FUNCTION rouse.forget_worker(worker_id text) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET datestyle = 'ISO'
SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at        timestamptz := clock_timestamp();
    life      record;
    forgotten integer;
    kept_from timestamptz;
BEGIN
    -- The lock of rouse.register: nobody starts a life of this id meanwhile.
    PERFORM rouse._lock('register', forget_worker.worker_id);
    FOR life IN
        SELECT w.incarnation, w.hostname, w.seen_at FROM rouse.worker AS w
        WHERE w.worker_id = forget_worker.worker_id AND w.stopped_at IS NULL AND w.dead_at IS NULL
    LOOP
        IF life.seen_at > at - interval '90 seconds' THEN
            RAISE EXCEPTION 'rouse.forget_worker: worker % lives (%, heard of % s ago)', forget_worker.worker_id, life.hostname,
                round(extract(epoch FROM at - life.seen_at))
                USING ERRCODE = 'object_not_in_prerequisite_state',
                      HINT = 'Stop it first. One that is gone is dead 90 s after its last heartbeat.';
        END IF;
        PERFORM rouse._expire_worker(life.incarnation);
    END LOOP;
    UPDATE rouse.worker AS w
    SET forgotten_at = at, key_hash = NULL, hostname = '', platform = '', version = '', slots = 0, refused = 0,
        timeouts = 0, timed_out_since = NULL, timed_out_at = NULL, timed_out_job = NULL, timed_out_handler = NULL,
        handlers = '{}', capabilities = '{}', queues = '{}', tags = '{}', stats = NULL, stats_at = NULL
    WHERE w.worker_id = forget_worker.worker_id AND w.forgotten_at IS NULL;
    GET DIAGNOSTICS forgotten = ROW_COUNT;
    IF forgotten = 0 THEN
        RAISE EXCEPTION 'rouse.forget_worker: there is no worker %', coalesce(quote_literal(left(forget_worker.worker_id, 80)), 'null')
            USING ERRCODE = 'no_data_found';
    END IF;
    PERFORM rouse._have_partitions(at);
    INSERT INTO rouse.record (at, event, who, detail)
    VALUES (at, 'forgotten', session_user, jsonb_build_object('worker_id', forget_worker.worker_id, 'incarnations', forgotten));
    SELECT min(p.first_day)::timestamp AT TIME ZONE 'UTC' INTO kept_from FROM rouse._partitions() AS p WHERE p.parent IN ('finished', 'attempt', 'record');
    DELETE FROM rouse.worker AS w
    WHERE w.forgotten_at < kept_from AND NOT EXISTS (
        SELECT FROM rouse.job AS j WHERE j.state = 'running' AND j.lease_until > '-infinity' AND j.worker = w.incarnation);
    RETURN forgotten;
END
$$;

-- Clears the timeout flag of all lives of a worker, and says how many had it. Leaves a record.
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
        RAISE EXCEPTION 'rouse.clear_timeouts: there is no worker %', coalesce(quote_literal(left(clear_timeouts.worker_id, 80)), 'null')
            USING ERRCODE = 'no_data_found';
    END IF;
    WITH flagged AS (
        SELECT w.incarnation, w.timeouts FROM rouse.worker AS w
        WHERE w.worker_id = clear_timeouts.worker_id AND w.timed_out_since IS NOT NULL FOR NO KEY UPDATE),
    done AS (
        UPDATE rouse.worker AS w
        SET timeouts = 0, timed_out_since = NULL, timed_out_at = NULL, timed_out_job = NULL, timed_out_handler = NULL
        FROM flagged AS f WHERE w.incarnation = f.incarnation)
    -- Each life goes on from the one before.
    SELECT count(*), max(f.timeouts) INTO cleared, seen FROM flagged AS f;
    IF cleared > 0 THEN
        PERFORM rouse._have_partitions(at);
        INSERT INTO rouse.record (at, event, who, detail)
        VALUES (at, 'timeouts_cleared', session_user,
                jsonb_build_object('worker_id', clear_timeouts.worker_id, 'incarnations', cleared, 'timeouts', seen));
    END IF;
    RETURN cleared;
END
$$;

-- Asks the worker of this id to prove that it has the module of the handler; returns the number that its answer
-- will have, which nobody can guess. The worker is told at once, where it listens; else it looks at its next heartbeat.
-- Of one worker no more than 100 challenges are open at a time, give or take those that are asked for at the same moment.
-- With each, at most 100 of more than a day ago go. Served by worker_living, challenge_open and challenge_asked.
CREATE OR REPLACE FUNCTION rouse.challenge(worker_id text, handler text) RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    at     timestamptz := clock_timestamp();
    life   bigint;
    unsaid bigint;
    asked  uuid;
BEGIN
    IF challenge.handler IS NULL OR challenge.handler !~ '^[a-z0-9][a-z0-9_-]*([.][a-z0-9][a-z0-9_-]*)*$' OR length(challenge.handler) > 128 THEN
        RAISE EXCEPTION 'rouse.challenge: % is no handler name', coalesce(quote_literal(left(challenge.handler, 140)), 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT w.incarnation INTO life FROM rouse.worker AS w
    WHERE w.worker_id = challenge.worker_id AND w.stopped_at IS NULL AND w.dead_at IS NULL AND w.seen_at >= at - interval '90 seconds';
    IF NOT FOUND THEN
        RAISE EXCEPTION 'rouse.challenge: no worker % lives', coalesce(quote_literal(left(challenge.worker_id, 80)), 'null')
            USING ERRCODE = 'no_data_found';
    END IF;
    DELETE FROM rouse.challenge AS c WHERE c.nonce = ANY (ARRAY(
        SELECT o.nonce FROM rouse.challenge AS o WHERE o.asked_at < at - interval '1 day'
        ORDER BY o.asked_at LIMIT 100 FOR UPDATE SKIP LOCKED));
    -- Those that the worker can still see; see rouse.challenges.
    SELECT count(*) INTO unsaid FROM (
        SELECT FROM rouse.challenge AS c
        WHERE c.worker = life AND c.answered_at IS NULL AND c.asked_at > at - interval '10 minutes' LIMIT 100) AS c;
    IF unsaid >= 100 THEN
        RAISE EXCEPTION 'rouse.challenge: worker % has 100 challenges of the last 10 minutes to answer', challenge.worker_id
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'Ask again when it has answered, or 10 minutes after they were asked.';
    END IF;
    INSERT INTO rouse.challenge AS c (worker, handler) VALUES (life, challenge.handler) RETURNING c.nonce INTO asked;
    PERFORM rouse._hint('rouse_worker_' || life, 'challenge');
    RETURN asked;
END
$$;

-- What was answered; null: nothing yet, or nobody was asked that.
CREATE OR REPLACE FUNCTION rouse.challenge_answer(nonce uuid) RETURNS jsonb
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT c.answer FROM rouse.challenge AS c WHERE c.nonce = challenge_answer.nonce
$$;

-- What this life of a worker is to prove. What nobody can wait for any more is left out. Served by challenge_open.
CREATE OR REPLACE FUNCTION rouse.challenges(p_worker bigint, p_key bytea) RETURNS TABLE (nonce uuid, handler text)
LANGUAGE plpgsql SECURITY DEFINER ROWS 10 SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    RETURN QUERY
    SELECT c.nonce, c.handler FROM rouse.challenge AS c
    WHERE c.worker = p_worker AND c.answered_at IS NULL AND c.asked_at > clock_timestamp() - interval '10 minutes'
    ORDER BY c.asked_at LIMIT 10;
END
$$;

-- Answers one of them, once. False: it is not this worker's, or has an answer.
CREATE OR REPLACE FUNCTION rouse.answer_challenge(p_worker bigint, p_key bytea, p_nonce uuid, p_answer jsonb) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    PERFORM rouse._check_size('answer_challenge', pg_column_size(p_answer), 65536);
    UPDATE rouse.challenge AS c SET answer = p_answer, answered_at = clock_timestamp()
    WHERE c.nonce = p_nonce AND c.worker = p_worker AND c.answered_at IS NULL;
    RETURN FOUND;
END
$$;
