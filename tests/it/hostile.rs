//! Untrusted modules: what guests may try, and what the host guarantees.
//!
//! Each case is a name, a guarantee, and a module in WebAssembly text. All cases run on one host in parallel with a
//! harmless neighbour that runs without pause: each case asserts how it ended, that the neighbour continues, and that
//! it was not slowed down by more than [`SLOWDOWN_MAX`]. `docs/explanation/security.md` describes the other guarantees.

mod boundary;
mod computing;
mod contract;
mod escapes;
mod hoarding;
mod modules;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rouse::job::{
    AbortReason, AttemptError, ErrorKind, Outcome, OwnLimits, RetryPolicy, RunEnd, Tries, decide,
};
use rouse::sandbox::{AbortHandle, Handler};

use crate::sandbox_guest::{Handlers, TIMEOUT, echo, guest_of_wasip1, job, manifest, sandbox};
use crate::sanitize::is_unsafe;
use crate::support::attempt;

/// The factor by which the neighbour's median duration may grow while a hostile guest runs. [`ALWAYS_ALLOWED`] is
/// allowed in any case: a CPU-bound guest yields only at each tick of 10 ms, and the test machines have two cores,
/// shared with other tests.
const SLOWDOWN_MAX: u32 = 20;
const ALWAYS_ALLOWED: Duration = Duration::from_millis(40);

/// A guest that never ends on its own is aborted after this time, without a grace period.
const ABORTED_AFTER: Duration = Duration::from_millis(300);

/// How a hostile guest may end.
pub(super) enum Ends {
    /// A trap whose message contains these words.
    Trap(&'static str),
    /// Any trap.
    AnyTrap,
    Panics,
    /// It computes or waits until it is stopped.
    Stopped,
    OutOfMemory,
    StackOverflow,
    OutputTooLarge,
    /// An error of its own, with no part larger than allowed.
    Failed,
    /// It returns this value: none of its tries had any effect.
    Returns(&'static str),
    /// It returns something that only Postgres can judge
    /// (`outcomes::a_result_that_only_postgres_refuses_fails_alone_too`).
    Carried,
    /// It returns something that is not accepted as a result.
    InvalidResult,
}

/// One attack that a guest may try.
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) guarantee: &'static str,
    pub(super) module: Vec<u8>,
    pub(super) payload: &'static str,
    pub(super) ends: Ends,
}

/// A guest whose `run` has this body.
fn body(name: &'static str, guarantee: &'static str, body: &str, ends: Ends) -> Case {
    with(name, guarantee, "", body, ends)
}

/// Like [`body`], with these items in its module.
fn with(name: &'static str, guarantee: &'static str, items: &str, body: &str, ends: Ends) -> Case {
    Case {
        name,
        guarantee,
        module: guest_of_wasip1(items, &manifest("test.files", "1"), body),
        payload: "{}",
        ends,
    }
}

/// A harmless guest that runs again and again, and the durations of its runs.
struct Neighbour {
    handler: Arc<Handler>,
    stop: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<Vec<Duration>>,
}

impl Neighbour {
    fn start(handler: Arc<Handler>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopping, guest) = (stop.clone(), handler.clone());
        let task = tokio::spawn(async move {
            let mut took = Vec::new();
            while !stopping.load(Ordering::Relaxed) || took.is_empty() {
                let start = Instant::now();
                let run = attempt(&sandbox(), &guest, job("[7]"), AbortHandle::new()).await;
                assert_eq!(
                    run.end,
                    RunEnd::Returned(b"[7]".into()),
                    "the neighbour's result"
                );
                took.push(start.elapsed());
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            took
        });
        Self {
            handler,
            stop,
            task,
        }
    }

    /// The median duration.
    async fn end(self) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        let mut took = self.task.await.expect("the neighbour keeps running");
        took.sort_unstable();
        drop(self.handler);
        took[took.len() / 2]
    }
}

/// The harmless guest, and the median duration of its runs while nothing else runs here.
struct Harmless {
    handler: Arc<Handler>,
    alone: Duration,
    _handlers: Handlers,
}

impl Harmless {
    async fn measure() -> Self {
        let handlers = Handlers::with(&[("harmless.wasm", &echo("test.echo", "1"))]).await;
        let handler = handlers.handler("test.echo");
        let alone = Neighbour::start(handler.clone());
        tokio::time::sleep(Duration::from_millis(200)).await;
        Self {
            handler,
            alone: alone.end().await,
            _handlers: handlers,
        }
    }

