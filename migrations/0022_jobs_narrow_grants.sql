-- A job may leave less of the grants and limits of its handler (SPEC row B9): `grants` of rouse.enqueue and rouse.enqueue_many.
--
-- What this does to a database with live jobs: columns without a default are added to rouse.job and rouse.finished, which takes
-- a moment and rewrites nothing; functions and a view are replaced. rouse.enqueue and rouse.enqueue_many get a last parameter: the
-- new ones are made, the rights to the old ones copied, the old ones dropped. Calls go on as they are, prepared ones too; a
-- database object that depends on an old one (a view that calls it, a function written as BEGIN ATOMIC) fails the migration, and
-- has to be dropped before and made again after it.
--
-- Older hosts go on, and claim and adopt only jobs without grants of their own: they do not know how to narrow, and must not run
-- such a job with more than it may have. It waits for a newer host.

ALTER TABLE rouse.job
    -- What the job leaves; null: all that its handler has.
    ADD COLUMN grants jsonb;
ALTER TABLE rouse.finished ADD COLUMN grants jsonb;

-- Refuses grants that no host would keep to, so that the mistake shows where it is made. Whether names and hosts exist is not
-- looked at: what the handler does not have, the job does not get.
CREATE FUNCTION rouse._check_grants(p_grants jsonb) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    entry record;
    wrong text;
