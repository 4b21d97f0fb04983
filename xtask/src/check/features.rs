//! Checks that no crate is compiled twice, and that every crate of the workspace is compiled with assertions and
//! overflow checks.
//!
//! No crate is compiled twice if `cargo xtask` selects the same features as the builds that it starts.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context as _, Result, bail, ensure};
use rouse_workbench::workspace::{self, Workspace};

/// The manifest of xtask, which selects features to match the builds of the whole workspace.
const MANIFEST: &str = "xtask/Cargo.toml";

pub(crate) fn check(workspace: &Workspace) -> Result<()> {
    let of_xtask = crates(workspace, &["--package", "xtask"])?;
    let of_all = crates(workspace, &["--workspace"])?;
    let twice: Vec<_> = of_xtask.difference(&of_all).cloned().collect();
    if !twice.is_empty() {
        bail!(
            "xtask and the rest of the workspace compile crates with different features. Add the missing features to {MANIFEST}: {}",
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
            "[profile.dev.package] in Cargo.toml needs debug-assertions = true and overflow-checks = true for {}",
            unchecked.join(", ")
        );
    }
    Ok(())
}

/// Whether the profile of the tests has assertions and overflow checks for a crate.
fn has_checks(manifest: &str, name: &str) -> bool {
    let start = format!("{name} = {{ ");
    (manifest.lines())
        .filter_map(|line| line.strip_prefix(&start))
        .any(|settings| {
            settings.contains("debug-assertions = true")
                && settings.contains("overflow-checks = true")
        })
}

/// The crates that a build of these packages compiles, with their features.
fn crates(workspace: &Workspace, packages: &[&str]) -> Result<BTreeSet<String>> {
    let mut command = workspace.cargo("tree");
    command
        .args(packages)
        .args(["--locked", "--edges", "normal,build"])
        .args(["--prefix", "none", "--no-dedupe", "--format", "{p} [{f}]"]);
    let command_line = workspace::command_line(&command);
    let output = command
        .output()
        .with_context(|| format!("start `{command_line}`"))?;
    ensure!(
        output.status.success(),
        "`{command_line}` failed: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(read(&String::from_utf8_lossy(&output.stdout)))
}

/// The lines of `cargo tree`. The mark of proc macros is removed, because it does not distinguish two builds of a
/// crate.
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
    fn crates_with_different_features_differ() {
        let one = read("syn v3.0.9 [full]\nserde_derive v1.0.229 (proc-macro) [default]\n\n");
        let other = read("syn v3.0.9 [fold,full]\nserde_derive v1.0.229 [default]\n");
        let difference: Vec<_> = one.difference(&other).collect();
        assert_eq!(difference, ["syn v3.0.9 [full]"]);
    }
}
