-- For `cargo xtask chaos --sabotage tests/chaos/sabotage/no_fence.sql`: settlements look neither at the fence any more nor
-- at whose job it is. A run with it has to fail, with violations of stale_outcome.
--
-- Workers refuse a stale outcome themselves, before the database can: an attempt that cannot trust its lease is dropped. So
-- claims are also good for a tenth of what workers think, and others take over jobs that still run.
--
-- It changes the functions that are there.
DO $$
DECLARE
    f record;
    now text;
BEGIN
    FOR f IN
        SELECT p.proname, pg_get_functiondef(p.oid) AS was
        FROM pg_proc AS p WHERE p.pronamespace = 'rouse'::regnamespace AND p.proname IN ('_settle', 'claim')
    LOOP
        now := replace(f.was, 'j.fence = s.fence', 'true');
        now := replace(now, '(p_worker IS NULL OR j.worker = p_worker)', 'true');
        now := replace(now, 'coalesce(j.lease_ms, picked.lease_ms) * interval ''1 millisecond''',
                       'coalesce(j.lease_ms, picked.lease_ms) * interval ''0.1 millisecond''');
        IF now = f.was THEN
            RAISE EXCEPTION 'rouse.% is written in other words than expected here', f.proname;
        END IF;
        EXECUTE now;
    END LOOP;
END
$$;
