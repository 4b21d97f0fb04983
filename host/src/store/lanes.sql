-- The lanes that were catalogued after $1. Served by the primary key of rouse.lane. Two rows may
-- say the same of one lane (see the table); the reader keeps one.
SELECT seq, id, queue, handler, priority::text, tags FROM rouse.lane WHERE seq > $1 ORDER BY seq
