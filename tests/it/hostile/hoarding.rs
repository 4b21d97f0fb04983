//! What the host holds for guests is within its memory, also where every slot hoards it.

use std::process::Command;
use std::sync::Arc;

use rouse::job::RunEnd;
use rouse::sandbox::{AbortHandle, Limits, Sandbox, Settings};

use crate::sandbox_guest::{Handlers, assemble_for, echo, job, manifest};
use crate::support::{attempt, rouse_binary};

const SLOTS: usize = 8;

/// Memory of all attempts together: less than one of these guests would have the host hold.
const TOTAL_BYTES: usize = 48 << 20;

/// What the process may need beside: for its own work, and what its allocator keeps.
const BESIDE_BYTES: usize = 48 << 20;

/// Makes a thousand sets of fields, each nearly as large as it may be, and never drops one. `fill` fills one of them: `$fields`
/// is its handle, `$n` a number that counts down to 0 from `count`.
fn hoards(handler: &str, count: u32, fill: &str) -> Vec<u8> {
    let value: String = "v".repeat(1024);
    let imports = format!(
        r#"(import "wasi:http/types@0.2.0" "[constructor]fields" (func $make (result i32)))
           (import "wasi:http/types@0.2.0" "[method]fields.append" (func $append (param i32 i32 i32 i32 i32 i32)))
           (data (i32.const 2048) "x-aa") (data (i32.const 16384) "{value}")"#
    );
    let manifest = manifest(handler, "1");
    let describe = format!(
        "(call $text (i32.const 4096) (i32.const {}))",
        manifest.len()
    );
    let run = format!(
        "(local $fields i32) (local $sets i32) (local $n i32)
         (local.set $sets (i32.const 1000))
         (loop $more
            (local.set $fields (call $make))
            (local.set $n (i32.const {count}))
            (loop $fill
                (local.set $n (i32.sub (local.get $n) (i32.const 1)))
                {fill}
                (br_if $fill (local.get $n)))
            (local.set $sets (i32.sub (local.get $sets) (i32.const 1)))
            (br_if $more (local.get $sets)))
         (call $return_ok (local.get $payload) (local.get $payload_len))"
    );
    let world = "import wasi:http/types@0.2.0;";
    assemble_for(world, &imports, &describe, &manifest, &run)
}

/// A few large fields.
fn hoards_bytes(handler: &str) -> Vec<u8> {
    let fill = "(call $append (local.get $fields) (i32.const 2048) (i32.const 4) (i32.const 16384) (i32.const 1024) (i32.const 2064))";
    hoards(handler, 56, fill)
}

/// Many small ones, which take more room in the host's tables than they have bytes.
fn hoards_fields(handler: &str) -> Vec<u8> {
    let fill = "(i32.store8 (i32.const 2050) (i32.add (i32.const 97) (i32.div_u (local.get $n) (i32.const 25))))
        (i32.store8 (i32.const 2051) (i32.add (i32.const 97) (i32.rem_u (local.get $n) (i32.const 25))))
        (call $append (local.get $fields) (i32.const 2048) (i32.const 4) (i32.const 16384) (i32.const 1) (i32.const 2064))";
    hoards(handler, 600, fill)
}

/// The most memory that this process has had, bytes, and what it has now.
fn memory() -> (usize, usize) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let bytes = |key: &str| {
        let line = status.lines().find(|line| line.starts_with(key)).unwrap();
        line.split_whitespace()
            .nth(1)
            .unwrap()
            .parse::<usize>()
            .unwrap()
            << 10
    };
    (bytes("VmHWM:"), bytes("VmRSS:"))
}

async fn run(sandbox: &Arc<Sandbox>, handlers: &Handlers, handler: &str) -> RunEnd {
    attempt(
        sandbox,
        &handlers.handler(handler),
        job("7"),
        AbortHandle::new(),
    )
    .await
    .end
}

#[tokio::test]
#[ignore = "measures its process: every_slot_may_hoard_and_the_host_stays_within_its_memory runs it in one of its own"]
async fn alone() {
    let sandbox = Sandbox::start(Settings {
        attempts_max: SLOTS,
        memory_bytes_total_max: Some(TOTAL_BYTES),
        limits: Limits {
            memory_bytes: 256 << 20,
            ..Limits::default()
        },
        compiler: Some(rouse_binary()),
        ..Settings::default()
    });
    let sandbox = sandbox.expect("a sandbox");
    let handlers = Handlers::on(
        sandbox.clone(),
        &[
            ("bytes.wasm", &hoards_bytes("test.bytes")),
            ("fields.wasm", &hoards_fields("test.fields")),
            ("echo.wasm", &echo("test.echo", "1")),
        ],
    )
    .await;
    assert_eq!(
        run(&sandbox, &handlers, "test.echo").await,
        RunEnd::Returned(b"7".into())
    );
    std::fs::write("/proc/self/clear_refs", "5").expect("count the most anew");
    let (_, before) = memory();
    for handler in ["test.bytes", "test.fields"] {
        let hoarding = [0; SLOTS].map(|_| {
            attempt(
                &sandbox,
                &handlers.handler(handler),
                job("7"),
                AbortHandle::new(),
            )
        });
        for attempt in hoarding {
            let end = attempt.await.end;
            assert!(
                matches!(&end, RunEnd::Unrunnable(why) if why.contains("used up its memory")),
                "{handler}: {end:?}"
            );
        }
        let (most, _) = memory();
        let grown = most.saturating_sub(before);
        println!("{handler}: {} MiB more", grown >> 20);
        assert!(
            grown <= TOTAL_BYTES + BESIDE_BYTES,
            "{handler}: {} MiB",
            grown >> 20
        );
        // All of it is free again.
        assert!(!sandbox.memory_is_short());
        assert_eq!(
            run(&sandbox, &handlers, "test.echo").await,
            RunEnd::Returned(b"7".into())
        );
    }
}

#[test]
fn every_slot_may_hoard_and_the_host_stays_within_its_memory() {
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args([
            "--exact",
            "hostile::hoarding::alone",
            "--ignored",
            "--nocapture",
        ])
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
