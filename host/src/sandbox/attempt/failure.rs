//! Converts the error that a handler returns into a failure.

use std::time::{Duration, SystemTime};

use crate::job::Failure;
use crate::sandbox::bindings::exports::rouse::handler::handlers::Failure as GuestFailure;
use crate::sanitize::{paragraphs, printable};

/// The maximum sizes of an error's kind (a word) and message (a paragraph), which are stored with each attempt.
const KIND_BYTES_MAX: usize = 128;
pub(super) const MESSAGE_BYTES_MAX: usize = 16 << 10;

/// The maximum delay before a retry: a handler that requests a longer one has confused its units.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// The handler's error, truncated to a size that people can read.
pub(in crate::sandbox) fn failed(failure: GuestFailure, details_bytes_max: usize) -> Failure {
    let mut message = paragraphs(&failure.message, MESSAGE_BYTES_MAX);
    let details = failure.details.filter(|details| {
        let fits = details.len() <= details_bytes_max;
        if !fits {
            message += &format!(" (its details of {} bytes are left out)", details.len());
        }
        fits
    });
    Failure {
        kind: printable(&failure.kind, KIND_BYTES_MAX),
        message,
        details,
        permanent: failure.permanent,
        retry_after: failure
            .retry_after_ms
            .map(|ms| Duration::from_millis(ms).min(RETRY_AFTER_MAX)),
        retry_at: None,
    }
}

/// A time that Postgres can store, at most a year after `now`, the time of the database: this host's clock may be wrong
/// by decades. A time before 1970 is clamped, because it has passed either way.
pub(super) fn retry_at(unix_ms: i64, now: SystemTime) -> SystemTime {
    let latest = now + RETRY_AFTER_MAX;
    let ms = u64::try_from(unix_ms).unwrap_or(0);
    let at = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(ms));
    at.map_or(latest, |at| at.min(latest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure() -> GuestFailure {
        GuestFailure {
            kind: "busy".into(),
            message: "not now".into(),
            details: Some(b"[1]".into()),
            permanent: false,
            retry_after_ms: Some(20),
        }
    }

    #[test]
    fn keep_a_failure_of_ordinary_size() {
        let failed = failed(failure(), 3);
        assert_eq!(
            (failed.kind.as_str(), failed.message.as_str()),
            ("busy", "not now")
        );
        assert_eq!(failed.details.as_deref(), Some(&b"[1]"[..]));
        assert_eq!(failed.retry_after, Some(Duration::from_millis(20)));
    }

    #[test]
    fn escape_control_characters_in_a_failure_and_keep_its_lines() {
        let failed = failed(
            GuestFailure {
                kind: "a\nb\u{9b}".into(),
                message: "one\n\ttwo\r\u{1b}[2J\u{202e}\0".into(),
                ..failure()
            },
            3,
        );
        assert_eq!(failed.kind, "a b\\u{9b}");
        assert_eq!(failed.message, "one\n\ttwo\\u{d}\\u{1b}[2J\\u{202e}\\u{0}");
    }

    #[test]
    fn cut_long_failures() {
        let long = failed(
            GuestFailure {
                kind: "k".repeat(1000),
                message: "ü".repeat(100_000),
                retry_after_ms: Some(u64::MAX),
                ..failure()
            },
            2,
        );
        assert!(long.kind.len() <= KIND_BYTES_MAX + '…'.len_utf8());
        assert!(long.message.starts_with('ü') && long.message.len() < MESSAGE_BYTES_MAX + 100);
        assert!(
            long.message
                .ends_with("(its details of 3 bytes are left out)")
        );
        assert_eq!(long.details, None);
        assert_eq!(long.retry_after, Some(RETRY_AFTER_MAX));
    }

    #[test]
    fn clamp_the_time_of_a_retry_by_the_clock_of_the_database() {
        // A clock that this host's own clock is far behind.
        let now = SystemTime::now() + 100 * RETRY_AFTER_MAX;
        let unix_ms = |time: SystemTime| {
            let since_1970 = time.duration_since(SystemTime::UNIX_EPOCH).unwrap();
            i64::try_from(since_1970.as_millis()).unwrap()
        };
        let in_an_hour = unix_ms(now) + 3_600_000;
        assert_eq!(unix_ms(retry_at(in_an_hour, now)), in_an_hour);
        assert_eq!(retry_at(i64::MAX, now), now + RETRY_AFTER_MAX);
        assert_eq!(retry_at(-1, now), SystemTime::UNIX_EPOCH);
    }
}
