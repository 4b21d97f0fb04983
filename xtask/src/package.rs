//! `cargo xtask package`: a tarball and a .deb to install Rouse from.

mod for_tests;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use rouse_workbench::workspace::{self, Workspace};
use sha2::{Digest as _, Sha256};

use crate::ci::is_ci;
use crate::tool::CARGO_DEB;

pub(crate) use for_tests::prepare as prepare_for_tests;

#[derive(Args)]
pub(crate) struct Options {
    /// The folder for the packages; default: `package` in cargo's target folder
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// The cargo profile to compile `rouse` with; the tests use `dev`
    #[arg(long, default_value = "release")]
    profile: String,
    /// Install cargo-deb into ~/.cache/rouse/tools if it is missing; implied by CI=true
    #[arg(long)]
    install: bool,
}

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The files of the tarball in addition to the binary: path in the clone, path in the tarball, mode.
const FILES: [(&str, &str, &str); 6] = [
    ("host/package/README.md", "README.md", "644"),
    ("host/package/rouse.service", "rouse.service", "644"),
    ("host/package/rouse.toml", "etc/rouse.toml", "644"),
    ("host/package/environment", "etc/environment", "600"),
    ("LICENSE-MIT", "LICENSE-MIT", "644"),
    ("LICENSE-APACHE", "LICENSE-APACHE", "644"),
];

pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    let install = options.install || is_ci();
    // Fails before the build, which takes minutes.
    let cargo_deb = CARGO_DEB.find(install)?;
    let rouse = workspace.build_program_as("rouse", &options.profile)?;
    let out = match &options.out {
        Some(out) => std::path::absolute(out)?,
        None => workspace.target_dir.join("package"),
    };
    fs::create_dir_all(&out).with_context(|| format!("create {}", out.display()))?;

    let made = [
        tarball(workspace, &rouse, &out)?,
        deb(workspace, &cargo_deb, &options.profile, &out)?,
    ];
    let mut sums = String::new();
    for package in made {
        let bytes = fs::read(&package).with_context(|| format!("read {}", package.display()))?;
        let name = package.file_name().unwrap_or_default().to_string_lossy();
        writeln!(sums, "{:x}  {name}", Sha256::digest(&bytes))?;
        let mb = bytes.len() as f64 / 1e6;
        println!("{} ({mb:.1} MB)", package.display());
    }
    let path = out.join("SHA256SUMS");
    fs::write(&path, sums).with_context(|| format!("write {}", path.display()))?;
    println!("{}", path.display());
    Ok(())
}

/// Packs the binary and the other files. The same sources give the same archive.
fn tarball(workspace: &Workspace, rouse: &Path, out: &Path) -> Result<PathBuf> {
    let name = format!("rouse-{VERSION}-{}-linux-gnu", std::env::consts::ARCH);
    let staging = tempfile::tempdir().context("create a folder for the tarball")?;
    let folder = staging.path().join(&name);
    let files = FILES.map(|(from, to, mode)| (workspace.root.join(from), to, mode));
    for (from, to, mode) in files
        .iter()
        .chain([&(rouse.to_owned(), "bin/rouse", "755")])
    {
        let mut install = Command::new("install");
        install.args(["-D", "-m", mode]).arg(from);
        succeed(install.arg(folder.join(to)))?;
    }
    let archive = out.join(format!("{name}.tar.gz"));
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner"])
        .arg(format!("--mtime=@{}", committed_at(workspace)))
        .arg("-czf")
        .arg(&archive)
        .arg("-C")
        .arg(staging.path())
        .arg(&name);
    succeed(&mut tar)?;
    Ok(archive)
}

