//! Finds or installs a rustc that builds for WebAssembly.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use crate::workspace::Workspace;

const TARGETS: [&str; 2] = ["wasm32-wasip1", "wasm32-wasip2"];

/// The compiler for guests.
pub(crate) enum Rustc {
    /// The default compiler of cargo.
    Default,
    /// Another compiler, because rustup could not add the targets.
    Other(PathBuf),
}

/// Finds the compiler: cargo's default if it has the targets or rustup can add them, otherwise that of the script.
pub(crate) fn ensure(workspace: &Workspace) -> Result<Rustc> {
    if has_targets(&workspace.root)? || rustup_adds_targets(&workspace.root) {
        return Ok(Rustc::Default);
    }
    let script = workspace.root.join("scripts/setup-wasm.sh");
    eprintln!("rustup cannot add the wasm targets here; trying scripts/setup-wasm.sh");
    let output = Command::new("bash")
        .arg(&script)
        // Skips the downloads with rustup, which has just failed.
        .env("ROUSE_WASM_DEBIAN", "1")
        .stderr(Stdio::inherit())
        .output()
        .context("start scripts/setup-wasm.sh")?;
    let rustc = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if !output.status.success() || rustc.is_empty() {
        bail!(
            "no compiler for {}: run `rustup target add {}` with a network that reaches \
             static.rust-lang.org, or see \"Without rustup's downloads\" in CONTRIBUTING.md",
            TARGETS.join(" and "),
            TARGETS.join(" ")
        );
    }
    Ok(Rustc::Other(rustc.into()))
}

impl Rustc {
    /// Makes a cargo command use this compiler.
    pub(crate) fn apply(&self, command: &mut Command) {
        match self {
            Self::Default => {}
            Self::Other(rustc) => {
                command.env("RUSTC", rustc);
            }
        }
    }
}

fn has_targets(root: &Path) -> Result<bool> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc)
        .args(["--print", "sysroot"])
        .current_dir(root)
        .output()
        .context("start rustc")?;
    let sysroot = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    Ok(TARGETS.iter().all(|target| {
        let lib = sysroot.join("lib/rustlib").join(target).join("lib");
        lib.read_dir().is_ok_and(|mut files| files.next().is_some())
    }))
}

fn rustup_adds_targets(root: &Path) -> bool {
    eprintln!("adding {} with rustup", TARGETS.join(" and "));
    Command::new("rustup")
        .args(["target", "add"])
        .args(TARGETS)
        .current_dir(root)
        .status()
        .is_ok_and(|status| status.success())
}
