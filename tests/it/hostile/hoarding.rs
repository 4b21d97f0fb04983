//! The memory that the host holds for guests stays within its limit, even if every slot hoards.

use std::process::Command;
use std::sync::Arc;

use rouse::job::RunEnd;
use rouse::sandbox::{AbortHandle, Instances, JobInput, Limits, Sandbox, Settings};

use crate::sandbox_guest::{Handlers, assemble_for, echo, job};
use crate::support::{attempt, rouse_binary};

const SLOTS: usize = 8;

/// Memory of all attempts together: less than one of these guests would make the host hold.
const TOTAL_BYTES: usize = 48 << 20;

/// Memory that the process may use in addition: for its own work, and for what its allocator keeps.
const OTHER_BYTES_MAX: usize = 48 << 20;

/// The variable that selects the handler that hoards. Each handler runs in a process of its own, since memory kept by
/// the allocator would count for the next.
const HOARDER: &str = "ROUSE_TEST_HOARDER";

/// The imports of these guests from `wasi:http`.
const IMPORTS: &str = r#"
    (import "wasi:http/types@0.2.0" "[constructor]fields" (func $make (result i32)))
    (import "wasi:http/types@0.2.0" "[resource-drop]fields" (func $drop_fields (param i32)))
    (import "wasi:http/types@0.2.0" "[method]fields.append" (func $append (param i32 i32 i32 i32 i32 i32)))
    (import "wasi:http/types@0.2.0" "[constructor]outgoing-request" (func $request (param i32) (result i32)))
    (import "wasi:http/types@0.2.0" "[method]outgoing-request.set-method" (func $set_method (param i32 i32 i32 i32) (result i32)))
    (import "wasi:http/types@0.2.0" "[method]outgoing-request.set-path-with-query" (func $set_path (param i32 i32 i32 i32) (result i32)))
    (import "wasi:http/types@0.2.0" "[method]outgoing-request.set-authority" (func $set_authority (param i32 i32 i32 i32) (result i32)))
    (import "wasi:http/types@0.2.0" "[method]outgoing-request.body" (func $request_body (param i32 i32)))
    (import "wasi:http/types@0.2.0" "[constructor]outgoing-response" (func $response (param i32) (result i32)))
    (import "wasi:http/types@0.2.0" "[method]outgoing-response.body" (func $response_body (param i32 i32)))
    (import "wasi:http/types@0.2.0" "[method]outgoing-body.write" (func $stream (param i32 i32)))
    (import "wasi:io/streams@0.2.0" "[method]output-stream.write" (func $write (param i32 i32 i32 i32)))
    (import "wasi:io/streams@0.2.0" "[resource-drop]output-stream" (func $drop_stream (param i32)))"#;

