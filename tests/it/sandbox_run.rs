//! Each way in which an attempt can end, and each limit that it can hit.

mod files;

use std::time::{Duration, Instant};

use rouse::job::{AbortReason, Failure, RunEnd};
use rouse::sandbox::AbortHandle;
use tokio::time::timeout;

use crate::sandbox_guest::{
    Handlers, MEMORY_BYTES_MAX, RESULT_BYTES_MAX, TIMEOUT, assemble, echo, guest, guest_of_wasip1,
    job, manifest, run, run_with, sandbox,
};
use crate::support::{Progress, attempt, attempt_with, until_quicker_than};

/// A guest that never stops computing.
const SPIN: &str = "(loop $ever (br $ever)) unreachable";

#[tokio::test]
async fn the_result_is_what_the_handler_returns() {
    let handlers = Handlers::with(&[("echo.wasm", &echo("test.echo", "1"))]).await;
    let run = attempt(
        &sandbox(),
        &handlers.handler("test.echo"),
        job("[1,2]"),
        AbortHandle::new(),
    )
    .await;
    assert_eq!(run.end, RunEnd::Returned(b"[1,2]".into()));
    let used = run.used.expect("a guest ran");
    assert!(used.cpu > Duration::ZERO && used.cpu <= run.wall + Duration::from_millis(50));
    assert!(used.memory_bytes_peak >= 4 << 16);
}

#[tokio::test]
async fn a_handlers_error_is_reported_unchanged() {
    let guest = guest(
        r#"{"handlers":[{"name":"test.it"}]}"#,
        "(call $return_error (local.get $payload) (local.get $payload_len) (i32.const 1))",
    );
    let handlers = Handlers::with(&[("guest.wasm", &guest)]).await;
    let run = attempt(
        &sandbox(),
        &handlers.handler("test.it"),
        job("boom"),
        AbortHandle::new(),
    )
    .await;
    assert_eq!(
        run.end,
        RunEnd::Failed(Failure {
            kind: "boom".into(),
            message: "boom".into(),
            details: None,
            permanent: true,
            retry_after: Some(Duration::from_millis(1500)),
            retry_at: None,
        })
    );
}

#[tokio::test]
async fn a_trap_is_reported_with_its_cause_and_a_backtrace() {
    let RunEnd::Trapped {
        message,
        backtrace,
        stderr,
    } = run("unreachable").await.end
    else {
        panic!("a trap");
    };
    assert!(message.contains("unreachable"), "{message}");
    assert!(backtrace[0].contains("run"), "{backtrace:?}");
    assert!(stderr.is_empty(), "{stderr:?}");
}

/// Imports that a module of wasip1 needs for [`complains`].
const IMPORT_FD_WRITE: &str = r#"(import "wasi_snapshot_preview1" "fd_write" (func $fd_write (param i32 i32 i32 i32) (result i32)))
    (data (i32.const 2048) "Traceback:\nTypeError: no such field\n")"#;

/// Writes two lines to standard error, and traps.
fn complains() -> &'static str {
    "(i32.store (i32.const 320) (i32.const 2048)) (i32.store (i32.const 324) (i32.const 36))
     (drop (call $fd_write (i32.const 2) (i32.const 320) (i32.const 1) (i32.const 344)))
     unreachable"
}

#[tokio::test]
async fn a_trap_is_reported_with_the_last_lines_of_standard_error() {
    let guest = guest_of_wasip1(IMPORT_FD_WRITE, &manifest("test.it", "1"), complains());
    let handlers = Handlers::with(&[("guest.wasm", &guest)]).await;
    let handler = handlers.handler("test.it");
    let run = attempt(&sandbox(), &handler, job("{}"), AbortHandle::new()).await;
    let RunEnd::Trapped { stderr, .. } = run.end else {
        panic!("expected a trap, got {:?}", run.end);
    };
    assert_eq!(stderr, ["Traceback:", "TypeError: no such field"]);
}

#[tokio::test]
async fn a_failing_describe_is_refused_with_standard_error_and_backtrace() {
    let guest = assemble(IMPORT_FD_WRITE, complains(), "", "unreachable");
    let handlers = Handlers::with(&[("guest.wasm", &guest)]).await;
    let why = handlers.refusal("guest.wasm");
    let trailer = "; standard error: Traceback: | TypeError: no such field; backtrace: function ";
    assert!(
        why.starts_with("it failed while it described itself: wasm trap:") && why.contains(trailer),
        "{why}"
    );
}

