//! Runs all benchmarks one after another, and prints one table at the end.

use anyhow::{Context as _, Result};
use clap::{Args, Command};
use rouse_workbench::host_process::Interruption;

use super::report::{ALL, Report};
use super::{Bench, decay, drain, effects, enqueue, flows, idle, latency, scale};

#[derive(Args)]
pub(super) struct Options {
    /// Use sizes that take minutes instead of an hour: they show that the benchmarks work, but the figures mean little
    #[arg(long)]
    pub(super) quick: bool,
    /// Leave out the benchmarks with reused instances
    #[arg(long)]
    pub(super) no_reuse: bool,
}

/// The sizes of `--quick`.
const QUICK_DRAIN: [&str; 2] = ["--jobs=5000", "--runs=1"];
const QUICK_LATENCY: [&str; 1] = ["--seconds=3"];
const QUICK_ENQUEUE: [&str; 2] = ["--seconds=1", "--pairs=1"];
const QUICK_FLOWS: [&str; 6] = [
    "--jobs=5000",
    "--runs=1",
    "--chains=200",
    "--hops=100",
    "--sleepers=3000",
    "--resumptions=50",
];
const QUICK_DECAY: [&str; 6] = [
    "--jobs=3000",
    "--runs=1",
    "--pending=50000",
    "--finished=50000",
    "--held=12000",
    "--window=2000",
];
const QUICK_IDLE: [&str; 4] = ["--seconds=10", "--settle=12", "--alone=5", "--hosts=1,3"];
const QUICK_SCALE: [&str; 8] = [
    "--jobs=3000",
    "--runs=1",
    "--hosts=1,3",
    "--lanes=1,10,1000",
    "--chain=300",
    "--window=1",
    "--late=3",
    "--producers=5",
];

pub(super) async fn run(bench: &Bench, options: &Options) -> Result<Report> {
    let mut all = All {
        bench,
        report: Report::new(ALL),
        interruption: Interruption::watch()?,
    };
    let quick = options.quick;
    let sizes = |sizes: &'static [&str]| if quick { sizes } else { &[] };

    let given: drain::Options = defaults(sizes(&QUICK_DRAIN))?;
    all.part("drain", drain::run(bench, &given)).await?;
    if !options.no_reuse {
        let mut given: drain::Options = defaults(sizes(&QUICK_DRAIN))?;
        given.reuse = true;
        all.part("drain --reuse", drain::run(bench, &given)).await?;
    }
    let given: latency::Options = defaults(sizes(&QUICK_LATENCY))?;
    all.part("latency", latency::run(bench, &given)).await?;
    let given: enqueue::Options = defaults(sizes(&QUICK_ENQUEUE))?;
    all.part("enqueue", enqueue::run(bench, &given)).await?;
    let given: flows::Options = defaults(sizes(&QUICK_FLOWS))?;
    all.part("flows", flows::run(bench, &given)).await?;
    let given: effects::Options = defaults(sizes(&[]))?;
    all.part("effects", effects::run(bench, &given)).await?;
    let given: decay::Options = defaults(sizes(&QUICK_DECAY))?;
    all.part("decay", decay::run(bench, &given)).await?;
    let given: idle::Options = defaults(sizes(&QUICK_IDLE))?;
    all.part("idle", idle::run(bench, &given)).await?;
    let given: scale::Options = defaults(sizes(&QUICK_SCALE))?;
    all.part("scale", scale::run(bench, &given)).await?;
    Ok(all.report)
}

/// The options of a benchmark: these arguments, and defaults for all others.
fn defaults<T: Args>(given: &[&str]) -> Result<T> {
    let command = T::augment_args(Command::new("all"));
    let matches = command
        .try_get_matches_from(["all"].iter().chain(given))
        .context("parse the sizes of --quick")?;
    Ok(T::from_arg_matches(&matches)?)
}

struct All<'a> {
    bench: &'a Bench,
    report: Report,
    interruption: Interruption,
}

impl All<'_> {
    /// Runs a part and adds its figures. If it fails, the other parts still run, unless the user has interrupted
    /// the program.
    async fn part(&mut self, name: &str, part: impl Future<Output = Result<Report>>) -> Result<()> {
        self.bench.progress.note(&format!("== {name}"));
        match Box::pin(part).await {
            Ok(report) => self.report.absorb(report),
            Err(error) if self.interruption.has_arrived().await => return Err(error),
            Err(error) => self.report.failures.push(format!("{name}: {error:#}")),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quick_sizes_are_options_of_their_benchmarks() {
        assert_eq!(
            defaults::<drain::Options>(&QUICK_DRAIN).unwrap().jobs,
            5_000
        );
        assert_eq!(
            defaults::<latency::Options>(&QUICK_LATENCY)
                .unwrap()
                .seconds,
            3
        );
        assert_eq!(
            defaults::<enqueue::Options>(&QUICK_ENQUEUE).unwrap().pairs,
            1
        );
        assert_eq!(
            defaults::<flows::Options>(&QUICK_FLOWS).unwrap().sleepers,
            3_000
        );
        assert_eq!(
            defaults::<decay::Options>(&QUICK_DECAY).unwrap().window,
            2_000
        );
        assert_eq!(
            defaults::<idle::Options>(&QUICK_IDLE).unwrap().hosts,
            [1, 3]
        );
        assert_eq!(defaults::<scale::Options>(&QUICK_SCALE).unwrap().late, 3);
    }

    #[test]
    fn the_default_sizes_are_those_of_the_published_figures() {
        assert_eq!(defaults::<drain::Options>(&[]).unwrap().jobs, 100_000);
        assert_eq!(defaults::<decay::Options>(&[]).unwrap().only.len(), 6);
        let scale = defaults::<scale::Options>(&[]).unwrap();
        assert_eq!(scale.lanes(scale::Kind::Lanes), [1, 10, 1_000, 10_000]);
        assert_eq!(scale.lanes(scale::Kind::Modes), [1, 100, 10_000]);
        assert_eq!(scale.jobs(scale::Kind::Fair), 50_000);
        assert_eq!(scale.window, 10);
        assert_eq!(scale.jobs(scale::Kind::Modes), 40_000);
    }
}
