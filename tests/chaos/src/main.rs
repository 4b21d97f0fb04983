//! `cargo xtask chaos`: real hosts and a real server under load, while faults are injected.
//!
//! Afterwards the guarantees are checked against two witnesses outside the database: the ledger, with every request and
//! its response, and the evidence that each attempt leaves.

mod run;
mod schedules;

mod bank;
mod flows;
mod gates;
mod load;
mod plan;
mod random;
mod suspending;

mod admin_actions;
mod bursts;
mod cuts;
mod faults;
mod flow_producer;
mod producers;

mod calls;
mod hosts;
mod module;
mod server;
mod settings;
mod twins;

mod folder;
mod ledger;

mod dump;
mod watch;
mod world;

mod check;

mod report;
mod tally;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use clap::{Parser, ValueEnum as _};
use rouse_workbench::host_process;
use rouse_workbench::workspace::Workspace;

use check::Known;
use folder::Folder;
use ledger::Run;
use plan::Fault;
use report::Report;
use world::World;

/// Kill, freeze and crash hosts and Postgres under load, then check that every guarantee was kept
#[derive(Parser)]
#[command(
    name = "cargo xtask chaos",
    bin_name = "cargo xtask chaos",
    after_help = "Examples:\n  \
        cargo xtask chaos --minutes 5 --seed 7           the seed alone determines the schedule of faults\n  \
        cargo xtask chaos --minutes 1 --faults kill-host,crash-server   injects only these faults\n  \
        cargo xtask chaos --minutes 1 --keep chaos-run   keeps the ledger, the evidence and the hosts' logs\n  \
        cargo xtask chaos --check chaos-run              checks the folder of an earlier run again\n\n\
        The exit code is 0 if every guarantee held and every fault and every rule had a case. Otherwise the folder\n\
        with ledger, evidence and logs is kept, and its path is printed. docs/explanation/reliability.md lists the rules."
)]
struct Options {
    /// Duration of the load, without draining and checking
    #[arg(long, default_value_t = 5.0)]
    minutes: f64,
    /// Determines every job and the time of every fault; default: random
    #[arg(long)]
    seed: Option<u64>,
    /// Number of `rouse serve` processes, besides two with few slots and pairs that share an id
    #[arg(long, default_value_t = 3)]
    hosts: usize,
    /// Number of connections that enqueue
    #[arg(long, default_value_t = 2)]
    producers: usize,
    /// Jobs per second, of all producers together
    #[arg(long, default_value_t = 60)]
    rate: u32,
    /// Inject only these faults, separated by commas; default: all
    #[arg(long, value_enum, value_delimiter = ',')]
    faults: Vec<Fault>,
    /// Keep ledger, evidence and logs in this new folder, even if the run passes
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Run this SQL as the superuser before the load, to violate a guarantee on purpose and see whether chaos notices
    #[arg(long, value_name = "FILE")]
    sabotage: Option<PathBuf>,
    /// Start nothing; check the folder that an earlier run has kept
    #[arg(long, value_name = "DIR", conflicts_with_all = ["keep", "seed"])]
    check: Option<PathBuf>,
    /// Print one JSON object on stdout, and nothing else
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    run(Options::parse()).unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

fn run(options: Options) -> Result<ExitCode> {
    if let Some(path) = &options.check {
        let report = judge(&Folder::of(path))?;
        return Ok(finish(&report, &options, Some(path)));
    }
    if options.hosts == 0 || options.producers == 0 || options.rate == 0 || options.minutes <= 0.0 {
        bail!("--hosts, --producers, --rate and --minutes must be more than 0");
    }
    let workspace = Workspace::find()?;
    let planned = Run {
        seed: options
            .seed
            .unwrap_or_else(|| ledger::now_us() as u64 % 1_000_000),
        minutes: options.minutes,
        hosts: options.hosts,
        producers: options.producers,
        rate: options.rate,
        faults: match options.faults.as_slice() {
            [] => Fault::value_variants().to_vec(),
            some => some.to_vec(),
        },
        lease_us: settings::LEASE.as_micros() as i64,
        lost_max: settings::LOST_MAX,
    };
    let scratch = match &options.keep {
        Some(_) => None,
        None => Some(host_process::scratch_folder()?),
    };
    let path = match (&options.keep, &scratch) {
        (Some(path), _) => path.clone(),
        (None, Some(scratch)) => scratch.path().join("run"),
        (None, None) => bail!("the run has no folder"),
    };
    let folder = Folder::create(&path)?;
    let sabotage = match &options.sabotage {
        Some(file) => Some(
            std::fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?,
        ),
        None => None,
    };
    let done = run::run(&workspace, planned, folder, sabotage.as_deref())
        .and_then(|()| judge(&Folder::of(&path)));
    let failed = done
        .as_ref()
        .map_or(true, |report| !report.failures.is_empty());
    let kept = match scratch {
        Some(scratch) if failed => Some(scratch.keep().join("run")),
        Some(_) => None,
        None => Some(path),
    };
    let report = done.with_context(|| match &kept {
        Some(kept) => format!("the run was aborted; its folder is {}", kept.display()),
        None => "the run was aborted".into(),
    })?;
    Ok(finish(&report, &options, kept.as_deref()))
}

/// Checks the folder of a run.
fn judge(folder: &Folder) -> Result<Report> {
    let world = World::read(folder)?;
    let known = Known::of(&world);
    let report = Report::of(&known);
    if !report.violations.is_empty() {
        let path = folder.violations();
        let text = report.violations_in_full(&known);
        std::fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(report)
}

fn finish(report: &Report, options: &Options, kept: Option<&Path>) -> ExitCode {
    report.print(options.json, kept);
    match report.failures.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}
