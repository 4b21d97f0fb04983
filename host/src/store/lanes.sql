-- The lanes that were catalogued after $1. Served by the primary key of rouse.lane. Two rows may
-- say the same of one lane (see the table); the reader keeps one. In a lane that was closed more than a day ago nothing is looked for
-- any more (migrations/functions/lanes.sql).
SELECT seq, id, queue, handler, priority::text, tags, coalesce(closed_at < clock_timestamp() - interval '1 day', false)
FROM rouse.lane WHERE seq > $1 ORDER BY seq
