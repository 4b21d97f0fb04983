//! `rouse:handler/parents`: the ends of the chains that the job has waited for.

use crate::job::ParentEnd;
use crate::sandbox::attempt::state::AttemptState;
use crate::sandbox::bindings::rouse::handler::parents::{End, Host, Parent, ParentError};

impl Host for AttemptState {
    async fn page(
        &mut self,
        after: Option<String>,
    ) -> wasmtime::Result<Result<Vec<Parent>, ParentError>> {
        self.meter.count_host_call();
        let abort = self.abort.clone();
        let counted = self.steps.require_one_job();
        if let Err(why) = counted.and_then(|()| self.steps.count_calls(1)) {
            return Ok(Err(ParentError::Refused(why)));
        }
        // A handler that is invoked without the queue has not waited for any chain.
        let Some(waits) = self.steps.waits() else {
            return Ok(Ok(Vec::new()));
        };
        let page = tokio::select! {
            biased;
            () = abort.aborted() => return Ok(Err(ParentError::Aborted)),
            page = waits.parents(after.as_deref()) => page,
        };
        let page = page.map(|page| page.into_iter().map(parent).collect());
        Ok(page.map_err(ParentError::Refused))
    }
}

fn parent(end: ParentEnd) -> Parent {
    Parent {
        name: end.name,
        job: end.job.map_or(0, |job| job.0),
        end: match end.state.as_deref() {
            Some("succeeded") => End::Succeeded,
            Some("failed") => End::Failed,
            Some("timed_out") => End::TimedOut,
            Some("cancelled") => End::Cancelled,
            Some(_) | None => End::Deleted,
        },
        output: end.output.map(|output| output.0.into_bytes()),
    }
}
