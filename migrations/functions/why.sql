-- rouse.why: the reasons why a job does not start.

-- A duration in one unit, rounded, as host/display/src/when.rs writes it.
CREATE OR REPLACE FUNCTION rouse._duration(p_time interval) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN s.all < 10 THEN greatest(round(s.all, 1), 0) || ' s'
        WHEN s.all < 119.5 THEN round(s.all) || ' s'
        WHEN s.all < 5370 THEN round(s.all / 60) || ' min'
        WHEN s.all < 35820 THEN trim_scale(round(s.all / 3600, 1)) || ' h'
        WHEN s.all < 171000 THEN round(s.all / 3600) || ' h'
        ELSE round(s.all / 86400) || ' days' END
    FROM (SELECT extract(epoch FROM p_time) AS all) AS s
$$;

-- A count as text; counts end at 10,000.
CREATE OR REPLACE FUNCTION rouse._counted(p_number bigint, p_one text, p_many text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_number > 10000 THEN 'more than 10,000 ' || p_many
                WHEN p_number = 1 THEN '1 ' || p_one
                ELSE to_char(p_number, 'FM999,999') || ' ' || p_many END
$$;

-- A string as one word of a shell command. Operators copy the commands of remedies, and names may be untrusted text.
CREATE OR REPLACE FUNCTION rouse._shell_word(p_text text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_text ~ '^[A-Za-z0-9_][A-Za-z0-9_.:-]*$' THEN p_text ELSE '''' || replace(p_text, '''', E'''\\''''') || '''' END
$$;

-- The jobs that share a limit with a job, as text: ' of tenant acme'. Empty if all jobs share it. The values are those
-- of the job, shortened.
CREATE OR REPLACE FUNCTION rouse._gated_jobs(p_gate text[], p_queue text, p_handler text, p_key text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(' of ' || string_agg(CASE WHEN v.value = '' THEN 'no ' || g.by ELSE g.by || ' ' || left(v.value, 140) END, ' and ' ORDER BY g.n), '')
    FROM unnest(p_gate) WITH ORDINALITY AS g(by, n) CROSS JOIN LATERAL (SELECT rouse._lane_value(g.by, p_queue, p_handler, p_key) AS value) AS v
$$;

-- The reason why a queued job has no turn. `p_now`: the time.
CREATE OR REPLACE FUNCTION rouse._why_not_ready(p_job rouse.job, p_now timestamptz)
RETURNS TABLE (reason text, sentence text, remedy text, since timestamptz, until timestamptz)
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    blocker record;
    rest    text;
    failed  text;
BEGIN
    IF p_job.wait IS NOT NULL THEN
        reason := 'suspended';
        until := CASE WHEN p_job.wait ? 'until_ms' THEN to_timestamp(least((p_job.wait ->> 'until_ms')::numeric, 1e14)::double precision / 1000) END;
        rest := coalesce(', for another ' || rouse._duration(until - p_now), '');
        CASE p_job.wait ->> 'kind'
            WHEN 'signal' THEN
                sentence := format('Its attempt is suspended until the job receives signal %s%s.', left(p_job.wait ->> 'name', 200), rest);
                remedy := format('`rouse job signal %s %s%s`', p_job.id, CASE WHEN p_job.wait ->> 'name' LIKE '-%' THEN '-- ' ELSE '' END,
                                 rouse._shell_word(p_job.wait ->> 'name'));
            WHEN 'call' THEN
                sentence := 'Its attempt is suspended until the jobs that it has called have ended.';
            ELSE
                sentence := format('Its attempt sleeps%s.', ltrim(rest, ','));
        END CASE;
        RETURN NEXT;
        until := NULL;
    END IF;
    IF p_job.blockers IS NOT NULL THEN
        reason := 'after';
        FOR blocker IN
            SELECT b.chain, b.on_failure, rouse._live_job(b.chain) AS live, e.job AS ended, e.state
            FROM (SELECT d.chain, d.on_failure FROM rouse.dependency AS d WHERE d.job = p_job.id LIMIT 10) AS b
            CROSS JOIN LATERAL rouse._end_of(b.chain) AS e
            ORDER BY b.chain
        LOOP
            CASE
                WHEN blocker.live IS NOT NULL THEN
                    sentence := format('It waits for the end of job %s, which is %s.', blocker.live,
                                       (SELECT j.state FROM rouse.job AS j WHERE j.id = blocker.live));
                    remedy := format('`rouse why %s`', blocker.live);
                WHEN blocker.on_failure <> 'wait' OR blocker.state = 'succeeded' THEN
                    sentence := format('Job %s has ended, and a worker is about to release this one.', coalesce(blocker.ended, blocker.chain));
                    remedy := NULL;
                WHEN blocker.ended IS NOT NULL AND EXISTS (SELECT FROM rouse.finished AS f WHERE f.id = blocker.ended) THEN
                    sentence := format('It waits for job %s, which has ended as %s, to be retried.', blocker.ended, replace(blocker.state::text, '_', ' '));
                    remedy := format('`rouse job retry %s`', blocker.ended);
                ELSE
                    sentence := format('It waits for a retry of job %s, which is no longer kept: it will never start.', coalesce(blocker.ended, blocker.chain));
                    remedy := format('`rouse job cancel %s`', p_job.id);
            END CASE;
            RETURN NEXT;
        END LOOP;
        IF p_job.blockers > 10 THEN
            sentence := format('It waits for %s jobs in all.', p_job.blockers);
            remedy := format('`rouse job %s` lists the first 100 of them.', p_job.id);
            RETURN NEXT;
        END IF;
    ELSIF p_job.wait IS NULL AND p_job.available_at > p_now THEN
        reason := 'not_due';
        until := p_job.available_at;
        SELECT a.error ->> 'message' INTO failed FROM rouse.attempt AS a
        WHERE a.job = p_job.id AND a.error IS NOT NULL ORDER BY a.attempt DESC LIMIT 1;
        sentence := CASE
            WHEN p_job.attempt = 0 THEN format('It is not due: it may start in %s.', rouse._duration(until - p_now))
            ELSE format('It waits to be tried again in %s, after attempt %s: %s', rouse._duration(until - p_now), p_job.attempt,
                        coalesce(left(split_part(failed, E'\n', 1), 200), 'it was interrupted.')) END;
        remedy := format('`rouse job reschedule %s`', p_job.id);
        RETURN NEXT;
    END IF;
END
$$;

-- The reasons why no running worker takes the jobs of a lane: a row for each condition that no worker meets, or no row.
-- A worker runs if it was seen within the last 90 seconds. If none has the handler, it also reports whether none serves
-- the queue, and whether none has the tags: a worker that gets the handler would not take the job either.
CREATE OR REPLACE FUNCTION rouse._why_unserved(p_handler text, p_queue text, p_tags text[], p_now timestamptz)
RETURNS TABLE (reason text, sentence text, remedy text, since timestamptz, until timestamptz)
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    able record;
BEGIN
    SELECT count(*) AS running, count(*) FILTER (WHERE w.serves) AS any_serving, count(*) FILTER (WHERE w.tagged) AS any_tagged,
           count(*) FILTER (WHERE w.has) AS having, count(*) FILTER (WHERE w.has AND w.serves) AS serving,
           count(*) FILTER (WHERE w.has AND w.serves AND w.tagged) AS tagged,
           count(*) FILTER (WHERE w.has AND w.serves AND w.tagged AND w.permitted) AS permitted,
           count(*) FILTER (WHERE w.has AND w.serves AND w.tagged AND w.permitted AND NOT w.drains) AS staying,
           count(*) FILTER (WHERE w.has AND w.serves AND w.tagged AND w.permitted AND NOT w.drains AND w.parked IS NULL) AS able,
           (array_agg(w.parked) FILTER (WHERE w.has AND w.serves AND w.tagged AND w.permitted AND NOT w.drains))[1] AS parked,
           (array_agg(w.parked_cause) FILTER (WHERE w.has AND w.serves AND w.tagged AND w.permitted AND NOT w.drains))[1] AS parked_cause,
           ARRAY(SELECT t.tag FROM unnest(p_tags) AS t(tag)
                 WHERE NOT EXISTS (SELECT FROM rouse._running_workers(p_handler, p_queue, p_tags, p_now) AS o WHERE o.has AND o.serves AND t.tag = ANY (o.tags))
                 ORDER BY 1) AS missing
    INTO able FROM rouse._running_workers(p_handler, p_queue, p_tags, p_now) AS w;
    CASE
        WHEN able.running = 0 THEN
            reason := 'no_worker';
            sentence := 'No worker is running.';
            remedy := 'Start a host: `rouse serve`.';
        WHEN able.having = 0 THEN
            reason := 'no_handler';
            sentence := format('No running worker has the handler %s.', p_handler);
            remedy := 'Put its module into the folder of a host. `rouse handlers ls` lists the handlers of the fleet.';
        WHEN able.serving = 0 THEN
            reason := 'no_queue';
            sentence := format('No running worker with the handler %s serves queue %s.', p_handler, p_queue);
            remedy := format('Start a host with `--queue %s`, or empty the queue once: `rouse queue drain %1$s`.', p_queue);
        WHEN able.tagged = 0 THEN
            reason := 'no_tag';
            sentence := CASE WHEN able.missing = '{}' THEN format('No worker that could run it has all of its tags: %s.', array_to_string(p_tags, ', '))
                             ELSE format('No worker that could run it has tag %s.', array_to_string(able.missing, ', ')) END;
            remedy := 'Start a host with these tags (`tags` in rouse.toml).';
        WHEN able.permitted = 0 THEN
            reason := 'not_permitted';
            sentence := format('The logins of the workers that could run it do not permit handler %s in queue %s.', p_handler, p_queue);
            remedy := 'rouse.worker_login lists what each login may do.';
        WHEN able.staying = 0 THEN
            reason := 'draining';
            sentence := 'All workers that could run it are being stopped, and claim no more jobs.';
            remedy := 'Start another host.';
        WHEN able.able = 0 THEN
            reason := 'parked';
            IF able.parked_cause = 'login' THEN
                sentence := format('Handler %s is parked on all workers that could run it: %s.', p_handler, left(able.parked, 500));
                remedy := 'Check whether the login of the handler (`login` in its `sql` table in rouse.toml) can connect to the database. '
                          'The hosts keep trying, and notice within a minute that it responds.';
            ELSE
                sentence := format('Handler %s is parked on all workers that could run it, because its SQL statements cannot run: %s', p_handler,
                                   left(able.parked, 500));
                remedy := 'Run the GRANT or the migration that is missing. The hosts check again every 30 seconds.';
            END IF;
        ELSE
            RETURN;
    END CASE;
    RETURN NEXT;
    IF able.running > 0 AND able.having = 0 AND able.any_serving = 0 THEN
        reason := 'no_queue';
        sentence := format('No running worker serves queue %s.', p_queue);
        remedy := format('Start a host with `--queue %s`.', p_queue);
        RETURN NEXT;
    END IF;
    IF able.running > 0 AND able.having = 0 AND able.any_tagged = 0 THEN
        reason := 'no_tag';
        sentence := format('No running worker has all of its tags: %s.', array_to_string(p_tags, ', '));
        remedy := 'Start a host with these tags (`tags` in rouse.toml).';
        RETURN NEXT;
    END IF;
END
$$;

-- The running workers, and which of the conditions of the jobs of a lane each meets. `parked`: the reason why the
-- handler is parked there. `parked_cause`: `statements`, which do not fit the database, or `login`, which does not
-- respond or has not done so yet.
CREATE OR REPLACE FUNCTION rouse._running_workers(p_handler text, p_queue text, p_tags text[], p_now timestamptz)
RETURNS TABLE (incarnation bigint, slots integer, tags text[], has boolean, serves boolean, tagged boolean, permitted boolean, drains boolean, parked text,
               parked_cause text)
LANGUAGE sql STABLE AS $$
    SELECT w.incarnation, w.slots, w.tags, p_handler = ANY (w.handlers), w.queues = '{}' OR p_queue = ANY (w.queues), w.tags @> p_tags,
           NOT w.limited OR rouse._login_takes(w.login, p_queue, p_handler, p_tags), w.draining_at IS NOT NULL,
           CASE WHEN p_handler = ANY (w.parked) THEN coalesce(w.capabilities -> p_handler ->> 'parked', '') END,
           w.capabilities -> p_handler ->> 'parked_cause'
    FROM rouse.live_worker AS l CROSS JOIN LATERAL (
        SELECT * FROM rouse.worker AS n WHERE n.incarnation = l.worker ORDER BY n.seen_at DESC LIMIT 1) AS w
    WHERE w.seen_at > p_now - interval '90 seconds'
$$;

-- The gates that keep a ready job from starting.
CREATE OR REPLACE FUNCTION rouse._why_gated(p_job rouse.job, p_queue text, p_handler text, p_key text, p_now timestamptz)
RETURNS TABLE (reason text, sentence text, remedy text, since timestamptz, until timestamptz)
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    gate   record;
    state  record;
    of     text;
    change text;
BEGIN
    FOR gate IN
        WITH gates AS MATERIALIZED (
            SELECT g.*, rouse._gate_key(g.key, p_queue, p_handler, p_key) AS own FROM rouse._claim_gates() AS g
            WHERE coalesce(g.queue, p_queue) = p_queue AND coalesce(g.handler, p_handler) = p_handler),
        -- Reads all running jobs once.
        running AS MATERIALIZED (
            SELECT f.gate, f.key, f.jobs
            FROM (SELECT array_agg(g.name) AS names FROM gates AS g
                  -- Gates of other kinds cannot be full.
                  WHERE g.kind = 'max_concurrent'
                    AND g.max <= (
                        SELECT count(*) FROM rouse.job AS j
                        WHERE j.state = 'running' AND j.lease_until >= (
                            SELECT rouse._lease_floor(array_agg(m.name), p_now) FROM gates AS m WHERE m.kind = 'max_concurrent'))
                  HAVING count(*) > 0) AS n
            CROSS JOIN LATERAL rouse._in_flight(n.names, rouse._lease_floor(n.names, p_now)) AS f)
        SELECT g.*, coalesce((SELECT r.jobs FROM running AS r WHERE r.gate = g.name AND r.key = g.own), 0) AS running FROM gates AS g ORDER BY g.name
    LOOP
        of := rouse._gated_jobs(gate.key, p_queue, p_handler, p_key);
        change := format('`rouse gate set %s --kind %s', gate.name, gate.kind) || coalesce(' --handler ' || gate.handler, '')
                  || coalesce(' --queue ' || gate.queue, '') || coalesce((SELECT string_agg(' --key ' || rouse._shell_word(k.by), '') FROM unnest(gate.key) AS k(by)), '')
                  || coalesce(' --period ' || gate.period_ms || 'ms', '') || coalesce(' --burst ' || gate.burst, '') || ' --max N`';
        since := NULL;
        until := NULL;
        IF gate.kind = 'max_concurrent' THEN
            CONTINUE WHEN gate.running < gate.max;
            -- The limit was reached when the last one of them started.
            since := (
                SELECT max(j.claimed_at) FROM rouse.job AS j
                CROSS JOIN LATERAL (SELECT a.queue, a.handler, a.key FROM rouse.lane AS a WHERE a.id = j.lane LIMIT 1) AS l
                WHERE j.state = 'running' AND j.lease_until > '-infinity' AND coalesce(gate.queue, l.queue) = l.queue
                  AND coalesce(gate.handler, l.handler) = l.handler AND rouse._gate_key(gate.key, l.queue, l.handler, l.key) = gate.own);
            reason := CASE WHEN gate.name LIKE 'queue %' THEN 'max_in_flight' ELSE 'max_concurrent' END;
            sentence := format('Jobs%s have been at their limit, %s of %s running, for %s (%s).', of, gate.running, gate.max,
                               rouse._duration(p_now - since),
                               CASE WHEN gate.name LIKE 'queue %' THEN 'fair share of ' || gate.name ELSE 'gate ' || gate.name END);
            remedy := 'The end of one of them, or a higher limit: '
                      || CASE WHEN gate.name LIKE 'queue %' THEN format('`rouse queue set %s --max-in-flight N`', gate.queue) ELSE change END;
        ELSIF gate.kind = 'throttle' THEN
            SELECT t.tokens, t.wait_ms INTO state
            FROM (SELECT) AS one LEFT JOIN rouse.gate_key AS k ON k.gate = gate.name AND k.key = gate.own
            CROSS JOIN LATERAL rouse._tokens(gate.max, gate.period_ms, gate.burst, k.starts, k.until, p_now) AS t;
            CONTINUE WHEN state.tokens > 0;
            reason := 'throttle';
            until := p_now + state.wait_ms * interval '1 millisecond';
            sentence := format('Jobs%s are at their rate, %s in %s: the next may start in %s (gate %s).', of, gate.max,
                               rouse._duration(gate.period_ms * interval '1 millisecond'), rouse._duration(until - p_now), gate.name);
            remedy := 'Time, or a higher rate: ' || change;
        ELSE
            SELECT b.room, b.wait_ms INTO state FROM rouse._batches(
                p_job.lane, coalesce((SELECT j.turn FROM rouse.job AS j WHERE j.lane = p_job.lane AND j.state = 'queued' AND j.turn IS NOT NULL
                                      ORDER BY j.turn LIMIT 1), 0) - 1, gate.max, gate.period_ms, 1, p_now) AS b;
            CONTINUE WHEN state.room > 0 OR state.wait_ms IS NULL;
            reason := 'batch';
            sentence := format('Jobs%s start in batches of %s, and there are fewer; the first of them waits for others up to %s (gate %s).', of, gate.max,
                               rouse._duration(gate.period_ms * interval '1 millisecond'), gate.name);
            remedy := 'Time, or more jobs.';
        END IF;
        RETURN NEXT;
    END LOOP;
END
$$;

-- The other reasons why a ready job does not start: its worker, its shard, the jobs ahead of it, a slot.
CREATE OR REPLACE FUNCTION rouse._why_in_line(p_job rouse.job, p_lane rouse.lane, p_now timestamptz)
RETURNS TABLE (reason text, sentence text, remedy text, since timestamptz, until timestamptz)
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    able   bigint[];
    before text[];
    of     record;
    shards integer;
    shard  integer;
    slots  bigint;
    jobs   bigint;
    rest   text;
BEGIN
    SELECT array_agg(w.incarnation) INTO able
    FROM rouse._running_workers(p_lane.handler, p_lane.queue, p_lane.tags, p_now) AS w
    WHERE w.has AND w.serves AND w.tagged AND w.permitted AND NOT w.drains AND w.parked IS NULL;
    IF p_lane.worker IS NOT NULL THEN
        IF p_lane.worker = ANY (able) THEN
            able := ARRAY[p_lane.worker];
        ELSE
            reason := 'inbox';
            sentence := format('It was sent to worker %s, which no longer takes it.',
                               coalesce((SELECT w.worker_id FROM rouse.worker AS w WHERE w.incarnation = p_lane.worker), 'unknown'));
            remedy := 'The other workers take it over within two minutes.';
            RETURN NEXT;
        END IF;
    ELSIF able IS NOT NULL THEN
        shards := (SELECT q.shards FROM rouse.queue AS q WHERE q.name = p_lane.queue AND q.shards > 0);
        IF shards > 0 THEN
            shard := rouse._shard_of(p_lane.id, shards);
            able := (
                SELECT array_agg(s.worker) FROM rouse.shard AS s JOIN rouse.shard_lease AS l ON l.worker = s.worker AND l.queue = s.queue
                WHERE s.queue = p_lane.queue AND s.shard = shard AND s.worker = ANY (able) AND l.until > p_now);
            IF able IS NULL THEN
                reason := 'shard';
                sentence := format('No worker that can run it has leased its shard, %s of %s of queue %s.', shard, shards, p_lane.queue);
                remedy := 'Workers lease free shards within seconds.';
                RETURN NEXT;
            END IF;
        END IF;
    END IF;
    jobs := (SELECT count(*) FROM (
        SELECT FROM rouse.job AS j WHERE j.lane = p_job.lane AND j.turn < p_job.turn AND j.state = 'queued' AND j.turn IS NOT NULL
        ORDER BY j.turn LIMIT 10001) AS a);
    IF jobs > 0 THEN
        reason := 'ahead';
        sentence := format('%s ahead of it.', rouse._counted(jobs, 'job of its handler, queue and priority is', 'jobs of its handler, queue and priority are'));
        remedy := 'Time, or more hosts.';
        RETURN NEXT;
    END IF;
    -- The queues that all of these workers serve before its queue.
    before := ARRAY(
        SELECT q.name FROM rouse.worker AS w CROSS JOIN LATERAL unnest(w.queues) AS q(name)
        WHERE w.incarnation = ANY (able) AND array_position(w.queues, q.name) < array_position(w.queues, p_lane.queue)
        GROUP BY q.name HAVING count(DISTINCT w.incarnation) = cardinality(able) ORDER BY q.name);
    FOR of IN
        -- Determines what these workers can run before it reads lanes, of which there may be many.
        WITH kinds AS MATERIALIZED (
            SELECT k.* FROM (
                SELECT DISTINCT l.priority, l.handler, l.queue, l.tags FROM rouse.lane AS l
                WHERE (l.priority < p_lane.priority OR l.priority = p_lane.priority AND l.queue = ANY (before)) AND l.closed_at IS NULL) AS k
            WHERE NOT EXISTS (SELECT FROM rouse.queue AS q WHERE q.name = k.queue AND q.paused_at IS NOT NULL)
              AND EXISTS (
                SELECT FROM rouse._running_workers(k.handler, k.queue, k.tags, p_now) AS w
                WHERE w.incarnation = ANY (able) AND w.has AND w.serves AND w.tagged AND w.permitted AND w.parked IS NULL))
        SELECT p.priority, (SELECT count(*) FROM (
            SELECT FROM kinds AS k
            JOIN rouse.lane AS l ON l.handler = k.handler AND l.queue = k.queue AND l.priority = k.priority AND l.tags = k.tags AND l.closed_at IS NULL
            CROSS JOIN LATERAL (
                SELECT FROM rouse.job AS j WHERE j.lane = l.id AND j.state = 'queued' AND j.turn IS NOT NULL ORDER BY j.turn LIMIT 10001) AS j
            WHERE k.priority = p.priority AND (l.worker IS NULL OR l.worker = ANY (able))
            LIMIT 10001) AS a) AS jobs
        FROM unnest(enum_range(NULL::rouse.priority)) AS p(priority) WHERE p.priority <= p_lane.priority ORDER BY p.priority
    LOOP
        CONTINUE WHEN of.jobs = 0;
        rest := CASE of.jobs WHEN 1 THEN 'goes first unless a gate holds it back.' ELSE 'go first unless a gate holds them back.' END;
        IF of.priority = p_lane.priority THEN
            reason := 'queue_order';
            sentence := format('%s of queue %s, which the workers serve before queue %s, %s', rouse._counted(of.jobs, 'job', 'jobs'),
                               left(array_to_string(before, ' or '), 200), p_lane.queue, rest);
            remedy := 'Time, more hosts, or another order of `queues` in rouse.toml. By default, jobs that have waited for 15 minutes go first.';
        ELSE
            reason := 'priority';
            sentence := format('%s priority %s, and %s', rouse._counted(of.jobs, 'job has', 'jobs have'), of.priority, rest);
            remedy := 'Time, or more hosts. By default, jobs that have waited for 15 minutes go first.';
        END IF;
        RETURN NEXT;
    END LOOP;
    IF able IS NOT NULL THEN
        SELECT CASE WHEN count(l.jobs_max) = count(*) THEN sum(l.jobs_max) END AS jobs_max, false AS are_full INTO of
        FROM (SELECT (w.capabilities -> p_lane.handler ->> 'concurrency')::bigint AS jobs_max FROM rouse.worker AS w WHERE w.incarnation = ANY (able)) AS l;
        -- An attempt with a batch of jobs counts as one, and these are not counted here.
        IF of.jobs_max IS NOT NULL AND NOT EXISTS (
            SELECT FROM rouse.gate AS g
            WHERE g.kind = 'batch' AND coalesce(g.handler, p_lane.handler) = p_lane.handler AND coalesce(g.queue, p_lane.queue) = p_lane.queue)
        THEN
            -- Reads all running jobs once.
            of.are_full := (
                SELECT bool_and(coalesce(r.jobs, 0) >= (w.capabilities -> p_lane.handler ->> 'concurrency')::bigint)
                FROM rouse.worker AS w
                LEFT JOIN (
                    SELECT j.worker, count(*) AS jobs
                    FROM rouse.job AS j CROSS JOIN LATERAL (SELECT a.handler FROM rouse.lane AS a WHERE a.id = j.lane LIMIT 1) AS a
                    WHERE j.state = 'running' AND j.lease_until > '-infinity' AND j.worker = ANY (able) AND a.handler = p_lane.handler
                    GROUP BY j.worker) AS r ON r.worker = w.incarnation
                WHERE w.incarnation = ANY (able));
        END IF;
        IF of.are_full THEN
            reason := 'concurrency';
            sentence := format('%s as many jobs of handler %s as may run at a time there: %s.',
                CASE cardinality(able) WHEN 1 THEN 'The worker that can run it has' ELSE format('The %s workers that can run it have', cardinality(able)) END,
                p_lane.handler, of.jobs_max || CASE WHEN cardinality(able) > 1 THEN ' in all' ELSE '' END);
            remedy := 'The end of one of them, more hosts, or a higher `concurrency` of the handler in rouse.toml.';
            RETURN NEXT;
        END IF;
        slots := (SELECT sum(w.slots) FROM rouse.worker AS w WHERE w.incarnation = ANY (able));
        jobs := (SELECT count(*) FROM (
            SELECT FROM rouse.job AS j WHERE j.state = 'running' AND j.lease_until > '-infinity' AND j.worker = ANY (able) LIMIT 100000) AS r);
        IF jobs >= slots THEN
            reason := 'busy';
            sentence := format('%s that can run it %s, and %s %s.',
                CASE cardinality(able) WHEN 1 THEN 'The worker' ELSE format('The %s workers', cardinality(able)) END,
                CASE WHEN cardinality(able) = 1 THEN 'has ' ELSE 'have ' END || CASE slots WHEN 1 THEN '1 slot' ELSE slots || ' slots' END,
                CASE WHEN cardinality(able) = 1 THEN 'holds' ELSE 'hold' END, CASE jobs WHEN 1 THEN '1 job' ELSE jobs || ' jobs' END);
            remedy := 'Time, more hosts, or more slots (`slots` in rouse.toml). `rouse top` shows what runs.';
            RETURN NEXT;
        END IF;
    END IF;
END
$$;

-- Returns a row for each reason why a job does not start, or one row `ready` if there is none. No row if the job does
-- not exist or is no longer kept.
--
--   reason    running, ended, orphaned; not_due, after, suspended: it has no turn yet; paused; no_worker, no_handler,
--             no_queue, no_tag, not_permitted, draining, parked: no worker takes it; max_concurrent, throttle, batch:
--             gates of these kinds; max_in_flight: the limit of a fair queue; inbox, shard; ahead, priority,
--             queue_order, concurrency, busy: others are first; ready: no reason
--   sentence  the reason as a sentence
--   remedy    what an operator can do about it; null: it can only wait
--   since     the time since which the reason has applied, if it is known
--   until     the time at which it ends on its own, if it is known
--
-- Jobs are counted up to 10,000. Served by primary keys, job_ready, job_lease, lane_id and dependency_job, after a read
-- of the catalog.
CREATE OR REPLACE FUNCTION rouse.why(id bigint)
RETURNS TABLE (reason text, sentence text, remedy text, since timestamptz, until timestamptz)
LANGUAGE plpgsql STABLE SECURITY DEFINER ROWS 3
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    now    timestamptz := clock_timestamp();
    job    rouse.job;
    lane   rouse.lane;
    ended  record;
    worker text;
    live   bigint;
    is_any boolean := false;
BEGIN
    SELECT * INTO job FROM rouse.job AS j WHERE j.id = why.id;
    IF NOT FOUND THEN
        SELECT f.state, f.finished_at, f.chain INTO ended FROM rouse.finished AS f WHERE f.id = why.id;
        IF FOUND THEN
            live := rouse._live_job(coalesce(ended.chain, why.id));
            RETURN QUERY SELECT 'ended', format('It ended %s ago: %s.%s', rouse._duration(now - ended.finished_at), replace(ended.state::text, '_', ' '),
                                                ' Job ' || live || ' continues its chain.'),
                CASE WHEN live IS NOT NULL THEN format('`rouse why %s`', live)
                     WHEN ended.state <> 'succeeded' THEN format('`rouse job retry %s` enqueues it again.', why.id) END,
                ended.finished_at, NULL::timestamptz;
        END IF;
        RETURN;
    END IF;
    SELECT * INTO lane FROM rouse.lane AS l WHERE l.id = job.lane LIMIT 1;
    IF job.state = 'running' THEN
        worker := coalesce((SELECT w.worker_id FROM rouse.worker AS w WHERE w.incarnation = job.worker), 'unknown');
        IF job.lease_until > now THEN
            RETURN QUERY SELECT 'running', format('Attempt %s has been with worker %s for %s.', job.attempt, worker, rouse._duration(now - job.claimed_at)),
                NULL, job.claimed_at, NULL::timestamptz;
            RETURN;
        END IF;
        RETURN QUERY SELECT 'orphaned',
            format('Worker %s, which had it, has been gone for %s: another one will take it over.', worker, rouse._duration(now - job.lease_until)),
            NULL, job.lease_until, NULL::timestamptz;
        RETURN QUERY SELECT * FROM rouse._why_unserved(lane.handler, lane.queue, lane.tags, now);
        RETURN;
    END IF;
    IF job.turn IS NULL THEN
        RETURN QUERY SELECT * FROM rouse._why_not_ready(job, now);
        is_any := FOUND;
    END IF;
    RETURN QUERY
    SELECT 'paused', format('Queue %s has been paused for %s%s.', q.name, rouse._duration(now - q.paused_at), (
               SELECT ', by ' || rouse._by(r.who, r.reader) FROM rouse.record AS r
               WHERE r.queue = q.name AND r.event = 'paused' AND r.at = q.paused_at LIMIT 1)),
           format('`rouse queue resume %s`', q.name), q.paused_at, NULL::timestamptz
    FROM rouse.queue AS q WHERE q.name = lane.queue AND q.paused_at IS NOT NULL;
    is_any := is_any OR FOUND;
    RETURN QUERY SELECT * FROM rouse._why_unserved(lane.handler, lane.queue, lane.tags, now);
    is_any := is_any OR FOUND;
    IF job.turn IS NOT NULL THEN
        RETURN QUERY SELECT * FROM rouse._why_gated(job, lane.queue, lane.handler, lane.key, now);
        is_any := is_any OR FOUND;
        RETURN QUERY SELECT * FROM rouse._why_in_line(job, lane, now);
        is_any := is_any OR FOUND;
    END IF;
    IF NOT is_any THEN
        RETURN QUERY SELECT 'ready', CASE WHEN job.turn IS NULL THEN 'It is due, and gets its turn in a moment.'
                                          ELSE 'Nothing prevents it from starting: a worker will claim it in a moment.' END,
            NULL, job.available_at, NULL::timestamptz;
    END IF;
END
$$;
