//! Checks the dependencies against deny.toml with cargo-deny.

use std::process::{Command, Output};

use anyhow::{Context as _, Result, bail};
use rouse_workbench::workspace::Workspace;

use crate::tool::CARGO_DENY;

/// Checks licences, banned crates and sources.
pub(crate) fn policy(workspace: &Workspace, install: bool) -> Result<()> {
    let output = deny(workspace, install, &["bans", "licenses", "sources"])?;
    if !output.status.success() {
        bail!(
            "cargo-deny refuses a dependency: replace it, or allow it in deny.toml\n{}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}

/// Checks for known vulnerabilities. Returns the reason if the database cannot be fetched.
pub(crate) fn advisories(workspace: &Workspace, install: bool) -> Result<Option<String>> {
    let output = deny(workspace, install, &["advisories"])?;
    if output.status.success() {
        return Ok(None);
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    if stderr.contains("failed to fetch advisory database") {
        return Ok(Some(
            "the advisory database (github.com/RustSec/advisory-db) cannot be reached".into(),
        ));
    }
    bail!(
        "dependencies have advisories: update them\n{}",
        stderr.trim()
    );
}

fn deny(workspace: &Workspace, install: bool, checks: &[&str]) -> Result<Output> {
    let mut command = Command::new(CARGO_DENY.find(install)?);
    command
        .args(["--color", "never", "--log-level", "error"])
        .arg("check")
        .args(checks)
        // A fetch that prompts for a password would wait forever.
        .env("GIT_TERMINAL_PROMPT", "0")
        .current_dir(&workspace.root);
    command.output().context("start cargo-deny")
}
