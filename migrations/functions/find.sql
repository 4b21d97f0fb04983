-- Searches jobs by their properties, and retries the matches.
--
-- A filter is an object; a job matches if it matches every key:
--
--   state            a state, or a list of states
--   handler, queue, tenant, source, unique_key   the name
--   tag              one of the tags that the job requires
--   error            a string that the error message contains, ignoring case
--   kind             the kind of the error, such as timed_out or denied, or the handler's own (guest_kind), such as
--                    empty_order
--   payload          {"/customer/id": 42}: the payload has this value at this JSON pointer
--   since, until     a time, or an age ("2 hours"): when the job ended; for a live job, when it was enqueued
--   retried          true: only jobs that were retried; false: only those that never were
--
-- A search examines the jobs starting at the newest id, and at most `max_examined` of them in one call: it returns the
-- id at which it stopped, and the next call continues from there (`before`). `since` and `until` exclude whole days of
-- history, and a search for jobs that did not succeed reads only those (finished_unsuccessful).

-- A time of a filter: a point in time, or an age. An age needs units: otherwise Postgres would read 2026-11 as 2026
-- years and 11 months, and a bare number as seconds.
CREATE OR REPLACE FUNCTION rouse._filter_time(p_name text, p_key text, p_value jsonb) RETURNS timestamptz
LANGUAGE plpgsql STABLE AS $$
DECLARE
    written text := p_value #>> '{}';
    at      timestamptz;
BEGIN
    IF jsonb_typeof(p_value) = 'string' THEN
        BEGIN
            at := CASE WHEN written ~ '[[:alpha:]]' AND written !~ '^[[:space:]]*[0-9]{4}-' THEN now() - written::interval ELSE written::timestamptz END;
        EXCEPTION
            WHEN data_exception THEN
                BEGIN
                    at := written::timestamptz;
                EXCEPTION
                    WHEN data_exception THEN
                        NULL;
                END;
        END;
    END IF;
    IF at IS NULL OR NOT isfinite(at) THEN
        RAISE EXCEPTION 'rouse.%: % of the filter must be a time or an age, not %',
            p_name, p_key, left(p_value::text, 140)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'For instance "2027-01-31T08:00Z" or "2 hours".';
    END IF;
    RETURN at;
END
$$;

-- The path of a JSON pointer (RFC 6901).
CREATE OR REPLACE FUNCTION rouse._pointer(p_name text, p_pointer text) RETURNS text[]
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_pointer = '' THEN
        RETURN '{}';
    END IF;
    IF p_pointer !~ '^/' OR p_pointer ~ '~([^01]|$)' THEN
        RAISE EXCEPTION 'rouse.%: payload of the filter has %, which is not a JSON pointer',
            p_name, quote_literal(left(p_pointer, 140))
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'For instance {"/customer/id": 42}; ~1 stands for a slash in a key, ~0 for a tilde.';
    END IF;
    RETURN ARRAY(
        SELECT replace(replace(part.key, '~1', '/'), '~0', '~')
        FROM regexp_split_to_table(substr(p_pointer, 2), '/') WITH ORDINALITY AS part(key, place) ORDER BY part.place);
END
$$;

-- Checks a filter for function `p_name`, and returns it as SQL: the tables that it applies to, and a condition on a row
-- `k` of them.
CREATE OR REPLACE FUNCTION rouse._read_filter(
    p_name text, p_filter jsonb, OUT is_live boolean, OUT is_ended boolean, OUT is_unsuccessful boolean,
    OUT since timestamptz, OUT until timestamptz, OUT retried boolean, OUT condition text)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    entry    record;
    states   text[];
    expected text;
    lanes    text[] := '{}';
    among    text;