#[tokio::test]
async fn a_describe_has_32_mib_on_top_of_the_modules_initial_memory() {
    // A runtime that starts with 28 MiB, and needs the same amount for its work.
    let text = manifest("test.it", "1");
    let describe = |mib: u32| {
        format!(
            "(if (i32.eq (i32.const -1) (memory.grow (i32.const {}))) (then unreachable))
             (call $text (i32.const 4096) (i32.const {}))",
            16 * mib,
            text.len()
        )
    };
    let run = "unreachable) (memory 448) (func";
    let fits = assemble("", &describe(30), &text, run);
    let greedy = assemble("", &describe(300), &text, run);
    let handlers = Handlers::with(&[("fits.wasm", &fits), ("greedy.wasm", &greedy)]).await;
    handlers.handler("test.it");
    let why = handlers.refusal("greedy.wasm");
    assert!(
        why.starts_with("it needed more than 88 MiB of memory to describe itself; backtrace: "),
        "{why}"
    );
}

#[tokio::test]
async fn a_panic_is_reported_with_its_message_and_location() {
    let body = r#"
        (i64.store (i32.const 256) (i64.const 0x73646c6f6866)) ;; "fholds"
        (call $panicked (i32.const 256) (i32.const 6) (i32.const 256) (i32.const 3))
        unreachable"#;
    let RunEnd::Panicked {
        message,
        location,
        backtrace,
    } = run(body).await.end
    else {
        panic!("a panic");
    };
    assert_eq!((message.as_str(), location.as_str()), ("fholds", "fho"));
    assert!(!backtrace.is_empty());
}

#[tokio::test]
async fn endless_recursion_is_a_stack_overflow() {
    let run = run("(call $recurse) unreachable").await;
    let RunEnd::StackOverflow { backtrace } = run.end else {
        panic!("expected an overflow, got {:?}", run.end);
    };
    assert!(!backtrace.is_empty());
}

#[tokio::test]
async fn a_guest_that_asks_for_too_much_memory_and_gives_up_is_out_of_memory() {
    let body = "(loop $more (br_if $more (i32.ne (i32.const -1) (memory.grow (i32.const 16)))))
        unreachable";
    let run = run(body).await;
    assert_eq!(
        run.end,
        RunEnd::OutOfMemory {
            limit_bytes: MEMORY_BYTES_MAX
        }
    );
    assert!(run.used.unwrap().memory_bytes_peak <= MEMORY_BYTES_MAX as u64);
}

#[tokio::test]
async fn a_guest_can_recover_from_a_refused_memory_growth() {
    let body = "(if (i32.ne (i32.const -1) (memory.grow (i32.const 60000))) (then unreachable))
        (call $return_ok (local.get $payload) (local.get $payload_len))";
    assert_eq!(run(body).await.end, RunEnd::Returned(b"{}".into()));
    // A trap that comes later, after memory was granted again, has another cause.
    let body = "(drop (memory.grow (i32.const 60000))) (drop (memory.grow (i32.const 1)))
        unreachable";
    assert!(matches!(run(body).await.end, RunEnd::Trapped { .. }));
}

#[tokio::test]
async fn a_result_that_is_too_large_is_reported_with_its_size() {
    let body = |bytes: usize| {
        format!(
            "(drop (memory.grow (i32.const 400))) (call $return_ok (i32.const 0) (i32.const {bytes}))"
        )
    };
    let too_large = |bytes| RunEnd::OutputTooLarge {
        bytes,
        limit_bytes: RESULT_BYTES_MAX,
    };
    let end = run(&body(RESULT_BYTES_MAX)).await.end;
    assert!(matches!(end, RunEnd::Returned(bytes) if bytes.len() == RESULT_BYTES_MAX));
    assert_eq!(
        run(&body(RESULT_BYTES_MAX + 1)).await.end,
        too_large(RESULT_BYTES_MAX + 1)
    );
    // So large that the host refuses to read it: its size is a lower bound.
    assert_eq!(run(&body(20 << 20)).await.end, too_large(8 << 20));
}

