//! Checks payloads and results against the handler's schemas, in every attempt at a job and in every invocation.
//!
//! Most checks take microseconds and run in the attempt's task. Long checks run on threads of their own, at most one
//! for each core, and end with their attempt.

use std::sync::Arc;

use rouse_schema::Schema;

use crate::job::{AbortReason, RunEnd};
use crate::sandbox::{AbortHandle, Handler, Sandbox};

/// The payload of a job that was enqueued without one.
const NO_PAYLOAD: &[u8] = b"{}";

impl Sandbox {
    /// Checks the payload. Returns the end of the attempt if it does not match, or if the attempt was aborted during
    /// the check.
    pub async fn refuse_payload(
        &self,
        handler: &Handler,
        payload: &[u8],
        abort: &AbortHandle,
    ) -> Option<RunEnd> {
        let schema = &handler.manifest.input_schema;
        let why = match self.checked(schema, payload, abort).await {
            Ok(matches) => matches.err()?,
            Err(reason) => return Some(RunEnd::Aborted(reason)),
        };
        // A handler without a payload declares `null`.
        if payload.trim_ascii() == NO_PAYLOAD {
            match self.checked(schema, b"null", abort).await {
                Ok(Ok(())) => return None,
                Ok(Err(_)) => {}
                Err(reason) => return Some(RunEnd::Aborted(reason)),
            }
        }
        Some(RunEnd::PayloadRefused(format!(
            "payload {why}; `rouse handlers show {} --schema` shows the input_schema",
            handler.name
        )))
    }

    /// Checks the result of a run. Returns how the run ended, which differs from `end` if the result does not match.
    pub(in crate::sandbox) async fn check_result(
        &self,
        handler: &Handler,
        end: RunEnd,
        abort: &AbortHandle,
    ) -> RunEnd {
        let RunEnd::Returned(result) = &end else {
            return end;
        };
        let schema = &handler.manifest.output_schema;
        match self.checked(schema, result, abort).await {
            Ok(Ok(())) => end,
            Ok(Err(why)) => RunEnd::ResultRefused(format!(
                "result {why}; `rouse handlers show {} --schema` shows the output_schema",
                handler.name
            )),
            Err(reason) => RunEnd::Aborted(reason),
        }
    }

    /// Returns the outcome of a check, or the reason for an abort during the check.
    async fn checked(
        &self,
        schema: &Schema,
        text: &[u8],
        abort: &AbortHandle,
    ) -> Result<Result<(), String>, AbortReason> {
        if let Some(checked) = schema.check_quickly(text) {
            return Ok(checked);
        }
        let checks = Arc::clone(&self.checks);
        let (schema, signal) = (schema.clone(), abort.clone());
        let check = async move {
            // The semaphore is never closed.
            let permit = checks.acquire_owned().await.ok();
            // Copied only now, so that a check that waits for its permit has no copy.
            let text = text.to_vec();
            let check = tokio::task::spawn_blocking(move || {
                let _permit = permit;
                schema.check_while(&text, &|| signal.reason().is_some())
            });
            check.await.unwrap_or_else(|_panic| {
                Err("cannot be checked against the schema: the check panicked".into())
            })
        };
        let checked = tokio::select! {
            biased;
            () = abort.aborted() => Ok(()),
            checked = check => checked,
        };
        abort.reason().map_or(Ok(checked), Err)
    }
}
