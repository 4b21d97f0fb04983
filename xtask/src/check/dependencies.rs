//! Holds the dependencies against deny.toml by means of cargo-deny.

use std::process::{Command, Output};

use anyhow::{Context as _, Result, bail};
use rouse_workbench::workspace::Workspace;

use crate::tool::CARGO_DENY;

/// Licences, banned crates, sources.
pub(crate) fn policy(workspace: &Workspace, install: bool) -> Result<()> {
    let output = deny(workspace, install, &["bans", "licenses", "sources"])?;
    if !output.status.success() {
        bail!(
            "cargo-deny refuses a dependency; deny.toml says what may be used\n{}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}

/// Known holes; skipped with the reason where the database cannot be fetched.
pub(crate) fn advisories(workspace: &Workspace, install: bool) -> Result<Option<String>> {
    let output = deny(workspace, install, &["advisories"])?;
    if output.status.success() {
        return Ok(None);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("failed to fetch advisory database") {
        return Ok(Some(
            "the advisory database (github.com/RustSec/advisory-db) cannot be reached from here"
                .into(),
        ));
    }
    bail!("cargo-deny knows of advisories\n{}", said.trim());
}

fn deny(workspace: &Workspace, install: bool, what: &[&str]) -> Result<Output> {
    let mut command = Command::new(CARGO_DENY.find(install)?);
    command
        .args(["--color", "never", "--log-level", "error"])
        .arg("check")
        .args(what)
        // A fetch that asks for a password would wait for ever.
        .env("GIT_TERMINAL_PROMPT", "0")
        .current_dir(&workspace.root);
    command.output().context("start cargo-deny")
}
