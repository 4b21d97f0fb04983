-- Wakeups: idle workers sleep, and enqueues notify them at commit.

-- False if more than half of the server's notification queue is in use: a listener that does not read, in any database,
-- keeps it from being emptied. When it is full, every notifying transaction fails.
CREATE OR REPLACE FUNCTION rouse._may_notify() RETURNS boolean
LANGUAGE sql AS $$
    SELECT pg_notification_queue_usage() <= 0.5
$$;

-- Notifies if there is room. Notifications are hints: without them, workers find everything by polling and with their
-- heartbeats and renewals.
CREATE OR REPLACE FUNCTION rouse._hint(p_channel text, p_note text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF rouse._may_notify() THEN
        PERFORM pg_notify(p_channel, p_note);
    END IF;
END
$$;

-- The key of the lock under which one transaction at a time sends this notification, for 100 ms. It reads no table, so
-- that Postgres inlines it: otherwise it would be planned in each transaction (70 to 200 µs).
CREATE OR REPLACE FUNCTION rouse._wake_key(p_salt bytea, p_note text, p_at timestamptz) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT hashtextextended(encode(sha256(p_salt || convert_to(p_note || ' ' || floor(extract(epoch FROM p_at) * 10), 'UTF8')), 'hex'), 0)
$$;

-- Notifies the workers that sleep on the lane's queue: '<queue> <lane>' for a ready job, '<queue>' for a scheduled one.
-- Does not notify for a paused queue: resuming it notifies. For the inbox of a worker (direct.sql), only that worker is
-- notified, on its own channel, with the same note after `wake`.
--
-- NOTIFY takes a lock that serialises all notifying commits of the server, including the flush of each. So if another
-- session is committing the same notification at this moment, this one is skipped: the sleeper is being woken, and
-- finds this job at one of its next polls, which are a few milliseconds apart. A job that was enqueued a while ago is
-- not skipped: cursors may have passed it, and only its own notification leads to it. The lock's key contains the time,
-- so that a transaction that decides early (SET CONSTRAINTS ALL IMMEDIATE) and stays open suppresses other
-- notifications only for 100 ms, not until it ends. It is an advisory lock because rows cannot be locked without a
-- write; its key is computed with a secret, so that no other login can hold it beforehand.
CREATE OR REPLACE FUNCTION rouse._notify(p_lane bigint, p_ready boolean, p_since timestamptz) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    at         timestamptz := clock_timestamp();
    queue_name text;
    inbox_of   bigint;
    channel    text := 'rouse_wake';
    note       text;
    salt       bytea;
BEGIN
    -- Served by lane_id.
    SELECT l.queue, l.worker, s.salt INTO queue_name, inbox_of, salt
    FROM (SELECT l.queue, l.worker FROM rouse.lane AS l WHERE l.id = p_lane LIMIT 1) AS l CROSS JOIN rouse.wake_salt AS s;
    -- Comparisons of rows, which only sleeper_queue can serve: with sleeper_until, a commit would read the requests of
    -- all workers for all queues. In a transaction with a single snapshot, workers that fell asleep later are not
    -- visible.
    IF EXISTS (SELECT FROM rouse.sleeper AS s
               WHERE (s.queue, s.until) > (queue_name, at) AND (s.queue, s.until) <= (queue_name, 'infinity'::timestamptz)
                 AND (inbox_of IS NULL OR s.worker = inbox_of))
       OR EXISTS (SELECT FROM rouse.sleeper AS s
                  WHERE (s.queue, s.until) > ('*', at) AND (s.queue, s.until) <= ('*', 'infinity'::timestamptz)
                    AND (inbox_of IS NULL OR s.worker = inbox_of))
       OR current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM FROM rouse.queue AS q WHERE q.paused_at IS NOT NULL AND q.name = queue_name;
        IF FOUND THEN
            RETURN;
        END IF;
        note := CASE WHEN p_ready THEN queue_name || ' ' || p_lane ELSE queue_name END;
        IF inbox_of IS NOT NULL THEN
            channel := 'rouse_worker_' || inbox_of;
            note := 'wake ' || note;
        END IF;
        IF at > p_since + interval '100 ms'
           OR pg_try_advisory_xact_lock(rouse._wake_key(salt, CASE WHEN inbox_of IS NULL THEN note ELSE channel || ' ' || note END, at)) THEN
            PERFORM rouse._hint(channel, note);
        END IF;
    END IF;
END
$$;

-- Runs while the producer's transaction commits, for one row of each call: it wakes the workers that sleep at that
-- time, however long ago the job was enqueued. It is rolled back with its row, including by a rollback to a savepoint.
-- A busy system has no sleepers, and the only cost is the read of an empty index.
CREATE OR REPLACE FUNCTION rouse._wake_at_commit() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    at timestamptz := clock_timestamp();
BEGIN
    PERFORM FROM rouse.sleeper AS s WHERE s.until > at ORDER BY s.until LIMIT 1;
    IF FOUND THEN
        PERFORM rouse._notify(NEW.lane, NEW.turn IS NOT NULL, NEW.requested_at);
    ELSIF current_setting('transaction_isolation') <> 'read committed' THEN
        -- A single snapshot: workers that have fallen asleep since are invisible.
        IF at > now() + interval '50 ms' THEN
            PERFORM rouse._notify(NEW.lane, NEW.turn IS NOT NULL, NEW.requested_at);
        END IF;
    END IF;
    RETURN NULL;
END
$$;
-- Not CREATE OR REPLACE: that would lock the table whenever a function changes. A trigger that has to change is dropped
-- by a migration.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'rouse.job'::regclass AND tgname = 'wake') THEN
        CREATE CONSTRAINT TRIGGER wake AFTER INSERT ON rouse.job
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.wake) EXECUTE FUNCTION rouse._wake_at_commit();
    END IF;
END
$$;

-- Requests notifications about these queues ('*': any queue) for a worker, for this long from now (at most an hour),
-- instead of what it has requested before. Served by sleeper_worker.
CREATE OR REPLACE FUNCTION rouse.sleep(p_worker bigint, p_key bytea, p_queues text[], p_for_ms bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    at timestamptz := clock_timestamp();
BEGIN
    IF rouse._authenticated_as_limited(p_worker, p_key) THEN
        p_queues := rouse._permitted_queues(p_worker, p_queues);
    END IF;
    IF NOT rouse._are_queue_names(array_remove(p_queues, '*')) THEN
        RAISE EXCEPTION 'rouse.sleep: queues must be a list of at most 1000 queue names' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM set_config('synchronous_commit', 'off', true);
    DELETE FROM rouse.sleeper AS s
    WHERE (s.worker, s.until) > (p_worker, at) AND (s.worker, s.until) <= (p_worker, 'infinity'::timestamptz);
    INSERT INTO rouse.sleeper (worker, queue, until)
    SELECT p_worker, named.queue, at + least(greatest(p_for_ms, 0), 3600000) * interval '1 millisecond'
    FROM (SELECT DISTINCT unnest(p_queues)) AS named(queue);
END
$$;

-- Ends the request of rouse.sleep: the worker is busy. Served by sleeper_worker.
CREATE OR REPLACE FUNCTION rouse.awake(p_worker bigint, p_key bytea) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    at timestamptz := clock_timestamp();
BEGIN
    PERFORM rouse._authenticated_as_limited(p_worker, p_key);
    PERFORM set_config('synchronous_commit', 'off', true);
    DELETE FROM rouse.sleeper AS s
    WHERE (s.worker, s.until) > (p_worker, at) AND (s.worker, s.until) <= (p_worker, 'infinity'::timestamptz);
END
$$;
