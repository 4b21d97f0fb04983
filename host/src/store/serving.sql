-- The handlers, queues and tags of the workers that accept jobs now, and why handlers are parked there. A scan of few
-- rows.
SELECT jsonb_build_object('handlers', w.handlers, 'queues', w.queues, 'tags', w.tags,
                          'parked', (SELECT jsonb_object_agg(c.key, c.value -> 'parked') FROM jsonb_each(w.capabilities) AS c WHERE c.value ? 'parked'),
                          'loading', CASE WHEN w.stats IS NULL THEN w.handlers = '{}' ELSE w.stats ->> 'loading' = 'true' END)
FROM rouse.workers AS w WHERE w.state = 'active'
