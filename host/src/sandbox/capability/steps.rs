//! `rouse:handler/steps`: results that a later attempt reads instead of doing the work again.

mod recorded;
mod spans;

pub(super) use self::recorded::StepStart;
pub(in crate::sandbox) use self::recorded::Steps;
pub(in crate::sandbox) use self::spans::StepSpans;
pub(super) use self::spans::end_step;
use crate::sandbox::AbortHandle;
use crate::sandbox::attempt::state::AttemptState;
use crate::sandbox::bindings::rouse::handler::steps::{Host, StepError};

/// Runs a step's call, unless the attempt has to stop before it is done.
async fn unless_aborted<T>(
    abort: AbortHandle,
    step: impl Future<Output = Result<T, StepError>>,
) -> Result<T, StepError> {
    tokio::select! {
        biased;
        () = abort.aborted() => Err(StepError::Aborted),
        done = step => done,
    }
}

impl Host for AttemptState {
    async fn start(
        &mut self,
        name: String,
    ) -> wasmtime::Result<Result<Option<Vec<u8>>, StepError>> {
        self.meter.count_host_call();
        let abort = self.abort.clone();
        let started = unless_aborted(abort, self.steps.start(&name)).await;
        if let Ok(None) = started {
            let count_max = self.steps.count_max();
            self.step_spans.start(&self.trace, name, count_max);
        }
        Ok(started)
    }

    async fn complete(
        &mut self,
        name: String,
        output: Vec<u8>,
    ) -> wasmtime::Result<Result<(), StepError>> {
        self.meter.count_host_call();
        let abort = self.abort.clone();
        let span = self.step_spans.take(&name);
        let completed = unless_aborted(abort, self.steps.complete(name, output)).await;
        end_step(span, completed.as_ref().err());
        Ok(completed)
    }
}
