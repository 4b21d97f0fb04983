-- One job for its page: as in read.sql, but with the $2 newest events of its history, and of each event only what the
-- page shows. Of the renewals of an attempt only the last is returned, with their number (`times`): an attempt that runs
-- for a month may have a million. `has_older_events` is true if there are more events. Reads as much as rouse.history
-- (migrations/functions/views.sql), but returns a limited number of rows. No row if the job does not exist.
WITH events AS MATERIALIZED (
    SELECT h.*, count(*) OVER same AS times,
           h.event = 'renewed' AND lead(h.place) OVER (same ORDER BY h.place) IS NOT NULL AS is_left_out
    FROM rouse.history($1) WITH ORDINALITY AS h(at, event, attempt, worker, detail, place)
    WINDOW same AS (PARTITION BY h.event, h.attempt, h.worker)),
newest AS MATERIALIZED (
    SELECT e.* FROM events AS e WHERE NOT e.is_left_out ORDER BY e.place DESC LIMIT $2)
SELECT j.state::text,
       jsonb_build_object(
           'history', coalesce((
               SELECT jsonb_agg(jsonb_strip_nulls(jsonb_build_object(
                          'at', n.at, 'event', n.event, 'attempt', n.attempt, 'worker', n.worker, 'detail', jsonb_build_object(
                              'by', n.detail -> 'by', 'as', n.detail -> 'as', 'step', n.detail -> 'step', 'name', n.detail -> 'name',
                              'run_at', n.detail -> 'run_at', 'max_attempts', n.detail -> 'max_attempts',
                              'message', left(n.detail ->> 'message', 500),
                              'times', CASE WHEN n.event = 'renewed' AND n.times > 1 THEN n.times END))) ORDER BY n.place)
               FROM newest AS n), '[]'),
           'has_older_events', (SELECT count(*) FROM events AS e WHERE NOT e.is_left_out) > $2)
       || to_jsonb(j)
FROM rouse.job($1) AS j