/// Makes a .deb with the binary of a profile, by cargo-deb and `[package.metadata.deb]` in host/Cargo.toml.
fn deb(workspace: &Workspace, cargo_deb: &Path, profile: &str, out: &Path) -> Result<PathBuf> {
    let folder = out.join("deb");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display()))?;
    }
    let mut command = Command::new(cargo_deb);
    command
        .args([
            "--package",
            "rouse-host",
            "--no-build",
            "--strip",
            "--quiet",
        ])
        .args(["--profile", profile, "--output"])
        // cargo-deb takes a path for a folder only if it ends with a slash.
        .arg(folder.join(""))
        .env("CARGO_TARGET_DIR", &workspace.target_dir)
        .env("SOURCE_DATE_EPOCH", committed_at(workspace))
        .current_dir(&workspace.root);
    if profile == "dev" {
        // Only tests unpack it, so the size does not matter.
        command.arg("--fast");
    }
    succeed(&mut command)?;
    let made = fs::read_dir(&folder)
        .with_context(|| format!("list {}", folder.display()))?
        .next()
        .context("cargo-deb has not created a package")??
        .path();
    let package = out.join(made.file_name().unwrap_or_default());
    fs::rename(&made, &package).with_context(|| format!("write {}", package.display()))?;
    fs::remove_dir(&folder).with_context(|| format!("remove {}", folder.display()))?;
    Ok(package)
}

/// The time of the last commit, in seconds; 0 outside of git.
fn committed_at(workspace: &Workspace) -> String {
    let output = Command::new("git")
        .args(["log", "-1", "--format=%ct"])
        .current_dir(&workspace.root)
        .output();
    let output = output.ok().filter(|output| output.status.success());
    let time = output.and_then(|output| String::from_utf8(output.stdout).ok());
    time.map_or_else(|| "0".to_owned(), |time| time.trim().to_owned())
}

/// Runs a command and returns its output. The error has its stderr.
fn succeed(command: &mut Command) -> Result<String> {
    let command_line = workspace::command_line(command);
    let output = command
        .output()
        .with_context(|| format!("start `{command_line}`"))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!(
            "`{command_line}` failed ({}):\n{}",
            output.status,
            stderr.trim()
        );
    }
    String::from_utf8(output.stdout).with_context(|| format!("read the output of `{command_line}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_a_failed_command_has_its_stderr() {
        let error = succeed(Command::new("sh").args(["-c", "echo no space >&2; exit 3"]))
            .unwrap_err()
            .to_string();
        assert!(error.contains("(exit status: 3):\nno space"), "{error}");
        let error = succeed(&mut Command::new("/nonexistent/tar")).unwrap_err();
        assert_eq!(error.to_string(), "start `tar`");
    }

    /// In systemd 252, no group of system calls contains them. Without them, compilers run without their file sandbox.
    #[test]
    fn the_unit_allows_the_system_calls_of_landlock() {
        let unit = include_str!("../../host/package/rouse.service");
        for call in ["create_ruleset", "add_rule", "restrict_self"] {
            let allowed = unit.lines().any(|line| {
                line.starts_with("SystemCallFilter=") && line.contains(&format!("landlock_{call}"))
            });
            assert!(allowed, "{call}");
        }
    }

    /// Without `AF_NETLINK`, getifaddrs fails, and with it every request of a handler to a public address.
    #[test]
    fn the_unit_allows_the_sockets_of_a_host() {
        let unit = include_str!("../../host/package/rouse.service");
        let mut lines = unit.lines();
        let allowed = lines.find_map(|line| line.strip_prefix("RestrictAddressFamilies="));
        let allowed: Vec<&str> = allowed.unwrap().split(' ').collect();
        assert_eq!(allowed, ["AF_INET", "AF_INET6", "AF_NETLINK", "AF_UNIX"]);
    }

    #[test]
    fn systemd_waits_longer_than_the_drain_timeout() {
        let unit = include_str!("../../host/package/rouse.service");
        let seconds = unit.split_once("TimeoutStopSec=").unwrap().1;
        let seconds: u32 = seconds.lines().next().unwrap().parse().unwrap();
        let settings = include_str!("../../host/package/rouse.toml");
        let drain = settings.split_once("drain_timeout = \"").unwrap().1;
        let drain: u32 = drain.split_once("s\"").unwrap().0.parse().unwrap();
        assert!(
            seconds >= drain + 30,
            "{seconds} s for a drain of {drain} s"
        );
    }
}
