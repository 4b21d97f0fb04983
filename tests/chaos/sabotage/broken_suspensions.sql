-- For `cargo xtask chaos --sabotage tests/chaos/sabotage/broken_suspensions.sql`: a signal to a job that does not wait
-- for one at this moment is dropped, children are enqueued twice, and suspended attempts count. A run with it must
-- fail, with violations of signals_not_lost, children_only_of_successes and suspensions_not_counted.
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
            ('signal', 'VALUES (signal.id, signal.name, coalesce(signal.payload, ''null'')::json, at)',
             'SELECT signal.id, signal.name, coalesce(signal.payload, ''null'')::json, at
              WHERE EXISTS (SELECT FROM rouse.job AS j WHERE j.id = signal.id AND j.state = ''queued'' AND j.turn IS NULL AND j.wait ->> ''kind'' = ''signal'')'),
            ('_settle', 'FROM rouse._enqueue_children(p_worker, parents, p_jobs) AS c;',
             'FROM rouse._enqueue_children(p_worker, parents, p_jobs) AS c;
              PERFORM rouse._enqueue_children(p_worker, parents, ARRAY(SELECT s FROM unnest(p_jobs) AS s WHERE s.kind = ''child''));'),
            ('_suspend', 'uncounted = j.uncounted + 1', 'uncounted = j.uncounted')) AS patch(name, was, becomes)
        JOIN pg_proc AS p ON p.pronamespace = 'rouse'::regnamespace AND p.proname = patch.name
    LOOP
        now := replace(f.source, f.was, f.becomes);
        IF now = f.source THEN
            RAISE EXCEPTION 'the source of rouse.% has changed: adapt tests/chaos/sabotage/broken_suspensions.sql', f.proname;
        END IF;
        EXECUTE now;
    END LOOP;
END
$$;
