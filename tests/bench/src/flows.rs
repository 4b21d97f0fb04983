//! How fast one host runs jobs that wait for each other, continue their chain, or sleep, compared with jobs that do
//! not; how long settlements are delayed while waiting jobs are cancelled or retried (`held_up.rs`); and how late the
//! jobs of schedules are (`schedules.rs`).

mod continued;
mod resumptions;
mod sleepers;

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::{Args, ValueEnum};
use rouse_workbench::percentiles::median;
use tokio_postgres::Client;
use tokio_postgres::types::ToSql;

use super::Bench;
use super::backlog::{Graph, Work};
use super::drained::{self, Drained};
use super::held_up;
use super::host::HostOptions;
use super::report::{Report, Unit};
use super::schedules;
use super::server::Server;

/// The jobs that the guests in tests/guests-flow may enqueue.
const GRANTS: &str = "[handlers.\"flow.*\"]\nenqueue = [\"flow.*\"]\n";
/// The benchmark fails if nothing changes for this long.
const STALLED_AFTER: Duration = Duration::from_secs(60);
const POLL_EVERY: Duration = Duration::from_millis(50);

#[derive(Args)]
pub(super) struct Options {
    /// Jobs per run, in flows of 10,000; also the number of jobs that are cancelled
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(i64).range(1..=1_000_000))]
    pub(super) jobs: i64,
    /// Runs of each drain, interleaved; the median of each figure is reported
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=100))]
    pub(super) runs: u16,
    /// Chains of ten jobs, each continued by its handler
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(i64).range(1..=100_000))]
    pub(super) chains: i64,
    /// How many times the single chain is continued
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(i64).range(1..=100_000))]
    pub(super) hops: i64,
    /// Jobs that sleep, and wake at the same moment
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(i64).range(10..=1_000_000))]
    pub(super) sleepers: i64,
    /// Sleeps of one job; the host's limits.steps allows 1,000
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(i64).range(30..=1_000))]
    pub(super) resumptions: i64,
    /// Schedules that are due in the same second
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(i32).range(1..=10_000))]
    pub(super) schedules: i32,
    /// Measure only these parts
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Part::ALL)]
    pub(super) only: Vec<Part>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Part {
    /// Jobs that wait for others
    Graphs,
    /// Many chains, each continued by its handler
    Chains,
    /// One chain on an idle host
    Hops,
    /// Jobs that sleep
    Sleepers,
    /// One job that sleeps many times
    Resumptions,
    /// Settlements while waiting jobs are cancelled or retried
    HeldUp,
    /// Schedules
    Schedules,
}

impl Part {
    const ALL: [Self; 7] = [
        Self::Graphs,
        Self::Chains,
        Self::Hops,
        Self::Sleepers,
        Self::Resumptions,
        Self::HeldUp,
        Self::Schedules,
    ];
}

/// The graphs of jobs that are compared, each with its key and label.
const GRAPHS: [(Option<Graph>, &str, &str); 3] = [
    (None, "plain", "probe: jobs that wait for nothing"),
    (
        Some(Graph::FanOutIn),
        "fan",
        "fan-out and fan-in: one job, then all but two in parallel, then one",
    ),
    (
        Some(Graph::Chains),
        "chains",
        "chains of ten jobs, each enqueued `after` the one before",
    ),
];

/// The server under measurement, the options of its hosts, and the figures so far.
struct Measured<'a> {
    bench: &'a Bench,
    server: &'a Server,
    /// The options of a host that serves only `noop`.
    noop: HostOptions,
    /// The options of a host that serves the guests in tests/guests-flow.
    host: HostOptions,
    report: Report,
}

impl Measured<'_> {
    async fn part(&mut self, part: Part, options: &Options) -> Result<()> {
        let (bench, server) = (self.bench, self.server);
        let (report, runs) = (&mut self.report, options.runs);
        match part {
            Part::Graphs => graphs(bench, server, &self.noop, options, report).await,
            Part::Chains => continued::many(self, options.chains, runs).await,
            Part::Hops => continued::single(self, options.hops).await,
            Part::Sleepers => sleepers::run(self, options.sleepers, runs).await,
            Part::Resumptions => resumptions::run(self, options.resumptions).await,
            Part::HeldUp => held_up::run(bench, server, options.jobs, report).await,
            Part::Schedules => {
                let schedules = options.schedules;
                schedules::run(bench, server, &self.noop, schedules, runs, report).await
            }
        }
    }

    /// Removes the jobs that a failed part left behind.
    async fn clear(&self) -> Result<()> {
        let client = &self.server.client;
        // The part may have failed in a transaction.
        client.batch_execute("ROLLBACK").await?;
        let removed = client
            .batch_execute("TRUNCATE rouse.job, rouse.dependency")
            .await;
        removed.context("remove all jobs")
    }

    fn add(&mut self, key: &str, label: &str, value: f64, unit: Unit) {
        self.report.add(format!("flows.{key}"), label, value, unit);
    }
}

