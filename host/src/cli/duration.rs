//! Times on the command line.

use std::time::Duration;

/// Reads `90s` or `2h`; the error shows how a time is written.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|error| format!("it is no time such as 90s or 2h: {error}"))
}

/// The same, of something that cannot take no time at all.
pub(super) fn some_time(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err("it must be longer than that, for instance 90s".into()),
        time => Ok(time),
    }
}
