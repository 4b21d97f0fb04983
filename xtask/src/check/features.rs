//! Checks that nothing is compiled twice or unchecked: `cargo xtask` has the features of the builds that it starts, and each of our
//! own crates its settings.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context as _, Result, bail, ensure};
use rouse_workbench::workspace::{self, Workspace};

/// Where features are named for no other reason.
const MANIFEST: &str = "xtask/Cargo.toml";

pub(crate) fn check(workspace: &Workspace) -> Result<()> {
    let of_xtask = crates(workspace, &["--package", "xtask"])?;
    let of_all = crates(workspace, &["--workspace"])?;
    let twice: Vec<_> = of_xtask.difference(&of_all).cloned().collect();
    if !twice.is_empty() {
        bail!(
            "compiled once for xtask and once more for the rest, with other features; add those to {MANIFEST}: {}",
            twice.join(", ")
        );
    }
    let manifest =
        fs::read_to_string(workspace.root.join("Cargo.toml")).context("read Cargo.toml")?;
    let unchecked: Vec<_> = workspace
        .members()
        .filter(|name| !has_checks(&manifest, name))
        .collect();
    if !unchecked.is_empty() {
        bail!(
            "[profile.dev.package] of Cargo.toml does not turn the checks on for {}",
            unchecked.join(", ")
        );
    }
    Ok(())
}

/// Whether the profile of the tests has the assertions of a crate.
fn has_checks(manifest: &str, name: &str) -> bool {
    let start = format!("{name} = {{ ");
    (manifest.lines())
        .filter_map(|line| line.strip_prefix(&start))
        .any(|settings| {
            settings.contains("debug-assertions = true")
                && settings.contains("overflow-checks = true")
        })
}

/// The crates that a build of these packages compiles, each with its features.
fn crates(workspace: &Workspace, packages: &[&str]) -> Result<BTreeSet<String>> {
    let mut command = workspace.cargo("tree");
    command
        .args(packages)
        .args(["--locked", "--edges", "normal,build"])
        .args(["--prefix", "none", "--no-dedupe", "--format", "{p} [{f}]"]);
    let shown = workspace::shown(&command);
    let output = command
        .output()
        .with_context(|| format!("start `{shown}`"))?;
    ensure!(
        output.status.success(),
        "`{shown}` failed: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(read(&String::from_utf8_lossy(&output.stdout)))
}

/// The lines of `cargo tree`. A proc macro is marked, and is the same crate all the same.
fn read(tree: &str) -> BTreeSet<String> {
    tree.lines()
        .filter(|line| !line.is_empty())
        .map(|line| line.replace(" (proc-macro)", ""))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_without_its_checks_is_found() {
        let manifest = "one = { opt-level = 0, debug-assertions = true, overflow-checks = true }\n\
                        two = { opt-level = 3 }\n";
        assert!(has_checks(manifest, "one"));
        assert!(!has_checks(manifest, "two"));
        assert!(!has_checks(manifest, "three"));
    }

    #[test]
    fn a_crate_with_other_features_is_another_one() {
        let one = read("syn v3.0.9 [full]\nserde_derive v1.0.229 (proc-macro) [default]\n\n");
        let other = read("syn v3.0.9 [fold,full]\nserde_derive v1.0.229 [default]\n");
        let difference: Vec<_> = one.difference(&other).collect();
        assert_eq!(difference, ["syn v3.0.9 [full]"]);
    }
}
