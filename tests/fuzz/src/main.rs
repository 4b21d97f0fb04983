//! Hostile input by the thousand, for the code that a host takes it in with; started by `cargo xtask fuzz`.
//!
//! Each case is written to a file before it runs. Whatever must not happen ends this process: a panic anywhere, a case
//! that takes too long, too much memory. Then the file is the finding.

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

use host::Host;

/// One case: a module may be compiled for some seconds on a busy machine, and an attempt is stopped after less.
const CASE_SECONDS_MAX: u64 = 60;

/// Some of a hundred run, if any can.
const CASES_WITHOUT_A_RUN_MAX: u64 = 200;

/// Of this process, with two attempts of 128 MiB and all that the host keeps.
const MEMORY_KIB_MAX: u64 = 2 << 20;

#[derive(Parser)]
struct Options {
    /// What is fuzzed
    target: Target,
    /// Decides all cases
    #[arg(long)]
    seed: u64,
    /// How long new cases are started
    #[arg(long)]
    seconds: u64,
    /// Where the case that runs is written
    #[arg(long)]
    input: PathBuf,
    /// Run only what is in the input file
    #[arg(long)]
    repeat: bool,
    /// The `rouse` binary, which compiles
    #[arg(long)]
    rouse: PathBuf,
    /// Modules that are in order
    #[arg(long)]
    guests: PathBuf,
}

/// What hostile input is for.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Target {
    /// Modules made of nothing, with the contract's imports and exports
    Modules,
    /// Modules of the tests, with bytes changed
    Mutated,
    /// Manifests
    Manifests,
    /// Schemas, with values to check
    Schemas,
}

/// When the case started that runs, in seconds from the start.
static BEGAN: AtomicU64 = AtomicU64::new(0);

fn main() -> Result<()> {
    let options = Options::parse();
    let start = Instant::now();
    // In whichever thread: nothing of the host may panic.
    let told = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        told(panic);
        process::abort();
    }));
    thread::spawn(move || {
        loop {
            thread::sleep(Duration::from_secs(1));
            let took = start.elapsed().as_secs() - BEGAN.load(Ordering::Relaxed);
            if took > CASE_SECONDS_MAX {
                eprintln!("a case has not ended after {took} s");
                process::abort();
            }
        }
    });

    let host = match options.target {
        Target::Modules | Target::Mutated => Some(Host::start(&options.rouse)?),
        Target::Manifests | Target::Schemas => None,
    };
    let guests = mutated::guests(&options.guests)?;
    let mut ends: BTreeMap<&str, u64> = BTreeMap::new();
    for case in 0_u64.. {
        if case > 0 && (options.repeat || start.elapsed().as_secs() >= options.seconds) {
            break;
        }
        BEGAN.store(start.elapsed().as_secs(), Ordering::Relaxed);
        let input = if options.repeat {
            fs::read(&options.input).context("read the input")?
        } else {
            let mut random = StdRng::seed_from_u64(options.seed ^ case.rotate_left(32));
            let input = match options.target {
                Target::Modules => module::made(&mut random)?,
                Target::Mutated => mutated::made(&mut random, &guests),
                Target::Manifests => manifest::made(&mut random),
                Target::Schemas => schema::made(&mut random),
            };
            fs::write(&options.input, &input).context("write the input")?;
            input
        };
        let end = match (options.target, &host) {
            (Target::Manifests, _) => manifest::tried(&input),
            (Target::Schemas, _) => schema::tried(&input)?,
            (Target::Modules | Target::Mutated, Some(host)) => host.tried(&input)?,
            (Target::Modules | Target::Mutated, None) => unreachable!("started above"),
        };
        *ends.entry(end).or_default() += 1;
        let memory_kib = memory_kib_peak()?;
        assert!(memory_kib < MEMORY_KIB_MAX, "{memory_kib} KiB of memory");
    }
    let name = options.target.to_possible_value().expect("none is hidden");
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
    // What is refused at its loading shows nothing of running.
    let runs = matches!(options.target, Target::Modules | Target::Mutated);
    let ran = cases > refused;
    anyhow::ensure!(
        ran || !runs || options.repeat || cases < CASES_WITHOUT_A_RUN_MAX,
        "not one of {cases} modules got as far as to run: this has shown nothing"
    );
    Ok(())
}

fn memory_kib_peak() -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status").context("read /proc/self/status")?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = peak.and_then(|peak| peak.trim().strip_suffix(" kB")?.parse().ok());
    kib.context("/proc/self/status has no VmHWM")
}
