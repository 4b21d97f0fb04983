-- Ends a wait for a signal behind the fence; see rouse.take_signal (migrations/functions/suspensions.sql).
SELECT refusal, result::text FROM rouse.take_signal($1, $2, $3, $4, $5, $6, $7)
