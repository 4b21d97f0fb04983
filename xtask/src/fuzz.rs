//! `cargo xtask fuzz`: thousands of hostile inputs. Each target runs in its own process (`tests/fuzz`): any failure of
//! that process during a case is a finding.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};
use rouse_workbench::guests;
use rouse_workbench::workspace::Workspace;

#[derive(Args)]
pub(crate) struct Options {
    /// The time for which new cases are started, in seconds, for all targets together
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// The seed that determines all cases; default: the current time
    #[arg(long)]
    seed: Option<u64>,
    /// Fuzz only this target; default: all targets, one after another
    #[arg(long, value_enum)]
    target: Option<Target>,
    /// Run only the case in this file, which an earlier run has kept
    #[arg(long, value_name = "FILE", conflicts_with_all = ["seconds", "seed", "target"])]
    repeat: Option<PathBuf>,
}

/// The kind of input; see `tests/fuzz/src/main.rs`.
#[derive(Clone, Copy, ValueEnum)]
enum Target {
    /// Generated modules with the contract's imports and exports
    Modules,
    /// Modules of the tests with changed bytes
    Mutated,
    /// Manifests with changed values
    Manifests,
    /// Schemas with values to check
    Schemas,
    /// Schemas as contracts: Postgres must not refuse a payload that a host accepts
    Contracts,
}

impl Target {
    fn name(self) -> &'static str {
        match self {
            Self::Modules => "modules",
            Self::Mutated => "mutated",
            Self::Manifests => "manifests",
            Self::Schemas => "schemas",
            Self::Contracts => "contracts",
        }
    }

    /// The file extension of a kept case.
    fn extension(self) -> &'static str {
        match self {
            Self::Modules | Self::Mutated => "wasm",
            Self::Manifests | Self::Schemas | Self::Contracts => "json",
        }
    }

    /// The share of the time: a module takes as long as thousands of schemas.
    fn share(self) -> f64 {
        match self {
            Self::Modules | Self::Mutated => 0.3,
            Self::Manifests | Self::Schemas => 0.1,
            Self::Contracts => 0.2,
        }
    }
}

pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<ExitCode> {
    let guests = guests::build_test_guests(workspace)?.join("p2");
    let rouse = workspace.build_rouse()?;
    let fuzz = workspace.build_program("rouse-fuzz")?;
    let command = |target: Target, input: &PathBuf| {
        let mut command = Command::new(&fuzz);
        command.arg(target.name()).arg("--input").arg(input);
        command
            .arg("--rouse")
            .arg(&rouse)
            .arg("--guests")
            .arg(&guests);
        command
    };
    if let Some(file) = &options.repeat {
        let file = workspace.root.join(file);
        let mut command = command(target_of(&file)?, &file);
        command.args(["--repeat", "--seed", "0", "--seconds", "0"]);
        let status = command.status().context("start rouse-fuzz")?;
        return Ok(ExitCode::from(u8::from(!status.success())));
    }

    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.context("read the clock")?.as_secs();
    let seed = options.seed.unwrap_or(now);
    println!("fuzzing with --seed {seed}");
    let folder = workspace.target_dir.join("fuzz");
    std::fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    let (targets, shared) = match options.target {
        Some(target) => (vec![target], false),
        None => (Target::value_variants().to_vec(), true),
    };
    let mut code = ExitCode::SUCCESS;
    for target in targets {
        let share = if shared { target.share() } else { 1.0 };
        let seconds = (options.seconds as f64 * share).ceil();
        let input = folder.join(format!("{}.input", target.name()));
        let mut command = command(target, &input);
        command.args(["--seed", &seed.to_string()]);
        command.args(["--seconds", &seconds.to_string()]);
        discard_case(&input)?;
        let status = command.status().context("start rouse-fuzz")?;
        if !status.success() {
            code = ExitCode::FAILURE;
            let kept = folder.join(format!("{}-{seed}.{}", target.name(), target.extension()));
            let name = target.name();
            match keep_case(&input, &kept)? {
                true => {
                    println!("{name:<10} FAILED ({status}); to repeat the case:");
                    println!("  cargo xtask fuzz --repeat {}", kept.display());
                }
                false => println!("{name:<10} FAILED ({status}) before its first case"),
            }
        }
    }
    Ok(code)
}

/// Deletes the last case of an earlier run.
fn discard_case(input: &Path) -> Result<()> {
    match std::fs::remove_file(input) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("delete {}", input.display()))
        }
        Err(_) | Ok(()) => Ok(()),
    }
}

/// Keeps the last case of a target that has failed. Returns false if there is none.
fn keep_case(input: &Path, kept: &Path) -> Result<bool> {
    match std::fs::rename(input, kept) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).with_context(|| format!("keep {}", input.display())),
    }
}

/// The target of a kept case, read from the start of its file name.
fn target_of(file: &Path) -> Result<Target> {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let starts = |target: &&Target| name.starts_with(&format!("{}-", target.name()));
    match Target::value_variants().iter().find(starts) {
        Some(target) => Ok(*target),
        None => bail!(
            "{name} is not a case that `cargo xtask fuzz` has kept: expected a name such as schemas-7.json, \
             which starts with the target"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kept_case_is_repeated_by_the_target_that_found_it() {
        for target in Target::value_variants() {
            let file = format!("target/fuzz/{}-7.{}", target.name(), target.extension());
            assert_eq!(target_of(file.as_ref()).unwrap().name(), target.name());
        }
        assert!(target_of("target/fuzz/else-7.wasm".as_ref()).is_err());
    }

    #[test]
    fn a_failure_before_the_first_case_keeps_no_case_of_an_earlier_run() {
        let folder = tempfile::tempdir().unwrap();
        let [input, kept] = ["schemas.input", "schemas-7.json"].map(|it| folder.path().join(it));
        std::fs::write(&input, "earlier").unwrap();
        discard_case(&input).unwrap();
        assert!(!keep_case(&input, &kept).unwrap() && !kept.exists());
        discard_case(&input).unwrap();
        std::fs::write(&input, "case").unwrap();
        assert!(keep_case(&input, &kept).unwrap());
        assert_eq!(std::fs::read_to_string(&kept).unwrap(), "case");
    }

    #[test]
    fn the_shares_of_the_targets_add_up_to_one() {
        let shares = Target::value_variants().iter().map(|target| target.share());
        assert!((shares.sum::<f64>() - 1.0).abs() < 1e-9);
    }
}