#[tokio::test]
async fn a_log_line_that_is_too_large_for_one_call_traps() {
    let body = "(drop (memory.grow (i32.const 400)))
        (call $log (i32.const 2) (i32.const 0) (i32.const 20000000)) unreachable";
    let RunEnd::Trapped { message, .. } = run(body).await.end else {
        panic!("a trap");
    };
    assert!(
        message.contains("too much data to the host in one call (at most 8388608 bytes are allowed: limits.hostcall_bytes"),
        "{message}"
    );
}

#[tokio::test]
async fn a_guest_that_hoards_handles_is_stopped() {
    let body = "(loop $ever (drop (call $abort)) (br $ever)) unreachable";
    let RunEnd::Trapped { message, .. } = run(body).await.end else {
        panic!("a trap");
    };
    assert!(message.contains("limits.resources"), "{message}");
}

#[tokio::test]
async fn a_waiting_guest_receives_the_abort_and_its_result_is_dropped() {
    let abort = AbortHandle::new();
    let body = "(call $wait_for_abort)
        (call $return_ok (local.get $payload) (local.get $payload_len))";
    let running = tokio::spawn({
        let abort = abort.clone();
        async move { run_with(body, abort).await }
    });
    abort.abort(AbortReason::TimedOut, Duration::from_secs(3600));
    let run = timeout(TIMEOUT, running).await;
    let run = run.expect("it does not wait for the grace").unwrap();
    assert_eq!(run.end, RunEnd::Aborted(AbortReason::TimedOut));
}

#[tokio::test]
async fn a_guest_that_keeps_computing_is_stopped_after_its_grace() {
    // Reports that it runs, and never stops computing.
    let computes = format!("(call $progress (i32.const 50) (i32.const 4096) (i32.const 4)) {SPIN}");
    let guest = guest(&manifest("test.it", "1"), &computes);
    let handlers = Handlers::with(&[("guest.wasm", &guest)]).await;
    let handler = handlers.handler("test.it");
    until_quicker_than(Duration::from_secs(5), async || {
        let (abort, progress) = (AbortHandle::new(), Progress::new());
        let running = attempt_with(&sandbox(), &handler, job("1"), abort.clone(), &progress);
        progress.reported(1).await;
        assert!(!running.is_finished());
        let aborted_at = Instant::now();
        abort.abort(AbortReason::Cancelled, Duration::from_millis(200));
        let run = timeout(TIMEOUT, running).await.expect("it is stopped");
        assert_eq!(run.end, RunEnd::Aborted(AbortReason::Cancelled));
        assert!(aborted_at.elapsed() >= Duration::from_millis(200));
        assert!(run.used.unwrap().cpu > Duration::ZERO);
    })
    .await;
}

#[tokio::test]
async fn a_lost_lease_stops_a_waiting_guest_at_once() {
    // The guest waits a second time, forever, for a signal that has already been given.
    let handlers = Handlers::with(&[(
        "guest.wasm",
        &guest(
            &manifest("test.it", "1"),
            "(loop $ever (call $wait_for_abort) (br $ever)) unreachable",
        ),
    )])
    .await;
    let handler = handlers.handler("test.it");
    until_quicker_than(Duration::from_secs(5), async || {
        let abort = AbortHandle::new();
        let running = attempt(&sandbox(), &handler, job("1"), abort.clone());
        abort.abort(AbortReason::TakenByAnotherWorker, Duration::ZERO);
        let run = timeout(TIMEOUT, running).await.expect("it is stopped");
        let lost = RunEnd::Aborted(AbortReason::TakenByAnotherWorker);
        assert_eq!(run.end, lost);
    })
    .await;
}

#[tokio::test]
async fn an_attempt_that_is_aborted_before_it_starts_does_not_run() {
    let abort = AbortHandle::new();
    abort.abort(AbortReason::Shutdown, Duration::ZERO);
    let run = run_with(SPIN, abort).await;
    assert_eq!(run.end, RunEnd::Aborted(AbortReason::Shutdown));
    assert_eq!(run.used, None);
}

