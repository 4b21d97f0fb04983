//! Runs invocations on a host: a cap, immediate refusal above it, and an orderly shutdown.

use std::sync::Arc;
use std::time::Duration;

use metrics::{Gauge, counter, gauge, histogram};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

use super::once::{Call, InvokeOutcome, Invoked, once};
use crate::job::{AbortReason, AttemptError, ErrorKind};
use crate::sandbox::{AbortHandle, Catalog, Handler, Sandbox};
use crate::worker::{Overrides, Policy, Stop};

/// Runs up to `max` invocations at once. There is no queue: further calls are refused immediately, so that the caller
/// can try another host in time.
pub struct Invoker {
    sandbox: Arc<Sandbox>,
    catalog: Arc<Catalog>,
    overrides: Overrides,
    max: usize,
    free: Arc<Semaphore>,
    running: TaskTracker,
    stop: Stop,
}

/// The reason why nothing was run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// There is no such handler; the host has these.
    UnknownHandler(Vec<String>),
    /// There is no such handler yet, but modules are still being loaded.
    Loading,
    /// This many are running, which is the cap.
    Full(usize),
    /// The host is stopping.
    Stopping,
}

/// A running invocation. Dropping it aborts the attempt with [`AbortReason::Cancelled`], because the caller no longer
/// waits for the outcome.
#[derive(Debug)]
pub struct Invocation {
    abort: AbortHandle,
    grace: Duration,
    task: JoinHandle<Invoked>,
}

impl Invoker {
    /// Runs at most `max` at once; the sandbox needs that much capacity in addition to everything else it runs. Once
    /// `stop` is set, no invocation starts.
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
            // Its drain deadline must not affect other parts of the host.
            stop: stop.child(),
        }
    }

    /// How many may run at once.
    pub fn max(&self) -> usize {
        self.max
    }

    /// The number of running invocations.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Checks early whether a call would be refused, without starting it.
    ///
    /// # Errors
    /// Those of [`start`](Self::start).
    pub fn check(&self, handler: &str) -> Result<(), Refusal> {
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

    /// Starts a handler at once, or refuses the call.
    ///
    /// # Errors
    /// If there is no such handler, too many invocations run, or the host is stopping.
    pub fn start(&self, handler: &str, call: Call) -> Result<Invocation, Refusal> {
        // Taken before the lookup, so that `end` does not miss an invocation that starts at this moment.
        let _token = self.running.token();
        let handler = self.find(handler)?;
        let Ok(permit) = self.free.clone().try_acquire_owned() else {
            return Err(Refusal::Full(self.max));
        };
        let policy = Policy::resolve(&handler.manifest, &self.overrides);
        let abort = AbortHandle::new();
        let invocation = Running {
            _permit: permit,
            gauge: gauge!("rouse_invocations_running"),
        };
        invocation.gauge.increment(1);
        let (sandbox, stop, grace) = (self.sandbox.clone(), self.stop.clone(), policy.grace);
        let run = {
            let abort = abort.clone();
            async move {
                // The permit is held until the guest has really ended, even if the caller has left.
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

    /// Waits for the stop signal, then for running invocations: up to `timeout`, after which they are aborted with
    /// `shutdown` and waited for.
    pub async fn end(&self, timeout: Duration) {
        self.stop.stopping().await;
        self.running.close();
        tokio::select! {
            () = self.running.wait() => return,
            () = self.stop.aborting() => {}
            () = tokio::time::sleep(timeout) => self.stop.now(),
        }
        warn!(
            running = self.running.len(),
            "stopping invocations that have not finished"
        );
        self.running.wait().await;
    }
}

impl Invocation {
    /// Waits for the outcome.
    pub async fn ended(mut self) -> Invoked {
        match (&mut self.task).await {
            Ok(invoked) => invoked,
            // `Sandbox::run` never panics, and the task is never aborted.
            Err(error) => Invoked {
                outcome: InvokeOutcome::Failed(AttemptError::new(
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
        // If the attempt has ended, this has no effect.
        self.abort.abort(AbortReason::Cancelled, self.grace);
    }
}

/// The resources that a running invocation occupies.
struct Running {
    _permit: OwnedSemaphorePermit,
    gauge: Gauge,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.gauge.decrement(1);
    }
}

fn count(handler: &str, invoked: &Invoked) {
    let outcome = invoked.outcome.word();
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
