-- Enqueue at its cheapest, and wakeups that are decided when the producer commits.
--
-- What this does to a database with live jobs: every change of rouse.job here is one of the catalog
-- alone (a column without a default, constraints that are not checked again, a trigger). It needs
-- the table to itself for a moment, so it waits for open transactions that have used it.

-- True on the row whose commit decides whether a worker is notified: the only row, or the last one,
-- of a call. Null on all others.
ALTER TABLE rouse.job ADD COLUMN wake boolean;

-- Postgres reads the text of each CHECK again for every statement that writes, which was more than
-- half the price of an insert. One short constraint says what six long ones said. Left out, because
-- nothing but the functions can write: that max_attempts is at most 1000 (rouse._lane), and that a
-- running job has a turn and an attempt (rouse.claim).
-- NOT VALID: the rows that are there have satisfied stricter ones.
ALTER TABLE rouse.job
    DROP CONSTRAINT job_is_live,
    DROP CONSTRAINT running_job_has_an_owner,
    DROP CONSTRAINT job_attempt_check,
    DROP CONSTRAINT job_check,
    DROP CONSTRAINT job_max_attempts_check,
    DROP CONSTRAINT job_available_at_check,
    ADD CONSTRAINT job_is_sound CHECK (
        -- Live: queued or running.
        state < 'succeeded'
        -- A running job has all of these, a queued one none.
        AND num_nonnulls(nullif(state, 'queued'), fence, worker, claimed_at, lease_until) IN (0, 5)
        AND lost BETWEEN 0 AND attempt
        AND max_attempts > 0
        AND isfinite(available_at)) NOT VALID;

-- A payload of up to 1 KiB fits every queue, so that enqueue need not look for its limit.
UPDATE rouse.queue SET payload_bytes_max = 1024 WHERE payload_bytes_max < 1024;
ALTER TABLE rouse.queue
    DROP CONSTRAINT queue_payload_bytes_max_check,
    ADD CONSTRAINT queue_payload_bytes_max_check CHECK (payload_bytes_max BETWEEN 1024 AND 67108864);

-- Notifies those who sleep on the lane's queue: '<queue> <lane>' for a job that is ready, '<queue>'
-- for one that is scheduled.
--
-- NOTIFY takes a lock that puts all notifying commits of the server in one line, through the
-- flush of each. So where somebody else is committing the same notification at this moment, this
-- one is left out: the sleeper is being woken, and finds this job at one of its next looks, which
-- are a few milliseconds apart. Not so for a job that was enqueued a while ago: cursors may
-- have passed it, and only its own notification leads there.
-- The lock's key has the time in it, so that a transaction that decides early (SET CONSTRAINTS ALL
-- IMMEDIATE) and stays open mutes the others for a tenth of a second, and not until its end.
CREATE FUNCTION rouse._notify(p_lane bigint, p_ready boolean, p_since timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    at   timestamptz := clock_timestamp();
    name text;
    note text;
BEGIN
    -- Served by lane_id.
    SELECT l.queue INTO name FROM rouse.lane AS l WHERE l.id = p_lane LIMIT 1;
    -- In a transaction with one snapshot for all of it, sleepers who came later cannot be seen.
    IF EXISTS (SELECT FROM rouse.sleeper AS s WHERE s.queue IN (name, '*') AND s.until > at)
       OR current_setting('transaction_isolation') <> 'read committed' THEN
        note := CASE WHEN p_ready THEN name || ' ' || p_lane ELSE name END;
        IF at > p_since + interval '100 ms'
           OR pg_try_advisory_xact_lock(hashtextextended(
               'rouse.wake ' || note || ' ' || floor(extract(epoch FROM at) * 10), 0)) THEN
            PERFORM pg_notify('rouse_wake', note);
        END IF;
    END IF;
END
$$;

-- Runs while the producer's transaction commits, for one row of each call: whoever sleeps then
-- is woken, however long ago the job was enqueued. Rolled back with its row, to a savepoint too.
-- A busy system has no sleepers and pays for one look at an empty table.
CREATE FUNCTION rouse._wake_at_commit() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM rouse.sleeper AS s WHERE s.until > clock_timestamp())
       OR (current_setting('transaction_isolation') <> 'read committed' AND clock_timestamp() > now() + interval '50 ms') THEN
        PERFORM rouse._notify(NEW.lane, NEW.turn IS NOT NULL, NEW.requested_at);
    END IF;
    RETURN NULL;
