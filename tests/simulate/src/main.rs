//! `cargo xtask simulate`: runs scenarios in virtual time, and prints the resulting shares and delays, and whether
//! limits held.

use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use rouse_simulate::{Name, Report, Sabotage, Sizes, run};

/// Run the scheduler and the gates in virtual time, with more hosts, tenants and jobs than a machine can run
#[derive(Parser)]
#[command(
    name = "cargo xtask simulate",
    bin_name = "cargo xtask simulate",
    after_help = "Examples:\n  \
        cargo xtask simulate                              all except fleet: a minute\n  \
        cargo xtask simulate fleet                        1,000 hosts, 100,000,000 jobs: minutes\n  \
        cargo xtask simulate fleet --jobs 1000000         the same fleet with fewer jobs\n  \
        cargo xtask simulate weights --hosts 7 --tenants 200 --seed 3\n  \
        cargo xtask simulate shared-limit shared-rate --hosts 1\n  \
        cargo xtask simulate gates --json                 one JSON object on stdout, for scripts\n  \
        cargo xtask simulate gates --sabotage gates       violates a guarantee; the exit status is 1\n\n\
        The turns of lanes and the size of claims are the code of the host. The gates, the server,\n\
        the network and the slots are models. The seed determines everything.\n\n\
        `share` is the part that a class got of the jobs to which its weight entitles it, while its\n\
        tenants had waiting jobs; `worst` is the largest difference of a single tenant.\n\
        Delays are those from enqueue to start.\n\n\
        The exit status is 1 if a limit was exceeded, a tenant is stuck, or a share is off by more than 5 %.\n\
        docs/explanation/simulation.md describes the model, and what it leaves out."
)]
struct Options {
    /// The scenarios; default: all except `fleet`
    #[arg(value_enum, value_name = "SCENARIO")]
    scenarios: Vec<Name>,
    /// Number of hosts; default: that of the scenario
    #[arg(long)]
    hosts: Option<usize>,
    /// Slots of each host; default: that of the scenario
    #[arg(long)]
    slots: Option<usize>,
    /// Number of tenants of all classes together; default: that of the scenario
    #[arg(long)]
    tenants: Option<u32>,
    /// Number of jobs of all tenants together; default: that of the scenario
    #[arg(long)]
    jobs: Option<u64>,
    /// Determines everything that is random
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Violate a guarantee on purpose, to see whether the simulator notices
    #[arg(long, value_enum)]
    sabotage: Option<Sabotage>,
    /// Print one JSON object on stdout, and nothing else
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    simulate(&Options::parse()).unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::from(2)
    })
}

fn simulate(options: &Options) -> Result<ExitCode> {
    if [options.hosts, options.slots].contains(&Some(0)) || options.tenants == Some(0) {
        bail!("--hosts, --slots and --tenants must be more than 0");
    }
    if options.jobs == Some(0) {
        bail!("--jobs must be more than 0");
    }
    let names = match options.scenarios.as_slice() {
        [] => &[
            Name::Fair,
            Name::Weights,
            Name::Gates,
            Name::SharedLimit,
            Name::SharedRate,
            Name::Deaths,
        ],
        names => names,
    };
    let sizes = Sizes {
        hosts: options.hosts,
        tenants: options.tenants,
        jobs: options.jobs,
        slots: options.slots,
    };
    let mut reports = Vec::new();
    for (place, name) in names.iter().enumerate() {
        let mut scenario = name.scenario(options.seed, sizes);
        scenario.sabotage = options.sabotage;
        let bar = progress(*name, scenario.jobs())?;
        let started = Instant::now();
        let report = run(&scenario, |jobs| bar.set_position(jobs));
        bar.finish_and_clear();
        if !options.json {
            if place > 0 {
                println!();
            }
            let elapsed_s = started.elapsed().as_secs_f64();
            let per_s = report.jobs as f64 / elapsed_s / 1e6;
            println!("{report}");
            println!("simulated in {elapsed_s:.1} s: {per_s:.2} million jobs a second");
        }
        reports.push(report);
    }
    finish(&reports, options.json)
}

fn finish(reports: &[Report], json: bool) -> Result<ExitCode> {
    let faults = |report: &Report| {
        let name = report.scenario.clone();
        let faults = report.faults().into_iter();
        faults.map(move |fault| format!("{name}: {fault}"))
    };
    let faults: Vec<String> = reports.iter().flat_map(faults).collect();
    if json {
        let all = serde_json::json!({ "reports": reports, "faults": faults });
        let text = serde_json::to_string_pretty(&all).context("write the report")?;
        println!("{text}");
    } else {
        faults.iter().for_each(|fault| println!("FAILED: {fault}"));
    }
    Ok(ExitCode::from(u8::from(!faults.is_empty())))
}

/// A bar on a terminal, nothing elsewhere.
fn progress(name: Name, jobs: u64) -> Result<ProgressBar> {
    if !std::io::stderr().is_terminal() {
        return Ok(ProgressBar::hidden());
    }
    let template = "{elapsed} {msg} {bar:30} {human_pos}/{human_len} jobs, {eta} left";
    let style = ProgressStyle::with_template(template).context("the template of the bar")?;
    let bar = ProgressBar::new(jobs).with_style(style);
    bar.set_message(name.as_str());
    Ok(bar)
}
