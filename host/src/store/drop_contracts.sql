-- Drops the contracts of these handlers (null: of all) with their functions; see rouse.drop_contracts
-- (migrations/functions/contract.sql).
SELECT rouse.drop_contracts($1)
