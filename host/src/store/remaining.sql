-- What a queue has left, by handler and required tags; see migrations/0019_what_is_left_and_challenges.sql.
SELECT handler, tags, ready, due, scheduled, retries, mine, others, at_least FROM rouse.remaining($1, $2, $3)
