//! Attempts on the threads for guests, awaited by a test.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use rouse::job::RecordedStep;
use rouse::sandbox::{AbortHandle, Handler, JobInput, Journal, JournalFuture, RunReport, Sandbox};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::worker::TIMEOUT;

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

/// Like [`attempt`]; the guest's reports of its progress are counted.
pub(crate) fn attempt_with(
    sandbox: &Arc<Sandbox>,
    handler: &Arc<Handler>,
    job: JobInput,
    abort: AbortHandle,
    progress: &Arc<Progress>,
) -> Attempting {
    let journal: Arc<dyn Journal> = progress.clone();
    let run = sandbox.run(handler, job, abort, Some(journal));
    Attempting(sandbox.guests().spawn(run))
}

/// A journal that counts how often attempts report progress. They have no steps.
pub(crate) struct Progress(watch::Sender<usize>);

impl Progress {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self(watch::Sender::new(0)))
    }

    /// Waits until attempts have reported progress this many times.
    pub(crate) async fn reported(&self, times: usize) {
        let mut reports = self.0.subscribe();
        timeout(TIMEOUT, reports.wait_for(|reports| *reports >= times))
            .await
            .expect("the attempts report progress")
            .expect("the sender is in this struct");
    }
}

impl Journal for Progress {
    fn recorded(&self) -> JournalFuture<'_, Arc<HashMap<String, RecordedStep>>> {
        Box::pin(async { Arc::default() })
    }

    fn result<'a>(&'a self, _: &'a str) -> JournalFuture<'a, Result<Vec<u8>, String>> {
        Box::pin(async { Err("no steps".into()) })
    }

    fn record<'a>(&'a self, _: &'a str, _: &'a [u8]) -> JournalFuture<'a, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }

    fn progress(&self, _: u8, _: &str) {
        self.0.send_modify(|reports| *reports += 1);
    }
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
