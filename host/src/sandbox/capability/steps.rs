//! `rouse:handler/steps`: results that a later attempt gets back instead of doing the work again.

use std::collections::HashMap;
use std::sync::Arc;

use serde::de::IgnoredAny;

use crate::sandbox::bindings::rouse::handler::steps::{Host, StepError};
use crate::sandbox::state::AttemptState;
use crate::sandbox::{AbortHandle, Journal};

/// A loop that makes steps for ever would fill the database.
const STEPS_MAX: usize = 1_000;

/// A step is a word for people.
const NAME_CHARS_MAX: usize = 200;

/// The result of one step, bytes: what the next attempt has to know, not the data itself.
const OUTPUT_BYTES_MAX: usize = 256 << 10;

/// The results of all steps of a job, bytes: a later attempt reads them all before its first step.
const OUTPUTS_BYTES_MAX: usize = 8 << 20;

/// The steps of one attempt.
#[derive(Default)]
pub(in crate::sandbox) struct Steps {
    journal: Option<Arc<dyn Journal>>,
    /// None until the first step begins.
    recorded: Option<HashMap<String, Vec<u8>>>,
    /// Of all results that are recorded.
    bytes: usize,
}

impl Steps {
    /// Steps that are recorded there; none: nowhere, so that each is done.
    pub(in crate::sandbox) fn of(journal: Option<Arc<dyn Journal>>) -> Self {
        Self {
            journal,
            ..Self::default()
        }
    }

    pub(super) fn journal(&self) -> Option<&dyn Journal> {
        self.journal.as_deref()
    }

    async fn recorded(&mut self) -> &mut HashMap<String, Vec<u8>> {
        if self.recorded.is_none() {
            let recorded = match &self.journal {
                Some(journal) => journal.recorded().await,
                None => HashMap::new(),
            };
            self.bytes = recorded.values().map(Vec::len).sum();
            self.recorded = Some(recorded);
        }
        self.recorded.get_or_insert_default()
    }

    async fn begin(&mut self, name: &str) -> Result<Option<Vec<u8>>, StepError> {
        check_name(name)?;
        let recorded = self.recorded().await;
        if let Some(output) = recorded.get(name) {
            return Ok(Some(output.clone()));
        }
        if recorded.len() >= STEPS_MAX {
            return Err(refused(format!("a job has at most {STEPS_MAX} steps")));
        }
        Ok(None)
    }

    async fn complete(&mut self, name: String, output: Vec<u8>) -> Result<(), StepError> {
        if self.begin(&name).await?.is_some() {
            return Err(refused(format!("the step {name} is recorded already")));
        }
        if output.len() > OUTPUT_BYTES_MAX {
            return Err(refused(format!(
                "the result of the step {name} has {} bytes; {OUTPUT_BYTES_MAX} are allowed",
                output.len()
            )));
        }
        if self.bytes + output.len() > OUTPUTS_BYTES_MAX {
            return Err(refused(format!(
                "with the step {name} the results of all steps have more than the {OUTPUTS_BYTES_MAX} bytes that are allowed"
            )));
        }
        if let Err(error) = serde_json::from_slice::<IgnoredAny>(&output) {
            return Err(refused(format!(
                "the result of the step {name} is no JSON: {error}"
            )));
        }
        if let Some(journal) = &self.journal {
            journal.record(&name, &output).await.map_err(refused)?;
        }
        self.bytes += output.len();
        self.recorded().await.insert(name, output);
        Ok(())
    }
}

fn check_name(name: &str) -> Result<(), StepError> {
    let chars = name.chars().count();
    if chars == 0 || chars > NAME_CHARS_MAX || name.chars().any(char::is_control) {
        return Err(refused(format!(
            "the name of a step has 1 to {NAME_CHARS_MAX} printable characters"
        )));
    }
    Ok(())
}

fn refused(why: String) -> StepError {
    StepError::Refused(why)
}

/// What the step says, unless the attempt has to stop before it is done.
async fn unless_aborted<T>(
    abort: AbortHandle,
    step: impl Future<Output = Result<T, StepError>>,
) -> Result<T, StepError> {
    tokio::select! {
        biased;
        () = abort.turned() => Err(StepError::Aborted),
        said = step => said,
    }
}

impl Host for AttemptState {
    async fn begin(
        &mut self,
        name: String,
    ) -> wasmtime::Result<Result<Option<Vec<u8>>, StepError>> {
        let abort = self.abort.clone();
        Ok(unless_aborted(abort, self.steps.begin(&name)).await)
    }

    async fn complete(
        &mut self,
        name: String,
        output: Vec<u8>,
    ) -> wasmtime::Result<Result<(), StepError>> {
        let abort = self.abort.clone();
        Ok(unless_aborted(abort, self.steps.complete(name, output)).await)
    }
}
