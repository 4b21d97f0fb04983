-- One job with its history, as JSON for display and for scripts; see rouse.job and rouse.history
-- (migrations/functions/views.sql). No row if the job does not exist.
SELECT j.state::text,
       jsonb_build_object('history', coalesce((
           SELECT jsonb_agg(jsonb_strip_nulls(to_jsonb(h) - 'ordinality') ORDER BY h.ordinality)
           FROM (SELECT * FROM rouse.history($1) WITH ORDINALITY) AS h), '[]'))
       || to_jsonb(j)
FROM rouse.job($1) AS j
