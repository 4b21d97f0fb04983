-- Why this login must not run statements of handlers; null if it may. A superuser or a member of another role of Rouse
-- could change jobs without their fence. Reads catalogs only.
SELECT CASE
    WHEN r.rolsuper THEN 'the login is a superuser; statements of handlers need a login with only the privileges that they use'
    ELSE (
        SELECT 'the login is a member of ' || role.name || '; statements of handlers need a login of their own, with no role of Rouse but rouse_handler'
        FROM unnest(ARRAY['rouse_owner', 'rouse_worker', 'rouse_operator', 'rouse_observer']) AS role(name)
        WHERE to_regrole(role.name) IS NOT NULL AND pg_has_role(session_user, to_regrole(role.name), 'MEMBER') LIMIT 1)
    END
FROM pg_roles AS r WHERE r.rolname = session_user
