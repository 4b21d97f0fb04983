-- Drops the functions and views of schema rouse that this transaction has not defined: the sources have them no more. Logins that may
-- call a vanished signature may call the functions of the same name.
DO $$
DECLARE
    -- The catalog rows that this transaction has written are those that it has defined.
    mine  xid := pg_current_xact_id()::xid;
    names text;
    held  record;
BEGIN
    SELECT string_agg(r.ev_class::regclass::text, ', ') INTO names
    FROM pg_rewrite AS r JOIN pg_class AS c ON c.oid = r.ev_class
    WHERE c.relnamespace = 'rouse'::regnamespace AND c.relkind = 'v' AND r.xmin <> mine;
    IF names IS NOT NULL THEN
        EXECUTE 'DROP VIEW ' || names;
    END IF;
    FOR held IN
        SELECT kept.oid::regprocedure AS kept, a.grantee::regrole AS grantee,
               CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END AS with_grant
        FROM pg_proc AS gone
        JOIN pg_proc AS kept ON kept.pronamespace = gone.pronamespace AND kept.proname = gone.proname AND kept.xmin = mine
        CROSS JOIN LATERAL aclexplode(gone.proacl) AS a
        WHERE gone.pronamespace = 'rouse'::regnamespace AND gone.xmin <> mine AND a.grantee NOT IN (0, gone.proowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s%s', held.kept, held.grantee, held.with_grant);
    END LOOP;
    -- The grants have written rows of functions that this transaction has defined, and of no others.
    SELECT string_agg(p.oid::regprocedure::text, ', ') INTO names
    FROM pg_proc AS p WHERE p.pronamespace = 'rouse'::regnamespace AND p.xmin <> mine;
    IF names IS NOT NULL THEN
        EXECUTE 'DROP ROUTINE ' || names;
    END IF;
END
$$
