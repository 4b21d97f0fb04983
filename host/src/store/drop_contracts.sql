-- Drops contracts and their functions, of these handlers or (null) of all; see rouse.drop_contracts (migrations/functions/contract.sql).
SELECT rouse.drop_contracts($1)