/// A guest that makes this many sets of fields, one after another, and runs `each` for each; `$fields` is its handle.
fn make_sets(handler: &str, sets: u32, each: &str) -> Vec<u8> {
    let value: String = "v".repeat(1024);
    let imports = format!(
        r#"{IMPORTS}
           (data (i32.const 2048) "x-aa") (data (i32.const 16384) "{value}")"#
    );
    let manifest =
        format!(r#"{{"handlers":[{{"name":"{handler}","version":"1","instances":"reuse"}}]}}"#);
    let describe = format!(
        "(call $text (i32.const 4096) (i32.const {}))",
        manifest.len()
    );
    let run = format!(
        "(local $fields i32) (local $request i32) (local $sets i32) (local $n i32)
         (local.set $sets (i32.const {sets}))
         (loop $more
            (local.set $fields (call $make))
            {each}
            (local.set $sets (i32.sub (local.get $sets) (i32.const 1)))
            (br_if $more (local.get $sets)))
         (call $return_ok (local.get $payload) (local.get $payload_len))"
    );
    let world = "import wasi:http/types@0.2.0; import wasi:io/streams@0.2.0;";
    assemble_for(world, &imports, &describe, &manifest, &run)
}

/// Fills a set of fields; `$n` counts down from `count` to 0.
fn fill_loop(count: u32, fill: &str) -> String {
    format!(
        "(local.set $n (i32.const {count}))
         (loop $fill
            (local.set $n (i32.sub (local.get $n) (i32.const 1)))
            {fill}
            (br_if $fill (local.get $n)))"
    )
}

/// A guest that makes a thousand sets of fields, each nearly as large as allowed, and drops none.
fn hoards(handler: &str, count: u32, fill: &str) -> Vec<u8> {
    make_sets(handler, 1000, &fill_loop(count, fill))
}

/// Appends a field of 1 KiB.
const APPEND_KIB: &str = "(call $append (local.get $fields) (i32.const 2048) (i32.const 4) (i32.const 16384) (i32.const 1024) (i32.const 2064))";

/// A few large fields.
fn hoards_bytes(handler: &str) -> Vec<u8> {
    hoards(handler, 56, APPEND_KIB)
}

/// Many small fields, which take more room in the host's tables than they have bytes.
fn hoards_fields(handler: &str) -> Vec<u8> {
    let fill = "(i32.store8 (i32.const 2050) (i32.add (i32.const 97) (i32.div_u (local.get $n) (i32.const 25))))
        (i32.store8 (i32.const 2051) (i32.add (i32.const 97) (i32.rem_u (local.get $n) (i32.const 25))))
        (call $append (local.get $fields) (i32.const 2048) (i32.const 4) (i32.const 16384) (i32.const 1) (i32.const 2064))";
    hoards(handler, 600, fill)
}

/// A guest that makes a thousand requests, each with a text of 60,000 bytes set by `set`; `$request` is its handle, and
/// the text is at 16385 (at 16384 with a leading slash).
fn hoards_texts(handler: &str, set: &str) -> Vec<u8> {
    let each = format!(
        "(memory.fill (i32.const 16385) (i32.const 0x61) (i32.const 70000))
         (i32.store8 (i32.const 16384) (i32.const 0x2f))
         (local.set $request (call $request (local.get $fields)))
         (if {set} (then unreachable))"
    );
    make_sets(handler, 1000, &each)
}

/// A guest that makes 500 bodies, writes two chunks of 64 KiB into each, and sends none of them.
fn hoards_bodies(handler: &str, of: &str) -> Vec<u8> {
    let each = format!(
        "(call ${of}_body (call ${of} (local.get $fields)) (i32.const 128))
         (if (i32.load8_u (i32.const 128)) (then unreachable))
         (call $stream (i32.load (i32.const 132)) (i32.const 128))
         (if (i32.load8_u (i32.const 128)) (then unreachable))
         (local.set $n (i32.load (i32.const 132)))
         (call $write (local.get $n) (i32.const 16384) (i32.const 65536) (i32.const 128))
         (call $write (local.get $n) (i32.const 16384) (i32.const 65536) (i32.const 128))
         (if (i32.load8_u (i32.const 128)) (then unreachable))
         (call $drop_stream (local.get $n))"
    );
    make_sets(handler, 500, &each)
}

/// The peak memory of this process and its current memory, in bytes.
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
#[ignore = "measures its process: the_host_stays_within_its_memory_even_if_every_slot_hoards runs it in one of its own"]
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
            (
                "method.wasm",
                &hoards_texts(
                    "test.method",
                    "(call $set_method (local.get $request) (i32.const 9) (i32.const 16385) (i32.const 60000))",
                ),
            ),
            (
                "path.wasm",
                &hoards_texts(
                    "test.path",
                    "(call $set_path (local.get $request) (i32.const 1) (i32.const 16384) (i32.const 60000))",
                ),
            ),
            (
                "authority.wasm",
                &hoards_texts(
                    "test.authority",
                    "(call $set_authority (local.get $request) (i32.const 1) (i32.const 16385) (i32.const 60000))",
                ),
            ),
            ("requests.wasm", &hoards_bodies("test.requests", "request")),
            ("responses.wasm", &hoards_bodies("test.responses", "response")),
            ("echo.wasm", &echo("test.echo", "1")),
        ],
    )
    .await;
    assert_eq!(
        run(&sandbox, &handlers, "test.echo").await,
        RunEnd::Returned(b"7".into())
    );
    std::fs::write("/proc/self/clear_refs", "5").expect("reset the peak");
    let (_, before) = memory();
    let hoarder = std::env::var(HOARDER).expect("the name of the hoarder");
    let hoarding = [0; SLOTS].map(|_| {
        attempt(
            &sandbox,
            &handlers.handler(&hoarder),
            job("7"),
            AbortHandle::new(),
        )
    });
    for attempt in hoarding {
        let end = attempt.await.end;
        assert!(
            matches!(&end, RunEnd::Unrunnable(why) if why.contains("used up its memory")),
            "{hoarder}: {end:?}"
        );
    }
    let (peak, _) = memory();
    let grown = peak.saturating_sub(before);
    println!("{hoarder}: {} MiB more", grown >> 20);
    assert!(
        grown <= TOTAL_BYTES + OTHER_BYTES_MAX,
        "{hoarder}: {} MiB",
        grown >> 20
    );
    // All of the memory is free again.
    assert!(!sandbox.memory_is_short());
    assert_eq!(
        run(&sandbox, &handlers, "test.echo").await,
        RunEnd::Returned(b"7".into())
    );
}

