-- For `cargo xtask chaos --sabotage tests/chaos/sabotage/open_gates.sql`: claims count neither running jobs nor earlier
-- starts, a singleton during 'queued' keeps no job out, a singleton during 'running' keeps jobs out only while its job
-- is queued, and a debounce does not wait for further enqueues. A run with it must fail, with violations of limit_holds,
-- throttle_holds, singleton_holds and debounce_holds.
--
-- This script patches the existing functions.
DO $$
DECLARE
    f    record;
    now  text;
BEGIN
    FOR f IN
        SELECT p.proname, patch.was, patch.becomes, pg_get_functiondef(p.oid) AS source
        FROM (VALUES
            ('_within_gates', 'p.max - coalesce((running ->> (p.gate || E''\n'' || p.key))::integer, 0)', 'p.max'),
            ('_tokens', 's.at > b.since', 'false'),
            ('_pass_gates', 'WHEN gate.during = ''queued'' THEN was.state = ''queued''
                WHEN gate.during = ''running'' THEN was.id IS NOT NULL', 'WHEN gate.during = ''queued'' THEN false
                WHEN gate.during = ''running'' THEN was.state = ''queued'''),
            ('_pass_gates', 'run_at := greatest(run_at, least(p_at + rest, held.since + gate.max_wait_ms * interval ''1 millisecond''));',
             'run_at := greatest(run_at, held.until);')) AS patch(name, was, becomes)
        JOIN pg_proc AS p ON p.pronamespace = 'rouse'::regnamespace AND p.proname = patch.name
    LOOP
        -- An earlier patch may have changed the function.
        f.source := pg_get_functiondef(('rouse.' || f.proname)::regproc);
        now := replace(f.source, f.was, f.becomes);
        IF now = f.source THEN
            RAISE EXCEPTION 'the source of rouse.% has changed: adapt tests/chaos/sabotage/open_gates.sql', f.proname;
        END IF;
        EXECUTE now;
    END LOOP;
END
$$;
