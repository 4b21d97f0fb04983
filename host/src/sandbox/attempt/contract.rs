//! What a module says of payloads and results, held against both: the one place that every attempt passes, of a job and of an
//! invocation.
//!
//! Most checks take microseconds and are done where the attempt is. Long ones have threads of their own, are only as many at
//! once as the machine has cores, and end with their attempt.

use std::sync::Arc;

use rouse_schema::Schema;

use crate::job::{AbortReason, RunEnd};
use crate::sandbox::{AbortHandle, Handler, Sandbox};

/// What a job has that was enqueued without a payload.
const NO_PAYLOAD: &[u8] = b"{}";

impl Sandbox {
    /// How the attempt ends before it starts: its payload does not fit, or it was told to stop meanwhile.
    pub(in crate::sandbox) async fn unfit_payload(
        &self,
        handler: &Handler,
        payload: &[u8],
        abort: &AbortHandle,
    ) -> Option<RunEnd> {
        let schema = &handler.manifest.input_schema;
        let why = match self.checked(schema, payload, abort).await {
            Ok(fits) => fits.err()?,
            Err(reason) => return Some(RunEnd::Aborted(reason)),
        };
        // A handler that takes nothing says so with `null`.
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

    /// How a run ends that has ended like this: as it did, unless its result does not fit.
    pub(in crate::sandbox) async fn with_fit_result(
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
        let (schema, told) = (schema.clone(), abort.clone());
        let check = async move {
            // Nobody closes the semaphore.
            let permit = checks.acquire_owned().await.ok();
            // Who waits for a thread keeps no copy.
            let text = text.to_vec();
            let check = tokio::task::spawn_blocking(move || {
                let _permit = permit;
                schema.check_while(&text, &|| told.reason().is_some())
            });
            check.await.unwrap_or_else(|_panic| {
                Err("cannot be checked against the schema: the check panicked".into())
            })
        };
        let checked = tokio::select! {
            biased;
            () = abort.turned() => Ok(()),
            checked = check => checked,
        };
        abort.reason().map_or(Ok(checked), Err)
    }
}
