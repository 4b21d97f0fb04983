//! How long something was, for people.

use std::time::Duration;

/// Whole seconds are enough for people.
pub(super) fn seconds(secs: f64) -> String {
    let whole = Duration::try_from_secs_f64(secs.max(0.0).floor()).unwrap_or_default();
    humantime::format_duration(whole).to_string()
}
