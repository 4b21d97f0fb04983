//! Each abort reason, in each state of a guest: the attempt ends soon after its grace.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use rouse::job::{AbortReason, RunEnd};
use rouse::sandbox::{AbortHandle, Catalog, Handler, Journal, JournalFuture};
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::sandbox_guest::{Handlers, TIMEOUT, guest_of_wasip1, job, manifest, sandbox};
use crate::support::worker::guests_dir;

const REASONS: [AbortReason; 7] = [
    AbortReason::TakenByAnotherWorker,
    AbortReason::AlreadyCompleted,
    AbortReason::NotFound,
    AbortReason::Error,
    AbortReason::TimedOut,
    AbortReason::Cancelled,
    AbortReason::Shutdown,
];

const GRACE: Duration = Duration::from_millis(200);

/// Measured from the end of the grace: two ticks of 10 ms, with a margin for a busy machine.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// Signals the first progress of an attempt. It never responds to the first step.
#[derive(Default)]
struct Hanging(Notify);

impl Journal for Hanging {
    fn recorded(&self) -> JournalFuture<'_, Arc<HashMap<String, rouse::job::RecordedStep>>> {
        self.0.notify_one();
        Box::pin(std::future::pending())
    }

    fn result<'a>(&'a self, _: &'a str) -> JournalFuture<'a, Result<Vec<u8>, String>> {
        Box::pin(std::future::pending())
    }

    fn record<'a>(&'a self, _: &'a str, _: &'a [u8]) -> JournalFuture<'a, Result<(), String>> {
        Box::pin(std::future::pending())
    }

    fn progress(&self, _: u8, _: &str) {
        self.0.notify_one();
    }
}

/// Aborts an attempt for this reason once it reports that it runs; returns how long it took to stop.
async fn stop(handler: &Arc<Handler>, payload: &str, reason: AbortReason) -> Duration {
    let (abort, journal) = (AbortHandle::new(), Arc::new(Hanging::default()));
    let running = sandbox().run(
        handler,
        job(payload),
        abort.clone(),
        Some(journal.clone() as Arc<dyn Journal>),
    );
    let running = sandbox().guests().spawn(running);
    timeout(TIMEOUT, journal.0.notified())
        .await
        .expect("the guest runs");
    let grace = match reason {
        AbortReason::TakenByAnotherWorker => Duration::ZERO,
        _ => GRACE,
    };
    abort.abort(reason, grace);
    let run = timeout(TIMEOUT, running)
        .await
        .expect("the end of the run")
        .unwrap();
    let took = abort.aborted_for().expect("an abort");
    assert_eq!(run.end, RunEnd::Aborted(reason));
    assert!(took < grace + STOP_TIMEOUT, "{reason:?}: {took:?}");
    took
}

/// Stops attempts for every reason, all in parallel. `uses_grace`: guests in this state use up their grace.
async fn stop_for_every_reason(
    state: &str,
    handler: Arc<Handler>,
    payload: &'static str,
    uses_grace: bool,
) {
    let stops = REASONS.map(|reason| {
        let handler = handler.clone();
        tokio::spawn(async move { stop(&handler, payload, reason).await })
    });
    for (reason, stop) in REASONS.into_iter().zip(stops) {
        let took = stop
            .await
            .unwrap_or_else(|error| panic!("{state}: {error}"));
        println!("{state}: {}: {} ms", reason.as_str(), took.as_millis());
        if uses_grace && reason != AbortReason::TakenByAnotherWorker {
            assert!(took >= GRACE, "{state}: the guest used its grace: {took:?}");
        }
    }
}

/// A guest that reports that it runs and then does this forever.
async fn raw(forever: &str) -> (Handlers, Arc<Handler>) {
    let body = format!(
        "(call $progress (i32.const 1) (i32.const 0) (i32.const 0))
         (drop (memory.grow (i32.const 400)))
         (loop $ever {forever} (br $ever)) unreachable"
    );
    let guest = guest_of_wasip1("", &manifest("test.it", "1"), &body);
    let handlers = Handlers::with(&[("guest.wasm", &guest)]).await;
    let handler = handlers.handler("test.it");
    (handlers, handler)
}

#[tokio::test]
async fn a_guest_that_spins_is_stopped() {
    let (_handlers, handler) = raw("").await;
    stop_for_every_reason("spinning", handler, "{}", true).await;
}

#[tokio::test]
async fn a_guest_that_copies_memory_is_stopped() {
    let copy = "(memory.copy (i32.const 200000) (i32.const 8000000) (i32.const 18000000))";
    let (_handlers, handler) = raw(copy).await;
    stop_for_every_reason("in memory.copy", handler, "{}", true).await;
}

#[tokio::test]
async fn a_guest_in_a_loop_of_host_calls_is_stopped() {
    let log = "(call $log (i32.const 2) (i32.const 0) (i32.const 16))";
    let (_handlers, handler) = raw(log).await;
    stop_for_every_reason("logging", handler, "{}", true).await;
}

#[tokio::test]
async fn a_guest_in_a_loop_of_panics_is_stopped() {
    let panic = "(call $panicked (i32.const 0) (i32.const 16) (i32.const 0) (i32.const 16))";
    let (_handlers, handler) = raw(panic).await;
    stop_for_every_reason("panicking", handler, "{}", true).await;
}

#[tokio::test]
async fn a_guest_that_waits_for_its_abort_again_and_again_is_stopped() {
    let (_handlers, handler) = raw("(call $wait_for_abort)").await;
    // The guest hoards pollables until the host ends it, which may be before its grace has expired.
    stop_for_every_reason("waiting for the abort", handler, "{}", false).await;
}

#[tokio::test]
async fn a_guest_whose_start_never_ends_is_stopped() {
    // The start ends while the module is described: then no directory is granted, and there is only the empty `/`.
    let imports = r#"(import "wasi_snapshot_preview1" "fd_prestat_get"
        (func $granted (param i32 i32) (result i32)))"#;
    let body = r#"unreachable)
        (func (export "_initialize")
            (if (i32.eqz (call $granted (i32.const 4) (i32.const 512))) (then
                (call $progress (i32.const 1) (i32.const 0) (i32.const 0))
                (loop $ever (br $ever))))"#;
    let guest = guest_of_wasip1(imports, &manifest("test.files", "1"), body);
    let handlers = Handlers::with(&[("guest.wasm", &guest)]).await;
    let handler = handlers.handler("test.files");
    stop_for_every_reason("starting", handler, "{}", true).await;
}

#[tokio::test]
async fn a_guest_of_rust_that_sleeps_or_waits_for_the_host_is_stopped() {
    let catalog = Catalog::open(sandbox(), guests_dir())
        .await
        .expect("a catalog");
    let set = catalog.current();
    let handler = |name: &str| set.get(name).expect("a served handler").clone();
    // Blocked in a host call; and in a step whose record never gets a response.
    stop_for_every_reason("sleeping", handler("test.ignore-abort"), "{}", true).await;
    let step = r#"{"between": "nothing"}"#;
    stop_for_every_reason("in a step", handler("test.steps"), step, false).await;
}
