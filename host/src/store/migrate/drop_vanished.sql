-- Drops the functions and views of schema rouse that this transaction has not defined: they have been removed from the
-- sources. Logins that may call a vanished signature may call the functions of the same name.
DO $$
DECLARE
    -- Catalog rows that this transaction has written belong to objects that it has defined.
    this_xid  xid := pg_current_xact_id()::xid;
    names text;
    grant_row  record;
BEGIN
    SELECT string_agg(r.ev_class::regclass::text, ', ') INTO names
    FROM pg_rewrite AS r JOIN pg_class AS c ON c.oid = r.ev_class
    WHERE c.relnamespace = 'rouse'::regnamespace AND c.relkind = 'v' AND r.xmin <> this_xid;
    IF names IS NOT NULL THEN
        EXECUTE 'DROP VIEW ' || names;
    END IF;
    FOR grant_row IN
        SELECT kept.oid::regprocedure AS kept, a.grantee::regrole AS grantee,
               CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END AS with_grant
        FROM pg_proc AS gone
        JOIN pg_proc AS kept ON kept.pronamespace = gone.pronamespace AND kept.proname = gone.proname AND kept.xmin = this_xid
        CROSS JOIN LATERAL aclexplode(gone.proacl) AS a
        WHERE gone.pronamespace = 'rouse'::regnamespace AND gone.xmin <> this_xid AND a.grantee NOT IN (0, gone.proowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s%s', grant_row.kept, grant_row.grantee, grant_row.with_grant);
    END LOOP;
    -- The grants have written rows only of functions that this transaction has defined.
    SELECT string_agg(p.oid::regprocedure::text, ', ') INTO names
    FROM pg_proc AS p WHERE p.pronamespace = 'rouse'::regnamespace AND p.xmin <> this_xid;
    IF names IS NOT NULL THEN
        EXECUTE 'DROP ROUTINE ' || names;
    END IF;
END
$$