BEGIN
    IF jsonb_typeof(p_filter) IS DISTINCT FROM 'object' THEN
        RAISE EXCEPTION 'rouse.%: filter must be an object, not %', p_name, coalesce(left(p_filter::text, 140), 'null')
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'For instance {"state": "failed", "handler": "email.send", "since": "2 hours"}.';
    END IF;
    condition := 'true';
    FOR entry IN SELECT f.key, f.value, f.value #>> '{}' AS word FROM jsonb_each(p_filter) AS f LOOP
        IF entry.key NOT IN ('state', 'handler', 'queue', 'tenant', 'source', 'tag', 'unique_key', 'error', 'kind', 'payload',
                             'since', 'until', 'retried') THEN
            RAISE EXCEPTION 'rouse.%: % is not a key of filters', p_name, quote_literal(left(entry.key, 140))
                USING ERRCODE = 'invalid_parameter_value',
                      HINT = 'The keys are state, handler, queue, tenant, source, tag, unique_key, error, kind, payload, '
                             'since, until and retried.';
        END IF;
        IF entry.key IN ('handler', 'queue', 'tenant', 'source', 'tag', 'unique_key', 'error', 'kind')
           AND (jsonb_typeof(entry.value) <> 'string' OR entry.word = '') THEN
            expected := 'a non-empty string';
        ELSIF entry.key = 'state' THEN
            states := ARRAY(SELECT s #>> '{}' FROM jsonb_array_elements(CASE jsonb_typeof(entry.value)
                WHEN 'array' THEN entry.value ELSE jsonb_build_array(entry.value) END) AS s);
            IF states = '{}' OR array_position(states, NULL) IS NOT NULL
               OR NOT states <@ ARRAY['queued', 'running', 'succeeded', 'failed', 'timed_out', 'cancelled'] THEN
                expected := 'queued, running, succeeded, failed, timed_out or cancelled, or an array of these';
            END IF;
        ELSIF entry.key = 'payload' AND (jsonb_typeof(entry.value) <> 'object' OR entry.value = '{}') THEN
            expected := 'an object of JSON pointers and values, such as {"/customer/id": 42}';
        ELSIF entry.key = 'retried' AND jsonb_typeof(entry.value) <> 'boolean' THEN
            expected := 'true or false';
        END IF;
        IF expected IS NOT NULL THEN
            RAISE EXCEPTION 'rouse.%: % of the filter must be %, not %',
                p_name, entry.key, expected, left(entry.value::text, 140)
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
        -- Handler, queue and tags are columns of lanes; everything else is in the job.
        IF entry.key IN ('handler', 'queue') THEN
            lanes := lanes || format('l.%I = %L', entry.key, entry.word);
        ELSIF entry.key = 'tag' THEN
            lanes := lanes || format('l.tags @> ARRAY[%L]', entry.word);
        ELSIF entry.key = 'unique_key' THEN
            -- The key follows the handler and a slash, as in the view rouse.jobs.
            condition := condition || format(' AND substr(k.unique_key, strpos(k.unique_key, ''/'') + 1) = %L', entry.word);
        ELSIF entry.key IN ('tenant', 'source') THEN
            condition := condition || format(' AND k.%I = %L', entry.key, entry.word);
        ELSIF entry.key = 'kind' THEN
            condition := condition || format(' AND %L IN (k.error->>''kind'', k.error->>''guest_kind'')', entry.word);
        ELSIF entry.key = 'error' THEN
            condition := condition || format(' AND strpos(lower(k.error->>''message''), lower(%L)) > 0', entry.word);
        ELSIF entry.key = 'payload' THEN
            SELECT condition || string_agg(
                format(' AND rouse._payload(k.id, k.payload, k.payload_at) #> %L = %L', rouse._pointer(p_name, p.key), p.value), '')
            INTO condition FROM jsonb_each(entry.value) AS p;
        ELSIF entry.key = 'since' THEN
            since := rouse._filter_time(p_name, 'since', entry.value);
            condition := condition || format(' AND k.at >= %L', since);
        ELSIF entry.key = 'until' THEN
            until := rouse._filter_time(p_name, 'until', entry.value);
            condition := condition || format(' AND k.at < %L', until);
        ELSIF entry.key = 'retried' THEN
            retried := entry.value::boolean;
        ELSE
            condition := condition || format(' AND k.state = ANY (%L::rouse.state[])', states);
        END IF;
    END LOOP;
    IF lanes <> '{}' THEN
        EXECUTE 'SELECT format('' AND k.lane = ANY (%L::bigint[])'', coalesce(array_agg(DISTINCT l.id), ''{}''))
                 FROM rouse.lane AS l WHERE ' || array_to_string(lanes, ' AND ') INTO among;
        -- First, because it is the cheapest.
        condition := 'true' || among || substr(condition, 5);
    END IF;
    -- Only ended jobs have errors, and only they can have been retried.
    is_ended := states IS NULL OR states && ARRAY['succeeded', 'failed', 'timed_out', 'cancelled'];
    is_live := (states IS NULL OR states && ARRAY['queued', 'running']) AND NOT p_filter ?| ARRAY['error', 'kind']
        AND retried IS NOT TRUE;
    is_unsuccessful := NOT 'succeeded' = ANY (states) OR p_filter ?| ARRAY['error', 'kind'];
END
$$;

