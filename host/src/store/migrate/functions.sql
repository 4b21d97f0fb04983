-- The functions of schema rouse, each with the statement that sets it aside (set_aside.rs). A function of another owner
-- can be neither renamed nor replaced: it is dropped at once.
SELECT p.oid, CASE
    WHEN pg_has_role(p.proowner, 'USAGE') THEN format('ALTER ROUTINE %s RENAME TO %I', p.oid::regprocedure, p.proname || '~')
    ELSE format('DROP ROUTINE %s', p.oid::regprocedure) END
FROM pg_proc AS p WHERE p.pronamespace = 'rouse'::regnamespace
