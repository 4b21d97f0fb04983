//! Middleware, which wraps each attempt.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::SystemTime;

use tracing::Instrument as _;

use crate::job::{Attempt, JobId, RunEnd};
use crate::sandbox::RunReport;

/// A running attempt.
pub type Running<'a> = Pin<Box<dyn Future<Output = RunReport> + Send + 'a>>;

/// A wrapper around each attempt. It is called before the sandbox, awaits [`Next`], and gets the [`RunReport`] before
/// the outcome of the job is decided.
///
/// Middleware nests in the order of [`Parts::middleware`](super::Parts::middleware), the first one outermost. Rouse's
/// own middleware, for traces and metrics, wraps all of it. The run timeout and the abort signal act on the sandbox,
/// inside all middleware; the time that middleware takes counts neither towards the run timeout nor in
/// [`RunReport::wall`] and the metric `rouse_attempt_seconds`. Middleware that calls [`Next::instead`] decides how the
/// attempt ends, without a guest. If middleware panics, the attempt is lost, as if its host had died. Middleware runs
/// on the guest threads, so it must not block. The lease is renewed while it runs, so middleware that never ends keeps
/// its slot forever, and a host that stops waits for it until a second signal.
///
/// ```
/// use rouse::worker::{AttemptInfo, Middleware, Next, Running};
///
/// /// Reports attempts that use much memory.
/// struct Greedy;
///
/// impl Middleware for Greedy {
///     fn around<'a>(&'a self, attempt: &'a AttemptInfo<'a>, next: Next<'a>) -> Running<'a> {
///         Box::pin(async move {
///             let report = next.run().await;
///             if report.used.is_some_and(|used| used.memory_bytes_peak > 64 << 20) {
///                 eprintln!("{} of job {} is greedy", attempt.handler, attempt.id);
///             }
///             report
///         })
///     }
/// }
/// ```
pub trait Middleware: Send + Sync {
    /// Runs the attempt with [`Next::run`], or ends it with [`Next::instead`].
    fn around<'a>(&'a self, attempt: &'a AttemptInfo<'a>, next: Next<'a>) -> Running<'a>;
}

/// Information about an attempt, for middleware. Times are by the database's clock.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct AttemptInfo<'a> {
    /// The job.
    pub id: JobId,
    /// The handler that runs. It differs from the job's own if the operator has bound the source to another handler.
    pub handler: &'a str,
    /// The job's queue.
    pub queue: &'a str,
    /// The tenant that it belongs to.
    pub tenant: Option<&'a str>,
    /// What triggered it.
    pub source: Option<&'a str>,
    /// The number of this attempt; 1 for the first.
    pub attempt: Attempt,
    /// The maximum number of attempts, including those that do not count, because they are numbered too.
    pub max_attempts: u32,
    /// When the job was enqueued.
    pub requested_at: SystemTime,
    /// When the job became ready: when it was enqueued, or when it or its retry became due. `None` if it was taken over
    /// from another worker.
    pub ready_at: Option<SystemTime>,
    /// When this worker claimed it.
    pub claimed_at: SystemTime,
    /// The worker.
    pub worker_id: &'a str,
}

/// The remaining middleware, with the sandbox inside it.
pub struct Next<'a> {
    left: &'a [Arc<dyn Middleware>],
    attempt: &'a AttemptInfo<'a>,
    sandbox: Running<'a>,
}

impl<'a> Next<'a> {
    pub(super) fn new(
        middleware: &'a [Arc<dyn Middleware>],
        attempt: &'a AttemptInfo<'a>,
        sandbox: Running<'a>,
    ) -> Self {
        Self {
            left: middleware,
            attempt,
            sandbox,
        }
    }

    /// Runs the attempt through the remaining middleware.
    pub fn run(self) -> Running<'a> {
        match self.left.split_first() {
            None => self.sandbox,
            Some((next, left)) => next.around(self.attempt, Self { left, ..self }),
        }
    }

    /// Ends the attempt with this `end`, without a guest.
    pub fn instead(self, end: RunEnd) -> RunReport {
        RunReport::without_guest(end)
    }
}

/// Wraps each attempt in a span, so that log lines within it name the attempt.
pub(super) struct Traced;

impl Middleware for Traced {
    fn around<'a>(&'a self, attempt: &'a AttemptInfo<'a>, next: Next<'a>) -> Running<'a> {
        let span = tracing::debug_span!(
            "attempt",
            job.id = attempt.id.0,
            handler = attempt.handler,
            queue = attempt.queue,
            attempt = attempt.attempt.0,
            worker.id = attempt.worker_id,
        );
        match span.is_disabled() {
            true => next.run(),
            false => Box::pin(next.run().instrument(span)),
        }
    }
}
