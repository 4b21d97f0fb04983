-- Publishes the contracts of handlers; see rouse.publish_contracts (migrations/functions/contract.sql). Returns the
-- changes, as a JSON array.
SELECT rouse.publish_contracts($1::text::jsonb, $2::text::name, $3)::text
