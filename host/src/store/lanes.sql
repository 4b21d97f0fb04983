-- The lanes that were added to the catalog after $1. Served by the primary key of rouse.lane. Two rows may describe the same lane (see the
-- table); the reader keeps one. A lane that was closed more than a day ago is retired (migrations/functions/lanes.sql).
SELECT seq, id, queue, handler, priority::text, tags, key, coalesce(closed_at < clock_timestamp() - interval '1 day', false)
FROM rouse.lane WHERE seq > $1 ORDER BY seq
