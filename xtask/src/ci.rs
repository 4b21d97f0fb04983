//! Tells CI from a developer's machine.

use std::ffi::OsStr;

/// True in CI, which sets `CI=true`: tests that cannot run fail there (tests/it/support/skip.rs), and missing tools are
/// installed.
pub(crate) fn is_ci() -> bool {
    is_set_to_true(std::env::var_os("CI").as_deref())
}

fn is_set_to_true(variable: Option<&OsStr>) -> bool {
    variable.is_some_and(|value| value == "true")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_value_true_means_ci() {
        assert!(is_set_to_true(Some("true".as_ref())));
        for value in ["", "0", "false", "1"] {
            assert!(!is_set_to_true(Some(value.as_ref())), "{value}");
        }
        assert!(!is_set_to_true(None));
    }
}
