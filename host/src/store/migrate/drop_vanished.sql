-- Drops the views of schema rouse that this transaction has not defined, and the functions that it has set aside
-- (set_aside.rs). Logins that may call such a function may call the functions that have its name now. Objects of users
-- are never dropped: if one depends on such a function or view, nothing is changed.
DO $$
DECLARE
    -- Catalog rows that this transaction has written belong to objects that it has defined.
    this_xid    xid := pg_current_xact_id()::xid;
    gone_views  text[];
    aside       text[];
    one         text;
    has_dropped boolean;
    grant_row   record;
    dependents  text;
BEGIN
    FOR grant_row IN
        SELECT kept.oid::regprocedure AS kept, a.grantee::regrole AS grantee,
               CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END AS with_grant
        FROM pg_proc AS gone
        JOIN pg_proc AS kept ON kept.pronamespace = gone.pronamespace AND kept.proname || '~' = gone.proname
        CROSS JOIN LATERAL aclexplode(gone.proacl) AS a
        WHERE gone.pronamespace = 'rouse'::regnamespace AND a.grantee NOT IN (0, gone.proowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s%s', grant_row.kept, grant_row.grantee, grant_row.with_grant);
    END LOOP;
    LOOP
        gone_views := ARRAY(
            SELECT r.ev_class::regclass::text FROM pg_rewrite AS r JOIN pg_class AS c ON c.oid = r.ev_class
            WHERE c.relnamespace = 'rouse'::regnamespace AND c.relkind = 'v' AND r.xmin <> this_xid);
        aside := ARRAY(
            SELECT p.oid::regprocedure::text FROM pg_proc AS p WHERE p.pronamespace = 'rouse'::regnamespace AND p.proname LIKE '%~');
        EXIT WHEN gone_views = '{}';
        -- A view may call such a function, and such a function may return rows of a view: each is dropped as soon as
        -- none of the others depends on it.
        has_dropped := false;
        FOREACH one IN ARRAY ARRAY(SELECT 'VIEW ' || v FROM unnest(gone_views) AS v UNION ALL SELECT 'ROUTINE ' || f FROM unnest(aside) AS f) LOOP
            BEGIN
                EXECUTE 'DROP ' || one;
                has_dropped := true;
            EXCEPTION
                WHEN dependent_objects_still_exist THEN
                    -- Dropped in a later round, or below.
            END;
        END LOOP;
        EXIT WHEN NOT has_dropped;
    END LOOP;
    -- Together, because functions may depend on each other.
    BEGIN
        IF aside <> '{}' THEN
            EXECUTE 'DROP ROUTINE ' || array_to_string(aside, ', ');
        END IF;
        IF gone_views <> '{}' THEN
            EXECUTE 'DROP VIEW ' || array_to_string(gone_views, ', ');
        END IF;
    EXCEPTION
        WHEN dependent_objects_still_exist THEN
            GET STACKED DIAGNOSTICS dependents = PG_EXCEPTION_DETAIL;
            RAISE EXCEPTION 'functions or views of an earlier release cannot be dropped: other objects depend on them'
                USING ERRCODE = 'dependent_objects_still_exist',
                      DETAIL = regexp_replace(dependents, '"([^"]*)~"', E'\\1', 'g'),
                      HINT = 'Drop these objects, run `rouse migrate`, and create them again.';
    END;
END
$$
