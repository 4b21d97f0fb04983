//! Reused instances: when they serve many jobs, when they never do, and which limits still hold.

use std::fmt::Debug;
use std::fs;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rouse::job::{AbortReason, JobId, RunEnd};
use rouse::sandbox::{AbortHandle, Catalog, Handler, JobInput, RunReport};
use tokio::sync::watch::Sender;
use tokio::time::timeout;
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

use crate::sandbox_guest::{
    Handlers, MEMORY_BYTES_MAX, TIMEOUT, guest_of_wasip1, job, sandbox, version,
};
use crate::support::{attempt, worker::guests_dir};

/// A guest that declares its instances as reusable.
fn counts(handler: &str, version: &str) -> Vec<u8> {
    let manifest = format!(
        r#"{{"handlers":[{{"name":"{handler}","version":"{version}","instances":"reuse"}}]}}"#
    );
    counts_with(&manifest)
}

/// A guest that does what the first letter of the payload stands for, and returns how many jobs its instance has
/// served, up to 9.
fn counts_with(manifest: &str) -> Vec<u8> {
    let own = "(global $served (mut i32) (i32.const 0))";
    let body = r#"
        (local $do i32) (local $lines i32)
        (local.set $do (i32.load8_u (local.get $payload)))
        (if (i32.lt_u (global.get $served) (i32.const 9))
            (then (global.set $served (i32.add (global.get $served) (i32.const 1)))))
        (if (i32.eq (local.get $do) (i32.const 0x74)) (then unreachable)) ;; t: traps
        (if (i32.eq (local.get $do) (i32.const 0x70)) ;; p: panics
            (then (call $panicked (i32.const 256) (i32.const 0) (i32.const 256) (i32.const 0))
                unreachable))
        (if (i32.eq (local.get $do) (i32.const 0x66)) ;; f: fails
            (then (return (call $return_error
                (local.get $payload) (local.get $payload_len) (i32.const 0)))))
        (if (i32.eq (local.get $do) (i32.const 0x77)) ;; w: reports that it waits, and waits
            (then (call $log (i32.const 2) (local.get $payload) (local.get $payload_len))
                (call $wait_for_abort)))
        (if (i32.eq (local.get $do) (i32.const 0x73)) ;; s: reports that it spins, and spins
            (then (call $log (i32.const 2) (local.get $payload) (local.get $payload_len))
                (loop $ever (br $ever))))
        (if (i32.eq (local.get $do) (i32.const 0x68)) (then (drop (call $abort)))) ;; h: holds
        (if (i32.eq (local.get $do) (i32.const 0x6c)) ;; l: large result
            (then (drop (memory.grow (i32.const 40)))
                (return (call $return_ok (i32.const 0) (i32.const 1048577)))))
        (if (i32.eq (local.get $do) (i32.const 0x67)) ;; g: grows by 8 MiB
            (then (if (i32.eq (memory.grow (i32.const 128)) (i32.const -1)) (then unreachable))))
        (if (i32.eq (local.get $do) (i32.const 0x47)) ;; G: grows by 24 MiB
            (then (if (i32.eq (memory.grow (i32.const 384)) (i32.const -1)) (then unreachable))))
        (if (i32.eq (local.get $do) (i32.const 0x6f)) ;; o: logs 400 KiB, beyond the limit of its log
            (then (local.set $lines (i32.const 100))
                (loop $more
                    (call $log (i32.const 2) (i32.const 4096) (i32.const 4096))
                    (br_if $more (local.tee $lines (i32.sub (local.get $lines) (i32.const 1)))))))
        (if (i32.eq (local.get $do) (i32.const 0x6e)) ;; n: logs its payload
            (then (call $log (i32.const 2) (local.get $payload) (local.get $payload_len))))
        (i32.store8 (i32.const 300) (i32.add (i32.const 0x30) (global.get $served)))
        (call $return_ok (i32.const 300) (i32.const 1))"#;
    guest_of_wasip1(own, manifest, body)
}

/// One handler in its own folder, because the tests run in parallel.
async fn load_one(guest: &[u8], name: &str) -> (Handlers, Arc<Handler>) {
    let handlers = Handlers::with(&[("guest.wasm", guest)]).await;
    let handler = handlers.handler(name);
    (handlers, handler)
}

async fn run_for(handler: &Arc<Handler>, tenant: Option<&str>, payload: &str) -> RunReport {
    let job = JobInput {
        tenant: tenant.map(str::to_owned),
        ..job(payload)
    };
    let running = attempt(&sandbox(), handler, job, AbortHandle::new());
    timeout(TIMEOUT, running).await.expect("the run ends")
}

/// Runs a job, and returns how many jobs its instance has served.
async fn served(handler: &Arc<Handler>, tenant: Option<&str>) -> String {
    match run_for(handler, tenant, "c").await.end {
        RunEnd::Returned(count) => String::from_utf8(count).unwrap(),
        end => panic!("expected a count, got {end:?}"),
    }
}

