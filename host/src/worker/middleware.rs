//! Middlewares: what happens around each attempt, from the outside in and back out again.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::SystemTime;

use metrics::Gauge;
use tracing::Instrument as _;

use super::waits::Waits;
use crate::job::{Attempt, JobId, RunEnd};
use crate::sandbox::Run;

/// An attempt that goes on.
pub type Running<'a> = Pin<Box<dyn Future<Output = Run> + Send + 'a>>;

/// Something around each attempt: it is called before the sandbox, awaits what is [`Next`], and has the
/// [`Run`] in its hands before anything is decided about the job.
///
/// Middlewares nest in the order in which they are listed in [`Parts::middlewares`](super::Parts::middlewares), the first
/// one outermost; Rouse's own, for traces and metrics, are around all of them. The run timeout and the abort signal act on the
/// sandbox, inside of everything. One that calls [`Next::instead`] decides how the attempt ends without a
/// guest; one that panics loses the attempt, as if its host had died. They run on the threads for guests, so they must not
/// block; and the lease is renewed as long as they take, so one that never ends keeps its slot.
///
/// ```
/// use rouse::worker::{AttemptInfo, Middleware, Next, Running};
///
/// /// Says which attempts have used much memory.
/// struct Greedy;
///
/// impl Middleware for Greedy {
///     fn around<'a>(&'a self, attempt: &'a AttemptInfo<'a>, next: Next<'a>) -> Running<'a> {
///         Box::pin(async move {
///             let run = next.run().await;
///             if run.used.is_some_and(|used| used.memory_bytes_peak > 64 << 20) {
///                 eprintln!("{} of job {} is greedy", attempt.handler, attempt.id);
///             }
///             run
///         })
///     }
/// }
/// ```
pub trait Middleware: Send + Sync {
    /// Runs the attempt, or does not.
    fn around<'a>(&'a self, attempt: &'a AttemptInfo<'a>, next: Next<'a>) -> Running<'a>;
}

/// What a middleware is told of an attempt. Times are by the database's clock.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct AttemptInfo<'a> {
    /// The job.
    pub id: JobId,
    /// The handler that runs, which may be another than the job names.
    pub handler: &'a str,
    /// The queue that the job came from.
    pub queue: &'a str,
    /// Whose job it is.
    pub tenant: Option<&'a str>,
    /// What triggered it.
    pub source: Option<&'a str>,
    /// Which attempt this is: 1 for the first.
    pub attempt: Attempt,
    /// How many may fail.
    pub max_attempts: u32,
    /// When the job was enqueued.
    pub requested_at: SystemTime,
    /// When the job became ready: enqueued, due, or tried again; none: it was taken over from a worker that is gone.
    pub ready_at: Option<SystemTime>,
    /// When this worker claimed it.
    pub claimed_at: SystemTime,
    /// The worker.
    pub worker_id: &'a str,
}

/// The middlewares that are left, with the sandbox behind them.
pub struct Next<'a> {
    left: &'a [Arc<dyn Middleware>],
    attempt: &'a AttemptInfo<'a>,
    sandbox: Running<'a>,
}

impl<'a> Next<'a> {
    pub(super) fn new(
        middlewares: &'a [Arc<dyn Middleware>],
        attempt: &'a AttemptInfo<'a>,
        sandbox: Running<'a>,
    ) -> Self {
        Self {
            left: middlewares,
            attempt,
            sandbox,
        }
    }

    /// Runs the attempt, through the middlewares that are left.
    pub fn run(self) -> Running<'a> {
        match self.left.split_first() {
            None => self.sandbox,
            Some((next, left)) => next.around(self.attempt, Self { left, ..self }),
        }
    }

    /// Ends the attempt like this, without a guest.
    pub fn instead(self, end: RunEnd) -> Run {
        Run::without_guest(end)
    }
}

/// A span around each attempt, so that whatever is logged within it says which one that is.
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

/// Counts the attempts that run, and how long their jobs have waited.
pub(super) struct Metered {
    pub(super) running: Gauge,
    pub(super) waits: Waits,
}

impl Middleware for Metered {
    fn around<'a>(&'a self, attempt: &'a AttemptInfo<'a>, next: Next<'a>) -> Running<'a> {
        Box::pin(async move {
            self.running.increment(1);
            let _decrements = Decrement(&self.running);
            self.waits.record(attempt);
            next.run().await
        })
    }
}

/// Also where the attempt panics.
struct Decrement<'a>(&'a Gauge);

impl Drop for Decrement<'_> {
    fn drop(&mut self) {
        self.0.decrement(1);
    }
}
