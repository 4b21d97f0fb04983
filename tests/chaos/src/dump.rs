//! Writes the tables at the end of a run to files, so that the checker needs no database.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use tokio_postgres::Client;

use super::folder::Folder;
use super::ledger::now_us;
use super::schedules::SOURCE;

/// Covers the waits after repeated losses (10 s, then 20 s), leases and retries.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(120);
const POLL_EVERY: Duration = Duration::from_millis(500);
/// Jobs scheduled further ahead than this are not waited for.
const AHEAD: &str = "1 hour";

/// Waits until the only live jobs are those scheduled far ahead, and those that wait for the retry of a failed job.
/// Returns the number of other jobs left after [`DRAIN_TIMEOUT`].
pub(super) async fn drained(client: &Client) -> Result<i64> {
    let started = Instant::now();
    let sql = format!(
        "WITH RECURSIVE held AS (
             SELECT d.job FROM rouse.dependency AS d
             WHERE d.on_failure = 'wait' AND rouse._live_job(d.chain) IS NULL AND (rouse._last_ended(d.chain)).state <> 'succeeded'
             UNION
             SELECT d.job FROM held AS h
             JOIN rouse.job AS j ON j.id = h.job
             JOIN rouse.dependency AS d ON d.chain = coalesce(j.chain, j.id))
         SELECT count(*) FROM rouse.job AS j
         WHERE source IS DISTINCT FROM '{SOURCE}' AND NOT EXISTS (SELECT FROM held AS h WHERE h.job = j.id)
           AND (state = 'running' OR turn IS NOT NULL OR available_at < now() + interval '{AHEAD}')"
    );
    loop {
        let left: i64 = client.query_one(&sql, &[]).await?.get(0);
        if left == 0 || started.elapsed() > DRAIN_TIMEOUT {
            return Ok(left);
        }
        tokio::time::sleep(POLL_EVERY).await;
    }
}

/// SQL for a time in microseconds since 1970.
macro_rules! us {
    ($column:literal) => {
        concat!("(extract(epoch FROM ", $column, ") * 1000000)::bigint")
    };
}

/// Each table with its query: one JSON object per row.
const TABLES: [(&str, &str); 10] = [
    (
        "jobs",
        concat!(
            "SELECT json_build_object('id', id, 'queue', queue, 'handler', handler, 'tags', tags, 'state', state, ",
            "'unique_key', unique_key, 'tenant', tenant, 'attempt', attempt, 'uncounted', uncounted, 'retried_from', retried_from, 'worker', worker, 'sha256', usage->>'sha256', ",
            "'n', payload->'n', 'result', result, 'after', after, 'chain', chain, 'parent', parent, 'wait', wait, 'is_waiting', waits_for IS NOT NULL, ",
            "'cancelled_after', (SELECT r.detail->'after' FROM rouse.record AS r WHERE r.job = jobs.id AND r.event = 'cancelled' LIMIT 1), 'error', CASE WHEN finished_at IS NOT NULL THEN error END, ",
            "'requested_us', ",
            us!("requested_at"),
            ", 'available_us', ",
            us!("available_at"),
            ", 'claimed_us', ",
            us!("claimed_at"),
            ", 'finished_us', ",
            us!("finished_at"),
            ")::text FROM rouse.jobs WHERE source IS DISTINCT FROM 'chaos-schedule'"
        ),
    ),
    (
        "attempts",
        concat!(
            "SELECT json_build_object('job', job, 'attempt', attempt, 'lost', lost, 'worker', worker, 'error', error, 'wait', wait, ",
            "'sha256', encode(digest, 'hex'), 'claimed_us', ",
            us!("claimed_at"),
            ", 'ended_us', ",
            us!("ended_at"),
            ", 'lease_ended_us', ",
            us!("(error->>'lease_ended_at')::timestamptz"),
            ")::text FROM rouse.attempt"
        ),
    ),
    (
        "records",
        concat!(
            "SELECT json_build_object('job', job, 'queue', queue, 'event', event, 'attempt', attempt, 'worker', worker, ",
            "'started', coalesce(detail ? 'started_at', false), 'at_us', ",
            us!("at"),
            ")::text FROM rouse.record WHERE event <> 'renewed'"
        ),
    ),
    (
        "steps",
        concat!(
            "SELECT json_build_object('job', job, 'name', name, 'result', result, 'wait', wait, 'attempt', attempt, 'worker', worker, ",
            "'at_us', ",
            us!("at"),
            ")::text FROM rouse.step"
        ),
    ),
    (
        "dependencies",
        "SELECT json_build_object('job', job, 'chain', chain)::text FROM rouse.dependency",
    ),
    (
        "signals",
        "SELECT json_build_object('job', job, 'name', name, 'mark', payload->'mark')::text FROM rouse.signal",
    ),
    (
        "workers",
        "SELECT json_build_object('incarnation', incarnation, 'worker_id', worker_id)::text FROM rouse.worker",
    ),
    (
        "lines",
        "SELECT json_build_object('job', job, 'attempt', attempt, 'part', part, 'amount', amount)::text FROM bank.line",
    ),
    (
        "accounts",
        "SELECT json_build_object('id', id, 'balance', balance)::text FROM bank.account",
    ),
    (
        "due",
        concat!(
            "SELECT json_build_object('schedule', r.schedule, 'job', r.job, ",
            "'jobs', (SELECT count(*) FROM rouse.jobs AS j WHERE j.id = r.job AND j.source = 'chaos-schedule'), 'due_us', ",
            us!("r.due_at"),
            ")::text FROM rouse.schedule_run AS r ",
            "UNION ALL SELECT json_build_object('schedule', '', 'job', j.id, 'jobs', 1, 'due_us', NULL)::text FROM rouse.jobs AS j ",
            "WHERE j.source = 'chaos-schedule' AND NOT EXISTS (SELECT FROM rouse.schedule_run AS r WHERE r.job = j.id)"
        ),
    ),
];

/// Writes all tables, and the current time.
pub(super) async fn write(client: &Client, folder: &Folder) -> Result<()> {
    for (table, sql) in TABLES {
        let path = folder.dump(table);
        let file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
        let mut file = BufWriter::new(file);
        for row in client.query(sql, &[]).await? {
            writeln!(file, "{}", row.get::<_, &str>(0))?;
        }
        file.flush()?;
    }
    std::fs::write(folder.dump("dumped"), now_us().to_string())?;
    Ok(())
}
