-- The lanes that were added to the catalog after $1. Served by the primary key of rouse.lane. Two rows may describe the
-- same lane (see the table); the reader keeps one. A lane that was closed more than a day ago is retired
-- (migrations/functions/lanes.sql): no worker serves it, but its row stays as long as ended jobs refer to it. Of these,
-- only those of the last $2 positions are read, which rouse.peek sums.
SELECT l.seq, l.id, l.queue, l.handler, l.priority::text, l.tags, l.key, l.retired
FROM (SELECT *, coalesce(closed_at < clock_timestamp() - interval '1 day', false) AS retired FROM rouse.lane WHERE seq > $1) AS l
WHERE NOT l.retired OR l.seq > (SELECT max(seq) FROM rouse.lane) - $2
ORDER BY l.seq
