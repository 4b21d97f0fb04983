-- Enforces rouse.worker_login: the limits of workers' logins.
--
-- The login is session_user: SET ROLE and SECURITY DEFINER do not change it. A worker belongs to the login that
-- registered it, and rouse._authenticated_as_limited, which every function for workers calls, returns whether that
-- login is limited. For unlimited logins, a claim has no extra cost.
--
--   RW006  the login may not make the call

-- True if one of these patterns matches: a name, or a prefix followed by *.
CREATE OR REPLACE FUNCTION rouse._matches_any(p_name text, p_patterns text[]) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(bool_or(CASE WHEN right(p.pattern, 1) = '*' THEN starts_with(p_name, left(p.pattern, -1)) ELSE p_name = p.pattern END), false)
    FROM unnest(p_patterns) AS p(pattern)
$$;

-- The limits of the session's login; no row if it has none. Served by the primary key.
CREATE OR REPLACE FUNCTION rouse._limits() RETURNS SETOF rouse.worker_login
LANGUAGE sql STABLE ROWS 1 AS $$
    SELECT * FROM rouse.worker_login AS l WHERE l.login = to_regrole(quote_ident(session_user))
$$;

-- The limits of the login that registered a worker: effects are committed in sessions of other logins. Served by
-- primary keys.
CREATE OR REPLACE FUNCTION rouse._limits_of(p_worker bigint) RETURNS SETOF rouse.worker_login
LANGUAGE sql STABLE ROWS 1 AS $$
    SELECT l.*
    FROM (SELECT n.login FROM rouse.worker AS n WHERE n.incarnation = p_worker ORDER BY n.seen_at DESC LIMIT 1) AS w
    JOIN rouse.worker_login AS l ON l.login = to_regrole(quote_ident(w.login))
$$;

-- Rejects a registration that the login may not make, and returns whether the login is limited. The lock freezes the
-- limits until the registration has committed: a concurrent change is either visible here, or sees the new row of
-- rouse.worker. Concurrent registrations of a login may slightly exceed incarnations_max. Served by worker_of_limited.
CREATE OR REPLACE FUNCTION rouse._admit(p_worker_id text, p_queues text[], p_tags text[]) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    limits      rouse.worker_login;
    not_allowed text;
    most        integer;
BEGIN
    LOCK TABLE rouse.worker_login IN SHARE MODE;
    SELECT * INTO limits FROM rouse._limits();
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF NOT rouse._matches_any(p_worker_id, limits.worker_ids) THEN
        RAISE EXCEPTION 'rouse.register: login % may not register worker id %', session_user, p_worker_id
            USING ERRCODE = 'RW006', HINT = format('Its worker ids are %s (rouse.worker_login).', array_to_string(limits.worker_ids, ', '));
    END IF;
    -- An empty list means all queues.
    SELECT q.name INTO not_allowed FROM unnest(CASE WHEN p_queues = '{}' THEN '{*}' ELSE p_queues END) AS q(name)
    WHERE NOT rouse._matches_any(q.name, limits.queues) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'rouse.register: login % may not serve %', session_user,
            CASE WHEN not_allowed = '*' THEN 'all queues' ELSE 'queue ' || not_allowed END
            USING ERRCODE = 'RW006',
                  HINT = format('Its queues are %s (rouse.worker_login): set `queues` of the host to some of them.', array_to_string(limits.queues, ', '));
    END IF;
    SELECT t.name INTO not_allowed FROM unnest(p_tags) AS t(name) WHERE NOT rouse._matches_any(t.name, limits.tags) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'rouse.register: login % may not register tag %', session_user, not_allowed
            USING ERRCODE = 'RW006',
                  HINT = format('Its tags are %s (rouse.worker_login).', coalesce(nullif(array_to_string(limits.tags, ', '), ''), 'none'));
    END IF;
    SELECT l.incarnations_max INTO most FROM rouse.limits AS l WHERE l.only_row;
    IF (SELECT count(*) FROM (SELECT FROM rouse.worker AS w WHERE w.login = session_user AND w.limited AND w.forgotten_at IS NULL LIMIT most) AS w)
       >= most THEN
        RAISE EXCEPTION 'rouse.register: login % has already registered % incarnations of workers that are still listed, the maximum', session_user, most
            USING ERRCODE = 'program_limit_exceeded',
                  HINT = 'Forget those that have ended (`rouse workers forget ID`), or raise incarnations_max in rouse.limits.';
    END IF;
    RETURN true;
