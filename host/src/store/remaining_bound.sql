-- The jobs of some sources that remain in a queue; see rouse.remaining_bound (migrations/functions/look.sql).
SELECT handler, tags, jobs FROM rouse.remaining_bound($1, $2)