BEGIN
    IF jsonb_typeof(p_grants) <> 'object' THEN
        RAISE EXCEPTION 'rouse.enqueue: grants must be an object, not %', left(p_grants::text, 140)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'For instance {"http": ["api.example.com"], "memory_mb": 32}. Leave it out for all that the handler has.';
    END IF;
    IF octet_length(p_grants::text) > 8192 THEN
        RAISE EXCEPTION 'rouse.enqueue: grants have % bytes; 8192 are allowed', octet_length(p_grants::text)
            USING ERRCODE = 'program_limit_exceeded';
    END IF;
    FOR entry IN SELECT g.key, g.value FROM jsonb_each(p_grants) AS g LOOP
        IF entry.key IN ('http', 'secrets', 'dirs', 'env') THEN
            IF jsonb_typeof(entry.value) <> 'array'
               OR jsonb_path_exists(entry.value, 'strict $[*] ? (@.type() != "string")') THEN
                wrong := 'a list of texts';
            ELSIF entry.key = 'http' AND EXISTS (
                SELECT FROM jsonb_array_elements_text(entry.value) AS host
                WHERE host !~ '^([*]|([*][.])?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?|\[?[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*\]?)$') THEN
                wrong := 'a list of hosts such as api.example.com or *.example.com, without scheme and port';
            ELSIF entry.key = 'dirs' AND EXISTS (
                SELECT FROM jsonb_array_elements_text(entry.value) AS dir WHERE dir !~ '^/') THEN
                wrong := 'a list of paths as the handler sees them, such as /photos or /out:read';
            END IF;
        ELSIF entry.key = 'memory_mb' THEN
            IF jsonb_typeof(entry.value) <> 'number' OR entry.value::text !~ '^[0-9]{1,4}$' OR entry.value = '0' THEN
                wrong := 'a whole number of MiB, 1 to 9999';
            END IF;
        ELSIF entry.key IN ('cpu', 'timeout') THEN
            IF jsonb_typeof(entry.value) <> 'string' OR entry.value #>> '{}' !~ '^0*[1-9][0-9]{0,8}(ms|s|m|h|d)$' THEN
                wrong := 'a duration above zero such as "500ms", "90s", "5m", "1h" or "1d"';
            END IF;
        ELSE
            RAISE EXCEPTION 'rouse.enqueue: grants have no key %', quote_literal(left(entry.key, 140))
                USING ERRCODE = 'invalid_parameter_value',
                      HINT = 'The keys are http, secrets, dirs, env, memory_mb, cpu and timeout.';
        END IF;
        IF wrong IS NOT NULL THEN
            RAISE EXCEPTION 'rouse.enqueue: % of grants must be %, not %', entry.key, wrong, left(entry.value::text, 140)
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
    END LOOP;
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
--   grants        less than the handler may do: {"http": hosts, "secrets": names, "dirs": paths, "env": names, "memory_mb": …,
--                 "cpu": …, "timeout": …}; of a list that is there, what it does not name is taken away
CREATE FUNCTION rouse.enqueue(
    handler      text,
    payload      jsonb       DEFAULT '{}',
    queue        text        DEFAULT 'default',
    tenant       text        DEFAULT NULL,
    source       text        DEFAULT NULL,
    priority     text        DEFAULT 'normal',
    run_at       timestamptz DEFAULT NULL,
    max_attempts integer     DEFAULT NULL,
    unique_key   text        DEFAULT NULL,
    tags         text[]      DEFAULT '{}',
    grants       jsonb       DEFAULT NULL
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
    IF coalesce(tenant, source, unique_key) IS NOT NULL OR run_at IS NOT NULL OR max_attempts IS NOT NULL OR grants IS NOT NULL THEN
        IF grants IS NOT NULL THEN
            PERFORM rouse._check_grants(grants);
        END IF;
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
            INSERT INTO rouse.job AS j (id, lane, turn, requested_at, available_at, max_attempts, tenant, source, payload, wake, grants)
            SELECT job_id, l.id, CASE WHEN run_at > at THEN NULL ELSE job_id END, at, coalesce(run_at, at),
                   max_attempts, tenant, source, payload, true, grants
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
        INSERT INTO rouse.job AS j (id, lane, turn, requested_at, available_at, max_attempts, tenant, source, unique_key, payload, wake, grants)
        VALUES (job_id, lane_id, CASE WHEN run_at > at THEN NULL ELSE job_id END, at, coalesce(run_at, at),
                max_attempts, tenant, source, slot, payload, true, grants)
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
CREATE FUNCTION rouse.enqueue_many(
    handler      text,
    payloads     jsonb[],
    queue        text        DEFAULT 'default',
    tenant       text        DEFAULT NULL,
    source       text        DEFAULT NULL,
    priority     text        DEFAULT 'normal',
    run_at       timestamptz DEFAULT NULL,
    max_attempts integer     DEFAULT NULL,
    tags         text[]      DEFAULT '{}',
    grants       jsonb       DEFAULT NULL
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

    IF grants IS NOT NULL THEN
        PERFORM rouse._check_grants(grants);
    END IF;
    RETURN QUERY
    INSERT INTO rouse.job AS j (id, lane, turn, requested_at, available_at, max_attempts, tenant, source, payload, wake, grants)
    SELECT p.id, lane_id, CASE WHEN run_at > at THEN NULL ELSE p.id END, at, coalesce(run_at, at),
           max_attempts, tenant, source, p.payload, CASE WHEN p.place = cardinality(payloads) THEN true END, grants
    FROM (SELECT nextval('rouse.turn_seq') AS id, u.payload, u.place
          FROM unnest(payloads) WITH ORDINALITY AS u(payload, place)) AS p
    RETURNING j.id;
END
$$;

-- Whoever may call the old ones may call the new ones.
REVOKE ALL ON FUNCTION rouse._check_grants,
    rouse.enqueue(text, jsonb, text, text, text, text, timestamptz, integer, text, text[], jsonb),
    rouse.enqueue_many(text, jsonb[], text, text, text, text, timestamptz, integer, text[], jsonb) FROM PUBLIC;
DO $$
DECLARE
    held record;
BEGIN
    FOR held IN
        SELECT made.oid::regprocedure AS made, CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee,
               CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END AS with_grant
        FROM (VALUES ('rouse.enqueue(text, jsonb, text, text, text, text, timestamptz, integer, text, text[])'::regprocedure,
                      'rouse.enqueue(text, jsonb, text, text, text, text, timestamptz, integer, text, text[], jsonb)'::regprocedure),
                     ('rouse.enqueue_many(text, jsonb[], text, text, text, text, timestamptz, integer, text[])'::regprocedure,
                      'rouse.enqueue_many(text, jsonb[], text, text, text, text, timestamptz, integer, text[], jsonb)'::regprocedure)) AS pair(old, new)
        JOIN pg_proc AS was ON was.oid = pair.old
        JOIN pg_proc AS made ON made.oid = pair.new
        CROSS JOIN LATERAL aclexplode(was.proacl) AS a
        WHERE a.grantee <> was.proowner
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s%s', held.made, held.grantee, held.with_grant);
    END LOOP;
END
$$;
DROP FUNCTION rouse.enqueue(text, jsonb, text, text, text, text, timestamptz, integer, text, text[]);
DROP FUNCTION rouse.enqueue_many(text, jsonb[], text, text, text, text, timestamptz, integer, text[]);

-- Claims up to `wanted` jobs from these lanes, in the order given, each lane from its cursor on; no
-- more after the one with which their payloads reach 8 MiB (PREFETCH_BYTES_MAX of the host).
-- Safe under concurrency: rows that another claim has locked are skipped, and a row that was
-- claimed meanwhile is checked again under its lock. Served by job_ready, then by the primary key.
-- Nothing is claimed from queues that are paused; that is looked up in an index that is empty where none is.
-- Of jobs that have grants of their own none is claimed for a worker that does not say that it narrows.
-- The commit does not wait for the disk: a claim that a server crash forgets is only made again.
--
-- What is too much is locked until this commits, and otherwise left as it was. The size is what the
-- table keeps, because the payload itself would have to be read for its own; one that is compressed
-- counts 16 times (JSON shrinks to a quarter or an eighth, and at the most to a ninetieth).
CREATE FUNCTION rouse.claim(
    p_worker bigint, p_key bytea, p_fence bigint, p_lanes bigint[], p_cursors bigint[], p_lease_ms bigint[], p_wanted integer,
    p_narrows boolean)
RETURNS TABLE (id bigint, lane bigint, turn bigint, attempt integer, lost integer, max_attempts integer, tenant text, source text,
               requested_at timestamptz, claimed_at timestamptz, payload jsonb, memory_bytes bigint, grants jsonb)
LANGUAGE plpgsql SECURITY DEFINER ROWS 100
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at timestamptz := clock_timestamp();
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM FROM rouse.queue AS q WHERE q.paused_at IS NOT NULL;
    IF FOUND THEN
        p_lanes := rouse._not_paused(p_lanes);
    END IF;
    RETURN QUERY
    WITH picked AS MATERIALIZED (
        SELECT found.id, found.lease_ms
        FROM (
            SELECT ready.id, wanted.lease_ms, ready.bytes, sum(ready.bytes) OVER (ROWS UNBOUNDED PRECEDING) AS bytes_so_far
            FROM unnest(p_lanes, p_cursors, p_lease_ms) AS wanted(lane, after, lease_ms)
            CROSS JOIN LATERAL (
                SELECT j.id, CASE WHEN pg_column_compression(j.payload) IS NULL THEN pg_column_size(j.payload)
                                  ELSE 16 * least(pg_column_size(j.payload), 1048576) END AS bytes
                FROM rouse.job AS j
                WHERE j.lane = wanted.lane AND j.turn > wanted.after AND j.state = 'queued' AND j.turn IS NOT NULL
                  AND (p_narrows OR j.grants IS NULL)
                ORDER BY j.turn LIMIT p_wanted FOR NO KEY UPDATE SKIP LOCKED) AS ready
            LIMIT p_wanted) AS found
        WHERE found.bytes_so_far - found.bytes < 8388608)
    UPDATE rouse.job AS j
    SET state = 'running', attempt = j.attempt + 1, fence = p_fence, worker = p_worker,
        claimed_at = at, lease_until = at + picked.lease_ms * interval '1 millisecond'
    FROM picked WHERE j.id = ANY (ARRAY[picked.id])
    RETURNING j.id, j.lane, j.turn, j.attempt, j.lost, j.max_attempts, j.tenant, j.source, j.requested_at, j.claimed_at, j.payload, j.memory_bytes,
              j.grants;
END
$$;

-- The same for older hosts.
CREATE OR REPLACE FUNCTION rouse.claim(
    p_worker bigint, p_key bytea, p_fence bigint, p_lanes bigint[], p_cursors bigint[], p_lease_ms bigint[], p_wanted integer)
RETURNS SETOF rouse.claimed
LANGUAGE sql SECURITY DEFINER ROWS 100 SET search_path = pg_catalog, pg_temp AS $$
    SELECT c.id, c.lane, c.turn, c.attempt, c.lost, c.max_attempts, c.tenant, c.source, c.requested_at, c.claimed_at, c.payload, c.memory_bytes
    FROM rouse.claim(p_worker, p_key, p_fence, p_lanes, p_cursors, p_lease_ms, p_wanted, false) AS c
$$;

-- Takes over jobs whose lease has run out: up to `p_wanted` are claimed at once, ahead of everything
-- queued. A job's first loss is taken up like that; after a later one it waits (10 s, doubled
-- each time); a job that was lost p_lost_max times fails, because it probably kills its workers.
-- `within_ms`: only leases that ran out within the last so many
-- milliseconds are looked for; null: all. Served by job_lease. Rows that somebody else holds locked are skipped, and
-- so are those of paused queues, and jobs that have grants of their own, for a worker that does not say that it narrows.
--
-- Returns those that were claimed (`became` is null), and, if asked to tell, those that were not: `queued` or `failed`, with
-- the attempt that was lost, and `lost_after_ms`, its time from the claim to now.
CREATE FUNCTION rouse.adopt(
    p_worker bigint, p_key bytea, p_fence bigint, p_lanes bigint[], p_lease_ms bigint[], p_wanted integer, p_lost_max integer,
    p_within_ms bigint, p_tell boolean, p_narrows boolean)
RETURNS TABLE (id bigint, lane bigint, turn bigint, attempt integer, lost integer, max_attempts integer, tenant text, source text,
               requested_at timestamptz, claimed_at timestamptz, payload jsonb, memory_bytes bigint, became rouse.state, lost_after_ms bigint,
               grants jsonb)
LANGUAGE plpgsql SECURITY DEFINER ROWS 10
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at     timestamptz := clock_timestamp();
    since  timestamptz := coalesce(at - p_within_ms * interval '1 millisecond', '-infinity');
    orphan record;
    why    jsonb;
    then_it rouse.state;
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    PERFORM FROM rouse.queue AS q WHERE q.paused_at IS NOT NULL;
    IF FOUND THEN
        p_lanes := rouse._not_paused(p_lanes);
    END IF;
    FOR orphan IN
        SELECT j.id, j.lane, j.fence, j.attempt, j.lost, j.worker, j.claimed_at, asked.lease_ms, w.worker_id
        FROM rouse.job AS j
        JOIN unnest(p_lanes, p_lease_ms) AS asked(lane, lease_ms) ON asked.lane = j.lane
        LEFT JOIN rouse.worker AS w ON w.incarnation = ANY (ARRAY[j.worker])
        WHERE j.state = 'running' AND j.lease_until > since AND j.lease_until < at
          AND (p_narrows OR j.grants IS NULL)
        ORDER BY j.lease_until LIMIT p_wanted
        FOR NO KEY UPDATE OF j SKIP LOCKED
    LOOP
        -- A hint for the old owner, if it still lives.
        PERFORM pg_notify('rouse_worker_' || orphan.worker, orphan.id::text);
        why := jsonb_build_object('kind', 'lost', 'message', format(
            'worker %s (incarnation %s) did not renew its lease', coalesce(orphan.worker_id, 'unknown'), orphan.worker));
        IF orphan.lost + 1 >= p_lost_max THEN
            why := why || jsonb_build_object('message', format(
                'the job was lost with its worker %s times; it probably kills the worker', orphan.lost + 1));
            UPDATE rouse.job AS j SET lost = j.lost + 1 WHERE j.id = orphan.id;
            PERFORM rouse._settle(NULL, ARRAY[orphan.id], ARRAY[orphan.fence], ARRAY['failed'::rouse.state], ARRAY[NULL]::bigint[],
                ARRAY[NULL]::jsonb[], ARRAY[why], ARRAY[NULL]::bigint[], ARRAY[NULL]::timestamptz[], ARRAY[NULL]::bigint[]);
            then_it := 'failed';
        ELSE
            INSERT INTO rouse.attempt (job, attempt, lost, worker, claimed_at, started_at, ended_at, error)
            VALUES (orphan.id, orphan.attempt, true, orphan.worker, orphan.claimed_at, NULL, at, why);
            IF orphan.lost = 0 THEN
                RETURN QUERY
                UPDATE rouse.job AS j
                SET attempt = j.attempt + 1, lost = j.lost + 1, fence = p_fence, worker = p_worker, claimed_at = at,
                    lease_until = at + orphan.lease_ms * interval '1 millisecond', turn = nextval('rouse.turn_seq')
                WHERE j.id = orphan.id
                RETURNING j.id, j.lane, j.turn, j.attempt, j.lost, j.max_attempts, j.tenant, j.source, j.requested_at, j.claimed_at, j.payload,
                          j.memory_bytes, NULL::rouse.state, NULL::bigint, j.grants;
                CONTINUE;
            END IF;
            UPDATE rouse.job AS j
            SET state = 'queued', turn = NULL, fence = NULL, worker = NULL, claimed_at = NULL, lease_until = NULL, lost = j.lost + 1,
                available_at = at + 10 * 2 ^ (orphan.lost - 1) * interval '1 second'
            WHERE j.id = orphan.id;
            then_it := 'queued';
        END IF;
        IF p_tell THEN
            id := orphan.id;
            lane := orphan.lane;
            attempt := orphan.attempt;
            lost := orphan.lost + 1;
            became := then_it;
            lost_after_ms := (extract(epoch FROM at - orphan.claimed_at) * 1000)::bigint;
            RETURN NEXT;
        END IF;
    END LOOP;
END
$$;

-- The same for older hosts.
CREATE OR REPLACE FUNCTION rouse.adopt(
    p_worker bigint, p_key bytea, p_fence bigint, p_lanes bigint[], p_lease_ms bigint[], p_wanted integer, p_lost_max integer,
    p_within_ms bigint, p_tell boolean)
RETURNS TABLE (id bigint, lane bigint, turn bigint, attempt integer, lost integer, max_attempts integer, tenant text, source text,
               requested_at timestamptz, claimed_at timestamptz, payload jsonb, memory_bytes bigint, became rouse.state, lost_after_ms bigint)
LANGUAGE sql SECURITY DEFINER ROWS 10 SET search_path = pg_catalog, pg_temp AS $$
    SELECT a.id, a.lane, a.turn, a.attempt, a.lost, a.max_attempts, a.tenant, a.source, a.requested_at, a.claimed_at, a.payload, a.memory_bytes,
           a.became, a.lost_after_ms
    FROM rouse.adopt(p_worker, p_key, p_fence, p_lanes, p_lease_ms, p_wanted, p_lost_max, p_within_ms, p_tell, false) AS a
$$;

-- Settles attempts, one per position of the lists, and returns the ids of those that were accepted.
-- The others had lost their lease: nothing was changed for them.
--
--   p_worker      only jobs that this worker has claimed; null: whoever's
--   p_states      succeeded, failed, timed_out, cancelled: the job's final state;
--                 queued with an error: retry after p_delays_ms; queued without: the claim is
--                 given back, and the attempt does not count
--   p_retry_at    retry then instead
--   p_memory      bytes for the next attempt; null: as they were
--   p_started_us  microseconds from the claim to the real start; null: it never started
--   p_cpu_us … p_digests   what the attempt has used, and the SHA-256 of the module that ran; null: nothing ran
--
-- Served by the primary key of rouse.job. The insert into rouse.finished goes to today's partition.
CREATE OR REPLACE FUNCTION rouse._settle(
    p_worker bigint, p_ids bigint[], p_fences bigint[], p_states rouse.state[], p_started_us bigint[],
    p_results jsonb[], p_errors jsonb[], p_delays_ms bigint[], p_retry_at timestamptz[], p_memory bigint[],
    p_cpu_us bigint[] DEFAULT NULL, p_memory_peaks bigint[] DEFAULT NULL, p_host_calls integer[] DEFAULT NULL,
    p_bytes_in bigint[] DEFAULT NULL, p_bytes_out bigint[] DEFAULT NULL, p_digests bytea[] DEFAULT NULL)
RETURNS SETOF bigint
LANGUAGE plpgsql ROWS 100 AS $$
DECLARE
    at       timestamptz := clock_timestamp();
    released bigint[];
    lanes    bigint[];
BEGIN
    RETURN QUERY
    WITH gone AS (
        DELETE FROM rouse.job AS j
        USING unnest(p_ids, p_fences, p_states, p_started_us, p_results, p_errors, p_cpu_us, p_memory_peaks, p_host_calls, p_bytes_in, p_bytes_out, p_digests)
                  AS s(id, fence, state, started_us, result, error, cpu_us, memory_peak, host_calls, bytes_in, bytes_out, digest)
        WHERE j.id = ANY (ARRAY[s.id]) AND j.fence = s.fence AND s.state <> 'queued' AND (p_worker IS NULL OR j.worker = p_worker)
        RETURNING j.id, j.lane, j.worker, j.retried_from, j.requested_at, j.available_at, j.claimed_at,
                  j.claimed_at + s.started_us * interval '1 microsecond' AS started_at,
                  j.attempt, j.lost, j.max_attempts, s.state, j.tenant, j.source, j.unique_key, j.payload, s.result, s.error,
                  s.cpu_us, s.memory_peak, s.host_calls, s.bytes_in, s.bytes_out, s.digest, j.grants)
    INSERT INTO rouse.finished AS f (id, lane, worker, retried_from, requested_at, available_at, claimed_at, started_at, finished_at,
                                attempt, lost, max_attempts, state, tenant, source, unique_key, payload, result, error,
                                cpu_us, memory_peak_bytes, host_calls, bytes_in, bytes_out, digest, grants)
    SELECT g.id, g.lane, g.worker, g.retried_from, g.requested_at, g.available_at, g.claimed_at, g.started_at, at,
           g.attempt, g.lost, g.max_attempts, g.state, g.tenant, g.source, g.unique_key, g.payload, g.result, g.error,
           g.cpu_us, g.memory_peak, g.host_calls, g.bytes_in, g.bytes_out, g.digest, g.grants
    FROM gone AS g
    RETURNING f.id;

    IF NOT ('queued' = ANY (p_states)) THEN
        RETURN;
    END IF;

    -- Retries: the attempt is kept, and the job waits for its time without a turn.
    RETURN QUERY
    WITH back AS (
        UPDATE rouse.job AS j
        SET state = 'queued', turn = NULL, fence = NULL, worker = NULL, claimed_at = NULL, lease_until = NULL,
            available_at = coalesce(s.retry_at, at + s.delay_ms * interval '1 millisecond'),
            memory_bytes = coalesce(s.memory, j.memory_bytes)
        FROM unnest(p_ids, p_fences, p_states, p_started_us, p_errors, p_delays_ms, p_retry_at, p_memory,
                    p_cpu_us, p_memory_peaks, p_host_calls, p_bytes_in, p_bytes_out, p_digests)
                 AS s(id, fence, state, started_us, error, delay_ms, retry_at, memory, cpu_us, memory_peak, host_calls, bytes_in, bytes_out, digest),
             rouse.job AS was
        WHERE j.id = ANY (ARRAY[s.id]) AND j.fence = s.fence AND s.state = 'queued' AND s.error IS NOT NULL
          AND (p_worker IS NULL OR j.worker = p_worker) AND was.id = ANY (ARRAY[s.id])
        RETURNING j.id, j.attempt, j.lane, j.tenant, was.worker, was.claimed_at, s.started_us, s.error,
                  s.cpu_us, s.memory_peak, s.host_calls, s.bytes_in, s.bytes_out, s.digest)
    INSERT INTO rouse.attempt AS a (job, attempt, lost, worker, claimed_at, started_at, ended_at, error, lane, tenant,
                                    cpu_us, memory_peak_bytes, host_calls, bytes_in, bytes_out, digest)
    SELECT b.id, b.attempt, false, b.worker, b.claimed_at, b.claimed_at + b.started_us * interval '1 microsecond', at, b.error, b.lane, b.tenant,
           b.cpu_us, b.memory_peak, b.host_calls, b.bytes_in, b.bytes_out, b.digest
    FROM back AS b
    RETURNING a.job;

    -- Claims given back: as if the claim had never been made, but for a record. Each is ready at once, for
    -- whoever sleeps.
    WITH back AS (
        UPDATE rouse.job AS j
        SET state = 'queued', attempt = j.attempt - 1, fence = NULL, worker = NULL, claimed_at = NULL, lease_until = NULL,
            turn = nextval('rouse.turn_seq')
        FROM unnest(p_ids, p_fences, p_states, p_errors) AS s(id, fence, state, error), rouse.job AS was
        WHERE j.id = ANY (ARRAY[s.id]) AND j.fence = s.fence AND s.state = 'queued' AND s.error IS NULL
          AND (p_worker IS NULL OR j.worker = p_worker) AND was.id = ANY (ARRAY[s.id])
        RETURNING j.id, j.lane, was.attempt, was.worker),
    kept AS (
        INSERT INTO rouse.record (at, job, event, attempt, worker)
        SELECT at, b.id, 'released', b.attempt, b.worker FROM back AS b)
    SELECT array_agg(b.id), array_agg(DISTINCT b.lane) INTO released, lanes FROM back AS b;
    -- The lock by which commits spare each other the same notification is one for each lane, and the server
    -- has room for some thousands of locks: for many lanes none is taken.
    PERFORM rouse._notify(l.lane, true, CASE WHEN cardinality(lanes) <= 32 THEN at ELSE '-infinity' END)
    FROM unnest(lanes) AS l(lane);
    RETURN QUERY SELECT r.id FROM unnest(released) AS r(id);
END
$$;

-- Ends a job that is live, and says whether it was. A running one is settled through the fence, and its
-- worker is told: whatever its attempt still returns is refused. Waits for whoever is changing the job at this
-- moment, and then deals with what has become of it. Served by the primary key.
CREATE OR REPLACE FUNCTION rouse._end(p_id bigint, p_state rouse.state, p_result jsonb, p_error jsonb, p_event text) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    at   timestamptz := clock_timestamp();
    live record;
BEGIN
    SELECT j.state, j.fence, j.worker, j.attempt INTO live FROM rouse.job AS j WHERE j.id = p_id FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM rouse._have_partitions(at);
    IF live.state = 'running' THEN
        PERFORM rouse._settle(NULL, ARRAY[p_id], ARRAY[live.fence], ARRAY[p_state], ARRAY[NULL]::bigint[],
            ARRAY[p_result], ARRAY[p_error], ARRAY[NULL]::bigint[], ARRAY[NULL]::timestamptz[], ARRAY[NULL]::bigint[]);
        PERFORM pg_notify('rouse_worker_' || live.worker, p_id::text);
    ELSE
        WITH gone AS (DELETE FROM rouse.job AS j WHERE j.id = p_id RETURNING j.*)
        INSERT INTO rouse.finished (id, lane, retried_from, requested_at, available_at, finished_at,
                                    attempt, lost, max_attempts, state, tenant, source, unique_key, payload, result, error, grants)
        SELECT g.id, g.lane, g.retried_from, g.requested_at, g.available_at, at,
               g.attempt, g.lost, g.max_attempts, p_state, g.tenant, g.source, g.unique_key, g.payload, p_result, p_error, g.grants
        FROM gone AS g;
    END IF;
    INSERT INTO rouse.record (at, job, event, attempt, who) VALUES (at, p_id, p_event, live.attempt, session_user);
    RETURN true;
END
$$;

-- Makes a new job of one that has ended, with the same lane, payload, tenant, source, max_attempts,
-- grants and unique key, and returns its id. While a retry of it is live, that one's id is returned. Served
-- by the primary key, finished_id and job_retry; wakes as an enqueue does.
CREATE OR REPLACE FUNCTION rouse.retry(id bigint) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at    timestamptz := clock_timestamp();
    live  rouse.state;
    was   rouse.finished;
    fresh bigint := nextval('rouse.turn_seq');
    their bigint;
BEGIN
    PERFORM rouse._check_id('retry', retry.id);
    SELECT j.state INTO live FROM rouse.job AS j WHERE j.id = retry.id;
    IF FOUND THEN
        RAISE EXCEPTION 'rouse: job % cannot be retried: it is %', retry.id, live
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = CASE live WHEN 'queued' THEN format('SELECT rouse.reschedule(%s) makes it ready at once.', retry.id)
                                   ELSE 'Wait for its end, or cancel it first.' END;
    END IF;
    was := rouse._ended(retry.id);
    PERFORM rouse._have_partitions(at);
    FOR try IN 1 .. 10 LOOP
        INSERT INTO rouse.job AS j (id, lane, turn, retried_from, requested_at, available_at, max_attempts, tenant, source,
                                    unique_key, payload, wake, grants)
        VALUES (fresh, was.lane, fresh, was.id, at, at, was.max_attempts, was.tenant, was.source, was.unique_key, was.payload, true, was.grants)
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            INSERT INTO rouse.record (at, job, event, who, detail)
            VALUES (at, was.id, 'retried', session_user, jsonb_build_object('as', fresh));
            RETURN fresh;
        END IF;
        SELECT j.id INTO their FROM rouse.job AS j WHERE j.retried_from = was.id;
        IF FOUND THEN
            RETURN their;
        END IF;
        SELECT j.id INTO their FROM rouse.job AS j WHERE j.unique_key = was.unique_key;
        IF FOUND THEN
            RAISE EXCEPTION 'rouse: job % cannot be retried: job %, which is live, has its unique key %',
                was.id, their, quote_literal(substr(was.unique_key, strpos(was.unique_key, '/') + 1))
                USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Wait for the end of that one, or cancel it first.';
        END IF;
        -- The other one finished between the statements.
    END LOOP;
    RAISE EXCEPTION 'rouse: job % cannot be retried: its place is taken and freed faster than it can be read', was.id
        USING ERRCODE = 'serialization_failure', HINT = 'Try again.';
END
$$;

-- Cancels up to `most` ready jobs of a queue, the oldest of each lane first, and says how many. Neither
-- running jobs nor those that wait for their time, and none that somebody else is claiming at this moment.
-- One record says how many they were. Served by job_ready, after one read of the catalog of lanes.
CREATE OR REPLACE FUNCTION rouse.purge_queue(queue text, most integer DEFAULT 1000) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    at      timestamptz := clock_timestamp();
    lane_id bigint;
    taken   integer;
    purged  integer := 0;
BEGIN
    PERFORM rouse._check_queue('purge_queue', purge_queue.queue);
    IF most IS NULL OR most < 1 THEN
        RAISE EXCEPTION 'rouse.purge_queue: most must be at least 1, not %', coalesce(most::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM rouse._have_partitions(at);
    FOR lane_id IN SELECT DISTINCT l.id FROM rouse.lane AS l WHERE l.queue = purge_queue.queue LOOP
        WITH ready AS MATERIALIZED (
            SELECT j.id FROM rouse.job AS j
            WHERE j.lane = lane_id AND j.state = 'queued' AND j.turn IS NOT NULL
            ORDER BY j.turn LIMIT most - purged FOR UPDATE SKIP LOCKED),
        gone AS (
            DELETE FROM rouse.job AS j USING ready WHERE j.id = ANY (ARRAY[ready.id]) RETURNING j.*),
        kept AS (
            INSERT INTO rouse.finished (id, lane, retried_from, requested_at, available_at, finished_at,
                                        attempt, lost, max_attempts, state, tenant, source, unique_key, payload, grants)
            SELECT g.id, g.lane, g.retried_from, g.requested_at, g.available_at, at,
                   g.attempt, g.lost, g.max_attempts, 'cancelled', g.tenant, g.source, g.unique_key, g.payload, g.grants
            FROM gone AS g RETURNING 1)
        SELECT count(*) INTO taken FROM kept;
        purged := purged + taken;
        EXIT WHEN purged >= most;
    END LOOP;
    IF purged > 0 THEN
        INSERT INTO rouse.record (at, queue, event, who, detail)
        VALUES (at, purge_queue.queue, 'purged', session_user, jsonb_build_object('jobs', purged));
    END IF;
    RETURN purged;
END
$$;

-- Every job that is kept, live or finished. `error` is the last failed attempt's; `progress` is what the
-- attempt that runs has said last; `usage` is what the last attempt has used, or the one that runs so far;
-- `grants` is what the job leaves of those of its handler.
CREATE OR REPLACE VIEW rouse.jobs AS
SELECT j.id, l.handler, l.queue, l.priority, l.tags, j.state, j.tenant, j.source, substr(j.unique_key, strpos(j.unique_key, '/') + 1) AS unique_key,
       j.attempt, j.lost, j.max_attempts, j.retried_from, j.worker,
       j.requested_at, j.available_at, j.claimed_at, NULL::timestamptz AS started_at, NULL::timestamptz AS finished_at,
       j.payload, NULL::jsonb AS result,
       (SELECT a.error FROM rouse.attempt AS a WHERE a.job = j.id ORDER BY a.attempt DESC LIMIT 1) AS error,
       (SELECT jsonb_build_object('percent', p.percent, 'step', p.step, 'at', p.at)
        FROM rouse.progress AS p WHERE p.job = j.id AND p.fence = j.fence) AS progress,
       (SELECT rouse._usage(r.cpu_us, r.memory_bytes, r.host_calls, r.bytes_in, r.bytes_out, NULL)
        FROM rouse.running AS r WHERE r.job = j.id AND r.fence = j.fence) AS usage,
       j.grants
FROM rouse.job AS j
CROSS JOIN LATERAL (SELECT * FROM rouse.lane AS l WHERE l.id = j.lane LIMIT 1) AS l
UNION ALL
SELECT f.id, l.handler, l.queue, l.priority, l.tags, f.state, f.tenant, f.source, substr(f.unique_key, strpos(f.unique_key, '/') + 1),
       f.attempt, f.lost, f.max_attempts, f.retried_from, f.worker,
       f.requested_at, f.available_at, f.claimed_at, f.started_at, f.finished_at,
       f.payload, f.result, f.error, NULL,
       rouse._usage(f.cpu_us, f.memory_peak_bytes, f.host_calls, f.bytes_in, f.bytes_out, f.digest), f.grants
FROM rouse.finished AS f
CROSS JOIN LATERAL (SELECT * FROM rouse.lane AS l WHERE l.id = f.lane LIMIT 1) AS l;

-- What has happened to one job, oldest first. Nothing of it is rewritten once it has ended. Who ended
-- a job from outside stands as `by` in the detail of its end.
CREATE OR REPLACE FUNCTION rouse.history(id bigint)
RETURNS TABLE (at timestamptz, event text, attempt integer, worker text, detail jsonb)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT e.at, e.event, e.attempt, w.worker_id, e.detail
    FROM (
        SELECT 0 AS place, j.requested_at AS at, 'requested' AS event, NULL::integer AS attempt, NULL::bigint AS worker,
               jsonb_strip_nulls(jsonb_build_object('handler', j.handler, 'queue', j.queue, 'tenant', j.tenant, 'source', j.source,
                                                    'retried_from', j.retried_from, 'grants', j.grants)) AS detail
        FROM rouse.jobs AS j WHERE j.id = history.id
        UNION ALL
        SELECT 2 * a.attempt, coalesce(a.started_at, a.claimed_at), CASE WHEN a.lost THEN 'claimed' ELSE 'started' END, a.attempt, a.worker, NULL
        FROM rouse.attempt AS a WHERE a.job = history.id
        UNION ALL
        SELECT 2 * a.attempt + 1, a.ended_at, CASE WHEN a.lost THEN 'lost' ELSE 'failed' END, a.attempt, a.worker,
               a.error || jsonb_strip_nulls(jsonb_build_object('usage', rouse._usage(a.cpu_us, a.memory_peak_bytes, a.host_calls, a.bytes_in, a.bytes_out, a.digest)))
        FROM rouse.attempt AS a WHERE a.job = history.id
        UNION ALL
        SELECT 2 * j.attempt, j.claimed_at, 'claimed', j.attempt, j.worker, NULL
        FROM rouse.job AS j WHERE j.id = history.id AND j.state = 'running'
        UNION ALL
        SELECT 2 * f.attempt, coalesce(f.started_at, f.claimed_at), CASE WHEN f.started_at IS NULL THEN 'claimed' ELSE 'started' END,
               f.attempt, f.worker, NULL
        FROM rouse.finished AS f WHERE f.id = history.id AND f.claimed_at IS NOT NULL
        UNION ALL
        SELECT 2 * f.attempt + 1, f.finished_at, f.state::text, nullif(f.attempt, 0), f.worker,
               nullif(coalesce(f.error, '{}')
                      || jsonb_strip_nulls(jsonb_build_object('usage', rouse._usage(f.cpu_us, f.memory_peak_bytes, f.host_calls, f.bytes_in, f.bytes_out, f.digest)))
                      || coalesce((
                   SELECT jsonb_build_object('by', r.who) FROM rouse.record AS r
                   WHERE r.job = f.id AND r.event IN ('cancelled', 'completed', 'failed', 'deleted') LIMIT 1), '{}'), '{}')
        FROM rouse.finished AS f WHERE f.id = history.id
        UNION ALL
        SELECT 2 * s.attempt, s.at, 'step', s.attempt, s.worker, jsonb_build_object('name', s.name)
        FROM rouse.step AS s WHERE s.job = history.id
        UNION ALL
        -- Within an attempt between its start and its end; after an attempt until the next begins; and what was
        -- done to the job after its end, last.
        SELECT CASE WHEN r.event IN ('released', 'renewed') THEN 2 * r.attempt
                    WHEN r.event = 'retried' THEN 2147483647
                    ELSE 2 * coalesce(r.attempt, 0) + 1 END,
               r.at, r.event, nullif(r.attempt, 0), r.worker,
               nullif(coalesce(r.detail, '{}') || CASE WHEN r.who IS NULL THEN '{}' ELSE jsonb_build_object('by', r.who) END, '{}')
        FROM rouse.record AS r
        -- The end itself says the same as these.
        WHERE r.job = history.id AND r.event NOT IN ('cancelled', 'completed', 'failed')
    ) AS e
    LEFT JOIN rouse.worker AS w ON w.incarnation = e.worker
    ORDER BY e.place, e.at, e.event = 'deleted' DESC
$$;

REVOKE ALL ON FUNCTION rouse.claim(bigint, bytea, bigint, bigint[], bigint[], bigint[], integer, boolean),
    rouse.adopt(bigint, bytea, bigint, bigint[], bigint[], integer, integer, bigint, boolean, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION rouse.claim(bigint, bytea, bigint, bigint[], bigint[], bigint[], integer, boolean),
    rouse.adopt(bigint, bytea, bigint, bigint[], bigint[], integer, integer, bigint, boolean, boolean) TO rouse_worker;
