//! The error that a caller of `/invoke` or `/jobs` gets instead of a result.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use metrics::counter;
use rouse_display::plural::{choose, counted};
use serde_json::{Value, json};

use crate::invoke::Refusal;

/// The delay before a retry if too many invocations run. A guess, because their durations are unknown.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");

/// The reason why there is no result.
#[derive(Debug)]
pub(super) struct Problem {
    status: StatusCode,
    error: Value,
    /// `None` if the handler has run, or if the call is not an invocation.
    refused: Option<&'static str>,
}

impl Problem {
    /// A refusal, before anything ran.
    pub(super) fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            error: json!({"kind": kind, "message": message.into()}),
            refused: Some(kind),
        }
    }

    /// A refusal of a call that is not an invocation.
    pub(super) fn unrelated(
        status: StatusCode,
        kind: &'static str,
        message: impl Into<String>,
    ) -> Self {
        Self::new(status, kind, message).uncounted()
    }

    /// The same, not counted as a refused invocation.
    pub(super) fn uncounted(self) -> Self {
        let refused = None;
        Self { refused, ..self }
    }

    /// The error of a handler that has run. Such calls are counted elsewhere.
    pub(super) fn of_run(status: StatusCode, error: Value) -> Self {
        let refused = None;
        Self {
            status,
            error,
            refused,
        }
    }

    #[cfg(test)]
    pub(super) fn status(&self) -> StatusCode {
        self.status
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        if let Some(reason) = self.refused {
            counter!("rouse_invocations_refused_total", "reason" => reason).increment(1);
        }
        let body = axum::Json(json!({"error": self.error}));
        let mut response = (self.status, body).into_response();
        let headers = response.headers_mut();
        if self.status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer");
            headers.insert(header::WWW_AUTHENTICATE, scheme);
        }
        if matches!(
            self.status,
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
        ) {
            headers.insert(header::RETRY_AFTER, RETRY_AFTER);
        }
        response
    }
}

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::UnknownHandler(there) => {
                let mut problem = Self::new(
                    StatusCode::NOT_FOUND,
                    "unknown_handler",
                    "this host has no such handler",
                );
                problem.error["handlers"] = json!(there);
                problem
            }
            Refusal::Loading => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "loading",
                "this host has no such handler yet, and is still loading modules",
            ),
            Refusal::Full(max) => Self::new(
                StatusCode::TOO_MANY_REQUESTS,
                "full",
                format!(
                    "{} {} running, which is the limit (`invoke_max`); retry later",
                    counted(max, "invocation"),
                    choose(max, "is", "are")
                ),
            ),
            Refusal::Stopping => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "stopping",
                "this host is stopping",
            ),
        }
    }
}
