//! Tests that cannot run on this machine.

/// Prints why a test does not run here. On a laptop it is skipped; in CI it fails.
pub(crate) fn skip(why: &str) {
    let is_ci = std::env::var_os("CI").is_some_and(|ci| ci == "true");
    assert!(!is_ci, "nothing is skipped in CI: {why}");
    eprintln!("SKIPPED: {why}");
}
