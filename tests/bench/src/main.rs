//! `cargo xtask bench`: one file per benchmark, each on a private, durable Postgres.

mod drain;
mod latency;

mod enqueue;

mod dashboard;
mod effects;
mod flows;
mod held_up;

mod decay;

mod idle;

mod scale;
mod schedules;

mod all;
mod levels;
mod smoke;
mod soak;

mod plain;
mod probe;
mod producers;
mod round_trip;

mod backlog;
mod drained;
mod host;
mod server;

mod contract;
mod counts;
mod cpu;
mod wal;

mod progress;
mod report;
mod targets;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use rouse_workbench::guests;
use rouse_workbench::workspace::Workspace;

use progress::Progress;

/// Measure: each benchmark starts a private Postgres with fsync on, and also measures the server without Rouse
#[derive(Parser)]
#[command(
    name = "cargo xtask bench",
    bin_name = "cargo xtask bench",
    after_help = "Examples:\n  \
        cargo xtask bench drain                 with the sizes of the published figures\n  \
        cargo xtask bench drain --jobs 10000 --runs 1\n  \
        cargo xtask bench latency --json\n  \
        cargo xtask bench all                   all benchmarks, and one table at the end\n\n\
        docs/explanation/performance.md explains each figure. Other load on the machine affects all of them."
)]
struct Cli {
    #[command(subcommand)]
    part: Part,
    /// Print one JSON object on stdout, and nothing else
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Part {
    /// Jobs per second of one host with a full queue, and the cost of a job
    Drain(drain::Options),
    /// Time until a job starts on an idle host, with and without notifications
    Latency(latency::Options),
    /// Enqueues per second over 1, 8 and 32 connections, compared with plain INSERTs of the same row
    Enqueue(enqueue::Options),
    /// Jobs per second of jobs that wait for each other, compared with jobs that do not
    Flows(flows::Options),
    /// Jobs per second of jobs that each change a row of another table, compared with plain SQL
    Effects(effects::Options),
    /// Jobs per second with many pending jobs, many finished jobs, an open transaction, or partition maintenance
    Decay(decay::Options),
    /// CPU time and transactions of idle hosts
    Idle(idle::Options),
    /// More hosts, more lanes, larger payloads, long jobs, late commits
    Scale(scale::Options),
    /// The dashboard with 10 million finished and 1 million queued jobs: pages, open pages, hosts alongside them
    Dashboard(dashboard::Options),
    /// All of the above but the dashboard, and one table at the end; about an hour on two cores
    All(all::Options),
    /// One minute of small measurements that fail on large regressions; part of CI
    Smoke(smoke::Options),
    /// A million mixed jobs, 2 % of them hostile, in one host that must not leak; up to an hour on two cores
    Soak(soak::Options),
}

/// The context of every benchmark.
struct Bench {
    /// The `rouse` binary.
    rouse: PathBuf,
    /// The folder with all guests.
    guests: PathBuf,
    progress: Progress,
}

fn main() -> ExitCode {
    run(Cli::parse()).unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

fn run(cli: Cli) -> Result<ExitCode> {
    let workspace = Workspace::find()?;
    let bench = Bench {
        rouse: workspace.build_rouse()?,
        guests: guests::build_test_guests(&workspace)?.join("p2"),
        progress: Progress::new(),
    };
    // The clients share the machine with the system under test: one thread is enough for them.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let report = runtime.block_on(async {
        match cli.part {
            Part::Drain(options) => drain::run(&bench, &options).await,
            Part::Latency(options) => latency::run(&bench, &options).await,
            Part::Enqueue(options) => enqueue::run(&bench, &options).await,
            Part::Flows(options) => flows::run(&bench, &options).await,
            Part::Effects(options) => effects::run(&bench, &options).await,
            Part::Decay(options) => decay::run(&bench, &options).await,
            Part::Idle(options) => idle::run(&bench, &options).await,
            Part::Scale(options) => scale::run(&bench, &options).await,
            Part::Dashboard(options) => dashboard::run(&bench, &options).await,
            Part::All(options) => all::run(&bench, &options).await,
            Part::Smoke(options) => smoke::run(&bench, &workspace.root, &options).await,
            Part::Soak(options) => soak::run(&bench, &options).await,
        }
    })?;
    bench.progress.end();
    report.print(cli.json);
    Ok(match report.failures.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}
