-- The jobs that remain in a queue, by handler and required tags; see rouse.remaining (migrations/functions/look.sql).
SELECT handler, tags, ready, due, scheduled, retries, mine, others, at_least FROM rouse.remaining($1, $2, $3)