END
$$;
CREATE CONSTRAINT TRIGGER wake AFTER INSERT ON rouse.job
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.wake) EXECUTE FUNCTION rouse._wake_at_commit();

-- Both functions look their lane up through its index, whatever the statistics say (enable_seqscan): a
-- session that had made its plan while the catalog had a page or two would go on reading all of it
-- when it has 10,000 rows.

-- Enqueues one job and returns its id. Part of the caller's transaction: a rollback leaves
-- nothing, and no worker sees the job before the commit.
--
--   queue         which queue; the lane is (handler, queue, priority, tags)
--   tenant        whose job it is
--   source        what triggered it
--   priority      high, normal or low
--   run_at        not before this time
--   max_attempts  how often it is tried in all; null: the handler's own
--   unique_key    unique among the live jobs of the handler: where one is there, its id is returned
--                 and nothing is added
--   tags          only workers that have all of these take the job
CREATE OR REPLACE FUNCTION rouse.enqueue(
    handler      text,
    payload      jsonb       DEFAULT '{}',
    queue        text        DEFAULT 'default',
    tenant       text        DEFAULT NULL,
    source       text        DEFAULT NULL,
    priority     text        DEFAULT 'normal',
    run_at       timestamptz DEFAULT NULL,
    max_attempts integer     DEFAULT NULL,
    unique_key   text        DEFAULT NULL,
    tags         text[]      DEFAULT '{}'
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_variable
DECLARE
    at        timestamptz := clock_timestamp();
    bytes     integer := octet_length(payload::text);
    bytes_max integer := 1024;
    lane_id   bigint;
    job_id    bigint := nextval('rouse.turn_seq');
    their     bigint;
    slot      text;
BEGIN
    IF bytes > bytes_max THEN
        bytes_max := coalesce((SELECT q.payload_bytes_max FROM rouse.queue AS q WHERE q.name = queue), 262144);
    END IF;
    -- What the catalog has is valid: where the lane is known, its parts need no checks of their own.
    IF bytes <= bytes_max
       AND priority IN ('high', 'normal', 'low')
       AND (run_at IS NULL OR isfinite(run_at))
       AND (max_attempts IS NULL OR max_attempts BETWEEN 1 AND 1000)
       AND (tenant IS NULL OR length(tenant) BETWEEN 1 AND 200)
       AND (source IS NULL OR length(source) BETWEEN 1 AND 200)
       AND (unique_key IS NULL OR length(unique_key) BETWEEN 1 AND 512) THEN
        IF unique_key IS NULL THEN
            -- Served by lane_key.
            INSERT INTO rouse.job AS j (id, lane, turn, requested_at, available_at, max_attempts, tenant, source, payload, wake)
            SELECT job_id, l.id, CASE WHEN run_at > at THEN NULL ELSE job_id END, at, coalesce(run_at, at),
                   max_attempts, tenant, source, payload, true
            FROM rouse.lane AS l
            WHERE l.handler = handler AND l.queue = queue AND l.priority = priority::rouse.priority AND l.tags = tags
            LIMIT 1;
            IF FOUND THEN
                RETURN job_id;
            END IF;
        ELSE
            SELECT l.id INTO lane_id FROM rouse.lane AS l
            WHERE l.handler = handler AND l.queue = queue AND l.priority = priority::rouse.priority AND l.tags = tags
            LIMIT 1;
        END IF;
    END IF;
    IF lane_id IS NULL THEN
        -- Something is new, or wrong: all checks, in their order.
        lane_id := rouse._lane(handler, queue, tenant, source, priority, run_at, max_attempts, tags);
        PERFORM rouse._check_payload(payload, queue);
        IF unique_key = '' OR length(unique_key) > 512 THEN
            RAISE EXCEPTION 'rouse.enqueue: unique_key has 1 to 512 characters, or is left out'
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
    END IF;
    slot := handler || '/' || unique_key;

    FOR try IN 1 .. 10 LOOP
        INSERT INTO rouse.job AS j (id, lane, turn, requested_at, available_at, max_attempts, tenant, source, unique_key, payload, wake)
        VALUES (job_id, lane_id, CASE WHEN run_at > at THEN NULL ELSE job_id END, at, coalesce(run_at, at),
                max_attempts, tenant, source, slot, payload, true)
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            RETURN job_id;
        END IF;
        SELECT j.id INTO their FROM rouse.job AS j WHERE j.unique_key = slot;
        IF FOUND THEN
            RETURN their;
        END IF;
        -- The other job finished between the two statements: its key is free again.
    END LOOP;
    RAISE EXCEPTION 'rouse.enqueue: unique_key % is taken and freed faster than it can be read', quote_literal(unique_key)
        USING ERRCODE = 'serialization_failure', HINT = 'Try again.';
END
$$;

-- Enqueues one job for each payload, in order, and returns their ids in the same order.
CREATE OR REPLACE FUNCTION rouse.enqueue_many(
    handler      text,
    payloads     jsonb[],
    queue        text        DEFAULT 'default',
    tenant       text        DEFAULT NULL,
    source       text        DEFAULT NULL,
    priority     text        DEFAULT 'normal',
    run_at       timestamptz DEFAULT NULL,
    max_attempts integer     DEFAULT NULL,
    tags         text[]      DEFAULT '{}'
) RETURNS SETOF bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_variable
DECLARE
    lane_id   bigint := rouse._lane(handler, queue, tenant, source, priority, run_at, max_attempts, tags);
    at        timestamptz := clock_timestamp();
    bytes_max integer := coalesce((SELECT q.payload_bytes_max FROM rouse.queue AS q WHERE q.name = queue), 262144);
    wrong     bigint;
BEGIN
    IF payloads IS NULL OR array_ndims(payloads) > 1 THEN
        RAISE EXCEPTION 'rouse.enqueue_many: payloads must be a list of JSON values, not %',
            CASE WHEN payloads IS NULL THEN 'null' ELSE 'a list of lists' END
            USING ERRCODE = 'invalid_parameter_value', HINT = 'For instance ARRAY[''{"n": 1}'', ''{"n": 2}'']::jsonb[].';
    END IF;
    SELECT p.ordinality INTO wrong
    FROM unnest(payloads) WITH ORDINALITY AS p(payload)
    WHERE p.payload IS NULL OR octet_length(p.payload::text) > bytes_max
    LIMIT 1;
    IF wrong IS NOT NULL THEN
        IF payloads[array_lower(payloads, 1) + wrong::integer - 1] IS NULL THEN
            RAISE EXCEPTION 'rouse.enqueue_many: payload % is null', wrong
                USING ERRCODE = 'invalid_parameter_value', HINT = 'Nothing was enqueued.';
        END IF;
        RAISE EXCEPTION 'rouse.enqueue_many: payload % is too large; queue % allows % bytes', wrong, queue, bytes_max
            USING ERRCODE = 'program_limit_exceeded', HINT = 'Nothing was enqueued.';
    END IF;

    RETURN QUERY
    INSERT INTO rouse.job AS j (id, lane, turn, requested_at, available_at, max_attempts, tenant, source, payload, wake)
    SELECT p.id, lane_id, CASE WHEN run_at > at THEN NULL ELSE p.id END, at, coalesce(run_at, at),
           max_attempts, tenant, source, p.payload, CASE WHEN p.place = cardinality(payloads) THEN true END
    FROM (SELECT nextval('rouse.turn_seq') AS id, u.payload, u.place
          FROM unnest(payloads) WITH ORDINALITY AS u(payload, place)) AS p
    RETURNING j.id;
END
$$;

-- rouse._wake(text) stays, for calls of the old rouse.enqueue that are under way at this moment.
REVOKE ALL ON FUNCTION rouse._notify, rouse._wake_at_commit FROM PUBLIC;
