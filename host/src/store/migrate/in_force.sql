-- The definitions in force in schema rouse: one row for each function, view and trigger with a digest of its
-- definition, and for each privilege of the roles in $1 and of PUBLIC. Reads catalogs only. Names and definitions are
-- printed with the search path of the session, which has to be pg_catalog. Partitions are left out, because they change
-- daily.
WITH function AS (
    SELECT format('%s(%s)', p.oid::regproc, pg_get_function_identity_arguments(p.oid)) AS name, p.*
    FROM pg_proc AS p WHERE p.pronamespace = 'rouse'::regnamespace),
relation AS (
    SELECT c.oid::regclass::text AS name, c.* FROM pg_class AS c
    WHERE c.relnamespace = 'rouse'::regnamespace AND NOT c.relispartition AND c.relkind IN ('r', 'p', 'v', 'S')),
held AS (
    SELECT 'function ' || f.name AS name, a.* FROM function AS f
    CROSS JOIN LATERAL aclexplode(coalesce(f.proacl, acldefault('f', f.proowner))) AS a WHERE a.grantee <> f.proowner
    UNION ALL
    SELECT r.name, a.* FROM relation AS r CROSS JOIN LATERAL aclexplode(r.relacl) AS a WHERE a.grantee <> r.relowner
    UNION ALL
    SELECT format('%s (%s)', r.name, c.attname), a.* FROM relation AS r
    JOIN pg_attribute AS c ON c.attrelid = r.oid AND NOT c.attisdropped
    CROSS JOIN LATERAL aclexplode(c.attacl) AS a WHERE a.grantee <> r.relowner
    UNION ALL
    SELECT 'schema rouse', a.* FROM pg_namespace AS n CROSS JOIN LATERAL aclexplode(n.nspacl) AS a
    WHERE n.nspname = 'rouse' AND a.grantee <> n.nspowner)
SELECT 'function ' || f.name AS fact,
       md5(concat_ws('|', f.prosrc, f.prosecdef, f.provolatile, f.prorows, f.proconfig::text, f.prolang, pg_get_function_arguments(f.oid),
                     pg_get_function_result(f.oid), pg_get_userbyid(f.proowner))) AS value
FROM function AS f
UNION ALL
SELECT 'view ' || r.name, md5(concat_ws('|', pg_get_viewdef(r.oid), r.reloptions::text, pg_get_userbyid(r.relowner)))
FROM relation AS r WHERE r.relkind = 'v'
UNION ALL
SELECT format('trigger %s on %s', t.tgname, r.name), md5(concat_ws('|', pg_get_triggerdef(t.oid), t.tgenabled))
FROM relation AS r JOIN pg_trigger AS t ON t.tgrelid = r.oid WHERE NOT t.tgisinternal
UNION ALL
SELECT DISTINCT format('%s on %s for %s', h.privilege_type, h.name, coalesce(g.rolname, 'PUBLIC')), ''
FROM held AS h LEFT JOIN pg_roles AS g ON g.oid = h.grantee
WHERE h.grantee = 0 OR g.rolname = ANY ($1)