#[test]
fn the_host_stays_within_its_memory_even_if_every_slot_hoards() {
    for hoarder in [
        "test.bytes",
        "test.fields",
        "test.method",
        "test.path",
        "test.authority",
        "test.requests",
        "test.responses",
    ] {
        let output = Command::new(std::env::current_exe().expect("this program"))
            .args([
                "--exact",
                "hostile::hoarding::alone",
                "--ignored",
                "--nocapture",
            ])
            .env(HOARDER, hoarder)
            .output()
            .expect("run the test binary");
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && stdout.contains("1 passed"),
            "{stdout}{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

/// A sandbox in which the host holds at most `held_bytes` for one attempt and `total_bytes` for all together.
fn sandbox_of(held_bytes: usize, total_bytes: usize) -> Arc<Sandbox> {
    let sandbox = Sandbox::start(Settings {
        attempts_max: 2,
        memory_bytes_total_max: Some(total_bytes),
        limits: Limits {
            memory_bytes: held_bytes,
            memory_retry_bytes: held_bytes,
            ..Limits::default()
        },
        instances: [("test.*".into(), Instances::Reuse)].into(),
        compiler: Some(rouse_binary()),
        ..Settings::default()
    });
    sandbox.expect("a sandbox")
}

#[tokio::test]
async fn an_idle_instance_holds_no_memory_of_its_last_job() {
    let fill = fill_loop(56, APPEND_KIB);
    // 21 MB held by the host, of 32 MiB.
    let drops = make_sets(
        "test.drops",
        275,
        &format!("{fill} (call $drop_fields (local.get $fields))"),
    );
    let sandbox = sandbox_of(24 << 20, 32 << 20);
    let handlers = Handlers::on(sandbox.clone(), &[("drops.wasm", &drops)]).await;
    for tenant in ["a", "b", "a"] {
        let job = JobInput {
            tenant: Some(tenant.into()),
            ..job("7")
        };
        let handler = handlers.handler("test.drops");
        let end = attempt(&sandbox, &handler, job, AbortHandle::new())
            .await
            .end;
        assert_eq!(end, RunEnd::Returned(b"7".into()), "{tenant}");
    }
}

#[tokio::test]
async fn values_that_are_refused_are_not_counted() {
    // 60 MB of values under a name that fields may not have; each is refused.
    let fill = fill_loop(
        60,
        "(call $append (local.get $fields) (i32.const 2048) (i32.const 4) (i32.const 16384) (i32.const 1024) (i32.const 2064))
         (if (i32.eqz (i32.load8_u (i32.const 2064))) (then unreachable))",
    );
    let each = format!(
        "(i32.store8 (i32.const 2048) (i32.const 0x20)) {fill} (call $drop_fields (local.get $fields))"
    );
    let refused = make_sets("test.refused", 1000, &each);
    let sandbox = sandbox_of(8 << 20, 32 << 20);
    let handlers = Handlers::on(sandbox.clone(), &[("refused.wasm", &refused)]).await;
    let end = run(&sandbox, &handlers, "test.refused").await;
    assert_eq!(end, RunEnd::Returned(b"7".into()));
}

#[tokio::test]
async fn strings_of_requests_are_bounded_and_an_attempt_exhausts_only_its_own_memory() {
    let set = |bytes: usize| {
        format!(
            "(call $set_authority (local.get $request) (i32.const 1) (i32.const 16385) (i32.const {bytes}))"
        )
    };
    let long = format!("(i32.eqz {})", set((64 << 10) + 1));
    let sandbox = sandbox_of(8 << 20, 32 << 20);
    let handlers = Handlers::on(
        sandbox.clone(),
        &[
            ("long.wasm", &hoards_texts("test.long", &long)),
            ("many.wasm", &hoards_texts("test.many", &set(60_000))),
        ],
    )
    .await;
    let end = run(&sandbox, &handlers, "test.long").await;
    assert_eq!(end, RunEnd::Returned(b"7".into()), "each is refused");
    let limit_bytes = 8 << 20;
    let end = run(&sandbox, &handlers, "test.many").await;
    assert_eq!(end, RunEnd::OutOfMemory { limit_bytes });
}