-- The ids of up to `max` jobs that match a filter, the newest first, with ids below `before` (null: all).
-- `next_before`: the search stopped there, because it had found `max` jobs or examined `max_examined` jobs, and can
-- continue from it; null: there are no more. `examined_back_to` is the same if it stopped because of `max_examined`.
-- Reads rouse.job and the partitions of rouse.finished in the order of their ids, served by the primary key, and
-- finished_id or finished_unsuccessful; sorts nothing.
CREATE OR REPLACE FUNCTION rouse.search_jobs(
    filter jsonb DEFAULT '{}', before bigint DEFAULT NULL, max integer DEFAULT 100, max_examined integer DEFAULT 100000,
    OUT ids bigint[], OUT examined_count integer, OUT next_before bigint, OUT examined_back_to bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET datestyle = 'ISO'
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off AS $$
#variable_conflict use_variable
DECLARE
    f         record;
    parts     text[] := '{}';
    among     text := 'k.id < $1';
    found_job record;
    last      bigint;
BEGIN
    IF max IS NULL OR max NOT BETWEEN 1 AND 100000 THEN
        RAISE EXCEPTION 'rouse.search_jobs: max must be between 1 and 100000, not %', coalesce(max::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF max_examined IS NULL OR max_examined NOT BETWEEN 1 AND 1000000 THEN
        RAISE EXCEPTION 'rouse.search_jobs: max_examined must be between 1 and 1000000, not %',
            coalesce(max_examined::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    f := rouse._read_filter('search_jobs', filter);
    -- Whole days, by columns that only ended jobs have. Every row that is read counts as examined, including those that
    -- ended before `since` on the same day, and live ones.
    IF f.since IS NOT NULL THEN
        among := among || format(' AND k.not_before >= %L',
            date_trunc('day', f.since AT TIME ZONE 'UTC') AT TIME ZONE 'UTC');
    END IF;
    IF f.until IS NOT NULL THEN
        among := among || format(' AND k.not_after < %L',
            (date_trunc('day', f.until AT TIME ZONE 'UTC') + interval '1 day') AT TIME ZONE 'UTC');
    END IF;
    IF f.is_unsuccessful THEN
        among := among || ' AND k.state <> ''succeeded''';
    END IF;
    IF f.is_live THEN
        parts := parts || 'SELECT j.id, j.lane, j.state, j.tenant, j.source, j.unique_key, j.payload, j.payload_at, NULL::jsonb AS error,
                                  j.requested_at AS at, timestamptz ''infinity'' AS not_before,
                                  timestamptz ''-infinity'' AS not_after
                           FROM rouse.job AS j'::text;
    END IF;
    IF f.is_ended THEN
        parts := parts || 'SELECT f.id, f.lane, f.state, f.tenant, f.source, f.unique_key, f.payload, f.payload_at, f.error, f.finished_at AS at,
                                  f.finished_at AS not_before, f.finished_at AS not_after
                           FROM rouse.finished AS f'::text;
    END IF;
    ids := '{}';
    examined_count := 0;
    IF parts = '{}' THEN
        RETURN;
    END IF;
    -- Conditions are outside the UNION: a part with its own condition is sorted instead of merged in the order of the
    -- ids.
    FOR found_job IN EXECUTE format('SELECT k.id, (%s) AS fits FROM (%s) AS k WHERE %s ORDER BY k.id DESC LIMIT $2',
                              f.condition, array_to_string(parts, ' UNION ALL '), among)
        USING coalesce(before, 9223372036854775807), max_examined
    LOOP
        examined_count := examined_count + 1;
        last := found_job.id;
        IF found_job.fits AND f.retried IS NOT NULL THEN
            PERFORM FROM rouse.record AS r WHERE r.job = found_job.id AND r.event = 'retried' LIMIT 1;
            found_job.fits := FOUND = f.retried;
        END IF;
        IF found_job.fits THEN
            ids := ids || found_job.id;
        END IF;
        IF cardinality(ids) = max THEN
            next_before := found_job.id;
            RETURN;
        END IF;
    END LOOP;
    IF examined_count = max_examined THEN
        next_before := last;
        examined_back_to := last;
    END IF;
END
$$;

-- The rows of the view rouse.jobs that match a filter, the newest first, as found by rouse.search_jobs. If the search
-- stopped because of `max_examined`, a notice explains how to continue.
CREATE OR REPLACE FUNCTION rouse.find_jobs(
    filter jsonb DEFAULT '{}', before bigint DEFAULT NULL, max integer DEFAULT 100, max_examined integer DEFAULT 100000)
RETURNS SETOF rouse.jobs
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_variable
DECLARE
    batch     record;
    found_job bigint;
BEGIN
    batch := rouse.search_jobs(filter, before, max, max_examined);
    FOREACH found_job IN ARRAY batch.ids LOOP
        RETURN QUERY SELECT * FROM rouse.jobs AS j WHERE j.id = found_job;
    END LOOP;
    IF batch.examined_back_to IS NOT NULL THEN
        RAISE NOTICE 'rouse.find_jobs: there may be more: % jobs were examined, back to %',
            batch.examined_count, batch.examined_back_to
            USING HINT = format('before => %s continues from there; since in the filter narrows the search.',
                                batch.examined_back_to);
    END IF;
END
$$;

-- Retries jobs that have ended, match a filter and were never retried: one batch, the newest first. A batch is selected
-- by rouse.search_jobs; if `next_before` is not null, pass it to the next call. Each job is enqueued as a new job and
-- leaves a record, as with rouse.retry. Repeating a batch finds nothing to do, because its jobs have been retried. The
-- filter has to name states.
--
--   retried, made   the jobs, and the new job of each
--   refused         jobs whose unique key a live job has, whose payload was removed, or that wait for a chain that has
--                   failed: a later batch, with older jobs, may retry it, and then the job can be retried too
--   locked          jobs that another transaction has locked: a later call may retry them. `lock_wait` is the time for
--                   which this call waits for all of them together, by default not at all.
--
-- It waits up to 10 s for another batch, and fails if that batch has not committed by then.
CREATE OR REPLACE FUNCTION rouse.retry_jobs(
    filter jsonb, before bigint DEFAULT NULL, max integer DEFAULT 100, max_examined integer DEFAULT 100000, lock_wait interval DEFAULT '0',
    OUT retried bigint[], OUT made bigint[], OUT refused bigint[], OUT locked bigint[], OUT examined_count integer, OUT next_before bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '10s'
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_variable
DECLARE
    at        timestamptz := clock_timestamp();
    wait_end  timestamptz;
    batch     record;
    found_job bigint;
    was       rouse.finished;
    done      record;
BEGIN
    IF max IS NULL OR max NOT BETWEEN 1 AND 1000 THEN
        RAISE EXCEPTION 'rouse.retry_jobs: max must be between 1 and 1000, not %', coalesce(max::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF lock_wait IS NULL OR lock_wait NOT BETWEEN interval '0' AND interval '1 minute' THEN
        RAISE EXCEPTION 'rouse.retry_jobs: lock_wait must be between 0 and 1 minute, not %', coalesce(lock_wait::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    batch := rouse._read_filter('retry_jobs', filter);
    IF NOT filter ? 'state' OR batch.is_live THEN
        RAISE EXCEPTION 'rouse.retry_jobs: state of the filter must name states of jobs that have ended'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'For instance {"state": ["failed", "timed_out"]}.';
    END IF;
    IF filter -> 'retried' = 'true' THEN
        RAISE EXCEPTION 'rouse.retry_jobs: jobs that were already retried are never retried by a filter'
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'Omit retried from the filter. SELECT rouse.retry(id) retries one job again.';
    END IF;
    -- One batch at a time: a call that has waited sees the jobs that were retried in the meantime.
    PERFORM rouse._lock('retry_jobs', '');
    batch := rouse.search_jobs(filter || '{"retried": false}', before, max, max_examined);
    PERFORM rouse._ensure_partitions(at);
    retried := '{}';
    made := '{}';
    refused := '{}';
    locked := '{}';
    examined_count := batch.examined_count;
    next_before := batch.next_before;
    wait_end := clock_timestamp() + lock_wait;
    -- Each job comes after those that it waits for.
    FOREACH found_job IN ARRAY ARRAY(SELECT i.id FROM unnest(batch.ids) AS i(id) ORDER BY i.id) LOOP
        SELECT * INTO was FROM rouse.finished AS f WHERE f.id = found_job LIMIT 1;
        -- Its partition may have been dropped in the meantime.
        CONTINUE WHEN NOT FOUND;
        -- A subtransaction: if another transaction has locked something that the retry needs, only this retry is
        -- undone.
        BEGIN
            -- 0 would mean no timeout.
            PERFORM set_config('lock_timeout', greatest(ceil(extract(epoch FROM wait_end - clock_timestamp()) * 1000), 1) || 'ms', true);
            done := rouse._retry(was, at);
        EXCEPTION
            WHEN lock_not_available OR deadlock_detected THEN
                locked := locked || found_job;
                CONTINUE;
        END;
        IF done.made IS NOT NULL THEN
            retried := retried || found_job;
            made := made || done.made;
        ELSIF done.is_retry IS NOT TRUE THEN
            refused := refused || found_job;
        END IF;
    END LOOP;
END
$$;
