//! One minute of small measurements, which fail on large regressions.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use rouse_workbench::percentiles::{Percentiles, median};

use super::backlog::Work;
use super::drained::{self, Drained};
use super::host::HostOptions;
use super::levels::Levels;
use super::plain::Plain;
use super::producers::{Kind, Producers};
use super::report::{Report, Unit};
use super::server::Server;
use super::{Bench, counts, idle, latency, probe, round_trip};

/// With fewer jobs, the first claim would dominate; more jobs would slow down CI.
const JOBS: i64 = 10_000;
const DRAINS: usize = 3;
const ENQUEUE_CONNECTIONS: usize = 8;
const ENQUEUE_SECONDS: u32 = 1;
const ENQUEUE_PAIRS: usize = 2;
const LATENCY_RATE: u32 = 20;
/// Enough jobs that the transactions of the host's start, which are included, are a small part.
const LATENCY_SECONDS: u32 = 6;
/// An idle session reports the transactions of the host's start after 10 s.
const IDLE_SETTLE_SECONDS: u32 = 12;
const IDLE_SECONDS: u32 = 15;

#[derive(Args)]
pub(super) struct Options {
    /// Write the measured figures to tests/bench/levels.toml as the new levels
    #[arg(long)]
    pub(super) record: bool,
}

pub(super) async fn run(bench: &Bench, root: &Path, options: &Options) -> Result<Report> {
    let mut levels = Levels::read(root)?;
    let mut report = Server::during(bench, async |server| {
        let mut report = Report::new("smoke");
        report.settings = server.settings();
        server.suspend_autovacuum().await?;
        drain(bench, server, &mut report).await?;
        enqueue(bench, server, &mut report).await?;
        wait(bench, server, &mut report).await?;
        let idle = idle::idle(bench, server, 1, IDLE_SETTLE_SECONDS, IDLE_SECONDS, 0.0).await?;
        let label = "transactions of an idle host per minute";
        report.add(
            "smoke.idle",
            label,
            idle.transactions_per_s * 60.0,
            Unit::Count,
        );
        Ok(report)
    })
    .await?;
    if options.record {
        levels.record(&report)?;
    } else {
        report.failures = levels.check(&report);
    }
    Ok(report)
}

async fn drain(bench: &Bench, server: &Server, report: &mut Report) -> Result<()> {
    let work = Work::noop(JOBS);
    let host = HostOptions::new(&server.handlers(&bench.guests, &["noop"])?);
    let before = server.cpu()?;
    let probes = probe::run(bench, server, work.jobs, &work.payload).await?;
    // Includes filling the probe's table: the probe stands for the speed of this machine.
    let probe_us = (server.cpu()? - before) * 1e6 / (work.jobs as f64 * probes.len() as f64);
    let probe = median(probes)?;
    let mut drains = Vec::new();
    for _ in 0..DRAINS {
        drains.push(drained::drain(bench, server, &host, 1, &work).await?);
    }
    let median_of = |value: fn(&Drained) -> f64| median(drains.iter().map(value).collect());
    // Other load on the machine makes batches smaller, never larger: the best of a few drains shows what the code
    // can do.
    let min = |value: fn(&Drained) -> f64| drains.iter().map(value).fold(f64::INFINITY, f64::min);
    let jobs_per_s = median_of(Drained::jobs_per_s)?;
    let mut figure = |name: &str, label: &str, value: f64, unit: Unit| {
        report.add(format!("smoke.{name}"), label, value, unit);
    };
    figure(
        "drain.ratio",
        "drain: ratio to the probe",
        jobs_per_s / probe,
        Unit::Ratio,
    );
    let us = Unit::Microseconds;
    figure(
        "drain.cpu_probe",
        "Postgres per row of the probe",
        probe_us,
        us,
    );
    for (name, label, used) in [
        (
            "postgres",
            "Postgres per job",
            median_of(|d| d.cpu_postgres_us)?,
        ),
        (
            "control",
            "the host per job",
            median_of(|d| d.cpu_control_us)?,
        ),
        (
            "guests",
            "the guest per job",
            median_of(|d| d.cpu_guests_us)?,
        ),
    ] {
        figure(&format!("drain.cpu_{name}"), label, used, us);
        // Only the ratio has a level, because machines differ by a factor of two and more.
        let ratio_label = format!("{label}, ratio to the probe");
        figure(
            &format!("drain.cpu_{name}_ratio"),
            &ratio_label,
            used / probe_us,
            Unit::Ratio,
        );
    }
    let transactions = min(|drained| drained.transactions);
    figure(
        "drain.transactions",
        "transactions per 1,000 jobs",
        transactions,
        Unit::Count,
    );
    let enqueue = min(|drained| drained.wal_enqueue);
    figure(
        "drain.wal_enqueue",
        "WAL of 1,000 jobs: enqueue",
        enqueue * 1e3,
        Unit::Bytes,
    );
    let mut records = f64::INFINITY;
    for drained in &drains {
        // Full-page images depend on checkpoints; without pg_walinspect they are included.
        records = records.min(drained.wal_records(server).await.unwrap_or(drained.wal));
    }
    figure(
        "drain.wal",
        "WAL of 1,000 jobs: claim, settle",
        records * 1e3,
        Unit::Bytes,
    );
    Ok(())
}

async fn enqueue(bench: &Bench, server: &Server, report: &mut Report) -> Result<()> {
    let plain = Plain::create(&server.client).await?;
    let producers = Producers::connect(server, &plain, ENQUEUE_CONNECTIONS).await?;
    bench
        .progress
        .step("enqueueing, alternating with plain INSERTs");
    let mut ratios = Vec::new();
    for _ in 0..ENQUEUE_PAIRS {
        let plain = producers
            .commits(Kind::Plain, ENQUEUE_CONNECTIONS, ENQUEUE_SECONDS)
            .await?;
        let rouse = producers
            .commits(Kind::Rouse, ENQUEUE_CONNECTIONS, ENQUEUE_SECONDS)
            .await?;
        ratios.push(rouse.per_s / plain.per_s);
    }
    server.client.batch_execute("TRUNCATE rouse.job").await?;
    let label = "enqueue: ratio to plain INSERTs";
    report.add("smoke.enqueue.ratio", label, median(ratios)?, Unit::Ratio);
    Ok(())
}

async fn wait(bench: &Bench, server: &Server, report: &mut Report) -> Result<()> {
    let every = Duration::from_secs(1) / LATENCY_RATE;
    let probe = round_trip::run(bench, server, every, LATENCY_RATE).await?;
    let options = latency::Options {
        rate: LATENCY_RATE,
        seconds: LATENCY_SECONDS,
        no_notify: false,
    };
    counts::report_counts(&server.client).await?;
    let transactions = counts::transactions(&server.observer).await?;
    let waits = latency::waits_of(bench, server, &options, false).await?;
    counts::report_counts(&server.client).await?;
    let transactions = counts::transactions(&server.observer).await? - transactions;
    let jobs = waits.called.len() as f64;
    let ratio = Percentiles::of(probe)?.p50 / Percentiles::of(waits.called)?.p50;
    let label = "the probe's median, divided by the median time until the start";
    report.add("smoke.latency.ratio", label, ratio, Unit::Ratio);
    // Without the statement that enqueues each job.
    let transactions = (transactions as f64 - jobs) * 1000.0 / jobs;
    let label = "transactions per 1,000 jobs enqueued one by one";
    report.add(
        "smoke.latency.transactions",
        label,
        transactions,
        Unit::Count,
    );
    Ok(())
}
