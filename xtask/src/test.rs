//! `cargo xtask test`: builds what the tests need once, then lets cargo run them all.

use std::process::ExitCode;
use std::thread;

use anyhow::{Context as _, Result};
use clap::Args;
use rouse_workbench::guests;
use rouse_workbench::workspace::Workspace;

use crate::other_guests;

/// Tests wait more than they compute, so that small machines may run more of them than they have cores.
const TEST_THREADS_MIN: usize = 4;

#[derive(Args)]
pub(crate) struct Options {
    /// Run only tests with one of these words in their name
    filters: Vec<String>,
    /// Arguments for the test runner, for instance `-- --nocapture`
    #[arg(last = true)]
    runner_args: Vec<String>,
}

impl Options {
    /// Whether tests of this module may run: what only they need is not made for others.
    fn wants(&self, module: &str) -> bool {
        self.filters.is_empty()
            || (self.filters.iter())
                .any(|filter| filter.starts_with(module) || module.contains(filter.as_str()))
    }
}

/// Three runs of the same build; the integration tests come last, so that their summary ends the output.
const RUNS: [&[&str]; 3] = [&["--doc"], &["--lib", "--bins"], &["--test", "*"]];

pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<ExitCode> {
    let guests = guests::build_test_guests(workspace)?;
    let rouse = workspace.build_rouse()?;
    if options.wants("middleware") {
        workspace.build_program("rouse-with-stopwatch")?;
    }
    if options.wants("other_languages") {
        other_guests::build(workspace, &rouse, &guests)?;
    }

    let mut failed: Vec<String> = Vec::new();
    let mut exit_code = 0;
    for targets in RUNS {
        let mut command = workspace.cargo("test");
        command
            .args(["--workspace", "--no-fail-fast"])
            .args(targets)
            .arg("--")
            .args(&options.filters)
            .args(&options.runner_args)
            .env("ROUSE_TEST_GUESTS", &guests);
        if std::env::var_os("RUST_TEST_THREADS").is_none() {
            command.env("RUST_TEST_THREADS", test_threads().to_string());
        }
        let status = command.status().context("start cargo test")?;
        if !status.success() {
            failed.push(targets.join(" "));
            exit_code = status.code().unwrap_or(1);
        }
    }
    if !failed.is_empty() {
        eprintln!("error: tests failed in: {}", failed.join(", "));
    }
    Ok(ExitCode::from(u8::try_from(exit_code).unwrap_or(1)))
}

fn test_threads() -> usize {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    cores.max(TEST_THREADS_MIN)
}
