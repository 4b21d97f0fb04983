-- What a queue has left of some sources; see rouse.remaining_bound (migrations/functions/look.sql).
SELECT handler, tags, jobs FROM rouse.remaining_bound($1, $2)
