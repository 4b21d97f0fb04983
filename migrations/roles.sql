-- The seven roles of Rouse. `rouse migrate` runs this automatically if its user may create roles; otherwise an
-- administrator runs the output of `rouse migrate --roles-sql`, once per server. Safe to repeat, and to run
-- concurrently.
--
--   rouse_owner     owns schema rouse; not for logins
--   rouse_enqueuer  enqueues, and reads the state of individual jobs
--   rouse_producer  the same; cancels and reads individual jobs; schedules
--   rouse_operator  the same; reads everything, and performs all admin actions
--   rouse_worker    claims and settles
--   rouse_handler   for the logins of handlers that run statements: commits these together with the outcome of a job
--   rouse_observer  reads everything, changes nothing
DO $$
DECLARE
    wanted text;
BEGIN
    FOREACH wanted IN ARRAY ARRAY['rouse_owner', 'rouse_enqueuer', 'rouse_producer', 'rouse_operator', 'rouse_worker', 'rouse_handler', 'rouse_observer'] LOOP
        IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = wanted) THEN
            BEGIN
                EXECUTE pg_catalog.format('CREATE ROLE %I NOLOGIN', wanted);
            EXCEPTION
                -- The migration of another database on the same server created it first.
                WHEN duplicate_object OR unique_violation THEN NULL;
            END;
        END IF;
    END LOOP;
    -- The migrating user has to act as the owner. In Postgres 16 and later, the creator of a role may grant it; in
    -- earlier versions, every user with CREATEROLE may; neither may act as the role without the grant.
    IF NOT (SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = CURRENT_USER) THEN
        BEGIN
            EXECUTE pg_catalog.format('GRANT rouse_owner TO %I', CURRENT_USER);
        EXCEPTION
            -- An administrator may have granted it already; otherwise the next statement fails.
            WHEN insufficient_privilege THEN NULL;
        END;
    END IF;
END
$$;
