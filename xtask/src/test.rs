//! `cargo xtask test`: builds everything that the tests need once, then runs them with cargo.

use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};
use rouse_workbench::guests;
use rouse_workbench::workspace::Workspace;

use crate::ci::is_ci;
use crate::{other_guests, package};

/// Tests wait more than they compute, so a small machine runs more of them at once than it has cores.
const TEST_THREADS_MIN: usize = 4;

#[derive(Args)]
pub(crate) struct Options {
    /// Run only the tests whose names contain one of these words; default: all tests
    #[arg(value_name = "WORD")]
    filters: Vec<String>,
    /// Run only integration tests, on this version of Postgres from the npm registry: those whose names contain one of
    /// the words, by default those that touch SQL
    #[arg(long, value_name = "MAJOR")]
    postgres: Option<Postgres>,
    /// Arguments for the test runner, such as `-- --nocapture`
    #[arg(last = true)]
    runner_args: Vec<String>,
}

/// A version in the npm registry that host/src/postgres/archive.rs pins.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Postgres {
    /// 18.4
    #[value(name = "18")]
    V18,
}

impl Postgres {
    const fn major(self) -> &'static str {
        match self {
            Self::V18 => "18",
        }
    }
}

/// The modules of tests/it that test Rouse's SQL. The other modules reach the database through the same functions.
const SQL_MODULES: [&str; 50] = [
    "admin_actions",
    "adopt",
    "audit",
    "children",
    "claims",
    "contract_sql",
    "dashboard",
    "database_metrics",
    "deadlines",
    "dependencies",
    "direct",
    "enqueue",
    "example_flows",
    "fair",
    "finding",
    "flows",
    "gates",
    "guest_flows",
    "guest_sql",
    "harness",
    "heartbeats",
    "in_line",
    "lanes",
    "logins",
    "looking",
    "migrations",
    "order",
    "outcomes",
    "own_times",
    "partitions",
    "payloads",
    "plans",
    "producers_page",
    "quotas",
    "retention",
    "revoked",
    "roles",
    "schedules",
    "settle",
    "shards",
    "sources",
    "state",
    "steps",
    "suspended",
    "usage",
    "waiting",
    "wakeups",
    "why",
    "worker",
    "workers",
];

/// A short test that passes only if the other Postgres is available on this machine.
const PROBE: &str = "harness::the_server_has_the_requested_version";

const UNIT_TESTS: [&[&str]; 2] = [&["--doc"], &["--lib", "--bins"]];
const INTEGRATION_TESTS: &[&str] = &["--test", "*"];

impl Options {
    /// Whether tests of this module may run. If not, programs that only this module needs are not built.
    fn includes(&self, module: &str) -> bool {
        match (self.filters.as_slice(), self.postgres) {
            ([], None) => true,
            ([], Some(_)) => SQL_MODULES.contains(&module),
            (filters, _) => (filters.iter())
                .any(|filter| filter.starts_with(module) || module.contains(filter.as_str())),
        }
    }

    /// Whether all tests run.
    fn is_all(&self) -> bool {
        self.filters.is_empty() && self.postgres.is_none()
    }
}

pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<ExitCode> {
    let guests = guests::build_test_guests(workspace)?;
    let rouse = workspace.build_rouse()?;
    if options.includes("middleware") {
        workspace.build_program("rouse-with-stopwatch")?;
    }
    if options.includes("other_languages") {
        other_guests::build(workspace, &rouse, &guests)?;
    }

    let package = match options.includes("package") {
        true => Some(package::prepare_for_tests(workspace, is_ci())?),
        false => None,
    };

    let tests = Tests {
        workspace,
        options,
        guests,
        package,
    };
    Ok(ExitCode::from(tests.run_all()?))
}

/// The test runs of one build.
struct Tests<'a> {
    workspace: &'a Workspace,
    options: &'a Options,
    guests: PathBuf,
    package: Option<PathBuf>,
}

