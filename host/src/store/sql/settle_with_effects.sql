-- Starts a transaction with effects: settles attempts behind their fences, or fails. Returns whether there are releases
-- to continue; see rouse.settle_with_effects (migrations/functions/effects.sql).
SELECT rouse.settle_with_effects($1, $2, $3, $4, $5)
