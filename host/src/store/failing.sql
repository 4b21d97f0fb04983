-- The handlers whose jobs have failed in the last hour, those with the most failures first. Counts only the $1 newest
-- jobs that did not succeed. Served by finished_unsuccessful.
WITH newest AS MATERIALIZED (
    SELECT f.lane, f.state, f.finished_at, f.error, f.id FROM rouse.finished AS f WHERE f.state <> 'succeeded' ORDER BY f.id DESC LIMIT $1)
SELECT jsonb_build_object(
    'handler', l.handler, 'jobs', count(*), 'at_least', (SELECT count(*) FROM newest) = $1, 'first_at', min(n.finished_at), 'last_at', max(n.finished_at),
    'message', (array_agg(left(n.error ->> 'message', 500) ORDER BY n.finished_at DESC))[1])
FROM newest AS n
CROSS JOIN LATERAL (SELECT l.handler FROM rouse.lane AS l WHERE l.id = n.lane LIMIT 1) AS l
WHERE n.state IN ('failed', 'timed_out') AND n.finished_at > now() - interval '1 hour'
GROUP BY l.handler ORDER BY count(*) DESC, l.handler LIMIT 20
