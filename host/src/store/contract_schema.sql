-- The statement that creates the schema of the typed functions; null: there is such a schema, or it is none that may be
-- used. The schema belongs to Rouse's owner, and whoever may enqueue may use it.
SELECT CASE WHEN to_regnamespace(quote_ident($1::text)) IS NULL AND $1::text <> '' AND $1::text NOT LIKE 'pg\_%' THEN
    format('CREATE SCHEMA %1$I AUTHORIZATION rouse_owner; GRANT USAGE ON SCHEMA %1$I TO rouse_enqueuer, rouse_producer, rouse_operator', $1::text) END
