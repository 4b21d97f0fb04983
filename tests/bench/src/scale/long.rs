//! Short jobs among 1-hour jobs: jobs that a host has claimed ahead must not wait for the long ones.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tokio_postgres::Client;

use super::Scale;
use crate::backlog::{Backlog, Work};
use crate::host::{self, Host, HostOptions};
use crate::report::Unit;

/// Two hosts with two slots each …
const HOSTS: usize = 2;
const SLOTS: u16 = 2;
/// … of which the long jobs leave one free.
const LONG_JOBS: i64 = 3;
/// Enough for hosts to claim ahead at full speed, and to stay busy for a while.
const SHORT_JOBS: i64 = 20_000;

/// The longest wait of a short job, without and with long jobs. The long jobs outlast all short ones.
pub(super) async fn measure(scale: &mut Scale<'_>) -> Result<()> {
    let alone = worst_wait_ms(scale, 0).await?;
    let label = "probe: worst wait of a short job, without long ones";
    scale.figure("long.probe", label, alone, Unit::Milliseconds);
    let among = worst_wait_ms(scale, LONG_JOBS).await?;
    let label = "worst wait of a short job, 3 of 4 slots occupied for an hour";
    scale.figure("long.worst", label, among, Unit::Milliseconds);
    Ok(())
}

async fn worst_wait_ms(scale: &Scale<'_>, long_jobs: i64) -> Result<f64> {
    let (bench, server) = (scale.bench, scale.server);
    let mut options = HostOptions::new(&server.handlers(&bench.guests, &["noop", "test_guests"])?);
    options.slots = Some(SLOTS);
    options.drain_timeout = Some("0s");
    let mut hosts = Host::start_many(bench, server, &options, HOSTS).await?;
    let short = Work::noop(SHORT_JOBS);
    let mut long = Work::noop(long_jobs);
    long.handler = "test.race";
    long.payload = "jsonb_build_object('ms', 3600000)".to_owned();

    long.priority = "high";

    let client = &server.client;
    client.batch_execute("BEGIN").await?;
    let mut backlog = short.enqueue(client, &bench.progress).await?;
    client.batch_execute("COMMIT").await?;
    let waiting = async {
        // The long jobs are enqueued while the hosts have many claims, and go ahead of the queued ones.
        started(client, &backlog).await?;
        long.enqueue(client, &bench.progress).await?;
        backlog.until_done(client, &bench.progress).await
    };
    host::during(&mut hosts, Box::pin(waiting))
        .await
        .context("wait until all short jobs have finished")?;
    let row = client
        .query_one(
            "SELECT extract(epoch FROM max(started_at - requested_at))::float8 * 1000,
                    (SELECT count(*) FROM rouse.job AS j
                     WHERE j.state::text = 'running' AND j.claimed_at < max(f.finished_at))
             FROM rouse.finished AS f WHERE f.id BETWEEN $1 AND $2",
            &[&backlog.first, &backlog.last],
        )
        .await?;
    ensure!(
        row.get::<_, i64>(1) == long_jobs,
        "the short jobs were done before the long jobs had started: raise SHORT_JOBS"
    );
    host::stop_all(hosts).await?;
    client
        .batch_execute("SELECT rouse.unlock_history('bench'); TRUNCATE rouse.job, rouse.finished")
        .await?;
    Ok(row.get(0))
}

/// Waits until a quarter of the jobs has finished.
async fn started(client: &Client, backlog: &Backlog) -> Result<()> {
    let finished = client
        .prepare("SELECT count(*) FROM rouse.finished WHERE id BETWEEN $1 AND $2")
        .await?;
    loop {
        let row = client
            .query_one(&finished, &[&backlog.first, &backlog.last])
            .await?;
        if row.get::<_, i64>(0) >= backlog.jobs / 4 {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