impl Tests<'_> {
    /// Runs the selected tests, and returns the exit code of the first run that fails. No run follows it, so that the
    /// output ends with the failure.
    fn run_all(&self) -> Result<u8> {
        if let Some(postgres) = self.options.postgres {
            return self.run_on(postgres);
        }
        let started = Instant::now();
        for targets in UNIT_TESTS {
            let code = self.run(targets)?;
            if code != 0 {
                return Ok(code);
            }
        }
        if self.options.is_all() {
            let code = self.run_on(Postgres::V18)?;
            if code != 0 {
                return Ok(code);
            }
        }
        eprintln!(
            "built, and ran all tests so far, in {} s",
            started.elapsed().as_secs()
        );
        // Last, so that their summary ends the output.
        self.run(INTEGRATION_TESTS)
    }

    /// Runs the tests in these targets, on the Postgres of this machine.
    fn run(&self, targets: &[&str]) -> Result<u8> {
        let mut command = self.cargo_test(targets);
        command
            .args(&self.options.filters)
            .args(&self.options.runner_args);
        Self::run_to_completion(command, &targets.join(" "))
    }

    /// Runs the selected integration tests on another Postgres; by default those that touch SQL.
    fn run_on(&self, postgres: Postgres) -> Result<u8> {
        let major = postgres.major();
        let cargo_test = |tests: &Self| {
            let mut command = tests.cargo_test(INTEGRATION_TESTS);
            command.env("ROUSE_TEST_POSTGRES", major);
            command
        };
        eprintln!("integration tests on Postgres {major}:");
        let mut probe = cargo_test(self);
        probe.args([PROBE, "--exact"]);
        let is_available = probe.status().context("start cargo test")?.success();
        if !is_available && !is_ci() {
            eprintln!(
                "SKIPPED: Postgres {major} cannot be downloaded or started on this machine (see the output above); \
                 it needs npm, a network, x86-64 and glibc"
            );
            return Ok(0);
        }
        let mut command = cargo_test(self);
        match self.options.filters.as_slice() {
            [] => command.args(SQL_MODULES.map(|module| format!("{module}::"))),
            filters => command.args(filters),
        };
        command.args(&self.options.runner_args);
        Self::run_to_completion(command, &format!("Postgres {major}"))
    }

    fn cargo_test(&self, targets: &[&str]) -> Command {
        let mut command = self.workspace.cargo("test");
        command
            .args(["--workspace", "--no-fail-fast"])
            .args(targets)
            .arg("--")
            .env("ROUSE_TEST_GUESTS", &self.guests)
            .env_remove("ROUSE_TEST_POSTGRES");
        if let Some(package) = &self.package {
            command.env("ROUSE_TEST_PACKAGE", package);
        }
        if std::env::var_os("RUST_TEST_THREADS").is_none() {
            command.env("RUST_TEST_THREADS", test_threads().to_string());
        }
        command
    }

    /// Runs a command to completion, and returns its exit code.
    fn run_to_completion(mut command: Command, name: &str) -> Result<u8> {
        let status = command.status().context("start cargo test")?;
        if !status.success() {
            eprintln!("error: tests failed in: {name}");
        }
        Ok(status
            .code()
            .map_or(1, |code| u8::try_from(code).unwrap_or(1)))
    }
}

fn test_threads() -> usize {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    cores.max(TEST_THREADS_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(filters: &[&str], postgres: Option<Postgres>) -> Options {
        Options {
            filters: filters.iter().map(|filter| (*filter).to_owned()).collect(),
            postgres,
            runner_args: Vec::new(),
        }
    }

    #[test]
    fn filters_select_the_modules_whose_programs_are_built() {
        assert!(options(&[], None).includes("middleware"));
        assert!(options(&["middleware::one"], None).includes("middleware"));
        assert!(!options(&["rollback"], None).includes("middleware"));
        assert!(!options(&[], Some(Postgres::V18)).includes("middleware"));
        assert!(options(&["middle"], Some(Postgres::V18)).includes("middleware"));
    }

    #[test]
    fn every_module_that_touches_sql_exists() {
        let all = include_str!("../../tests/it/main.rs");
        for module in SQL_MODULES {
            assert!(all.contains(&format!("mod {module};\n")), "{module}");
        }
    }
}
