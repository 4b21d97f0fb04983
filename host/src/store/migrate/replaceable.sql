-- The functions that were set aside (set_aside.rs) and that CREATE OR REPLACE can change into the new function of the
-- same name: the types and names of the parameters and the result are the same, and no default was removed.
SELECT old.oid
FROM pg_proc AS old
JOIN pg_proc AS new ON new.pronamespace = old.pronamespace AND new.proname || '~' = old.proname
WHERE old.pronamespace = 'rouse'::regnamespace AND new.prokind = old.prokind AND new.proargtypes = old.proargtypes
  AND pg_get_function_identity_arguments(new.oid) = pg_get_function_identity_arguments(old.oid)
  AND pg_get_function_result(new.oid) IS NOT DISTINCT FROM pg_get_function_result(old.oid)
  AND new.pronargdefaults >= old.pronargdefaults