END
$$;

-- The lanes in the same order, with null instead of those from which the limited worker may not claim, as determined by
-- its login's queues, tags and handlers, and by the queues and tags that it has registered. Served by lane_id and
-- primary keys.
CREATE OR REPLACE FUNCTION rouse._permitted(p_worker bigint, p_lanes bigint[]) RETURNS bigint[]
LANGUAGE sql STABLE AS $$
    SELECT array_agg(lane.id ORDER BY asked.place)
    FROM unnest(p_lanes) WITH ORDINALITY AS asked(lane, place)
    LEFT JOIN LATERAL (
        SELECT l.id
        FROM (SELECT l.id, l.queue, l.handler, l.tags FROM rouse.lane AS l WHERE l.id = asked.lane LIMIT 1) AS l
        CROSS JOIN (SELECT w.queues, w.tags FROM rouse.live_worker AS w WHERE w.worker = p_worker) AS mine
        CROSS JOIN rouse._limits() AS limits
        WHERE rouse._matches_any(l.queue, limits.queues) AND (mine.queues = '{}' OR l.queue = ANY (mine.queues))
          AND rouse._matches_any(l.handler, limits.handlers)
          AND l.tags <@ mine.tags AND NOT EXISTS (SELECT FROM unnest(l.tags) AS tag WHERE NOT rouse._matches_any(tag, limits.tags))) AS lane ON true
$$;

-- The queues of this list that the limited worker may serve; '*' (any) stands for all that it has registered.
CREATE OR REPLACE FUNCTION rouse._permitted_queues(p_worker bigint, p_queues text[]) RETURNS text[]
LANGUAGE sql STABLE AS $$
    SELECT array_agg(q.name)
    FROM rouse.live_worker AS w
    CROSS JOIN rouse._limits() AS limits
    CROSS JOIN LATERAL unnest(CASE WHEN '*' = ANY (p_queues) AND w.queues <> '{}' THEN w.queues ELSE p_queues END) AS q(name)
    WHERE w.worker = p_worker AND rouse._matches_any(q.name, limits.queues)
$$;

-- Rejects access to the state of a handler that the limited login may not run.
CREATE OR REPLACE FUNCTION rouse._check_handler(p_handler text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM rouse._limits() AS limits WHERE rouse._matches_any(p_handler, limits.handlers)) THEN
        RAISE EXCEPTION 'rouse: login % may not use the state of handler %', session_user, coalesce(quote_literal(left(p_handler, 140)), 'null')
            USING ERRCODE = 'RW006', HINT = 'Its handlers are listed in rouse.worker_login.';
    END IF;
END
$$;

-- True if the workers of a limited login may drop expired history and log admin actions.
CREATE OR REPLACE FUNCTION rouse._may_maintain() RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT limits.maintenance FROM rouse._limits() AS limits), false)
$$;

-- Limits apply at once to the live workers of the login. Earlier claims of such a worker remain valid.
CREATE OR REPLACE FUNCTION rouse._limit_workers() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF TG_OP <> 'INSERT' THEN
        UPDATE rouse.worker AS w SET limited = false FROM pg_roles AS r
        WHERE r.oid = OLD.login AND w.login = r.rolname AND w.stopped_at IS NULL AND w.dead_at IS NULL;
    END IF;
    IF TG_OP <> 'DELETE' THEN
        UPDATE rouse.worker AS w SET limited = true FROM pg_roles AS r
        WHERE r.oid = NEW.login AND w.login = r.rolname AND w.stopped_at IS NULL AND w.dead_at IS NULL;
    END IF;
    RETURN NULL;
