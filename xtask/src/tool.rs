//! Programs that cargo installs. They are found on PATH or in Rouse's own cache, or are installed into the cache.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

/// A program from crates.io.
pub(crate) struct Tool {
    name: &'static str,
    /// Pinned, so that a new release changes nothing until someone has reviewed it.
    version: &'static str,
    /// Arguments of `cargo install`, such as features.
    args: &'static [&'static str],
    /// The xtask command whose `--install` installs it.
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

/// Without its web server and search. 0.5.4 needs Rust 1.88.
pub(crate) const MDBOOK: Tool = Tool {
    name: "mdbook",
    version: "0.5.4",
    args: &["--no-default-features"],
    command: "check",
};

impl Tool {
    /// Finds the program in its pinned version, on PATH or in the cache. If it is missing and `install` is set,
    /// installs it into the cache.
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
        // Unoptimised: the build takes one minute instead of five, and the program runs for seconds.
        let status = Command::new("cargo")
            .args(["install", name, "--locked", "--debug", "--force"])
            .args(*args)
            .args(["--version", version, "--root"])
            .arg(tools_dir()?)
            .env("CARGO_PROFILE_DEV_DEBUG", "0")
            // The target folder and the lint flags of this clone do not apply to this build.
            .env_remove("CARGO_TARGET_DIR")
            .env_remove("RUSTFLAGS")
            .status()
            .context("start cargo install")?;
        if !status.success() {
            bail!("{name} {version} could not be installed: see the output of cargo above");
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
            .context("no home directory was found: set HOME or XDG_CACHE_HOME")?
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
