-- For `cargo xtask chaos --sabotage tests/chaos/sabotage/no_fence.sql`: settlements check neither the fence nor the worker
-- of the job. A run with it must fail, with violations of stale_outcome.
--
-- Workers refuse a stale outcome themselves, before the database can: an attempt that cannot trust its lease is dropped.
-- Therefore claims are also valid for only a tenth of the time that workers assume, and others take over running jobs.
--
-- This script patches the existing functions.
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
            RAISE EXCEPTION 'the source of rouse.% has changed: adapt tests/chaos/sabotage/no_fence.sql', f.proname;
        END IF;
        EXECUTE now;
    END LOOP;
END
$$;
