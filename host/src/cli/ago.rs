//! Human-readable durations and ages.

use std::time::{Duration, UNIX_EPOCH};

use serde_json::Value;

pub(super) use rouse_display::when::{epoch, relative, took};

use super::screen::Screen;
use super::text::plain;

/// A duration in whole seconds, for instance `1m 5s`.
pub(super) fn seconds(secs: f64) -> String {
    let whole = Duration::try_from_secs_f64(secs.max(0.0).floor()).unwrap_or_default();
    humantime::format_duration(whole).to_string()
}

/// Formats a time from the database in a list: relative on a terminal, exact on a pipe.
pub(super) fn listed(time: &Value, now: f64, screen: Screen) -> String {
    let text = time.as_str().unwrap_or_default();
    match epoch(text).filter(|_| screen.is_terminal()) {
        Some(at) => relative(at, now),
        None => plain(text),
    }
}

/// Formats a single time from the database: exact, and on a terminal also relative.
pub(super) fn shown(time: &str, now: f64, screen: Screen) -> String {
    match epoch(time).filter(|_| screen.is_terminal()) {
        Some(at) => format!("{} ({})", plain(time), relative(at, now)),
        None => plain(time),
    }
}

/// The title of the column that shows [`waited`].
pub(super) fn waits(screen: Screen) -> &'static str {
    match screen.is_terminal() {
        true => "oldest waits",
        false => "oldest waits since",
    }
}

/// On a terminal, the time that something has waited; on a pipe, the time at which the wait started.
pub(super) fn waited(secs: f64, now: f64, screen: Screen) -> String {
    match screen.is_terminal() {
        true => seconds(secs),
        false => {
            let since = Duration::try_from_secs_f64(now - secs).unwrap_or_default();
            humantime::format_rfc3339_micros(UNIX_EPOCH + since).to_string()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_gets_exact_times_and_a_terminal_relative_ones() {
        let time = "1970-01-01T00:01:00+00:00";
        let screen = |columns| Screen {
            columns,
            colours: false,
        };
        assert_eq!(listed(&time.into(), 120.0, screen(None)), time);
        assert_eq!(listed(&time.into(), 120.0, screen(Some(80))), "60 s ago");
        assert_eq!(shown(time, 120.0, screen(None)), time);
        assert_eq!(
            shown(time, 120.0, screen(Some(80))),
            format!("{time} (60 s ago)")
        );
        assert_eq!(waited(60.0, 120.0, screen(Some(80))), "1m");
        assert_eq!(
            waited(60.0, 120.0, screen(None)),
            "1970-01-01T00:01:00.000000Z"
        );
        assert_eq!(listed(&Value::Null, 120.0, screen(Some(80))), "");
        assert_eq!(shown("infinity", 120.0, screen(Some(80))), "infinity");
    }
}
