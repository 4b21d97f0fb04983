//! The declaration of the handler that runs. Calls that do not fit it are refused, as on a host.

use super::{MAX_ATTEMPTS, Recorder, TestCtx};
use crate::handler::Definition;
use crate::{Error, GateLimit, Handler, JobInfo, Result, Statement};

/// Why the host refuses these calls of a handler that takes batches, even in an attempt at one job.
pub(super) const NO_STEPS: &str = "a handler that takes batches has no steps, waits or results of other jobs, \
                                   because an attempt may run several jobs";
pub(super) const NO_JOBS: &str =
    "a handler that takes batches cannot enqueue jobs, because an attempt may run several jobs";
pub(super) const NO_EFFECTS: &str =
    "a handler that takes batches has no effects, because an attempt may run several jobs";

impl TestCtx {
    /// The job as this handler sees it.
    pub(super) fn job_of<H: Handler>(&self) -> JobInfo {
        let mut job = self.ctx.job().clone();
        H::DEFINITION.name.clone_into(&mut job.handler);
        let uncounted = self.recorder.uncounted;
        if job.max_attempts == MAX_ATTEMPTS + uncounted {
            job.max_attempts = H::DEFINITION.max_attempts.unwrap_or(MAX_ATTEMPTS) + uncounted;
        }
        job
    }

    /// Calls the handler with a job. During the call, its declaration applies. A result that it returns after the abort
    /// signal is dropped.
    pub(super) fn call_handler<H: Handler>(&self, job: JobInfo, payload: &[u8]) -> Result<Vec<u8>> {
        let outer = self.recorder.handler.replace(Some(H::DEFINITION));
        let _outer = Outer {
            recorder: &self.recorder,
            handler: outer,
        };
        let result = self.ctx.with_job(job, |ctx| H::run(ctx, payload))?;
        self.recorder.unless_aborted()?;
        Ok(result)
    }
}

/// Restores the handler that ran before, including when a wait or a panic unwinds this one.
struct Outer<'a> {
    recorder: &'a Recorder,
    handler: Option<Definition>,
}

impl Drop for Outer<'_> {
    fn drop(&mut self) {
        self.recorder.handler.set(self.handler);
    }
}

impl Recorder {
    /// Refuses a call that an attempt cannot make if the handler takes batches.
    pub(super) fn require_one_job(&self, why: &str, kind: &'static str) -> Result<()> {
        let takes_batches = self.handler.get().is_some_and(|handler| {
            let mut gates = handler.gates.iter();
            gates.any(|gate| matches!(gate.limit, GateLimit::Batch { .. }))
        });
        match takes_batches {
            true => Err(Error::permanent(why).kind(kind)),
            false => Ok(()),
        }
    }

    /// The statement of this name; `None` if the test has called the handler itself: then its statements are unknown.
    pub(super) fn statement(&self, name: &str) -> Result<Option<Statement>> {
        let Some(handler) = self.handler.get() else {
            return Ok(None);
        };
        let declared = handler.statements.iter().find(|it| it.name == name);
        declared.copied().map(Some).ok_or_else(|| {
            let why = format_args!(
                "the manifest of the handler {} declares no statement {name}",
                handler.name
            );
            Error::permanent(why).kind("sql_refused")
        })
    }
}
