-- One job with its history, as in read.sql, but of the renewals of an attempt only the last, with their number
-- (`times`, if there are several): an attempt that runs for a month may have a million. Reads as much as rouse.history
-- (migrations/functions/views.sql), but returns few events. No row if the job does not exist.
WITH events AS MATERIALIZED (
    SELECT h.*, count(*) OVER same AS times,
           h.event = 'renewed' AND lead(h.place) OVER (same ORDER BY h.place) IS NOT NULL AS is_left_out
    FROM rouse.history($1) WITH ORDINALITY AS h(at, event, attempt, worker, detail, place)
    WINDOW same AS (PARTITION BY h.event, h.attempt, h.worker))
SELECT j.state::text,
       jsonb_build_object('history', coalesce((
           SELECT jsonb_agg(jsonb_strip_nulls(jsonb_build_object(
                      'at', e.at, 'event', e.event, 'attempt', e.attempt, 'worker', e.worker, 'detail', e.detail,
                      'times', CASE WHEN e.event = 'renewed' AND e.times > 1 THEN e.times END)) ORDER BY e.place)
           FROM events AS e WHERE NOT e.is_left_out), '[]'))
       || to_jsonb(j)
FROM rouse.job($1) AS j
