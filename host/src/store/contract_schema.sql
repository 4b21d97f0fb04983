-- The statement that creates the schema of the typed functions; null if the schema exists, or may not be used. The
-- schema belongs to Rouse's owner, and all roles that may enqueue may use it.
SELECT CASE WHEN to_regnamespace(quote_ident($1::text)) IS NULL AND $1::text <> '' AND NOT starts_with($1::text, 'pg_') THEN
    format('CREATE SCHEMA %1$I AUTHORIZATION rouse_owner; GRANT USAGE ON SCHEMA %1$I TO rouse_enqueuer, rouse_producer, rouse_operator', $1::text) END
