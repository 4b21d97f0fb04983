//! Time until a job starts on an otherwise idle host.

use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use rouse_workbench::percentiles::Percentiles;
use serde_json::json;
use tokio_postgres::types::Json;

use super::host::{Host, HostOptions};
use super::report::{Report, Unit};
use super::server::Server;
use super::{Bench, round_trip};

/// How long after the last enqueue the last job may finish.
const FINISH_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Args)]
pub(super) struct Options {
    /// Enqueues per second
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub(super) rate: u32,
    /// Length of each measurement, in seconds
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=3_600))]
    pub(super) seconds: u32,
    /// Measure only without notifications; by default with and without them
    #[arg(long)]
    pub(super) no_notify: bool,
}

/// One enqueue, timed by the clock that client and server share.
struct Enqueued {
    id: i64,
    called_at: SystemTime,
    acknowledged_at: SystemTime,
}

pub(super) async fn run(bench: &Bench, options: &Options) -> Result<Report> {
    Server::during(bench, async |server| {
        let mut report = Report::new("latency");
        report.settings = server.settings();
        let every = Duration::from_secs(1) / options.rate;
        let probe_rounds = (options.rate * options.seconds).div_ceil(3);
        let mut probe = round_trip::run(bench, server, every, probe_rounds).await?;
        let ways: &[(&str, bool)] = match options.no_notify {
            true => &[("polling", true)],
            false => &[("notify", false), ("polling", true)],
        };
        for (name, no_notify) in ways {
            measure(bench, server, options, name, *no_notify, &mut report).await?;
        }
        probe.extend(round_trip::run(bench, server, every, probe_rounds).await?);
        add(
            &mut report,
            "latency.probe.called",
            "probe: NOTIFY, then an UPDATE by the listener",
            probe,
        )?;
        Ok(report)
    })
    .await
}

/// Times of all jobs, in milliseconds.
pub(super) struct Waits {
    /// From the call to the start.
    pub(super) called: Vec<f64>,
    /// From the acknowledgement to the start.
    acknowledged: Vec<f64>,
    /// From the acknowledgement to the settlement.
    settled: Vec<f64>,
}

async fn measure(
    bench: &Bench,
    server: &Server,
    options: &Options,
    name: &str,
    no_notify: bool,
    report: &mut Report,
) -> Result<()> {
    let waits = waits_of(bench, server, options, no_notify).await?;
    let key = |part: &str| format!("latency.{name}.{part}");
    let label = "enqueue call → handler start";
    add(report, &key("called"), label, waits.called)?;
    let label = "acknowledged enqueue → handler start";
    add(report, &key("acknowledged"), label, waits.acknowledged)?;
    let label = "acknowledged enqueue → outcome written";
    add(report, &key("settled"), label, waits.settled)
}

/// Starts a host, enqueues at the given rate, and reads the times of the jobs.
pub(super) async fn waits_of(
    bench: &Bench,
    server: &Server,
    options: &Options,
    no_notify: bool,
) -> Result<Waits> {
    let mut host = HostOptions::new(&server.handlers(&bench.guests, &["noop"])?);
    host.no_notify = no_notify;
    bench.progress.step("starting a host");
    let mut host = Host::start(bench, server, &host).await?;
    if !no_notify {
        host.asleep(server).await?;
    }
    let way = if no_notify { "polling" } else { "notify" };
    let label = format!("enqueueing {} jobs per second ({way})", options.rate);
    let length = Duration::from_secs(options.seconds.into());
    let enqueued = bench
        .progress
        .during(&label, length, host.during(enqueue(server, options)))
        .await?;
    let waits = host.during(waits(server, &enqueued)).await?;
    host.stop().await?;
    Ok(waits)
}

async fn enqueue(server: &Server, options: &Options) -> Result<Vec<Enqueued>> {
    let client = &server.client;
    let statement = client
        .prepare("SELECT rouse.enqueue('noop', $1)")
        .await
        .context("prepare the enqueueing")?;
    let mut clock = tokio::time::interval(Duration::from_secs(1) / options.rate);
    let mut enqueued = Vec::new();
    for n in 0..options.rate * options.seconds {
        clock.tick().await;
        let payload = Json(json!({"n": n, "pad": "x".repeat(80)}));
        let called_at = SystemTime::now();
        let row = client.query_one(&statement, &[&payload]).await?;
        enqueued.push(Enqueued {
            id: row.get(0),
            called_at,
            acknowledged_at: SystemTime::now(),
        });
    }
    Ok(enqueued)
}

/// `started_at` is the database's time of the claim plus the time that the host measured from the response to the
/// start, so it is too early by the transit time of the response. The settlement is too late by the duration of the
/// run. The true start is between the two.
async fn waits(server: &Server, enqueued: &[Enqueued]) -> Result<Waits> {
    let ids: Vec<i64> = enqueued.iter().map(|job| job.id).collect();
    let started = std::time::Instant::now();
    let rows = loop {
        let rows = server
            .client
            .query(
                "SELECT id, started_at, finished_at FROM rouse.finished
                 WHERE id = ANY ($1) AND state::text = 'succeeded' ORDER BY id",
                &[&ids],
            )
            .await
            .context("read when the jobs started")?;
        if rows.len() == ids.len() {
            break rows;
        }
        ensure!(
            started.elapsed() < FINISH_TIMEOUT,
            "{} of {} jobs had succeeded after {FINISH_TIMEOUT:?}",
            rows.len(),
            ids.len()
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    let mut waits = Waits {
        called: Vec::new(),
        acknowledged: Vec::new(),
        settled: Vec::new(),
    };
    for (row, job) in rows.iter().zip(enqueued) {
        ensure!(
            row.get::<_, i64>(0) == job.id,
            "the jobs are not ordered by id"
        );
        let (started_at, finished_at): (SystemTime, SystemTime) = (row.get(1), row.get(2));
        waits.called.push(ms_between(job.called_at, started_at));
        waits
            .acknowledged
            .push(ms_between(job.acknowledged_at, started_at));
        waits
            .settled
            .push(ms_between(job.acknowledged_at, finished_at));
    }
    Ok(waits)
}

/// Negative if `to` is before `from`: a host may start a job before its producer learns of the commit.
fn ms_between(from: SystemTime, to: SystemTime) -> f64 {
    match to.duration_since(from) {
        Ok(after) => after.as_secs_f64() * 1e3,
        Err(before) => -before.duration().as_secs_f64() * 1e3,
    }
}

fn add(report: &mut Report, key: &str, label: &str, values: Vec<f64>) -> Result<()> {
    let found = Percentiles::of(values)?;
    for (name, value) in [
        ("p50", found.p50),
        ("p95", found.p95),
        ("p99", found.p99),
        ("max", found.max),
    ] {
        report.add(format!("{key}.{name}"), label, value, Unit::Milliseconds);
    }
    Ok(())
}
