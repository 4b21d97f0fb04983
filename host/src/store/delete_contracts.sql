-- Deletes the contracts of these handlers (null: of all) with their functions; see rouse.delete_contracts
-- (migrations/functions/contract.sql).
SELECT rouse.delete_contracts($1)
