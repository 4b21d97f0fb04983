//! Responses.

use std::time::Duration;

use serde::de::DeserializeOwned;

use crate::{Error, Result};

/// The maximum length of the excerpt from the body in an error message.
const EXCERPT_CHARS_MAX: usize = 200;

/// A complete response.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Response {
    /// 200, 404 …
    pub status: u16,
    /// Names in lower case, and values. Invalid UTF-8 is replaced.
    pub headers: Vec<(String, String)>,
    /// The response body.
    pub body: Vec<u8>,
    /// True if the body was truncated ([`Request::truncate_response`](super::Request::truncate_response)).
    pub is_truncated: bool,
    /// The URL of the response, after all redirects that were followed, without user name and password.
    pub url: String,
}

impl Response {
    /// A response, for tests.
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body: body.into(),
            is_truncated: false,
            url: String::new(),
        }
    }

    /// Adds a header.
    #[must_use]
    pub fn with_header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers
            .push((name.into().to_ascii_lowercase(), value.into()));
        self
    }

    /// The first value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        let named = |(own, _): &&(String, String)| own.eq_ignore_ascii_case(name);
        let found = self.headers.iter().find(named);
        found.map(|(_, value)| value.as_str())
    }

    /// The body as text.
    ///
    /// # Errors
    /// If it is not valid UTF-8.
    pub fn text(&self) -> Result<&str> {
        Ok(std::str::from_utf8(&self.body)?)
    }

    /// The body, parsed as JSON.
    ///
    /// # Errors
    /// If it is not valid JSON, or does not match `T`.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T> {
        Ok(serde_json::from_slice(&self.body)?)
    }

    /// Returns an error for a status of 400 and above, with a kind such as `http_404`. Errors that may be temporary
    /// (408, 425, 429, 500 and above) are retryable, after the delay or at the date in `retry-after`; all others are
    /// permanent.
    ///
    /// # Errors
    /// For a status of 400 and above.
    pub fn error_for_status(self) -> Result<Self> {
        let status = self.status;
        if status < 400 {
            return Ok(self);
        }
        let text = String::from_utf8_lossy(&self.body);
        let excerpt: String = text.trim().chars().take(EXCERPT_CHARS_MAX).collect();
        let message = format!("{} responded with {status}: {excerpt}", self.url);
        let error = match status {
            408 | 425 | 429 | 500.. => Error::retryable(message),
            _ => Error::permanent(message),
        };
        let error = match self.header("retry-after").map(str::trim) {
            Some(when) if !error.permanent => with_retry_after(error, when),
            Some(_) | None => error,
        };
        Err(error.kind(format!("http_{status}")))
    }
}

/// The error, with the delay or the date in `retry-after` (RFC 9110, 10.2.3). Other values are ignored.
fn with_retry_after(error: Error, when: &str) -> Error {
    if let Ok(seconds) = when.parse() {
        return error.retry_after(Duration::from_secs(seconds));
    }
    match httpdate::parse_http_date(when) {
        Ok(date) => error.retry_at(date),
        Err(_) => error,
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn temporary_errors_are_retryable() {
        assert!(Response::new(302, "").error_for_status().is_ok());
        for (status, permanent) in [(400, true), (404, true), (429, false), (503, false)] {
            let error = Response::new(status, "no").error_for_status().unwrap_err();
            assert_eq!(error.permanent, permanent, "{status}");
            assert_eq!(error.kind, format!("http_{status}"));
        }
        let busy = Response::new(503, "busy").with_header("Retry-After", "7");
        let error = busy.error_for_status().unwrap_err();
        assert_eq!(error.retry_after, Some(Duration::from_secs(7)));
    }

    #[test]
    fn a_date_in_retry_after_is_a_time_and_other_text_is_ignored() {
        let with_header = |when: &str| {
            let busy = Response::new(429, "busy").with_header("retry-after", when);
            let error = busy.error_for_status().unwrap_err();
            (error.retry_after, error.retry_at)
        };
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
        for date in [
            "Sun, 06 Nov 1994 08:49:37 GMT",
            "Sunday, 06-Nov-94 08:49:37 GMT",
            "Sun Nov  6 08:49:37 1994",
        ] {
            assert_eq!(with_header(date), (None, Some(at)), "{date}");
        }
        assert_eq!(with_header("soon"), (None, None));
        assert_eq!(with_header("-1"), (None, None));
        let gone = Response::new(404, "").with_header("retry-after", "7");
        let error = gone.error_for_status().unwrap_err();
        assert!(error.permanent && error.retry_after.is_none());
    }
}
