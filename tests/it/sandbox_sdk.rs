//! Guests built with the SDK, in the sandbox.

use std::net::TcpListener;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rouse::job::{AbortReason, Attempt, JobId, RunEnd};
use rouse::sandbox::{
    AbortHandle, Capability, Catalog, DatabaseClock, JobInput, RunReport, Sandbox, Settings,
};
use rouse::traces::AttemptTrace;
use serde_json::{Value, json};
use tokio::sync::OnceCell;
use tokio::time::timeout;

use crate::sandbox_guest::{
    Handlers, MEMORY_BYTES_MAX, TIMEOUT, granted_dir, guest, job, manifest, sandbox, small_settings,
};
use crate::support::{Progress, attempt, attempt_with, until_quicker_than};

/// The folder into which `cargo xtask test` builds the guests.
fn guests(release: &str) -> PathBuf {
    let dir = std::env::var_os("ROUSE_TEST_GUESTS").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/test-guests"),
        PathBuf::from,
    );
    let dir = dir.join(release);
    assert!(
        dir.is_dir(),
        "no guests in {}; run the tests with `cargo xtask test`",
        dir.display()
    );
    dir
}

/// All guests of wasm32-wasip2, compiled once for all tests.
async fn catalog() -> &'static Catalog {
    static CATALOG: OnceCell<Catalog> = OnceCell::const_new();
    CATALOG
        .get_or_init(|| async {
            Catalog::open(sandbox(), guests("p2"))
                .await
                .expect("a catalog")
        })
        .await
}

async fn run_with(handler: &str, payload: Value, abort: AbortHandle) -> RunReport {
    let set = catalog().await.current();
    let handler = set
        .get(handler)
        .unwrap_or_else(|| panic!("{handler}; {:?}", set.refused));
    attempt(&sandbox(), handler, job(&payload.to_string()), abort).await
}

async fn run(handler: &str, payload: Value) -> RunEnd {
    run_with(handler, payload, AbortHandle::new()).await.end
}

/// The handler's result, as JSON.
async fn result(handler: &str, payload: Value) -> Value {
    match run(handler, payload).await {
        RunEnd::Returned(bytes) => serde_json::from_slice(&bytes).expect("JSON"),
        end => panic!("expected a result, got {end:?}"),
    }
}

/// The message of the handler's error.
async fn failure(handler: &str, payload: Value) -> String {
    match run(handler, payload).await {
        RunEnd::Failed(failure) => failure.message,
        RunEnd::Denied { then, .. } => match *then {
            RunEnd::Failed(failure) => failure.message,
            end => panic!("expected a failure, got {end:?}"),
        },
        end => panic!("expected a failure, got {end:?}"),
    }
}

#[tokio::test]
async fn all_guests_are_served_with_their_declared_settings() {
    let set = catalog().await.current();
    assert!(set.refused.is_empty(), "{:?}", set.refused);
    let echo = set.get("test.echo").expect("a served handler");
    assert_eq!(echo.manifest.version, "9.8.7");
    assert_eq!(echo.manifest.lease, Duration::from_secs(20));
    assert_eq!(echo.manifest.capabilities, [Capability::Dirs(None)]);
    assert!(
        set.get("text.stats").is_some_and(|stats| stats
            .manifest
            .input_schema
            .written()
            .starts_with('{'))
    );
}

#[tokio::test]
async fn the_delay_that_an_error_requests_is_rounded_up_to_milliseconds() {
    let RunEnd::Failed(failed) = run("test.fail", json!({"as": "retry-after"})).await else {
        panic!("expected a failure");
    };
    // The handler requests 1,499,001 µs.
    assert_eq!(failed.retry_after, Some(Duration::from_millis(1500)));
}

#[tokio::test]
async fn a_guest_receives_all_properties_of_its_job() {
    let set = catalog().await.current();
    let input = JobInput {
        id: JobId(i64::MAX),
        queue: "mail".into(),
        tenant: Some("acme".into()),
        source: None,
        attempt: Attempt(3),
        max_attempts: 7,
        requested_at_ms: 1_700_000_000_123,
        payload: r#"{"ü":[1,null]}"#.into(),
        payload_checked: None,
        memory_bytes: None,
        clock: DatabaseClock::from_host(),
        trace: AttemptTrace::default(),
    };
    let run = attempt(
        &sandbox(),
        set.get("test.echo").unwrap(),
        input,
        AbortHandle::new(),
    )
    .await;
    let RunEnd::Returned(bytes) = run.end else {
        panic!("expected a result, got {:?}", run.end);
    };
    assert_eq!(
        serde_json::from_slice::<Value>(&bytes).unwrap(),
        json!({
            "payload": {"ü": [1, null]}, "id": i64::MAX, "handler": "test.echo", "queue": "mail",
            "tenant": "acme", "source": null, "attempt": 3, "max_attempts": 7,
            "requested_at_ms": 1_700_000_000_123_i64,
        })
    );
}

