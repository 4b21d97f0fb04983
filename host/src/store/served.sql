-- Whether a worker that lives has the handler. One row for each life of a worker: a scan of few rows.
SELECT EXISTS (
    SELECT FROM rouse.worker
    WHERE stopped_at IS NULL AND dead_at IS NULL AND seen_at > now() - interval '90 s' AND $1 = ANY (handlers))
