//! Attempts on the threads for guests, awaited by a test.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use rouse::sandbox::{AbortHandle, Handler, JobInput, RunReport, Sandbox};
use tokio::task::JoinHandle;

/// Starts an attempt in a separate task, as a worker does. Dropping it stops the guest.
pub(crate) fn attempt(
    sandbox: &Arc<Sandbox>,
    handler: &Arc<Handler>,
    job: JobInput,
    abort: AbortHandle,
) -> Attempting {
    Attempting(
        sandbox
            .guests()
            .spawn(sandbox.run(handler, job, abort, None)),
    )
}

/// A running attempt.
pub(crate) struct Attempting(JoinHandle<RunReport>);

impl Attempting {
    pub(crate) fn is_finished(&self) -> bool {
        self.0.is_finished()
    }
}

impl Future for Attempting {
    type Output = RunReport;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<RunReport> {
        Pin::new(&mut self.0)
            .poll(context)
            .map(|run| run.expect("the attempt does not panic"))
    }
}

impl Drop for Attempting {
    fn drop(&mut self) {
        self.0.abort();
    }
}