#[tokio::test]
async fn computing_guests_share_the_threads_with_other_guests() {
    let handlers = Handlers::with(&[
        ("echo.wasm", &echo("test.echo", "1")),
        ("spin.wasm", &guest(&manifest("test.spin", "1"), SPIN)),
    ])
    .await;
    let abort = AbortHandle::new();
    let spinning: Vec<_> = (0..8)
        .map(|_| {
            attempt(
                &sandbox(),
                &handlers.handler("test.spin"),
                job("1"),
                abort.clone(),
            )
        })
        .collect();
    for _ in 0..5 {
        let run = attempt(
            &sandbox(),
            &handlers.handler("test.echo"),
            job("1"),
            AbortHandle::new(),
        );
        let run = timeout(TIMEOUT, run).await;
        assert_eq!(
            run.expect("it has its share").end,
            RunEnd::Returned(b"1".into())
        );
    }
    abort.abort(AbortReason::Shutdown, Duration::ZERO);
    for spinning in spinning {
        assert_eq!(spinning.await.end, RunEnd::Aborted(AbortReason::Shutdown));
    }
}

#[tokio::test]
async fn dropping_a_run_stops_its_guest() {
    let handlers = Handlers::with(&[("guest.wasm", &guest(&manifest("test.it", "1"), SPIN))]).await;
    let handler = handlers.handler("test.it");
    // More runs than fit at once: if they were not stopped, the later ones would never start.
    for _ in 0..40 {
        let run = attempt(&sandbox(), &handler, job("1"), AbortHandle::new());
        let ended = timeout(Duration::from_millis(20), run).await;
        assert!(ended.is_err());
    }
    let echo = Handlers::with(&[("echo.wasm", &echo("test.echo", "1"))]).await;
    let run = attempt(
        &sandbox(),
        &echo.handler("test.echo"),
        job("1"),
        AbortHandle::new(),
    );
    let run = timeout(TIMEOUT, run).await.expect("room for another run");
    assert_eq!(run.end, RunEnd::Returned(b"1".into()));
}

#[tokio::test]
async fn an_attempt_sees_no_state_of_an_earlier_one() {
    // Checks that everything is in its initial state; then leaves marks everywhere: in a global, in a table, over its
    // data, and in 16 MiB of additional memory, far beyond the part that is cleared in place.
    let own = r#"
        (table $table 9000 20000 funcref)
        (global $mark (mut i32) (i32.const 0))
        (func $all_zero (param $at i32) (param $end i32)
            (loop $next
                (if (i64.ne (i64.load (local.get $at)) (i64.const 0)) (then unreachable))
                (local.set $at (i32.add (local.get $at) (i32.const 8)))
                (br_if $next (i32.lt_u (local.get $at) (local.get $end)))))
        (elem declare func $all_zero)"#;
    let body = r#"
        (if (global.get $mark) (then unreachable))
        (if (i32.ne (memory.size) (i32.const 4)) (then unreachable))
        (if (i32.ne (i32.load (i32.const 4096)) (i32.const 0x6168227b)) (then unreachable)) ;; {"ha
        (call $all_zero (i32.const 8192) (i32.const 131072))
        (call $all_zero (i32.const 135168) (i32.const 262144))
        (if (i32.ne (table.size $table) (i32.const 9000)) (then unreachable))
        (if (i32.eqz (ref.is_null (table.get $table (i32.const 0)))) (then unreachable))
        (if (i32.eqz (ref.is_null (table.get $table (i32.const 8999)))) (then unreachable))
        (if (i32.ne (memory.grow (i32.const 256)) (i32.const 4)) (then unreachable))
        (call $all_zero (i32.const 262144) (i32.const 17039360))
        (if (i32.ne (table.grow $table (ref.func $all_zero) (i32.const 11000)) (i32.const 9000))
            (then unreachable))

        (global.set $mark (i32.const 1))
        (table.fill $table (i32.const 0) (ref.func $all_zero) (i32.const 9000))
        (memory.fill (i32.const 1024) (i32.const 255) (i32.const 17038336))
        (i32.store8 (i32.const 300) (i32.const 0x31)) ;; 1
        (call $return_ok (i32.const 300) (i32.const 1))"#;
    let guest = guest_of_wasip1(own, &manifest("test.marks", "1"), body);
    let handlers = Handlers::with(&[
        ("marks.wasm", &guest),
        ("echo.wasm", &echo("test.echo", "1")),
    ])
    .await;
    // The same place in the pool, again and again; and a place that another module has used.
    for name in ["test.marks", "test.marks", "test.echo"].repeat(10) {
        let run = attempt(
            &sandbox(),
            &handlers.handler(name),
            job("1"),
            AbortHandle::new(),
        );
        assert_eq!(run.await.end, RunEnd::Returned(b"1".into()), "{name}");
    }
}
