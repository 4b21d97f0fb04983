-- Why this login must not run statements of handlers; null if it may. A superuser could do anything, and so could a
-- member of one, with set_config('role', …). A member of another role of Rouse could change jobs without their fence,
-- read them, or enqueue jobs without a grant. A member of the predefined roles for all data can reach Rouse's tables
-- too, and a member of those for the server's files and programs is almost a superuser. Reads catalogs only.
SELECT CASE
    WHEN r.rolsuper THEN 'the login is a superuser; statements of handlers need a login with only the privileges that they use'
    WHEN EXISTS (SELECT FROM pg_roles AS s WHERE s.rolsuper AND pg_has_role(session_user, s.oid, 'MEMBER'))
        THEN 'the login is a member of a superuser; statements of handlers need a login with only the privileges that they use'
    ELSE (
        SELECT 'the login is a member of ' || role.name || role.why
        FROM (
            SELECT name, '; statements of handlers need a login of their own, with no role of Rouse but rouse_handler'
            FROM unnest(ARRAY['rouse_owner', 'rouse_worker', 'rouse_operator', 'rouse_observer', 'rouse_producer', 'rouse_enqueuer']) AS name
            UNION ALL
            SELECT name, ', which can reach ' || reach || '; statements of handlers need a login with only the privileges that they use'
            FROM (VALUES ('pg_read_all_data', 'Rouse''s own tables'), ('pg_write_all_data', 'Rouse''s own tables'),
                         ('pg_read_server_files', 'the files of the server'), ('pg_write_server_files', 'the files of the server'),
                         ('pg_execute_server_program', 'the programs of the server')) AS predefined(name, reach)
        ) AS role(name, why)
        WHERE to_regrole(role.name) IS NOT NULL AND pg_has_role(session_user, to_regrole(role.name), 'MEMBER') LIMIT 1)
    END
FROM pg_roles AS r WHERE r.rolname = session_user
