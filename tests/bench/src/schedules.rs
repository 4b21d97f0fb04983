//! How late the jobs are if many schedules are due in the same second, compared with the time for the same number of
//! enqueues.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rouse_workbench::percentiles::median;

use super::Bench;
use super::host::{Host, HostOptions};
use super::report::{Report, Unit};
use super::server::Server;

/// From the creation of the schedules to their due time: hosts first compute the due times.
const DUE_IN_S: i32 = 10;
/// The time from the creation of the schedules by which all jobs must have ended.
const END_TIMEOUT: Duration = Duration::from_secs(60);
const POLL_EVERY: Duration = Duration::from_millis(50);

/// The times of one round, in milliseconds.
struct Round {
    /// The same number of calls to `rouse.enqueue`, in one transaction.
    enqueued: f64,
    /// From the due time to the claim of the last job, which follows the commit of its firing.
    claimed: f64,
    /// From the due time to the start of the last job.
    started: f64,
}

/// Measures this many rounds with one host, and adds the medians.
pub(super) async fn run(
    bench: &Bench,
    server: &Server,
    options: &HostOptions,
    schedules: i32,
    rounds: u16,
    report: &mut Report,
) -> Result<()> {
    bench.progress.step("starting a host");
    let mut host = Host::start(bench, server, options).await?;
    let mut all = Vec::new();
    for round in 1..=rounds {
        let times = host.during(measure(server, schedules, round)).await?;
        bench.progress.note(&format!(
            "round {round} of {rounds}: {schedules} schedules due at once, the last job claimed after {:.0} ms",
            times.claimed
        ));
        all.push(times);
    }
    host.stop().await?;
    for (key, label, value) in [
        (
            "probe",
            "probe: as many enqueues in one transaction",
            (|round| round.enqueued) as fn(&Round) -> f64,
        ),
        (
            "claimed",
            "schedules due in the same second: due → last job fired and claimed",
            |round| round.claimed,
        ),
        ("started", "due → last job started", |round| round.started),
    ] {
        let value = median(all.iter().map(value).collect())?;
        report.add(
            format!("flows.schedules.{key}"),
            label,
            value,
            Unit::Milliseconds,
        );
    }
    Ok(())
}

async fn measure(server: &Server, schedules: i32, round: u16) -> Result<Round> {
    let client = &server.client;
    let started = Instant::now();
    let probe = "SELECT count(rouse.enqueue('noop')) FROM generate_series(1, $1::integer)";
    client
        .execute(probe, &[&schedules])
        .await
        .context("enqueue the jobs of the probe")?;
    let enqueued = started.elapsed().as_secs_f64() * 1e3;
    let prefix = format!("bench-{round}-");
    // All of them in the same second of this day.
    let create = "SELECT count(rouse.schedule($3 || n, 'noop', cron => to_char(now() AT TIME ZONE 'UTC' + $2::integer * interval '1 s', 'FMSS FMMI FMHH24 * * *')))
                  FROM generate_series(1, $1::integer) AS n";
    client
        .execute(create, &[&schedules, &DUE_IN_S, &prefix])
        .await
        .context("create the schedules")?;
    let source = format!("schedule:{prefix}%");
    let ended = "SELECT count(*) FROM rouse.finished WHERE source LIKE $1 AND state = 'succeeded'";
    let before = Instant::now();
    while client.query_one(ended, &[&source]).await?.get::<_, i64>(0) < i64::from(schedules) {
        anyhow::ensure!(
            before.elapsed() < END_TIMEOUT,
            "the jobs of the schedules did not end within a minute"
        );
        tokio::time::sleep(POLL_EVERY).await;
    }
    let times = "SELECT count(DISTINCT r.due_at), (extract(epoch FROM max(f.claimed_at) - min(r.due_at)) * 1000)::float8,
                        (extract(epoch FROM max(f.started_at) - min(r.due_at)) * 1000)::float8
                 FROM rouse.schedule_run AS r JOIN rouse.finished AS f ON f.id = r.job WHERE f.source LIKE $1";
    let row = client.query_one(times, &[&source]).await?;
    anyhow::ensure!(
        row.get::<_, i64>(0) == 1,
        "the schedules were due at different times"
    );
    client
        .execute("SELECT rouse.unschedule(name) FROM rouse.schedule", &[])
        .await?;
    Ok(Round {
        enqueued,
        claimed: row.get(1),
        started: row.get(2),
    })
}