pub(super) async fn run(bench: &Bench, options: &Options) -> Result<Report> {
    Server::during(bench, async |server| {
        let mut measured = Measured {
            bench,
            server,
            noop: HostOptions::new(&server.handlers(&bench.guests, &["noop"])?),
            host: HostOptions::new(&server.handlers(&bench.guests, &["flow_guests"])?),
            report: Report::new("flows"),
        };
        measured.host.config = Some(GRANTS.to_owned());
        measured.report.settings = server.settings();
        for part in &options.only {
            // The other parts are still measured.
            if let Err(error) = measured.part(*part, options).await {
                let failure = format!("flows, {part:?}: {error:#}");
                measured.report.failures.push(failure);
                measured.clear().await?;
            }
        }
        Ok(measured.report)
    })
    .await
}

/// Measures jobs that wait for others, alternating with jobs that do not.
async fn graphs(
    bench: &Bench,
    server: &Server,
    host: &HostOptions,
    options: &Options,
    report: &mut Report,
) -> Result<()> {
    let mut runs: [Vec<Drained>; 3] = Default::default();
    for run in 1..=options.runs {
        for ((graph, name, _), runs) in GRAPHS.iter().zip(&mut runs) {
            let work = Work {
                graph: *graph,
                ..Work::noop(options.jobs)
            };
            let drained = drained::drain(bench, server, host, 1, &work).await?;
            bench.progress.note(&format!(
                "run {run} of {}, {name}: {:.0} jobs/s",
                options.runs,
                drained.jobs_per_s()
            ));
            runs.push(drained);
        }
    }
    let median_of =
        |runs: &[Drained], value: fn(&Drained) -> f64| median(runs.iter().map(value).collect());
    let plain = median_of(&runs[0], Drained::jobs_per_s)?;
    for ((graph, name, label), runs) in GRAPHS.iter().zip(&runs) {
        let jobs_per_s = median_of(runs, Drained::jobs_per_s)?;
        let mut figure = |key: &str, label: &str, value: f64, unit: Unit| {
            report.add(format!("flows.{name}.{key}"), label, value, unit);
        };
        figure("jobs_per_s", label, jobs_per_s, Unit::PerSecond);
        if graph.is_some() {
            figure(
                "ratio",
                "ratio to the plain jobs",
                jobs_per_s / plain,
                Unit::Ratio,
            );
        }
        figure(
            "cpu_postgres",
            "CPU time per job: Postgres",
            median_of(runs, |run| run.cpu_postgres_us)?,
            Unit::Microseconds,
        );
        figure(
            "wal",
            "WAL per job: claim, settle and release",
            median_of(runs, |run| run.wal)?,
            Unit::Bytes,
        );
        figure(
            "transactions",
            "transactions per 1,000 jobs",
            median_of(runs, |run| run.transactions)?,
            Unit::Count,
        );
    }
    Ok(())
}

/// Waits until a query counts this many jobs.
async fn wait_for_count(
    bench: &Bench,
    client: &Client,
    title: &str,
    sql: &str,
    parameters: &[&(dyn ToSql + Sync)],
    jobs: i64,
) -> Result<()> {
    bench.progress.count(title, jobs.unsigned_abs());
    let statement = client.prepare(sql).await.context("prepare a count")?;
    let (mut seen, mut changed) = (-1, Instant::now());
    loop {
        let polled = Instant::now();
        let count: i64 = client.query_one(&statement, parameters).await?.get(0);
        if count >= jobs {
            return Ok(());
        }
        if count != seen {
            (seen, changed) = (count, Instant::now());
        }
        ensure!(
            changed.elapsed() < STALLED_AFTER,
            "{title}: stuck at {count} of {jobs} for {STALLED_AFTER:?}"
        );
        bench.progress.at(count.unsigned_abs());
        // Polls take CPU time from the host, so a slow poll is followed by a longer pause.
        tokio::time::sleep(POLL_EVERY.max(polled.elapsed() * 50)).await;
    }
}
