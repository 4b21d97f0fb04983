//! Files of an attempt that must stop, and missing directories.

use std::time::Duration;

use rouse::job::{AbortReason, RunEnd};
use rouse::sandbox::{AbortHandle, BootTime};
use tokio::time::timeout;

use crate::sandbox_guest::{
    Handlers, TIMEOUT, echo, granted_dir, guest_of_wasip1, job, manifest, sandbox,
};
use crate::support::attempt;

#[tokio::test]
async fn a_missing_granted_directory_is_named() {
    let handlers = Handlers::with(&[("lost.wasm", &echo("test.lost", "1"))]).await;
    let run = attempt(
        &sandbox(),
        &handlers.handler("test.lost"),
        job("1"),
        AbortHandle::new(),
    )
    .await;
    let RunEnd::Unrunnable(why) = run.end else {
        panic!("expected an unrunnable handler, got {:?}", run.end);
    };
    assert!(why.contains("nowhere") && why.contains("/data"), "{why}");
}

#[tokio::test]
async fn an_attempt_changes_no_file_after_its_abort() {
    // Opens `kept`, writes `a`, and waits; then writes `b` and makes the directory `late`.
    let imports = r#"
        (import "wasi_snapshot_preview1" "path_open" (func $path_open
            (param i32 i32 i32 i32 i32 i64 i64 i32 i32) (result i32)))
        (import "wasi_snapshot_preview1" "fd_write" (func $fd_write
            (param i32 i32 i32 i32) (result i32)))
        (import "wasi_snapshot_preview1" "path_create_directory" (func $path_create_directory
            (param i32 i32 i32) (result i32)))"#;
    let body = r#"
        (i32.store (i32.const 300) (i32.const 0x7470656b)) ;; "kept"
        (i32.store (i32.const 304) (i32.const 0x6574616c)) ;; "late"
        (i32.store (i32.const 308) (i32.const 0x6261)) ;; "ab"
        (if (call $path_open (i32.const 3) (i32.const 0) (i32.const 300) (i32.const 4)
                (i32.const 1) (i64.const 64) (i64.const 0) (i32.const 0) (i32.const 340))
            (then unreachable))
        (i32.store (i32.const 320) (i32.const 308))
        (i32.store (i32.const 324) (i32.const 1))
        (if (call $fd_write (i32.load (i32.const 340)) (i32.const 320) (i32.const 1) (i32.const 344))
            (then unreachable))
        (call $wait_for_abort)
        (i32.store (i32.const 320) (i32.const 309))
        (drop (call $fd_write (i32.load (i32.const 340)) (i32.const 320) (i32.const 1) (i32.const 344)))
        (drop (call $path_create_directory (i32.const 3) (i32.const 304) (i32.const 4)))
        (call $return_ok (local.get $payload) (local.get $payload_len))"#;
    let guest = guest_of_wasip1(imports, &manifest("test.files", "1"), body);
    let handlers = Handlers::with(&[("files.wasm", &guest)]).await;
    let abort = AbortHandle::new();
    let running = attempt(
        &sandbox(),
        &handlers.handler("test.files"),
        job("1"),
        abort.clone(),
    );
    let kept = granted_dir().join("kept");
    while std::fs::read_to_string(&kept).ok().as_deref() != Some("a") {
        assert!(!running.is_finished(), "{:?}", running.await);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }

    let grace = Duration::from_secs(3600);
    abort.abort(AbortReason::TakenByAnotherWorker, grace);
    let run = timeout(TIMEOUT, running).await;
    let run = run.expect("the attempt ends on its own");
    assert_eq!(run.end, RunEnd::Aborted(AbortReason::TakenByAnotherWorker));
    assert_eq!(std::fs::read_to_string(&kept).unwrap(), "a");
    assert!(!granted_dir().join("late").exists());
}

#[tokio::test]
async fn an_attempt_whose_lease_has_ended_changes_no_file_even_before_its_abort() {
    // Makes the directory `wait`, and the directory `over` as soon as a file `go` exists.
    let imports = r#"
        (import "wasi_snapshot_preview1" "path_open" (func $path_open
            (param i32 i32 i32 i32 i32 i64 i64 i32 i32) (result i32)))
        (import "wasi_snapshot_preview1" "path_create_directory" (func $path_create_directory
            (param i32 i32 i32) (result i32)))"#;
    let body = r#"
        (i32.store (i32.const 300) (i32.const 0x74696177)) ;; "wait"
        (i32.store (i32.const 304) (i32.const 0x7265766f)) ;; "over"
        (i32.store (i32.const 308) (i32.const 0x6f67)) ;; "go"
        (if (call $path_create_directory (i32.const 3) (i32.const 300) (i32.const 4))
            (then unreachable))
        (loop $again
            (br_if $again (call $path_open (i32.const 3) (i32.const 0) (i32.const 308) (i32.const 2)
                (i32.const 0) (i64.const 2) (i64.const 0) (i32.const 0) (i32.const 340))))
        (drop (call $path_create_directory (i32.const 3) (i32.const 304) (i32.const 4)))
        (call $return_ok (local.get $payload) (local.get $payload_len))"#;
    let guest = guest_of_wasip1(imports, &manifest("test.frozen", "1"), body);
    let handlers = Handlers::with(&[("frozen.wasm", &guest)]).await;
    let abort = AbortHandle::new();
    abort.trust_until(
        BootTime::now().plus(Duration::from_secs(3600)),
        Duration::from_secs(5),
    );
    let running = attempt(
        &sandbox(),
        &handlers.handler("test.frozen"),
        job("1"),
        abort.clone(),
    );
    while !granted_dir().join("wait").exists() {
        assert!(!running.is_finished(), "{:?}", running.await);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }

    // After a freeze, the lease has ended, and the host has not noticed yet.
    abort.trust_until(BootTime::now(), Duration::from_secs(5));
    std::fs::write(granted_dir().join("go"), "").unwrap();
    let run = running.await;
    assert_eq!(run.end, RunEnd::Aborted(AbortReason::Error));
    assert!(!granted_dir().join("over").exists());
}
