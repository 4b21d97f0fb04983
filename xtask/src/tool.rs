//! Programs that cargo installs: found on PATH or in a cache of our own, or installed into that.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

/// A program from crates.io.
pub(crate) struct Tool {
    name: &'static str,
    /// Pinned, so that a new release changes nothing until somebody has seen it.
    version: &'static str,
    /// The command that installs it with `--install`.
    command: &'static str,
}

pub(crate) const CARGO_DENY: Tool = Tool {
    name: "cargo-deny",
    version: "0.20.2",
    command: "check",
};

pub(crate) const CARGO_DEB: Tool = Tool {
    name: "cargo-deb",
    version: "3.8.0",
    command: "package",
};

impl Tool {
    /// The program: on PATH, else in our cache, else installed there if that is wanted.
    pub(crate) fn find(&self, install: bool) -> Result<PathBuf> {
        let cached = tools_dir()?.join("bin").join(self.name);
        for candidate in [PathBuf::from(self.name), cached.clone()] {
            let found = Command::new(&candidate).arg("--version").output();
            if found.is_ok_and(|output| output.status.success()) {
                return Ok(candidate);
            }
        }
        let Self {
            name,
            version,
            command,
        } = self;
        if !install {
            bail!(
                "{name} is missing: run `cargo xtask {command} --install`, \
                 or `cargo install {name} --locked --version {version}`"
            );
        }
        eprintln!(
            "installing {name} {version} into {}",
            tools_dir()?.display()
        );
        // Unoptimised: it is built in a minute instead of five, and runs for seconds.
        let status = Command::new("cargo")
            .args(["install", name, "--locked", "--debug", "--version", version])
            .arg("--root")
            .arg(tools_dir()?)
            .env("CARGO_PROFILE_DEV_DEBUG", "0")
            // Its build is not ours: neither our target folder nor our lint flags.
            .env_remove("CARGO_TARGET_DIR")
            .env_remove("RUSTFLAGS")
            .status()
            .context("start cargo install")?;
        if !status.success() {
            bail!("{name} could not be installed: see above");
        }
        Ok(cached)
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_tool_is_reported_with_the_command_that_installs_it() {
        let tool = Tool {
            name: "cargo-that-nobody-has",
            version: "1.2.3",
            command: "check",
        };
        let error = tool.find(false).unwrap_err().to_string();
        assert_eq!(
            error,
            "cargo-that-nobody-has is missing: run `cargo xtask check --install`, \
             or `cargo install cargo-that-nobody-has --locked --version 1.2.3`"
        );
    }
}
