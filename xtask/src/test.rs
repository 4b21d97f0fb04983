//! `cargo xtask test`: builds what the tests need once, then lets cargo run them all.

use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::thread;

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};
use rouse_workbench::guests;
use rouse_workbench::workspace::Workspace;

use crate::{other_guests, package};

/// Tests wait more than they compute, so that small machines may run more of them than they have cores.
const TEST_THREADS_MIN: usize = 4;

#[derive(Args)]
pub(crate) struct Options {
    /// Run only tests with one of these words in their name
    filters: Vec<String>,
    /// Run only integration tests, on this version of Postgres from the npm registry; without words, those that touch SQL
    #[arg(long, value_name = "MAJOR")]
    postgres: Option<Postgres>,
    /// Arguments for the test runner, for instance `-- --nocapture`
    #[arg(last = true)]
    runner_args: Vec<String>,
}

/// A version that the npm registry has, as host/src/postgres/archive.rs pins it.
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

/// The modules of tests/it that hold Rouse's SQL to its promises. Those that are left out reach the database through the same
/// functions.
const SQL_MODULES: [&str; 31] = [
    "admin_actions",
    "adopt",
    "audit",
    "claims",
    "database_metrics",
    "enqueue",
    "finding",
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
    "retention",
    "revoked",
    "roles",
    "settle",
    "sources",
    "state",
    "steps",
    "wakeups",
    "worker",
    "workers",
];

/// Tells whether the other Postgres can be had here, in some seconds.
const PROBE: &str = "harness::the_server_is_of_the_version_that_was_asked_for";

const UNIT_TESTS: [&[&str]; 2] = [&["--doc"], &["--lib", "--bins"]];
const INTEGRATION_TESTS: &[&str] = &["--test", "*"];

impl Options {
    /// Whether tests of this module may run: what only they need is not made for others.
    fn wants(&self, module: &str) -> bool {
        match (self.filters.as_slice(), self.postgres) {
            ([], None) => true,
            ([], Some(_)) => SQL_MODULES.contains(&module),
            (filters, _) => (filters.iter())
                .any(|filter| filter.starts_with(module) || module.contains(filter.as_str())),
        }
    }

    /// Whether everything is to be tested.
    fn is_all(&self) -> bool {
        self.filters.is_empty() && self.postgres.is_none()
    }
}

pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<ExitCode> {
    let guests = guests::build_test_guests(workspace)?;
    let rouse = workspace.build_rouse()?;
    if options.wants("middleware") {
        workspace.build_program("rouse-with-stopwatch")?;
    }
    if options.wants("other_languages") {
        other_guests::build(workspace, &rouse, &guests)?;
    }

    let package = match options.wants("package") {
        true => Some(package::prepare_for_tests(workspace, is_ci())?),
        false => None,
    };

    let mut tests = Tests {
        workspace,
        options,
        guests,
        package,
        failed: Vec::new(),
        exit_code: 0,
    };
    if let Some(postgres) = options.postgres {
        tests.run_on(postgres)?;
    } else {
        for targets in UNIT_TESTS {
            tests.run(targets)?;
        }
        if options.is_all() {
            tests.run_on(Postgres::V18)?;
        }
        // At the end, so that their summary ends the output.
        tests.run(INTEGRATION_TESTS)?;
    }
    if !tests.failed.is_empty() {
        eprintln!("error: tests failed in: {}", tests.failed.join(", "));
    }
    Ok(ExitCode::from(u8::try_from(tests.exit_code).unwrap_or(1)))
}

/// Runs of one build, and which of them have failed.
struct Tests<'a> {
    workspace: &'a Workspace,
    options: &'a Options,
    guests: PathBuf,
    package: Option<PathBuf>,
    failed: Vec<String>,
    exit_code: i32,
}

impl Tests<'_> {
    /// The tests in these targets, on the Postgres of this machine.
    fn run(&mut self, targets: &[&str]) -> Result<()> {
        let mut command = self.cargo_test(targets);
        command
            .args(&self.options.filters)
            .args(&self.options.runner_args);
        self.note(command, &targets.join(" "))
    }

    /// The integration tests that touch SQL, or those that were asked for, on another Postgres.
    fn run_on(&mut self, postgres: Postgres) -> Result<()> {
        let major = postgres.major();
        let on_it = |tests: &Self| {
            let mut command = tests.cargo_test(INTEGRATION_TESTS);
            command.env("ROUSE_TEST_POSTGRES", major);
            command
        };
        eprintln!("what touches SQL, on Postgres {major}:");
        let mut probe = on_it(self);
        probe.args([PROBE, "--exact"]);
        let is_there = probe.status().context("start cargo test")?.success();
        if !is_there && !is_ci() {
            eprintln!(
                "SKIPPED: Postgres {major} cannot be had or run on this machine, as the output above says; \
                 its tests need npm, a network, x86-64 and glibc"
            );
            return Ok(());
        }
        let mut command = on_it(self);
        match self.options.filters.as_slice() {
            [] => command.args(SQL_MODULES.map(|module| format!("{module}::"))),
            filters => command.args(filters),
        };
        command.args(&self.options.runner_args);
        self.note(command, &format!("Postgres {major}"))
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

    /// Runs it to its end, and keeps how it ended.
    fn note(&mut self, mut command: Command, what: &str) -> Result<()> {
        let status = command.status().context("start cargo test")?;
        if !status.success() {
            self.failed.push(what.to_owned());
            self.exit_code = status.code().unwrap_or(1);
        }
        Ok(())
    }
}

/// As in tests/it/support/skip.rs: what cannot run fails in CI, and is skipped elsewhere.
fn is_ci() -> bool {
    std::env::var_os("CI").is_some_and(|ci| ci == "true")
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
    fn only_what_the_wanted_tests_need_is_made() {
        assert!(options(&[], None).wants("middleware"));
        assert!(options(&["middleware::one"], None).wants("middleware"));
        assert!(!options(&["rollback"], None).wants("middleware"));
        assert!(!options(&[], Some(Postgres::V18)).wants("middleware"));
        assert!(options(&["middle"], Some(Postgres::V18)).wants("middleware"));
    }

    #[test]
    fn every_module_that_touches_sql_is_one_of_the_integration_tests() {
        let all = include_str!("../../tests/it/main.rs");
        for module in SQL_MODULES {
            assert!(all.contains(&format!("mod {module};\n")), "{module}");
        }
    }
}
