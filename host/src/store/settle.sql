-- Settles attempts behind their fences. Returns the ids that were accepted, those that are locked, and a null id if
-- there are releases to continue; see rouse.settle (migrations/functions/settle.sql).
SELECT id, locked FROM rouse.settle($1, $2, $3, $4, $5)
