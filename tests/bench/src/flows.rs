//! How fast one host runs jobs that wait for each other, compared with jobs that do not, and how long settlements are
//! held up while such jobs are cancelled or retried (`held_up.rs`).

use anyhow::Result;
use clap::Args;
use rouse_workbench::percentiles::median;

use super::Bench;
use super::backlog::{Graph, Work};
use super::drained::{self, Drained};
use super::held_up;
use super::host::HostOptions;
use super::report::{Report, Unit};
use super::schedules;
use super::server::Server;

#[derive(Args)]
pub(super) struct Options {
    /// Jobs per run, in flows of 10,000; and jobs that are cancelled
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(i64).range(1..=1_000_000))]
    pub(super) jobs: i64,
    /// Runs of each shape, in turns; the median of each figure is reported
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=100))]
    pub(super) runs: u16,
    /// Schedules that are due in the same second
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(i32).range(1..=10_000))]
    pub(super) schedules: i32,
}

/// Each shape, with its name and label.
const SHAPES: [(Option<Graph>, &str, &str); 3] = [
    (None, "plain", "probe: jobs that wait for nothing"),
    (
        Some(Graph::FanOutIn),
        "fan",
        "one job, then all but two, then one",
    ),
    (
        Some(Graph::Chains),
        "chains",
        "chains of ten jobs, each after the one before",
    ),
];

pub(super) async fn run(bench: &Bench, options: &Options) -> Result<Report> {
    Server::during(bench, async |server| {
        let mut report = Report::new("flows");
        report.settings = server.settings();
        let host = HostOptions::new(&server.handlers(&bench.guests, &["noop"])?);
        let mut runs: [Vec<Drained>; 3] = Default::default();
        for run in 1..=options.runs {
            for ((graph, name, _), runs) in SHAPES.iter().zip(&mut runs) {
                let work = Work {
                    graph: *graph,
                    ..Work::noop(options.jobs)
                };
                let drained = drained::drain(bench, server, &host, 1, &work).await?;
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
        for ((graph, name, label), runs) in SHAPES.iter().zip(&runs) {
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
                "statements",
                "round trips per 1,000 jobs",
                median_of(runs, |run| run.statements)?,
                Unit::Count,
            );
        }
        held_up::run(bench, server, options.jobs, &mut report).await?;
        schedules::run(
            bench,
            server,
            &host,
            options.schedules,
            options.runs,
            &mut report,
        )
        .await?;
        Ok(report)
    })
    .await
}
