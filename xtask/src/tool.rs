//! Programs that cargo installs: found on PATH or in a cache of our own, or installed into that.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

/// A program from crates.io.
pub(crate) struct Tool {
    name: &'static str,
    /// Pinned, so that a new release changes nothing until someone has looked at it.
    version: &'static str,
    /// Arguments of `cargo install`: features, for instance.
    args: &'static [&'static str],
    /// The command that installs it with `--install`.
    command: &'static str,
}

pub(crate) const CARGO_DENY: Tool = Tool {
    name: "cargo-deny",
    version: "0.20.2",
    args: &[],
    command: "check",
};

pub(crate) const CARGO_DEB: Tool = Tool {
    name: "cargo-deb",
    version: "3.8.0",
    args: &[],
    command: "package",
};

/// Without its web server and its search. 0.5.4 builds with Rust 1.88 and newer.
pub(crate) const MDBOOK: Tool = Tool {
    name: "mdbook",
    version: "0.5.4",
    args: &["--no-default-features"],
    command: "check",
};

impl Tool {
    /// The program in its pinned version: on PATH, else in our cache, else installed there if `install` is set.
    pub(crate) fn find(&self, install: bool) -> Result<PathBuf> {
        let cached = tools_dir()?.join("bin").join(self.name);
        for candidate in [PathBuf::from(self.name), cached.clone()] {
            let found = Command::new(&candidate).arg("--version").output();
            if found.is_ok_and(|output| self.is_pinned(&String::from_utf8_lossy(&output.stdout))) {
                return Ok(candidate);
            }
        }
        let Self {
            name,
            version,
            args,
            command,
        } = self;
        if !install {
            let args: String = args.iter().map(|arg| format!(" {arg}")).collect();
            bail!(
                "{name} {version} is missing: run `cargo xtask {command} --install`, \
                 or `cargo install {name} --locked{args} --version {version}`"
            );
        }
        eprintln!(
            "installing {name} {version} into {}",
            tools_dir()?.display()
        );
        // Unoptimised: it is built in a minute instead of five, and runs for seconds.
        let status = Command::new("cargo")
            .args(["install", name, "--locked", "--debug", "--force"])
            .args(*args)
            .args(["--version", version, "--root"])
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

    /// True if the output of `--version` names the pinned version: `cargo-deny 0.20.2`, `3.8.0`, `mdbook v0.5.4`.
    fn is_pinned(&self, output: &str) -> bool {
        let mut words = output.split_whitespace();
        words.any(|word| word.strip_prefix('v').unwrap_or(word) == self.version)
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
            args: &["--no-default-features"],
            command: "check",
        };
        let error = tool.find(false).unwrap_err().to_string();
        assert_eq!(
            error,
            "cargo-that-nobody-has 1.2.3 is missing: run `cargo xtask check --install`, \
             or `cargo install cargo-that-nobody-has --locked --no-default-features --version 1.2.3`"
        );
    }

    #[test]
    fn only_the_pinned_version_is_used() {
        for output in ["mdbook v0.5.4\n", "cargo-thing 0.5.4", "0.5.4"] {
            assert!(MDBOOK.is_pinned(output), "{output}");
        }
        for output in ["", "mdbook v0.5.40", "mdbook v0.5.3"] {
            assert!(!MDBOOK.is_pinned(output), "{output}");
        }
    }
}
