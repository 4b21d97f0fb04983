//! Generated hostile input for the code in a host that accepts untrusted input; started by `cargo xtask fuzz`.
//!
//! Each case is written to a file before it runs. A failure ends this process: a panic in any thread, a case that takes
//! too long, or too much memory. The file is then the finding.

mod contract;
mod host;

mod manifest;
mod module;
mod mutated;
mod schema;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::{Parser, ValueEnum};
use rand::SeedableRng as _;
use rand::rngs::StdRng;

use contract::Contracts;
use host::Host;

/// Time limit of one case: compiling a module may take a few seconds on a busy machine, and an attempt is stopped
/// sooner.
const CASE_SECONDS_MAX: u64 = 60;

/// The maximum number of cases without a run: if modules can run at all, a few in a hundred do.
const CASES_WITHOUT_A_RUN_MAX: u64 = 200;

/// The maximum memory of this process, with two attempts of 128 MiB and everything that the host keeps.
const MEMORY_KIB_MAX: u64 = 2 << 20;

#[derive(Parser)]
struct Options {
    /// The kind of input
    target: Target,
    /// The seed that determines all cases
    #[arg(long)]
    seed: u64,
    /// How long to start new cases, in seconds
    #[arg(long)]
    seconds: u64,
    /// The file for the running case
    #[arg(long)]
    input: PathBuf,
    /// Run only the case in the input file
    #[arg(long)]
    repeat: bool,
    /// The `rouse` binary, used as the compiler
    #[arg(long)]
    rouse: PathBuf,
    /// A folder of valid modules
    #[arg(long)]
    guests: PathBuf,
}

/// The code that a target tests.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Target {
    /// Generated modules with the contract's imports and exports
    Modules,
    /// Modules of the tests with changed bytes
    Mutated,
    /// Manifests with changed values
    Manifests,
    /// Schemas with values to check
    Schemas,
    /// Schemas as contracts: Postgres refuses nothing that a host accepts
    Contracts,
}

/// When the running case started, in seconds from the start.
static CASE_STARTED: AtomicU64 = AtomicU64::new(0);

fn main() -> Result<()> {
    let options = Options::parse();
    let start = Instant::now();
    // The hook applies to every thread: the host must not panic.
    let default_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        default_hook(panic);
        process::abort();
    }));
    thread::spawn(move || {
        loop {
            thread::sleep(Duration::from_secs(1));
            let took = start
                .elapsed()
                .as_secs()
                .saturating_sub(CASE_STARTED.load(Ordering::Relaxed));
            if took > CASE_SECONDS_MAX {
                eprintln!("a case has not ended after {took} s");
                process::abort();
            }
        }
    });

    let host = match options.target {
        Target::Modules | Target::Mutated => Some(Host::start(&options.rouse)?),
        Target::Manifests | Target::Schemas | Target::Contracts => None,
    };
    let mut contracts = match options.target {
        Target::Contracts => Some(Contracts::start(&options.rouse)?),
        _ => None,
    };
    let guests = mutated::guests(&options.guests)?;
    let mut ends: BTreeMap<&str, u64> = BTreeMap::new();
    for case in 0_u64.. {
        if case > 0 && (options.repeat || start.elapsed().as_secs() >= options.seconds) {
            break;
        }
        CASE_STARTED.store(start.elapsed().as_secs(), Ordering::Relaxed);
        let input = if options.repeat {
            fs::read(&options.input).context("read the input")?
        } else {
            let mut random = StdRng::seed_from_u64(options.seed ^ case.rotate_left(32));
            let input = match options.target {
                Target::Modules => module::generate(&mut random)?,
                Target::Mutated => mutated::generate(&mut random, &guests),
                Target::Manifests => manifest::generate(&mut random),
                Target::Schemas => schema::generate(&mut random),
                Target::Contracts => contract::generate(&mut random),
            };
            fs::write(&options.input, &input).context("write the input")?;
            input
        };
        let end = match (options.target, &host) {
            (Target::Manifests, _) => manifest::run(&input),
            (Target::Schemas, _) => schema::run(&input)?,
            (Target::Contracts, _) => match &mut contracts {
                Some(contracts) => contracts.run(&input)?,
                None => unreachable!("started above"),
            },
            (Target::Modules | Target::Mutated, Some(host)) => host.run(&input)?,
            (Target::Modules | Target::Mutated, None) => unreachable!("started above"),
        };
        *ends.entry(end).or_default() += 1;
        let memory_kib = memory_kib_peak()?;
        assert!(memory_kib < MEMORY_KIB_MAX, "{memory_kib} KiB of memory");
    }
    let name = options
        .target
        .to_possible_value()
        .expect("no target is hidden");
    let cases: u64 = ends.values().sum();
    let refused = ends.get(host::REFUSED).copied().unwrap_or(0);
    let ends: Vec<String> = ends
        .iter()
        .map(|(end, count)| format!("{end} {count}"))
        .collect();
    println!(
        "{:<10} {cases:>9} cases: {}",
        name.get_name(),
        ends.join(", ")
    );
    if let Some(contracts) = contracts {
        contracts.finish()?;
    }
    // Cases that are refused at loading do not count as runs.
    let runs = matches!(options.target, Target::Modules | Target::Mutated);
    let ran = cases > refused;
    anyhow::ensure!(
        ran || !runs || options.repeat || cases < CASES_WITHOUT_A_RUN_MAX,
        "none of {cases} modules could run, so nothing was tested"
    );
    Ok(())
}

fn memory_kib_peak() -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status").context("read /proc/self/status")?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = peak.and_then(|peak| peak.trim().strip_suffix(" kB")?.parse().ok());
    kib.context("/proc/self/status has no VmHWM")
}
