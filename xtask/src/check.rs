//! `cargo xtask check`: everything that CI checks in addition to the tests.

mod book;
mod conformance;
mod dependencies;
mod features;
mod pages;
mod reference;

use std::fmt;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use rouse_workbench::workspace::{self, Workspace};

use crate::ci::is_ci;

#[derive(Args)]
pub(crate) struct Options {
    /// Install missing tools (cargo-deny, mdBook) into ~/.cache/rouse/tools; implied by CI=true
    #[arg(long)]
    install: bool,
}

/// The result of a step.
enum End {
    Passed,
    /// Not possible on this machine, with the reason.
    Skipped(String),
    Failed(anyhow::Error),
}

struct Step<'a> {
    name: &'static str,
    /// Returns the reason if it skips the step.
    run: Box<dyn FnOnce() -> Result<Option<String>> + 'a>,
}

pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<ExitCode> {
    let install = options.install || is_ci();
    let steps = [
        step("format", || format(workspace)),
        step("conformance table", || {
            done(conformance::check(&workspace.root))
        }),
        step("pages", || done(pages::check(&workspace.root))),
        step("book", || done(book::check(workspace, install))),
        step("reference pages", || {
            done(reference::check(&workspace.root))
        }),
        step("build settings", || done(features::check(workspace))),
        step("licences, bans, sources", || {
            done(dependencies::policy(workspace, install))
        }),
        step("advisories", || {
            dependencies::advisories(workspace, install)
        }),
        step("lints", || lints(workspace)),
        step("documentation", || documentation(workspace)),
    ];

    let count = steps.len();
    let mut ends = Vec::new();
    for (index, step) in steps.into_iter().enumerate() {
        eprintln!("[{}/{count}] {} …", index + 1, step.name);
        let started = Instant::now();
        let end = match (step.run)() {
            Ok(None) => End::Passed,
            Ok(Some(why)) => End::Skipped(why),
            Err(error) => End::Failed(error),
        };
        eprintln!(
            "[{}/{count}] {}: {end}{}",
            index + 1,
            step.name,
            duration(started.elapsed())
        );
        ends.push((step.name, end));
    }

    eprintln!();
    for (name, end) in &ends {
        eprintln!("{name:<24} {end}");
    }
    let failed = ends
        .iter()
        .filter(|(_, end)| matches!(end, End::Failed(_)))
        .count();
    if failed > 0 {
        eprintln!("{failed} of {count} checks failed");
        return Ok(ExitCode::FAILURE);
    }
    eprintln!("no check failed");
    Ok(ExitCode::SUCCESS)
}

fn step<'a>(name: &'static str, run: impl FnOnce() -> Result<Option<String>> + 'a) -> Step<'a> {
    Step {
        name,
        run: Box::new(run),
    }
}

fn done(result: Result<()>) -> Result<Option<String>> {
    result.map(|()| None)
}

fn format(workspace: &Workspace) -> Result<Option<String>> {
    let mut command = workspace.cargo("fmt");
    command.args(["--all", "--check"]);
    succeed(command, "run `cargo fmt --all`")
}

fn lints(workspace: &Workspace) -> Result<Option<String>> {
    let mut command = workspace.cargo("clippy");
    command.args(["--workspace", "--all-targets", "--", "-D", "warnings"]);
    succeed(command, "fix the warnings of clippy above")
}

fn documentation(workspace: &Workspace) -> Result<Option<String>> {
    let mut command = workspace.cargo("doc");
    command
        .args(["--workspace", "--no-deps"])
        .env("RUSTDOCFLAGS", "-D warnings");
    succeed(command, "fix the warnings of rustdoc above")
}

fn succeed(mut command: std::process::Command, remedy: &str) -> Result<Option<String>> {
    let command_line = workspace::command_line(&command);
    let status = command
        .status()
        .with_context(|| format!("start `{command_line}`"))?;
    if !status.success() {
        bail!("`{command_line}` failed: {remedy}");
    }
    Ok(None)
}

/// The duration of a step; empty if it took less than a second.
fn duration(elapsed: Duration) -> String {
    match elapsed.as_secs() {
        0 => String::new(),
        seconds => format!(" ({seconds} s)"),
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed => write!(f, "ok"),
            Self::Skipped(why) => write!(f, "SKIPPED: {why}"),
            Self::Failed(error) => write!(f, "FAILED: {error:#}"),
        }
    }
}