#[tokio::test]
async fn a_core_module_of_wasip1_runs_like_a_component_of_wasip2() {
    let p1 = Catalog::open(sandbox(), guests("p1"))
        .await
        .expect("a catalog");
    let p1 = p1.current();
    assert!(p1.refused.is_empty(), "{:?}", p1.refused);
    let handler = p1.get("text.stats").expect("a served handler");
    let payload = json!({"text": "one two two"});
    let run = attempt(
        &sandbox(),
        handler,
        job(&payload.to_string()),
        AbortHandle::new(),
    )
    .await;
    let RunEnd::Returned(bytes) = run.end else {
        panic!("expected a result, got {:?}", run.end);
    };
    let from_p1: Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(from_p1, result("text.stats", payload).await);
}

#[tokio::test]
async fn nothing_is_granted_by_default() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let seen = result("test.env", json!({ "connect_to": address })).await;
    assert_eq!(seen["vars"], json!([]));
    assert_eq!(seen["args"], json!([]));
    assert_eq!(seen["stdin_bytes"], 0);
    for denied in ["root", "here", "passwd", "tcp", "listen", "udp"] {
        assert!(seen[denied]["error"].is_string(), "{denied}: {seen}");
    }
}

#[tokio::test]
async fn a_read_grant_allows_reading_and_not_writing() {
    let read = |path: &str| json!({ "path": path });
    assert_eq!(
        result("test.read-file", read("/data/greeting.txt")).await,
        "hello"
    );
    for out in [
        "/data/../etc/passwd",
        "/data/out/passwd",
        "/etc/passwd",
        "greeting.txt",
    ] {
        failure("test.read-file", read(out)).await;
    }
    let text = json!({ "path": "/data/new.txt", "text": "new" });
    result("test.write-file", text).await;
    assert_eq!(
        std::fs::read_to_string(granted_dir().join("new.txt")).unwrap(),
        "new"
    );
    failure(
        "test.write-file",
        json!({ "path": "/data/out/evil", "text": "x" }),
    )
    .await;
    failure("test.write-file", json!({ "path": "/evil", "text": "x" })).await;
}

#[tokio::test]
async fn a_rust_panic_is_reported_with_its_source_location() {
    let end = run("test.panic", json!({ "message": "the roof is on fire" })).await;
    let RunEnd::Panicked {
        message,
        location,
        backtrace,
    } = end
    else {
        panic!("expected a panic, got {end:?}");
    };
    assert_eq!(message, "the roof is on fire");
    assert!(location.contains("failing.rs:"), "{location}");
    assert!(
        backtrace.iter().any(|frame| frame.contains("failing.rs:")),
        "{backtrace:#?}"
    );
}

#[tokio::test]
async fn a_rust_trap_is_reported_with_its_source_location() {
    let end = run("test.trap", Value::Null).await;
    let RunEnd::Trapped {
        message, backtrace, ..
    } = end
    else {
        panic!("expected a trap, got {end:?}");
    };
    assert!(message.contains("unreachable"), "{message}");
    assert!(
        backtrace.iter().any(|frame| frame.contains("failing.rs:")),
        "{backtrace:#?}"
    );
}

#[tokio::test]
async fn every_attempt_starts_with_fresh_state() {
    for _ in 0..3 {
        assert_eq!(result("test.state", Value::Null).await, 1);
    }
}

