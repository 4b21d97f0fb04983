//! Holds the dependencies against deny.toml by means of cargo-deny.

use std::path::PathBuf;
use std::process::{Command, Output};

use anyhow::{Context as _, Result, bail};
use rouse_workbench::workspace::Workspace;

/// Pinned, so that a new release changes nothing until somebody has seen it.
const CARGO_DENY_VERSION: &str = "0.20.2";

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
    let mut command = Command::new(cargo_deny(install)?);
    command
        .args(["--color", "never", "--log-level", "error"])
        .arg("check")
        .args(what)
        // A fetch that asks for a password would wait for ever.
        .env("GIT_TERMINAL_PROMPT", "0")
        .current_dir(&workspace.root);
    command.output().context("start cargo-deny")
}

/// The program: on PATH, else in our cache, else installed there if that is wanted.
fn cargo_deny(install: bool) -> Result<PathBuf> {
    let cached = tools_dir()?.join("bin/cargo-deny");
    for candidate in [PathBuf::from("cargo-deny"), cached.clone()] {
        let found = Command::new(&candidate).arg("--version").output();
        if found.is_ok_and(|output| output.status.success()) {
            return Ok(candidate);
        }
    }
    if !install {
        bail!(
            "cargo-deny is missing: run `cargo xtask check --install`, \
             or `cargo install cargo-deny --locked --version {CARGO_DENY_VERSION}`"
        );
    }
    eprintln!(
        "installing cargo-deny {CARGO_DENY_VERSION} into {}",
        tools_dir()?.display()
    );
    // Unoptimised: it is built in a minute instead of five, and runs for two seconds.
    let status = Command::new("cargo")
        .args([
            "install",
            "cargo-deny",
            "--locked",
            "--debug",
            "--version",
            CARGO_DENY_VERSION,
        ])
        .arg("--root")
        .arg(tools_dir()?)
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        // Its build is not ours: neither our target folder nor our lint flags.
        .env_remove("CARGO_TARGET_DIR")
        .env_remove("RUSTFLAGS")
        .status()
        .context("start cargo install")?;
    if !status.success() {
        bail!("cargo-deny could not be installed: see above");
    }
    Ok(cached)
}

fn tools_dir() -> Result<PathBuf> {
    let cache = match std::env::var_os("XDG_CACHE_HOME") {
        Some(cache) => PathBuf::from(cache),
        None => std::env::home_dir()
            .context("there is no home directory: set XDG_CACHE_HOME")?
            .join(".cache"),
    };
    Ok(cache.join("rouse/tools"))
}
