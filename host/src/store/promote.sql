-- Gives due jobs their turn, and says when the next one is due; see rouse.promote
-- (migrations/0013_workers_prove_themselves.sql).
SELECT promoted, next_due_ms FROM rouse.promote($1, $2, $3, $4)
