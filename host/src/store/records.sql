-- The OIDs of these composite types and of their array types, with the names of the fields and the OIDs of the fields'
-- types. Reads the system catalogs, through their own indexes.
SELECT t.typname::text, t.oid, t.typarray,
       array_agg(a.attname::text ORDER BY a.attnum), array_agg(a.atttypid ORDER BY a.attnum)
FROM pg_type AS t JOIN pg_attribute AS a ON a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
WHERE t.typnamespace = 'rouse'::regnamespace AND t.typtype = 'c' AND t.typname = ANY ($1)
GROUP BY t.typname, t.oid, t.typarray
