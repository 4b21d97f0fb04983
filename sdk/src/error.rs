//! The error of an attempt, as the handler describes it.

use std::borrow::Cow;
use std::fmt;
use std::time::{Duration, SystemTime};

use serde_json::Value;

/// The result of a handler.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The error of an attempt, as the handler describes it.
///
/// `?` turns any [`std::error::Error`] into a retryable one, with its whole chain of causes as the message. (That is
/// why `Error` itself is not a `std::error::Error`.)
///
/// ```
/// use std::time::{Duration, SystemTime};
/// use rouse_sdk::Error;
///
/// let busy = Error::retryable("the server is busy")
///     .kind("smtp_busy")
///     .retry_after(Duration::from_secs(90));
/// assert!(!busy.permanent);
///
/// let unknown = Error::permanent("no such mailbox").details(serde_json::json!({"code": 550}));
/// assert!(unknown.permanent);
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Error {
    /// A short class; `error` unless the handler sets one.
    pub kind: Cow<'static, str>,
    /// The human-readable message.
    pub message: String,
    /// Further details; stored as JSON with the attempt.
    pub details: Option<Value>,
    /// True: the job fails at once. False: it is retried while it has attempts left.
    pub permanent: bool,
    /// Retry after this delay, instead of the handler's own backoff.
    pub retry_after: Option<Duration>,
    /// Retry at this time, instead of after `retry_after` or the backoff.
    pub retry_at: Option<SystemTime>,
}

impl Error {
    /// An error that may not occur again in the next attempt.
    pub fn retryable(message: impl fmt::Display) -> Self {
        Self {
            kind: Cow::Borrowed("error"),
            message: message.to_string(),
            details: None,
            permanent: false,
            retry_after: None,
            retry_at: None,
        }
    }

    /// An error that every further attempt would repeat.
    pub fn permanent(message: impl fmt::Display) -> Self {
        Self {
            permanent: true,
            ..Self::retryable(message)
        }
    }

    /// Sets the class: a short word to filter by, for instance `smtp_timeout`. It is stored as `guest_kind`, and
    /// `rouse job ls --kind smtp_timeout` finds it. By convention, kinds are in snake_case, and those for invalid
    /// values start with `invalid_`, as in Rouse and its SDK.
    #[must_use]
    pub fn kind(mut self, kind: impl Into<Cow<'static, str>>) -> Self {
        self.kind = kind.into();
        self
    }

    /// Adds further details.
    #[must_use]
    pub fn details(mut self, details: impl Into<Value>) -> Self {
        self.details = Some(details.into());
        self
    }

    /// Requests the next attempt after this time, rounded up to milliseconds; makes the error retryable.
    #[must_use]
    pub fn retry_after(mut self, wait: Duration) -> Self {
        self.permanent = false;
        self.retry_after = Some(wait);
        self.retry_at = None;
        self
    }

    /// Requests the next attempt at this time, rounded up to milliseconds, according to the database's clock; makes the
    /// error retryable. A time in the past means at once; a time more than a year ahead means a year from now.
    #[must_use]
    pub fn retry_at(mut self, time: SystemTime) -> Self {
        self.permanent = false;
        self.retry_after = None;
        self.retry_at = Some(time);
        self
    }

    /// Limits a requested delay or time of the next attempt to this long from now. Use it for delays that a server
    /// requests.
    #[must_use]
    pub fn retry_within(mut self, longest: Duration) -> Self {
        self.retry_after = self.retry_after.map(|wait| wait.min(longest));
        let latest = SystemTime::now().checked_add(longest);
        self.retry_at = self
            .retry_at
            .map(|time| latest.map_or(time, |latest| time.min(latest)));
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl<E: std::error::Error> From<E> for Error {
    fn from(error: E) -> Self {
        let mut message = error.to_string();
        let mut cause = error.source();
        while let Some(inner) = cause {
            let text = inner.to_string();
            // Many errors repeat their cause in their own text; the cause is included only once.
            if !message.contains(&text) {
                message.push_str(": ");
                message.push_str(&text);
            }
            cause = inner.source();
        }
        Self::retryable(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Chained(&'static str, Option<Box<Chained>>);

    impl fmt::Display for Chained {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }

    impl std::error::Error for Chained {
        fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
            self.1.as_deref().map(|inner| inner as _)
        }
    }

    fn parse(text: &str) -> Result<u8> {
        Ok(text.parse::<u8>()?)
    }

    #[test]
    fn a_question_mark_makes_any_error_retryable() {
        let error = parse("x").unwrap_err();
        assert_eq!(error.kind, "error");
        assert_eq!(error.message, "invalid digit found in string");
        assert!(!error.permanent);
        assert_eq!(error.retry_after, None);
    }

    #[test]
    fn the_message_contains_every_cause_once() {
        let inner = Chained("disk full", None);
        let middle = Chained("cannot write: disk full", Some(Box::new(inner)));
        let outer = Chained("no thumbnail", Some(Box::new(middle)));
        assert_eq!(
            Error::from(outer).message,
            "no thumbnail: cannot write: disk full"
        );
    }

    #[test]
    fn requesting_a_later_attempt_makes_an_error_retryable() {
        let error = Error::permanent("no").retry_after(Duration::from_secs(1));
        assert!(!error.permanent);
        assert_eq!(error.retry_after, Some(Duration::from_secs(1)));
        let at = SystemTime::UNIX_EPOCH;
        let error = error.retry_at(at);
        assert_eq!((error.retry_at, error.retry_after), (Some(at), None));
    }

    #[test]
    fn a_requested_delay_is_limited() {
        let hour = Duration::from_secs(3600);
        let after = |wait| {
            Error::retryable("busy")
                .retry_after(wait)
                .retry_within(hour)
        };
        assert_eq!(after(hour / 2).retry_after, Some(hour / 2));
        assert_eq!(after(hour * 9).retry_after, Some(hour));

        let now = SystemTime::now();
        let at = |time| Error::retryable("busy").retry_at(time).retry_within(hour);
        assert_eq!(at(now + hour / 2).retry_at, Some(now + hour / 2));
        let limited = at(now + hour * 9).retry_at.expect("it is still requested");
        assert!((now + hour..now + hour * 2).contains(&limited));

        let error = Error::permanent("no").retry_within(hour);
        assert!(error.permanent && error.retry_after.is_none() && error.retry_at.is_none());
    }
}
