//! The clone, its packages and its build output, according to cargo.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

/// The clone, according to `cargo metadata`.
pub struct Workspace {
    /// The folder of the clone.
    pub root: PathBuf,
    /// Cargo's output folder; `target`, unless CARGO_TARGET_DIR overrides it.
    pub target_dir: PathBuf,
    packages: Vec<Package>,
}

/// One crate of the workspace.
pub(crate) struct Package {
    pub(crate) name: String,
    /// Relative to the root, for instance `handlers/noop`.
    pub(crate) dir: PathBuf,
    /// Whether it builds a dynamic library, as WebAssembly guests do.
    pub(crate) is_guest: bool,
}

/// One artifact of a build.
pub(crate) struct Artifact {
    pub(crate) files: Vec<PathBuf>,
    pub(crate) executable: Option<PathBuf>,
}

impl Workspace {
    /// Runs `cargo metadata` in the clone that this program was started from.
    pub fn find() -> Result<Self> {
        let mut command = cargo();
        command.args(["metadata", "--no-deps", "--format-version", "1"]);
        // `cargo run` sets this to the folder of xtask, from wherever in the clone it was called.
        if let Some(xtask) = std::env::var_os("CARGO_MANIFEST_DIR") {
            command.current_dir(xtask);
        }
        let output = command
            .stderr(Stdio::inherit())
            .output()
            .context("start cargo metadata")?;
        if !output.status.success() {
            bail!("`cargo metadata` failed: run `cargo xtask` inside a clone of Rouse");
        }
        let metadata: Value =
            serde_json::from_slice(&output.stdout).context("parse the output of cargo metadata")?;
        let root = path(&metadata["workspace_root"])?;
        let packages = metadata["packages"]
            .as_array()
            .context("cargo metadata lists no packages")?;
        let packages = packages
            .iter()
            .map(|package| Package::read(package, &root))
            .collect::<Result<_>>()?;
        Ok(Self {
            target_dir: path(&metadata["target_directory"])?,
            packages,
            root,
        })
    }

    /// The names of the clone's crates.
    pub fn members(&self) -> impl Iterator<Item = &str> {
        self.packages.iter().map(|package| package.name.as_str())
    }

    /// The guests below one folder of the clone, sorted by path.
    pub(crate) fn guests_in(&self, folder: &str) -> Vec<&Package> {
        let mut guests: Vec<_> = self
            .packages
            .iter()
            .filter(|package| package.is_guest && package.dir.starts_with(folder))
            .collect();
        guests.sort_by(|a, b| a.dir.cmp(&b.dir));
        guests
    }

    /// A cargo command in the root of the clone.
    pub fn cargo(&self, subcommand: &str) -> Command {
        let mut command = cargo();
        command.arg(subcommand).current_dir(&self.root);
        command
    }

    /// Builds the `rouse` binary, and returns its path.
    pub fn build_rouse(&self) -> Result<PathBuf> {
        self.build_program("rouse")
    }

    /// Builds a program of the clone, and returns its path.
    ///
    /// Selects the whole workspace, so that dependencies are built with the same features as for the tests.
    pub fn build_program(&self, name: &str) -> Result<PathBuf> {
        self.build_program_as(name, "dev")
    }

    /// Like [`Self::build_program`], with a profile of Cargo.toml.
    pub fn build_program_as(&self, name: &str, profile: &str) -> Result<PathBuf> {
        let mut command = self.cargo("build");
        command.args(["--workspace", "--bin", name, "--profile", profile]);
        let artifacts = build(command)?;
        artifacts
            .into_iter()
            .filter_map(|artifact| artifact.executable)
            .find(|file| file.file_stem().is_some_and(|stem| stem == name))
            .with_context(|| format!("cargo built no binary `{name}`"))
    }
}

impl Package {
    fn read(package: &Value, root: &Path) -> Result<Self> {
        let manifest = path(&package["manifest_path"])?;
        let dir = manifest.parent().unwrap_or(root);
        let is_guest = package["targets"]
            .as_array()
            .into_iter()
            .flatten()
            .any(|target| {
                target["kind"]
                    .as_array()
                    .is_some_and(|kinds| kinds.iter().any(|kind| kind == "cdylib"))
            });
        Ok(Self {
            name: package["name"]
                .as_str()
                .context("a package has no name")?
                .to_owned(),
            dir: dir.strip_prefix(root).unwrap_or(dir).to_owned(),
            is_guest,
        })
    }
}

/// Runs a `cargo build` to its end, and returns its artifacts.
pub(crate) fn build(mut command: Command) -> Result<Vec<Artifact>> {
    command
        .arg("--message-format=json-render-diagnostics")
        .stderr(Stdio::inherit());
    let output = command.output().context("start cargo build")?;
    if !output.status.success() {
        bail!("the build failed: {}", command_line(&command));
    }
    let mut artifacts = Vec::new();
    for line in output.stdout.split(|byte| *byte == b'\n') {
        // Build scripts may print other lines.
        let Ok(message) = serde_json::from_slice::<Value>(line) else {
            continue;
        };
        if message["reason"] == "compiler-artifact" {
            artifacts.push(Artifact {
                files: message["filenames"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .filter_map(|file| file.as_str().map(PathBuf::from))
                    .collect(),
                executable: message["executable"].as_str().map(PathBuf::from),
            });
        }
    }
    Ok(artifacts)
}

/// A command as a user would type it.
pub fn command_line(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let mut line = program
        .file_name()
        .unwrap_or(program.as_os_str())
        .to_string_lossy()
        .into_owned();
    for argument in command.get_args() {
        line.push(' ');
        line.push_str(&argument.to_string_lossy());
    }
    line
}

/// A cargo command without the variables that `cargo run` sets for this package. Build scripts that watch these
/// variables, such as ring's, would rerun whenever `cargo xtask` and plain cargo alternate.
fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") {
            command.env_remove(name.as_ref());
        }
    }
    command
}

fn path(value: &Value) -> Result<PathBuf> {
    value
        .as_str()
        .map(PathBuf::from)
        .context("cargo metadata lacks a path")
}