#[tokio::test]
async fn an_instance_serves_many_jobs_only_if_module_and_operator_agree() {
    let (_kept, agreed) = load_one(&counts("test.reuse.agreed", "1"), "test.reuse.agreed").await;
    let (_kept, not_allowed) = load_one(&counts("test.counts", "1"), "test.counts").await;
    let undeclared = counts_with(r#"{"handlers":[{"name":"test.reuse.undeclared"}]}"#);
    let (_kept, undeclared) = load_one(&undeclared, "test.reuse.undeclared").await;
    for count in ["1", "2", "3"] {
        assert_eq!(served(&agreed, None).await, count);
        assert_eq!(served(&not_allowed, None).await, "1");
        assert_eq!(served(&undeclared, None).await, "1");
    }
}

#[tokio::test]
async fn rust_statics_persist_between_jobs_if_the_attribute_allows_reuse() {
    let catalog = Catalog::open(sandbox(), guests_dir()).await.unwrap();
    let handler = catalog.current().get("test.reuse.state").unwrap().clone();
    for count in ["1", "2", "3"] {
        let end = run_for(&handler, None, "null").await.end;
        assert_eq!(end, RunEnd::Returned(count.into()));
    }
}

#[tokio::test]
async fn no_instance_serves_two_tenants() {
    let (_kept, handler) = load_one(&counts("test.reuse.tenants", "1"), "test.reuse.tenants").await;
    for (tenant, count) in [
        (Some("a"), "1"),
        (Some("a"), "2"),
        (Some("b"), "1"),
        (None, "1"),
        (Some(""), "1"),
        (Some("a"), "3"),
        (None, "2"),
        (Some("b"), "2"),
    ] {
        assert_eq!(served(&handler, tenant).await, count, "{tenant:?}");
    }
}

#[tokio::test]
async fn no_instance_serves_two_handlers_of_its_module() {
    let manifest = r#"{"handlers":[{"name":"test.reuse.one","instances":"reuse"},
        {"name":"test.reuse.other","instances":"reuse"}]}"#;
    let (handlers, load_one) = load_one(&counts_with(manifest), "test.reuse.one").await;
    assert_eq!(served(&load_one, None).await, "1");
    let other = handlers.handler("test.reuse.other");
    assert_eq!(served(&other, None).await, "1");
    assert_eq!(served(&load_one, None).await, "2");
}

#[tokio::test]
async fn a_handlers_own_error_keeps_the_instance_and_any_other_failure_discards_it() {
    let (_kept, handler) = load_one(&counts("test.reuse.ends", "1"), "test.reuse.ends").await;
    assert_eq!(served(&handler, None).await, "1");
    let end = run_for(&handler, None, "f").await.end;
    assert!(matches!(end, RunEnd::Failed(_)), "{end:?}");
    assert_eq!(served(&handler, None).await, "3");

    for payload in ["t", "p", "l"] {
        let end = run_for(&handler, None, payload).await.end;
        assert!(
            matches!(
                end,
                RunEnd::Trapped { .. } | RunEnd::Panicked { .. } | RunEnd::OutputTooLarge { .. }
            ),
            "{end:?}"
        );
        assert_eq!(served(&handler, None).await, "1", "after {payload}");
    }
}

#[tokio::test]
async fn an_abort_reaches_and_ends_a_reused_instance() {
    let (_kept, handler) = load_one(&counts("test.reuse.abort", "1"), "test.reuse.abort").await;
    let logged = logged_by_guests();
    // `waits` receives the abort; `spins` keeps computing and is stopped.
    for (payload, grace) in [("waits", TIMEOUT * 10), ("spins", Duration::ZERO)] {
        assert_eq!(served(&handler, None).await, "1");
        assert_eq!(served(&handler, None).await, "2");
        let abort = AbortHandle::new();
        let running = attempt(&sandbox(), &handler, job(payload), abort.clone());
        // The job runs in the existing instance.
        logged.until(|line| line.message == payload).await;
        abort.abort(AbortReason::TimedOut, grace);
        let end = timeout(TIMEOUT, running)
            .await
            .expect("the end of the run")
            .end;
        assert_eq!(end, RunEnd::Aborted(AbortReason::TimedOut));
    }
    assert_eq!(served(&handler, None).await, "1");
}

#[tokio::test]
async fn an_abort_of_an_earlier_job_does_not_reach_a_later_one() {
    let (_kept, handler) = load_one(&counts("test.reuse.late", "1"), "test.reuse.late").await;
    let abort = AbortHandle::new();
    attempt(&sandbox(), &handler, job("c"), abort.clone()).await;
    abort.abort(AbortReason::TakenByAnotherWorker, Duration::ZERO);
    assert_eq!(served(&handler, None).await, "2");
}

#[tokio::test]
async fn an_instance_that_keeps_host_resources_is_not_reused() {
    let (_kept, handler) = load_one(&counts("test.reuse.holds", "1"), "test.reuse.holds").await;
    assert_eq!(served(&handler, None).await, "1");
    let end = run_for(&handler, None, "h").await.end;
    assert_eq!(end, RunEnd::Returned(b"2".into()));
    assert_eq!(served(&handler, None).await, "1");
}