    /// Repeats what a hostile guest does, next to the harmless one, until the latter is not slowed down too much: a few
    /// of its runs may be delayed by other tests.
    async fn is_not_slowed_by(&self, name: &str, mut hostile: impl AsyncFnMut()) {
        let until = Instant::now() + TIMEOUT;
        loop {
            let neighbour = Neighbour::start(self.handler.clone());
            hostile().await;
            let (slowed, alone) = (neighbour.end().await, self.alone);
            if slowed <= (alone * SLOWDOWN_MAX).max(ALWAYS_ALLOWED) {
                return;
            }
            assert!(
                Instant::now() < until,
                "{name}: the neighbour took {slowed:?} instead of {alone:?}"
            );
        }
    }
}

/// Runs one case after another, each in parallel with the neighbour.
pub(super) async fn run(cases: Vec<Case>) {
    let harmless = Harmless::measure().await;
    for case in cases {
        println!("{}: {}", case.name, case.guarantee);
        let handlers = Handlers::with(&[("hostile.wasm", &case.module)]).await;
        let handler = handlers.handler("test.files");
        let runs = async || expect(&case, one(&handler, &case).await);
        harmless.is_not_slowed_by(case.name, runs).await;
    }
}

/// Runs one case, and stops it if it never ends on its own.
async fn one(handler: &Arc<Handler>, case: &Case) -> RunEnd {
    let abort = AbortHandle::new();
    let mut running = attempt(&sandbox(), handler, job(case.payload), abort.clone());
    let patience = match case.ends {
        Ends::Stopped => ABORTED_AFTER,
        _ => TIMEOUT,
    };
    match tokio::time::timeout(patience, &mut running).await {
        Ok(run) => run.end,
        Err(_) => {
            abort.abort(AbortReason::TimedOut, Duration::ZERO);
            let stopped = tokio::time::timeout(TIMEOUT, running).await;
            stopped
                .unwrap_or_else(|_| panic!("{}: the guest cannot be stopped", case.name))
                .end
        }
    }
}

fn expect(case: &Case, end: RunEnd) {
    let fits = match (&case.ends, &end) {
        (Ends::Trap(words), RunEnd::Trapped { message, .. }) => message.contains(words),
        (Ends::AnyTrap, RunEnd::Trapped { .. })
        | (Ends::Panics, RunEnd::Panicked { .. })
        | (Ends::Stopped, RunEnd::Aborted(AbortReason::TimedOut))
        | (Ends::OutOfMemory, RunEnd::OutOfMemory { .. })
        | (Ends::StackOverflow, RunEnd::StackOverflow { .. })
        | (Ends::OutputTooLarge, RunEnd::OutputTooLarge { .. }) => true,
        (Ends::Returns(text), RunEnd::Returned(bytes)) => text.as_bytes() == bytes,
        (Ends::InvalidResult | Ends::Carried, RunEnd::Returned(_)) => true,
        (Ends::Failed, RunEnd::Failed(failure)) => {
            failure.message.len() <= 17 << 10 && failure.kind.len() <= 256
        }
        _ => false,
    };
    assert!(fits, "{}: {end:?}", case.name);
    // All text of a guest can be stored and is safe on a terminal.
    let tries = Tries {
        failed: 1,
        max: 1,
        more_memory_bytes: None,
        own: OwnLimits::default(),
    };
    let outcome = decide(end, tries, &RetryPolicy::default(), 0.5);
    let error = outcome.as_ref().ok().and_then(Outcome::error);
    if matches!(case.ends, Ends::InvalidResult) {
        let kind = error.as_ref().map(|error| error.kind);
        assert_eq!(kind, Some(ErrorKind::InvalidResult), "{}", case.name);
    }
    if let Some(details) = error.and_then(|error| error.details.as_ref()) {
        let read: Result<serde_json::Value, _> = serde_json::from_str(&details.0);
        let read = read.unwrap_or_else(|why| panic!("{}: {why}", case.name));
        assert!(!read.to_string().contains("\\u0000"), "{}", case.name);
    }
    for text in error.iter().flat_map(|error| {
        let AttemptError {
            guest_kind,
            message,
            location,
            backtrace,
            ..
        } = error;
        let once = [guest_kind.as_ref(), Some(message), location.as_ref()];
        once.into_iter().flatten().chain(backtrace)
    }) {
        assert!(!text.contains(is_unsafe), "{}: {text:?}", case.name);
    }
}
