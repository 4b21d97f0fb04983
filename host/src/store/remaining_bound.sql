-- What a queue has left of some sources; see rouse.remaining_bound (migrations/0024_jobs_are_found_by_their_source.sql).
SELECT handler, tags, jobs FROM rouse.remaining_bound($1, $2)
