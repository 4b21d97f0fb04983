//! One job that sleeps durably many times: measures whether a late resumption takes longer than an early one.
//!
//! Each resumption runs the handler from its beginning, through all sleeps so far, to the next one. The sleeps last an
//! hour. An admin action ends each of them, and the measured time starts at that moment.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rouse_workbench::percentiles::median;
use tokio_postgres::Client;

use super::Measured;
use crate::host::Host;
use crate::report::Unit;

const HOUR_MS: i64 = 3_600_000;
const POLL_EVERY: Duration = Duration::from_millis(1);
/// The maximum number of polls for a resumption.
const POLLS_MAX: u32 = 30_000;
/// The early resumptions are the fifth to the fifteenth; the same number of resumptions at the end are the late ones.
const EARLY: std::ops::RangeInclusive<usize> = 5..=15;
const LATE: usize = 11;

/// Milliseconds of each resumption, in order: from the end of the sleep to the next suspension, or to the end of the
/// job, according to the database's clock.
const TIMES: &str = "\
    SELECT (extract(epoch FROM e.ended_at - r.at) * 1000)::float8
    FROM (SELECT attempt, ended_at FROM rouse.attempt WHERE job = $1
          UNION ALL SELECT attempt, finished_at FROM rouse.finished WHERE id = $1 AND state = 'succeeded') AS e
    JOIN rouse.record AS r ON r.job = $1 AND r.event = 'rescheduled' AND r.attempt = e.attempt - 1
    ORDER BY e.attempt";

pub(super) async fn run(measured: &mut Measured<'_>, resumptions: i64) -> Result<()> {
    let (bench, server) = (measured.bench, measured.server);
    bench.progress.step("starting a host");
    let mut host = Host::start(bench, server, &measured.host).await?;
    host.asleep(server).await?;
    let times: Vec<f64> = host.during(async {
        let client = &server.client;
        let enqueue = "SELECT rouse.enqueue('flow.sleeps', jsonb_build_object('ms', jsonb_build_array($1::bigint), 'times', $2::bigint))";
        let row = client.query_one(enqueue, &[&HOUR_MS, &resumptions]).await;
        let id: i64 = row.context("enqueue the job")?.get(0);
        bench.progress.count("resuming one job", resumptions.unsigned_abs());
        for resumption in 1..=resumptions {
            until(client, id, "EXISTS (SELECT FROM rouse.job WHERE id = $1 AND turn IS NULL AND wait IS NOT NULL)").await?;
            wake(client, id).await.context("end a sleep")?;
            bench.progress.at(resumption.unsigned_abs());
        }
        until(client, id, "EXISTS (SELECT FROM rouse.finished WHERE id = $1)").await?;
        let rows = client.query(TIMES, &[&id]).await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }).await?;
    host.stop().await?;
    ensure!(
        times.len() as i64 == resumptions,
        "{} of {resumptions} resumptions were recorded",
        times.len()
    );
    let early = median(times[EARLY.start() - 1..*EARLY.end()].to_vec())?;
    let late = median(times[times.len() - LATE..].to_vec())?;
    let last = format!("the same, the last {LATE} of {resumptions}");
    let ms = Unit::Milliseconds;
    let early_label = "a resumption, up to the next sleep: the 5th to the 15th";
    measured.add("resumptions.early", early_label, early, ms);
    measured.add("resumptions.late", &last, late, ms);
    measured.add(
        "resumptions.ratio",
        "ratio of the last ones to the early ones",
        late / early,
        Unit::Ratio,
    );
    Ok(())
}

/// Ends the sleep. The row of its step is deleted first, because `rouse.reschedule` writes another one with the new
/// time, and a sleep that ends on its own leaves only one.
async fn wake(client: &Client, id: i64) -> Result<()> {
    client
        .batch_execute("BEGIN; SELECT rouse.unlock_history('a benchmark')")
        .await?;
    let forget = "DELETE FROM rouse.step AS s USING rouse.job AS j WHERE j.id = $1 AND s.job = $1 AND s.name = j.wait ->> 'step'";
    client.execute(forget, &[&id]).await?;
    client
        .execute("SELECT rouse.reschedule($1)", &[&id])
        .await?;
    client.batch_execute("COMMIT").await?;
    Ok(())
}

/// Waits until a condition of the job `$1` holds.
async fn until(client: &Client, id: i64, condition: &str) -> Result<()> {
    let statement = client.prepare(&format!("SELECT {condition}")).await?;
    for _ in 0..POLLS_MAX {
        if client.query_one(&statement, &[&id]).await?.get(0) {
            return Ok(());
        }
        tokio::time::sleep(POLL_EVERY).await;
    }
    anyhow::bail!("job {id} has neither been suspended again nor ended")
}
