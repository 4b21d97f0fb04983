//! The host's side of invocations: a cap, immediate refusal above it, and an orderly end.

use std::sync::Arc;
use std::time::Duration;

use metrics::{Gauge, counter, gauge, histogram};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

use super::once::{Answer, Call, Invoked, once};
use crate::job::{AbortReason, AttemptError, ErrorKind};
use crate::sandbox::{AbortHandle, Catalog, Handler, Sandbox};
use crate::worker::{Overrides, Policy, Stop};

/// Runs invocations, up to a number at once. They have no line to wait in: what does not fit is
/// refused, so that whoever asks can go elsewhere while it still matters.
pub struct Invoker {
    sandbox: Arc<Sandbox>,
    catalog: Arc<Catalog>,
    overrides: Overrides,
    max: usize,
    free: Arc<Semaphore>,
    running: TaskTracker,
    stop: Stop,
}

/// Why nothing was run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// There is no such handler; these are there.
    UnknownHandler(Vec<String>),
    /// There is no such handler yet, and modules are still being loaded.
    Loading,
    /// So many run already.
    Full(usize),
    /// The host is stopping.
    Stopping,
}

/// A handler that runs. Dropped, it is told to stop with [`AbortReason::Cancelled`]: nobody waits for
/// the answer any more, which is what the reason says of a job; that it is taken, completed or
/// unknown would be untrue.
#[derive(Debug)]
pub struct Invocation {
    abort: AbortHandle,
    grace: Duration,
    task: JoinHandle<Invoked>,
}

impl Invoker {
    /// At most `max` at once; the sandbox has to have room for them beside what else it runs. Once `stop` says so,
    /// nothing is started any more.
    pub fn new(
        sandbox: Arc<Sandbox>,
        catalog: Arc<Catalog>,
        overrides: Overrides,
        max: usize,
        stop: &Stop,
    ) -> Self {
        Self {
            sandbox,
            catalog,
            overrides,
            max,
            free: Arc::new(Semaphore::new(max)),
            running: TaskTracker::new(),
            // The end of its patience is not that of others.
            stop: stop.child(),
        }
    }

    /// How many may run at once.
    pub fn max(&self) -> usize {
        self.max
    }

    /// Says without starting anything that it would not be started, as far as that is clear already.
    ///
    /// # Errors
    /// Those of [`start`](Self::start).
    pub fn look(&self, handler: &str) -> Result<(), Refusal> {
        self.find(handler)?;
        match self.free.available_permits() {
            0 => Err(Refusal::Full(self.max)),
            _ => Ok(()),
        }
    }

    fn find(&self, handler: &str) -> Result<Arc<Handler>, Refusal> {
        if self.stop.is_stopping() {
            return Err(Refusal::Stopping);
        }
        let handlers = self.catalog.current();
        let found = handlers.get(handler).cloned();
        found.ok_or_else(
            || match handlers.is_loading() || !handlers.slow.is_empty() {
                true => Refusal::Loading,
                false => Refusal::UnknownHandler(handlers.names()),
            },
        )
    }

    /// Starts a handler, now or not at all.
    ///
    /// # Errors
    /// Where there is no such handler, too many run, or the host is stopping.
    pub fn start(&self, handler: &str, call: Call) -> Result<Invocation, Refusal> {
        // Held before the look, so that `end` does not miss what starts at this moment.
        let _starts = self.running.token();
        let handler = self.find(handler)?;
        let Ok(place) = self.free.clone().try_acquire_owned() else {
            return Err(Refusal::Full(self.max));
        };
        let policy = Policy::resolve(&handler.manifest, &self.overrides);
        let abort = AbortHandle::new();
        let invocation = Running {
            _place: place,
            gauge: gauge!("rouse_invocations_running"),
        };
        invocation.gauge.increment(1);
        let (sandbox, stop, grace) = (self.sandbox.clone(), self.stop.clone(), policy.grace);
        let run = {
            let abort = abort.clone();
            async move {
                // Its place is taken until the guest has really ended, whoever still waits for it.
                let _invocation = invocation;
                let mut running =
                    std::pin::pin!(once(&sandbox, &handler, &policy, call, abort.clone()));
                let invoked = tokio::select! {
                    biased;
                    invoked = &mut running => invoked,
                    () = stop.aborting() => {
                        abort.abort(AbortReason::Shutdown, policy.grace);
                        running.await
                    }
                };
                count(&handler.manifest.name, &invoked);
                invoked
            }
        };
        let task = self.running.spawn_on(run, self.sandbox.guests());
        Ok(Invocation { abort, grace, task })
    }

    /// Waits for the stop, then until nothing runs any more: for as long as `patience`, and then for what is told to stop,
    /// with `shutdown`.
    pub async fn end(&self, patience: Duration) {
        self.stop.stopping().await;
        self.running.close();
        tokio::select! {
            () = self.running.wait() => return,
            () = self.stop.aborting() => {}
            () = tokio::time::sleep(patience) => self.stop.now(),
        }
        warn!(
            running = self.running.len(),
            "stopping invocations that have not finished"
        );
        self.running.wait().await;
    }
}

impl Invocation {
    /// Waits for the answer.
    pub async fn ended(mut self) -> Invoked {
        match (&mut self.task).await {
            Ok(invoked) => invoked,
            // `Sandbox::run` never panics, and nobody aborts the task.
            Err(error) => Invoked {
                answer: Answer::Failed(AttemptError::new(
                    ErrorKind::Unrunnable,
                    format!("the host failed while it ran the handler: {error}"),
                )),
                wall: Duration::ZERO,
                used: None,
            },
        }
    }
}

impl Drop for Invocation {
    fn drop(&mut self) {
        // Where it has ended, nobody hears it.
        self.abort.abort(AbortReason::Cancelled, self.grace);
    }
}

/// What an invocation occupies.
struct Running {
    _place: OwnedSemaphorePermit,
    gauge: Gauge,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.gauge.decrement(1);
    }
}

fn count(handler: &str, invoked: &Invoked) {
    let outcome = invoked.answer.word();
    counter!("rouse_invocations_total", "handler" => handler.to_string(), "outcome" => outcome)
        .increment(1);
    histogram!("rouse_invocation_seconds", "handler" => handler.to_string())
        .record(invoked.wall.as_secs_f64());
    debug!(
        handler,
        outcome,
        elapsed_ms = u64::try_from(invoked.wall.as_millis()).unwrap_or(u64::MAX),
        "invocation ended"
    );
}
