-- Enqueue without the checks that a call does not need: two fifths of what it cost above a plain INSERT
-- were conditions and queries being prepared, not run.
--
-- What this does to a database with live jobs: nothing but replace two functions.

-- Runs while the producer's transaction commits, for one row of each call: whoever sleeps then
-- is woken, however long ago the job was enqueued. Rolled back with its row, to a savepoint too.
-- A busy system has no sleepers and pays for one look at an empty table.
CREATE OR REPLACE FUNCTION rouse._wake_at_commit() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM FROM rouse.sleeper AS s WHERE s.until > clock_timestamp();
    IF FOUND THEN
        PERFORM rouse._notify(NEW.lane, NEW.turn IS NOT NULL, NEW.requested_at);
    ELSIF current_setting('transaction_isolation') <> 'read committed' THEN
        -- One snapshot for all of it: who has gone to sleep since cannot be seen.
        IF clock_timestamp() > now() + interval '50 ms' THEN
            PERFORM rouse._notify(NEW.lane, NEW.turn IS NOT NULL, NEW.requested_at);
        END IF;
    END IF;
    RETURN NULL;
END
$$;

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
    valid     boolean := true;
    lane_id   bigint;
    job_id    bigint := nextval('rouse.turn_seq');
    their     bigint;
    slot      text;
BEGIN
    -- A condition is prepared anew in each transaction that comes to it, whether its parts are needed or
    -- not. So one that most calls do not need stands in a branch that they do not enter.
    IF bytes > bytes_max THEN
        bytes_max := coalesce((SELECT q.payload_bytes_max FROM rouse.queue AS q WHERE q.name = queue), 262144);
    END IF;
    IF coalesce(tenant, source, unique_key) IS NOT NULL OR run_at IS NOT NULL OR max_attempts IS NOT NULL THEN
        valid := (run_at IS NULL OR isfinite(run_at))
            AND (max_attempts IS NULL OR max_attempts BETWEEN 1 AND 1000)
            AND (tenant IS NULL OR length(tenant) BETWEEN 1 AND 200)
            AND (source IS NULL OR length(source) BETWEEN 1 AND 200)
            AND (unique_key IS NULL OR length(unique_key) BETWEEN 1 AND 512);
    END IF;
    -- What the catalog has is valid: where the lane is known, its parts need no checks of their own.
    IF valid AND bytes <= bytes_max AND priority IN ('high', 'normal', 'low') THEN
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
