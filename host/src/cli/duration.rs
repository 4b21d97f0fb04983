//! Times on the command line.

use std::time::Duration;

/// Reads `90s` or `2h`; the error shows how a time is written.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|error| format!("it is no time such as 90s or 2h: {error}"))
}
