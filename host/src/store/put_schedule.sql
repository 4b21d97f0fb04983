-- Creates or replaces a schedule; see rouse.schedule (migrations/functions/schedules.sql). Null arguments mean the
-- defaults.
SELECT rouse.schedule(
    $1, $2, payload => $3, cron => $4, time_zone => $5, overlap => $6, catch_up => $7, catch_up_window => $8 * interval '1 second',
    jitter => $9 * interval '1 second', queue => $10, tenant => $11, source => $12, priority => $13, max_attempts => $14, tags => $15,
    grants => $16, lease => $17 * interval '1 second', timeout => $18 * interval '1 second',
    job_timeout => $19 * interval '1 second', due_key => $20)
