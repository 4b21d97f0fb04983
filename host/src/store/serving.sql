-- The handlers, queues and tags of the workers that accept jobs now. A scan of few rows.
SELECT jsonb_build_object('handlers', w.handlers, 'queues', w.queues, 'tags', w.tags,
                          'loading', CASE WHEN w.stats IS NULL THEN w.handlers = '{}' ELSE w.stats ->> 'loading' = 'true' END)
FROM rouse.workers AS w WHERE w.state = 'active'