#[tokio::test]
async fn the_memory_of_all_jobs_counts_against_the_limit_of_an_instance() {
    let (_kept, handler) = load_one(&counts("test.reuse.memory", "1"), "test.reuse.memory").await;
    let end = run_for(&handler, None, "g").await.end;
    assert_eq!(end, RunEnd::Returned(b"1".into()));
    let run = run_for(&handler, None, "G").await;
    let limit_bytes = MEMORY_BYTES_MAX;
    assert_eq!(run.end, RunEnd::OutOfMemory { limit_bytes });
    assert!(run.used.unwrap().memory_bytes_peak >= 8 << 20);

    // A fresh instance has enough memory; after that it has grown too large to be kept.
    let end = run_for(&handler, None, "G").await.end;
    assert_eq!(end, RunEnd::Returned(b"1".into()));
    assert_eq!(served(&handler, None).await, "1");
}

#[tokio::test]
async fn an_instance_is_discarded_after_ten_thousand_jobs() {
    let (_kept, handler) = load_one(&counts("test.reuse.many", "1"), "test.reuse.many").await;
    let (sandbox, handler) = (sandbox(), handler.clone());
    let counts = sandbox.clone().guests().spawn(async move {
        let mut counts = Vec::new();
        for _ in 0..10_001 {
            let run = sandbox
                .run(&handler, job("c"), AbortHandle::new(), None)
                .await;
            counts.push(run.end);
        }
        counts
    });
    let counts = counts.await.unwrap();
    assert_eq!(counts[0], RunEnd::Returned(b"1".into()));
    assert_eq!(counts[9_999], RunEnd::Returned(b"9".into()));
    assert_eq!(counts[10_000], RunEnd::Returned(b"1".into()));
}

#[tokio::test]
async fn a_new_version_of_a_module_has_instances_of_its_own() {
    let name = "test.reuse.versions";
    let handlers = Handlers::watched(&[("guest.wasm", &counts(name, "1"))]).await;
    let old = handlers.handler(name);
    assert_eq!(served(&old, None).await, "1");
    assert_eq!(served(&old, None).await, "2");
    handlers.write(".new", &counts(name, "2"));
    fs::rename(handlers.path(".new"), handlers.path("guest.wasm")).unwrap();
    handlers
        .until("version 2 serves", |set| {
            version(set, name).as_deref() == Some("2")
        })
        .await;
    assert_eq!(served(&handlers.handler(name), None).await, "1");
    assert_eq!(
        served(&old, None).await,
        "3",
        "it drains on its own instance"
    );
}

#[tokio::test]
async fn each_job_of_an_instance_has_a_log_of_its_own() {
    let logged = logged_by_guests();
    let (_kept, handler) = load_one(&counts("test.reuse.log", "1"), "test.reuse.log").await;
    for (id, payload) in [(7_001, "o"), (7_002, "nothing is cut here")] {
        let job = JobInput {
            id: JobId(id),
            ..job(payload)
        };
        let run = attempt(&sandbox(), &handler, job, AbortHandle::new()).await;
        assert!(matches!(run.end, RunEnd::Returned(_)), "{:?}", run.end);
    }
    let of = |id| -> Vec<String> {
        let lines = logged.lines.borrow();
        let mine = lines.iter().filter(|line| line.job == Some(id));
        mine.map(|line| line.message.clone()).collect()
    };
    assert!(
        of(7_001)
            .last()
            .is_some_and(|last| last.contains("the limit of its log"))
    );
    assert_eq!(of(7_002), ["nothing is cut here"]);
}

/// One line logged by a guest.
#[derive(Default)]
struct Line {
    job: Option<i64>,
    message: String,
}

impl Visit for Line {
    fn record_i64(&mut self, field: &Field, value: i64) {
        if field.name() == "job.id" {
            self.job = Some(value);
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.message = format!("{value:?}");
        }
    }
}

/// Everything that guests log in the whole test binary: they log on threads of their own.
#[derive(Clone, Default)]
struct Logged {
    lines: Sender<Vec<Line>>,
}

impl Logged {
    /// Waits for such a line.
    async fn until(&self, is_it: impl Fn(&Line) -> bool) {
        let mut lines = self.lines.subscribe();
        let has_come = lines.wait_for(|lines| lines.iter().any(&is_it));
        timeout(TIMEOUT, has_come)
            .await
            .expect("the line comes in time")
            .expect("the sender is here");
    }
}

impl<S: tracing::Subscriber> Layer<S> for Logged {
    fn on_event(&self, event: &tracing::Event<'_>, _context: Context<'_, S>) {
        if event.metadata().target() == "rouse::guest" {
            let mut line = Line::default();
            event.record(&mut line);
            self.lines.send_modify(|lines| lines.push(line));
        }
    }
}

fn logged_by_guests() -> Logged {
    static LOGGED: OnceLock<Logged> = OnceLock::new();
    let logged = LOGGED.get_or_init(|| {
        let logged = Logged::default();
        let subscriber = tracing_subscriber::registry().with(logged.clone());
        tracing::subscriber::set_global_default(subscriber).expect("no other global subscriber");
        logged
    });
    logged.clone()
}
