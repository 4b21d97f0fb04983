//! `cargo xtask bench`: one file per measurement, each on a private Postgres that keeps its promises.

mod drain;
mod latency;

mod enqueue;

mod decay;

mod idle;

mod scale;

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

/// Measure: each benchmark starts a private Postgres with fsync on, and probes it beside
#[derive(Parser)]
#[command(
    name = "cargo xtask bench",
    bin_name = "cargo xtask bench",
    after_help = "Examples:\n  \
        cargo xtask bench drain                 the sizes of the published figures\n  \
        cargo xtask bench drain --jobs 10000 --runs 1\n  \
        cargo xtask bench latency --json\n  \
        cargo xtask bench all                   everything, and one table at the end\n\n\
        docs/explanation/performance.md says what each figure means. Other work on the machine shows in all of them."
)]
struct Cli {
    #[command(subcommand)]
    part: Part,
    /// Print one JSON object on stdout, and nothing else there
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Part {
    /// Jobs per second that one host takes out of a full queue, and what a job costs
    Drain(drain::Options),
    /// How long a job waits for its start on an idle host, with notifications and without
    Latency(latency::Options),
    /// Enqueues a second over 1, 8 and 32 connections, beside plain INSERTs of the same row
    Enqueue(enqueue::Options),
    /// Jobs per second with much pending, much finished, a transaction held open, partitions coming and going
    Decay(decay::Options),
    /// CPU time and statements of hosts that have nothing to do
    Idle(idle::Options),
    /// More hosts, more lanes, larger payloads, long jobs, late commits
    Scale(scale::Options),
    /// All of these, and one table at the end; about an hour on two cores
    All(all::Options),
    /// A minute of small measurements that fail where something has become far worse; part of CI
    Smoke(smoke::Options),
    /// A million mixed jobs, 2 % of them hostile, in one host, which may keep nothing of them; about ten minutes on two cores
    Soak(soak::Options),
}

/// What every benchmark needs.
struct Bench {
    /// The `rouse` binary.
    rouse: PathBuf,
    /// A folder with all guests.
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
    // Clients share the machine with what they measure: one thread is enough for them.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let report = runtime.block_on(async {
        match cli.part {
            Part::Drain(options) => drain::run(&bench, &options).await,
            Part::Latency(options) => latency::run(&bench, &options).await,
            Part::Enqueue(options) => enqueue::run(&bench, &options).await,
            Part::Decay(options) => decay::run(&bench, &options).await,
            Part::Idle(options) => idle::run(&bench, &options).await,
            Part::Scale(options) => scale::run(&bench, &options).await,
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