END
$$;
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'rouse.worker_login'::regclass AND tgname = 'limits_apply') THEN
        CREATE TRIGGER limits_apply AFTER INSERT OR UPDATE OR DELETE ON rouse.worker_login
            FOR EACH ROW EXECUTE FUNCTION rouse._limit_workers();
    END IF;
END
$$;

-- Rejects implausible values: unbounded strings and lists would be stored as long as the worker is listed.
CREATE OR REPLACE FUNCTION rouse._check_worker(
    p_hostname text, p_platform text, p_version text, p_slots integer, p_queues text[], p_tags text[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    problem text := CASE
        WHEN NOT rouse._is_label(p_hostname) THEN 'hostname must have 1 to 255 characters and no control characters'
        WHEN NOT rouse._is_label(p_platform) THEN 'platform must have 1 to 255 characters and no control characters'
        WHEN NOT rouse._is_label(p_version) THEN 'version must have 1 to 255 characters and no control characters'
        WHEN p_slots IS NULL OR p_slots NOT BETWEEN 1 AND 10000 THEN format('slots must be 1 to 10000, not %s', coalesce(p_slots::text, 'null'))
        WHEN p_queues IS NULL OR NOT rouse._are_queue_names(p_queues) THEN 'queues must be a list of at most 1000 queue names (letters, digits and _ . : - ; at most 128 characters)'
        WHEN p_tags IS NULL OR NOT rouse._are_tags(p_tags, 1000) THEN 'tags must be a list of at most 1000 tags (letters, digits and _ . : - ; key=value too; at most 128 characters)' END;
BEGIN
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION 'rouse.register: %', problem USING ERRCODE = 'invalid_parameter_value';
    END IF;
END
$$;

-- True if a string fits into a listing.
CREATE OR REPLACE FUNCTION rouse._is_label(p_text text) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(length(p_text) BETWEEN 1 AND 255 AND p_text !~ '[[:cntrl:]]', false)
$$;

-- True if these are at most `p_max` valid tags: a word, or key=value.
CREATE OR REPLACE FUNCTION rouse._are_tags(p_tags text[], p_max integer) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN cardinality(p_tags) <= p_max AND coalesce(array_ndims(p_tags), 1) = 1 AND array_position(p_tags, NULL) IS NULL
       AND NOT EXISTS (SELECT FROM unnest(p_tags) AS tag
                       WHERE length(tag) > 128 OR tag !~ '^[A-Za-z0-9][A-Za-z0-9_.:-]*(=[A-Za-z0-9_.:/-]+)?$');
END
$$;

-- True if these are at most 1,000 valid queue names. In PL/pgSQL, which caches its plan for the session: a SQL function
-- that Postgres cannot inline is planned in each transaction.
CREATE OR REPLACE FUNCTION rouse._are_queue_names(p_words text[]) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN cardinality(p_words) <= 1000 AND coalesce(array_ndims(p_words), 1) = 1 AND array_position(p_words, NULL) IS NULL
       AND NOT EXISTS (SELECT FROM unnest(p_words) AS word WHERE word !~ '^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$');
END
$$;

-- Rejects JSON of a worker that is larger than any host sends. The size is that in memory, which is known without
-- parsing.
CREATE OR REPLACE FUNCTION rouse._check_size(p_name text, p_bytes bigint, p_max bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF p_bytes > p_max THEN
        RAISE EXCEPTION 'rouse.%: % bytes are too many; at most % are stored', p_name, p_bytes, p_max USING ERRCODE = 'program_limit_exceeded';
    END IF;
END
$$;