#[tokio::test]
async fn a_small_guest_fits_into_the_memory_that_is_cleared_in_place() {
    let run = run_with("noop", json!({"n": 7}), AbortHandle::new()).await;
    assert_eq!(run.end, RunEnd::Returned(br#"{"n":7}"#.into()));
    let used = run.used.unwrap();
    assert!(
        used.memory_bytes_peak <= 256 << 10,
        "{}",
        used.memory_bytes_peak
    );
}

#[test]
fn a_module_imports_only_what_it_calls() {
    // Each import costs each attempt some time.
    let folder = guests("p2");
    let imports = |module: &str, name: &str| {
        let bytes = std::fs::read(folder.join(module)).unwrap();
        bytes.windows(name.len()).any(|at| at == name.as_bytes())
    };
    let interfaces = [
        "rouse:handler/state",
        "rouse:handler/steps",
        "rouse:handler/secrets",
        "rouse:handler/settings",
        "wasi:http/",
        "wasi:random/",
        "wasi:filesystem/",
    ];
    for name in interfaces {
        assert!(!imports("noop.wasm", name), "{name}");
    }
    assert!(imports("noop.wasm", "rouse:handler/context"));
    assert!(imports("http_deliver.wasm", "wasi:http/"));
}

#[tokio::test]
async fn a_rust_guest_that_exhausts_its_memory_is_out_of_memory() {
    assert_eq!(
        run("test.alloc", json!({ "bytes": 1_usize << 30 })).await,
        RunEnd::OutOfMemory {
            limit_bytes: MEMORY_BYTES_MAX
        }
    );
    // The guest returns its own error if it notices the lack of memory.
    let gently = json!({ "bytes": 1_usize << 30, "gently": true });
    assert!(
        failure("test.alloc", gently)
            .await
            .contains("memory allocation failed")
    );
}

#[tokio::test]
async fn a_rust_guest_that_recurses_too_deeply_overflows_its_stack() {
    let end = run("test.recurse", json!({ "depth": 1_000_000 })).await;
    assert!(matches!(end, RunEnd::StackOverflow { .. }), "{end:?}");
}

/// Starts a handler, and aborts its attempt once it has reported progress.
async fn aborted(handler: &str, payload: Value, grace: Duration) -> RunReport {
    let set = catalog().await.current();
    let handler = set.get(handler).expect("a served handler");
    let (abort, progress) = (AbortHandle::new(), Progress::new());
    let job = job(&payload.to_string());
    let running = attempt_with(&sandbox(), handler, job, abort.clone(), &progress);
    progress.reported(1).await;
    abort.abort(AbortReason::Shutdown, grace);
    timeout(TIMEOUT, running).await.expect("it ends")
}

#[tokio::test]
async fn a_guest_that_ignores_the_abort_in_a_host_call_is_stopped_after_its_grace() {
    // The first caller compiles all guests, which takes a while.
    catalog().await;
    let grace = Duration::from_millis(300);
    until_quicker_than(Duration::from_secs(10), async || {
        let started = Instant::now();
        let run = aborted("test.ignore-abort", Value::Null, grace).await;
        assert_eq!(run.end, RunEnd::Aborted(AbortReason::Shutdown));
        assert!(started.elapsed() >= grace);
    })
    .await;
}

#[tokio::test]
async fn a_guest_that_awaits_the_abort_stops_on_its_own() {
    let grace = Duration::from_secs(3600);
    let run = aborted("test.wait-abort", json!({ "log": true }), grace).await;
    assert_eq!(run.end, RunEnd::Aborted(AbortReason::Shutdown));
}

#[tokio::test]
async fn a_sleeping_guest_uses_no_cpu() {
    let run = run_with("test.sleep", json!({ "ms": 300 }), AbortHandle::new()).await;
    assert_eq!(run.end, RunEnd::Returned(b"300".into()));
    assert!(run.wall >= Duration::from_millis(300));
    let cpu = run.used.unwrap().cpu;
    assert!(cpu < Duration::from_millis(100), "{cpu:?}");
}

#[tokio::test]
async fn a_guest_that_prints_without_end_is_not_stopped() {
    let printed = result(
        "test.print",
        json!({ "line": "x".repeat(1000), "times": 2000 }),
    )
    .await;
    assert_eq!(printed, 2000);
}

/// In a sandbox of its own: attempts of other tests would wait for the end of these, and these for theirs.
#[tokio::test]
async fn many_attempts_run_in_parallel() {
    const COUNT: usize = 16;
    let settings = Settings {
        attempts_max: COUNT,
        ..small_settings()
    };
    let sandbox = Sandbox::start(settings).expect("a sandbox");
    let guest = guest(
        &manifest("test.it", "1"),
        "(call $progress (i32.const 50) (i32.const 4096) (i32.const 4))
         (call $wait_for_abort)
         (call $return_ok (local.get $payload) (local.get $payload_len))",
    );
    let handlers = Handlers::on(sandbox.clone(), &[("guest.wasm", &guest)]).await;
    let handler = handlers.handler("test.it");
    let (abort, progress) = (AbortHandle::new(), Progress::new());
    let runs =
        [(); COUNT].map(|()| attempt_with(&sandbox, &handler, job("1"), abort.clone(), &progress));
    // None ends before all have started.
    progress.reported(COUNT).await;
    abort.abort(AbortReason::Shutdown, Duration::from_secs(3600));
    for run in runs {
        let run = timeout(TIMEOUT, run).await.expect("it ends");
        assert_eq!(run.end, RunEnd::Aborted(AbortReason::Shutdown));
    }
}
