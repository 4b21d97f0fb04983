//! `POST /invoke/{handler}`: runs one handler once and responds with its result.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{FromRequest as _, Path, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use serde_json::json;

use super::problem::Problem;
use super::{Access, Pages};
use crate::invoke::{Call, InvokeOutcome, Invoked, Invoker};
use crate::job::ErrorKind;

/// The time in which a caller has to send the body.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// The queue that guests see.
const QUEUE: &str = "default";

/// The parts that invocations over HTTP need.
#[derive(Clone)]
pub struct Invocations {
    /// Runs them.
    pub invoker: Arc<Invoker>,
    /// The callers that may invoke.
    pub access: Access,
    /// The maximum size of a body, in bytes.
    pub payload_bytes_max: usize,
}

impl std::fmt::Debug for Invocations {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Invocations")
            .field("access", &self.access)
            .field("payload_bytes_max", &self.payload_bytes_max)
            .finish_non_exhaustive()
    }
}

/// Runs the handler. If the caller disconnects, this future is dropped, and with it the invocation:
/// the guest gets the abort signal.
pub(super) async fn invoke(
    State(pages): State<Pages>,
    Path(handler): Path<String>,
    request: Request,
) -> Response {
    let Some(invocations) = pages.invocations else {
        return Problem::new(
            StatusCode::FORBIDDEN,
            "off",
            "this host takes no invocations: they need a token, which callers send as `authorization: Bearer TOKEN`; set ROUSE_INVOKE_TOKEN, or invoke_token_file in rouse.toml, and an invoke_max above 0, and restart the host",
        )
        .into_response();
    };
    match respond(&invocations, &handler, request).await {
        Ok(result) => result,
        Err(problem) => problem.into_response(),
    }
}

async fn respond(
    invocations: &Invocations,
    handler: &str,
    request: Request,
) -> Result<Response, Problem> {
    invocations.access.admit(request.headers())?;
    // Do not read the body of a call that cannot run. `start` decides once the payload is there.
    invocations.invoker.check(handler)?;
    let payload = payload(request, invocations.payload_bytes_max, BODY_TIMEOUT).await?;
    let call = Call {
        payload,
        queue: QUEUE.into(),
        tenant: None,
        profile: None,
    };
    let invocation = invocations.invoker.start(handler, call)?;
    response(invocation.ended().await)
}

/// The body, which must be JSON, within the size limit, and must arrive in time.
async fn payload(
    request: Request,
    bytes_max: usize,
    timeout: Duration,
) -> Result<Vec<u8>, Problem> {
    let too_large = || {
        Problem::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "too_large",
            format!("the body is longer than {bytes_max} bytes (`invoke_payload_bytes_max`)"),
        )
    };
    // Refuse before the body is sent if the caller announces its size.
    let announced = request.headers().get(header::CONTENT_LENGTH);
    let announced = announced.and_then(|bytes| bytes.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|bytes| bytes > bytes_max) {
        return Err(too_large());
    }
    // `DefaultBodyLimit` of the route applies if nothing was announced.
    let read = Bytes::from_request(request, &());
    let body = match tokio::time::timeout(timeout, read).await {
        Ok(Ok(body)) => body,
        Ok(Err(error)) if error.status() == StatusCode::PAYLOAD_TOO_LARGE => {
            return Err(too_large());
        }
        Ok(Err(error)) => {
            return Err(Problem::new(
                StatusCode::BAD_REQUEST,
                "broken_body",
                error.body_text(),
            ));
        }
        Err(_) => {
            return Err(Problem::new(
                StatusCode::REQUEST_TIMEOUT,
                "slow_body",
                format!("the body did not arrive within {} s", timeout.as_secs()),
            ));
        }
    };
    let is_json = std::str::from_utf8(&body)
        .map_err(|error| error.to_string())
        .and_then(|text| {
            serde_json::from_str::<serde::de::IgnoredAny>(text).map_err(|error| error.to_string())
        });
    match is_json {
        Ok(_) => Ok(body.into()),
        Err(why) => Err(Problem::new(
            StatusCode::BAD_REQUEST,
            "invalid_payload",
            format!("the body is not JSON: {why}"),
        )),
    }
}

fn response(invoked: Invoked) -> Result<Response, Problem> {
    let (status, error) = match invoked.outcome {
        InvokeOutcome::Succeeded(result) => {
            let kind = [(header::CONTENT_TYPE, "application/json")];
            return Ok((kind, String::from(Box::<str>::from(result))).into_response());
        }
        InvokeOutcome::Failed(error) if error.kind == ErrorKind::Unrunnable => {
            (StatusCode::INTERNAL_SERVER_ERROR, json!(error))
        }
        InvokeOutcome::Failed(error) if error.kind == ErrorKind::InvalidPayload => {
            (StatusCode::BAD_REQUEST, json!(error))
        }
        InvokeOutcome::Failed(error) => (StatusCode::UNPROCESSABLE_ENTITY, json!(error)),
        InvokeOutcome::TimedOut(error) => (StatusCode::GATEWAY_TIMEOUT, json!(error)),
        InvokeOutcome::Stopped(reason) => (
            StatusCode::SERVICE_UNAVAILABLE,
            json!({"kind": reason.as_str(), "message": "this host has stopped the handler"}),
        ),
    };
    Err(Problem::of_run(status, error))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use axum::body::Body;
    use hyper::body::Frame;

    use super::*;
    use crate::job::{AbortReason, AttemptError};

    fn status(outcome: InvokeOutcome) -> u16 {
        let invoked = Invoked {
            outcome,
            wall: Duration::ZERO,
            used: None,
        };
        match response(invoked) {
            Ok(response) => response.status().as_u16(),
            Err(problem) => problem.into_response().status().as_u16(),
        }
    }

    /// A body that never arrives.
    struct Silent;

    impl hyper::body::Body for Silent {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            Poll::Pending
        }
    }

    #[tokio::test]
    async fn a_body_that_does_not_arrive_in_time_is_refused() {
        let request = Request::new(Body::new(Silent));
        let refused = payload(request, 64, Duration::from_millis(1)).await;
        let refused = refused.unwrap_err().into_response();
        assert_eq!(refused.status(), 408);
    }

    #[test]
    fn each_outcome_has_its_status() {
        let error = |kind| AttemptError::new(kind, "why");
        assert_eq!(
            status(InvokeOutcome::Succeeded(
                serde_json::value::to_raw_value(&1).unwrap()
            )),
            200
        );
        for (kind, code) in [
            (ErrorKind::GuestError, 422),
            (ErrorKind::InvalidPayload, 400),
            (ErrorKind::InvalidResult, 422),
            (ErrorKind::Trap, 422),
            (ErrorKind::OutOfMemory, 422),
            (ErrorKind::Unrunnable, 500),
        ] {
            assert_eq!(status(InvokeOutcome::Failed(error(kind))), code, "{kind:?}");
        }
        assert_eq!(
            status(InvokeOutcome::TimedOut(error(ErrorKind::TimedOut))),
            504
        );
        assert_eq!(status(InvokeOutcome::Stopped(AbortReason::Shutdown)), 503);
    }
}
