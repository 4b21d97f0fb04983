-- What is done from outside (cancelled, retried, paused …: SPEC row Q10) is told in the log of one host, with its next heartbeat.

-- What this does to a database with live jobs: claims, enqueues and settlements wait until it is over, together with 0024.

-- Whoever cancels a job locks it before the record: in another order the two would wait for each other.
LOCK TABLE rouse.job IN SHARE MODE;

-- What no host has told yet. Unlogged: a crash of the server keeps some of it out of logs, and nothing out of rouse.record.
CREATE UNLOGGED TABLE rouse.untold (
    id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at      timestamptz NOT NULL,
    job     bigint,
    queue   text,
    event   text NOT NULL,
    attempt integer,
    who     text NOT NULL,
    detail  jsonb
);
GRANT SELECT ON rouse.untold TO rouse_observer;

CREATE FUNCTION rouse._note_for_a_host() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO rouse.untold (at, job, queue, event, attempt, who, detail)
    VALUES (NEW.at, NEW.job, NEW.queue, NEW.event, NEW.attempt, NEW.who, NEW.detail);
    RETURN NULL;
END
$$;
-- What workers do, their own events tell.
CREATE TRIGGER record_is_told AFTER INSERT ON rouse.record
    FOR EACH ROW WHEN (NEW.who IS NOT NULL) EXECUTE FUNCTION rouse._note_for_a_host();

-- Up to so many things that were done from outside and that nobody has told: whoever gets them tells them, and nobody else
-- will. What is a day old is forgotten, 1,000 of it at a time. In the order in which they were done; handler and queue are null where the job is not kept any more. Served by the primary keys and
-- finished_id.
CREATE FUNCTION rouse.tell(p_worker bigint, p_key bytea, p_most integer)
RETURNS TABLE (at timestamptz, event text, job bigint, handler text, queue text, attempt integer, who text, detail jsonb)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    PERFORM rouse._known(p_worker, p_key);
    DELETE FROM rouse.untold AS u
    WHERE u.id = ANY (ARRAY(SELECT next.id FROM rouse.untold AS next ORDER BY next.id LIMIT 1000 FOR UPDATE SKIP LOCKED))
      AND u.at < clock_timestamp() - interval '1 day';
    RETURN QUERY
    WITH taken AS MATERIALIZED (
        DELETE FROM rouse.untold AS u
        WHERE u.id = ANY (ARRAY(SELECT next.id FROM rouse.untold AS next ORDER BY next.id LIMIT p_most FOR UPDATE SKIP LOCKED))
        RETURNING u.*)
    SELECT t.at, t.event, t.job, l.handler, coalesce(t.queue, l.queue), nullif(t.attempt, 0), t.who, t.detail
    FROM taken AS t
    LEFT JOIN LATERAL (
        SELECT lane.handler, lane.queue FROM rouse.lane AS lane
        WHERE lane.id = coalesce((SELECT j.lane FROM rouse.job AS j WHERE j.id = t.job),
                                 (SELECT f.lane FROM rouse.finished AS f WHERE f.id = t.job LIMIT 1))
        LIMIT 1) AS l ON true
    ORDER BY t.id;
END
$$;

REVOKE ALL ON FUNCTION rouse._note_for_a_host, rouse.tell FROM PUBLIC;
GRANT EXECUTE ON FUNCTION rouse.tell TO rouse_worker;
