//! How fast one host drains a queue of no-op jobs, and the cost of each job.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use rouse_workbench::percentiles::median;

use super::backlog::Work;
use super::drained::{self, Drained};
use super::host::{Host, HostOptions};
use super::report::{Report, Unit};
use super::server::Server;
use super::{Bench, probe};

/// How long all attempts may take to start; a small machine under load takes seconds for 200.
const START_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Args)]
pub(super) struct Options {
    /// Jobs per run
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(i64).range(1..=10_000_000))]
    pub(super) jobs: i64,
    /// Runs; the median of each figure is reported
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=100))]
    pub(super) runs: u16,
    /// Let instances of `noop` serve many jobs (rouse.toml: instances = "reuse") instead of one each
    #[arg(long)]
    pub(super) reuse: bool,
    /// Concurrent attempts when the host's memory is measured; 0 or --reuse skips this measurement
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u16).range(..=2_000))]
    pub(super) attempts: u16,
}

pub(super) async fn run(bench: &Bench, options: &Options) -> Result<Report> {
    Server::during(bench, async |server| {
        let mut report = Report::new("drain");
        report.settings = server.settings();
        let work = Work::noop(options.jobs);
        let mut host = HostOptions::new(&server.handlers(&bench.guests, &["noop"])?);
        if options.reuse {
            host.config = Some("[handlers.noop]\ninstances = \"reuse\"\n".to_owned());
        }
        let mut probes = probe::run(bench, server, work.jobs, &work.payload).await?;
        let mut runs = Vec::new();
        for run in 1..=options.runs {
            let drained = drained::drain(bench, server, &host, 1, &work).await?;
            bench.progress.note(&format!(
                "run {run} of {}: {:.0} jobs/s",
                options.runs,
                drained.jobs_per_s()
            ));
            runs.push(drained);
        }
        probes.extend(probe::run(bench, server, work.jobs, &work.payload).await?);
        add(&mut report, &prefix(options), &runs, median(probes)?)?;
        // A waiting attempt has an instance to itself even with --reuse, so that would measure the same.
        if options.attempts > 0 && !options.reuse {
            let resident = resident(bench, server, options.attempts).await?;
            let label = format!("memory of the host, {} attempts running", options.attempts);
            report.add("drain.rss_running", label, resident, Unit::Bytes);
        }
        Ok(report)
    })
    .await
}

fn prefix(options: &Options) -> String {
    match options.reuse {
        false => "drain".to_owned(),
        true => "drain.reuse".to_owned(),
    }
}

fn add(report: &mut Report, prefix: &str, runs: &[Drained], probe: f64) -> Result<()> {
    let median_of = |value: fn(&Drained) -> f64| median(runs.iter().map(value).collect());
    let jobs_per_s = median_of(Drained::jobs_per_s)?;
    let growths: Vec<f64> = runs.iter().filter_map(|run| run.rss_growth).collect();
    let mut figure = |name: &str, label: &str, value: f64, unit: Unit| {
        report.add(format!("{prefix}.{name}"), label, value, unit);
    };
    figure(
        "jobs",
        "jobs in a run",
        median_of(|d| d.jobs as f64)?,
        Unit::Count,
    );
    figure(
        "seconds",
        "first claim to last settlement",
        median_of(|d| d.seconds)?,
        Unit::Seconds,
    );
    figure("jobs_per_s", "jobs", jobs_per_s, Unit::PerSecond);
    figure(
        "probe_per_s",
        "probe: rows claimed and deleted by plain SQL",
        probe,
        Unit::PerSecond,
    );
    figure(
        "ratio",
        "ratio to the probe",
        jobs_per_s / probe,
        Unit::Ratio,
    );
    let us = Unit::Microseconds;
    figure(
        "cpu_postgres",
        "CPU time per job: Postgres",
        median_of(|d| d.cpu_postgres_us)?,
        us,
    );
    figure(
        "cpu_control",
        "the host's threads except guest threads",
        median_of(|d| d.cpu_control_us)?,
        us,
    );
    figure(
        "cpu_guests",
        "the host's guest threads",
        median_of(|d| d.cpu_guests_us)?,
        us,
    );
    figure(
        "wal",
        "WAL per job: claim and settle",
        median_of(|d| d.wal)?,
        Unit::Bytes,
    );
    figure(
        "wal_enqueue",
        "WAL per job: enqueue, in batches",
        median_of(|d| d.wal_enqueue)?,
        Unit::Bytes,
    );
    figure(
        "transactions",
        "transactions per 1,000 jobs",
        median_of(|d| d.transactions)?,
        Unit::Count,
    );
    figure(
        "rss_peak",
        "peak memory of the host",
        median_of(|d| d.rss_peak)?,
        Unit::Bytes,
    );
    if !growths.is_empty() {
        let label = "growth of the host's memory after a tenth of the jobs";
        figure("rss_growth", label, median(growths)?, Unit::Bytes);
    }
    Ok(())
}

/// Memory of a host with this many waiting attempts, in bytes.
async fn resident(bench: &Bench, server: &Server, attempts: u16) -> Result<f64> {
    bench
        .progress
        .step(&format!("starting {attempts} attempts that wait"));
    let mut options = HostOptions::new(&server.handlers(&bench.guests, &["test_guests"])?);
    options.slots = Some(attempts);
    options.drain_timeout = Some("0s");
    let mut host = Host::start(bench, server, &options).await?;
    let mut work = Work::noop(attempts.into());
    work.handler = "test.race";
    work.payload = "jsonb_build_object('ms', 3600000)".to_owned();
    work.enqueue(&server.client, &bench.progress).await?;
    host.during(async {
        let started = std::time::Instant::now();
        loop {
            let running: i64 = server
                .client
                .query_one(
                    "SELECT count(*) FROM rouse.job WHERE state::text = 'running'",
                    &[],
                )
                .await?
                .get(0);
            if running == i64::from(attempts) {
                // Some claimed jobs may not have started yet, but they will within milliseconds.
                tokio::time::sleep(Duration::from_secs(1)).await;
                return Ok(());
            }
            if started.elapsed() > START_TIMEOUT {
                bail!("only {running} of {attempts} attempts are running after {START_TIMEOUT:?}");
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    })
    .await
    .context("wait until all attempts run")?;
    let memory = host.memory()?;
    host.stop().await?;
    server
        .client
        .execute("DELETE FROM rouse.job", &[])
        .await
        .context("remove the waiting jobs")?;
    Ok(memory.resident as f64)
}
