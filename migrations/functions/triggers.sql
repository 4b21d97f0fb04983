-- Enables triggers of Rouse that have been disabled. A table is locked only if it has such a trigger. Triggers that
-- call functions of other schemas are not Rouse's.
DO $$
DECLARE
    disabled record;
BEGIN
    FOR disabled IN
        SELECT t.tgrelid::regclass AS on_table, t.tgname
        FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid JOIN pg_proc AS p ON p.oid = t.tgfoid
        WHERE c.relnamespace = 'rouse'::regnamespace AND p.pronamespace = 'rouse'::regnamespace AND t.tgenabled <> 'O'
    LOOP
        EXECUTE format('ALTER TABLE ONLY %s ENABLE TRIGGER %I', disabled.on_table, disabled.tgname);
    END LOOP;
END
$$;
