-- Enqueues one job, unless a live one has its key or a gate merges it with another; see rouse.enqueue_and_report
-- (migrations/functions/enqueue.sql).
SELECT id, created, differs FROM rouse.enqueue_and_report($1, $2, unique_key => $17, queue => $3, tenant => $4, source => $5, priority => $6,
    run_at => coalesce($16::text::timestamptz, clock_timestamp() + $7 * interval '1 second'), max_attempts => $8, tags => $9, grants => $10,
    lease => $11 * interval '1 second', timeout => $12 * interval '1 second', job_timeout => $13 * interval '1 second',
    after => $14, trace => $15)
