//! Values that guests pass to the host: sizes, pointers, text, results.

use super::{Case, Ends, body, run, with};
use crate::sandbox_guest::{guest_that, manifest};

/// A guest with this text in its memory, at `$at`, with `$bytes` bytes.
fn text(name: &'static str, guarantee: &'static str, text: &str, body: &str, ends: Ends) -> Case {
    let manifest = manifest("test.files", "1");
    let at = 4096 + manifest.len();
    let body = body
        .replace("$at", &format!("(i32.const {at})"))
        .replace("$bytes", &format!("(i32.const {})", text.len()));
    let describe = format!(
        "(call $text (i32.const 4096) (i32.const {}))",
        manifest.len()
    );
    Case {
        name,
        guarantee,
        module: guest_that(&describe, &format!("{manifest}{text}"), &body),
        payload: "{}",
        ends,
    }
}

/// Characters that would harm a terminal or a database.
const NASTY: &str = "\u{1b}]0;owned\u{7}\u{1b}[2J\0\u{202e}x\r\n\u{9b}31m";

#[tokio::test]
async fn no_size_claimed_by_a_guest_costs_the_host_more_than_its_limits() {
    run(vec![
        body(
            "a log line of 20 MB",
            "a call carries at most 8 MiB",
            "(drop (memory.grow (i32.const 400)))
             (call $log (i32.const 2) (i32.const 0) (i32.const 20000000)) unreachable",
            Ends::Trap("too much data to the host in one call"),
        ),
        body(
            "a string that ends beyond the memory",
            "lengths are checked before anything is read",
            "(call $log (i32.const 2) (i32.const 4096) (i32.const -1)) unreachable",
            Ends::AnyTrap,
        ),
        body(
            "an error of 20 MB",
            "as a result",
            "(drop (memory.grow (i32.const 400)))
             (call $return_error (i32.const 131072) (i32.const 20000000) (i32.const 1))",
            Ends::OutputTooLarge,
        ),
        body(
            "an error of 3 MB",
            "message and class are cut",
            "(drop (memory.grow (i32.const 400)))
             (memory.fill (i32.const 131072) (i32.const 65) (i32.const 3000000))
             (call $return_error (i32.const 131072) (i32.const 3000000) (i32.const 1))",
            Ends::Failed,
        ),
        body(
            "a result of 1.5 MB",
            "its size is measured, and it is refused above the limit",
            "(drop (memory.grow (i32.const 400)))
             (call $return_ok (i32.const 131072) (i32.const 1500000))",
            Ends::OutputTooLarge,
        ),
        body(
            "a result of 100 MB",
            "it cannot be larger than the memory",
            "(call $return_ok (i32.const 0) (i32.const 100000000))",
            Ends::AnyTrap,
        ),
        body(
            "a result at the end of the address space",
            "pointers are checked",
            "(i32.const -16)",
            Ends::AnyTrap,
        ),
        body(
            "a result that is neither ok nor an error",
            "discriminants are checked",
            "(i32.store8 (i32.const 64) (i32.const 7)) (i32.const 64)",
            Ends::AnyTrap,
        ),
        body(
            "a misaligned result",
            "alignment is checked",
            "(i32.const 65)",
            Ends::AnyTrap,
        ),
        with(
            "a request for 16 MiB of random numbers",
            "a request may ask for at most 1 MiB",
            "(import \"wasi_snapshot_preview1\" \"random_get\" (func $random (param i32 i32) (result i32)))",
            "(drop (memory.grow (i32.const 400)))
             (drop (call $random (i32.const 200000) (i32.const 16777216))) unreachable",
            Ends::Trap("limits.random_bytes in rouse.toml"),
        ),
        body(
            "an unknown level",
            "enumerations are checked",
            "(call $log (i32.const 77) (i32.const 4096) (i32.const 4)) unreachable",
            Ends::AnyTrap,
        ),
        body(
            "an unknown handle",
            "handles are checked",
            "(call $block (i32.const 12345)) unreachable",
            Ends::AnyTrap,
        ),
        body(
            "a handle of another kind",
            "types of handles are checked",
            "(call $block (call $abort)) unreachable",
            Ends::AnyTrap,
        ),
    ])
    .await;
}

#[tokio::test]
async fn no_text_of_a_guest_reaches_a_terminal_or_the_database_unescaped() {
    run(vec![
        text(
            "escapes in a log line",
            "control characters are escaped",
            NASTY,
            "(call $log (i32.const 4) $at $bytes) (call $return_ok (local.get $payload) (local.get $payload_len))",
            Ends::Returns("{}"),
        ),
        text(
            "escapes in a progress report",
            "the same",
            NASTY,
            "(call $progress (i32.const 255) $at $bytes) (call $return_ok (local.get $payload) (local.get $payload_len))",
            Ends::Returns("{}"),
        ),
        text(
            "escapes in an error",
            "the same",
            NASTY,
            "(call $return_error $at $bytes (i32.const 1))",
            Ends::Failed,
        ),
        text(
            "escapes in a panic and its location",
            "the same",
            NASTY,
            "(call $panicked $at $bytes $at $bytes) unreachable",
            Ends::Panics,
        ),
        body(
            "a log line that is not UTF-8",
            "text is checked",
            "(i32.store (i32.const 200) (i32.const 0xfffefdfc))
             (call $log (i32.const 2) (i32.const 200) (i32.const 4)) unreachable",
            Ends::AnyTrap,
        ),
        body(
            "a result that is not UTF-8",
            "it is not a result",
            "(i32.store (i32.const 200) (i32.const 0xfffefdfc)) (call $return_ok (i32.const 200) (i32.const 4))",
            Ends::InvalidResult,
        ),
        text(
            "a result with a NUL in a string",
            "Postgres cannot store it",
            "\"\\u0000\"",
            "(call $return_ok $at $bytes)",
            Ends::InvalidResult,
        ),
        text(
            "a result with half a surrogate pair",
            "Postgres cannot store it either",
            "\"\\ud800\"",
            "(call $return_ok $at $bytes)",
            Ends::InvalidResult,
        ),
        text(
            "a result with a number that Postgres would write out",
            "1e131071 would be 131,072 digits",
            "1e131071",
            "(call $return_ok $at $bytes)",
            Ends::InvalidResult,
        ),
        text(
            "a result that is nested 10,000 deep",
            "it is passed on unparsed; Postgres refuses it if it is too deep, and only that job fails",
            &format!("{}{}", "[".repeat(10_000), "]".repeat(10_000)),
            "(call $return_ok $at $bytes)",
            Ends::Carried,
        ),
        body(
            "an empty result",
            "it is not JSON",
            "(call $return_ok (i32.const 200) (i32.const 0))",
            Ends::InvalidResult,
        ),
        text(
            "two results in one",
            "it is not JSON either",
            "{} {}",
            "(call $return_ok $at $bytes)",
            Ends::InvalidResult,
        ),
    ])
    .await;
}

/// Fails with the text as the details of its error.
const WITH_DETAILS: &str = "
    (drop (call $return_error (i32.const 4096) (i32.const 4) (i32.const 1)))
    (i32.store8 (i32.const 88) (i32.const 1))
    (i32.store (i32.const 92) $at)
    (i32.store (i32.const 96) $bytes)
    (i32.const 64)";

#[tokio::test]
async fn no_details_of_an_error_harm_the_host_or_those_who_read_them() {
    run(vec![
        text(
            "details that are nested 50,000 deep",
            "they are left out, because few readers could parse them",
            &format!("{}{}", "[".repeat(50_000), "]".repeat(50_000)),
            WITH_DETAILS,
            Ends::Failed,
        ),
        text(
            "details with tens of thousands of values",
            "they stay text in the host, which takes a hundredth of the memory",
            &format!("[{}[]]", "[],".repeat(33_000)),
            WITH_DETAILS,
            Ends::Failed,
        ),
        text(
            "details with a NUL and half a surrogate pair",
            "both are replaced, because Postgres cannot store them",
            r#"{"\u0000": "\ud800"}"#,
            WITH_DETAILS,
            Ends::Failed,
        ),
        text(
            "details that are not JSON",
            "they are left out",
            "{",
            WITH_DETAILS,
            Ends::Failed,
        ),
    ])
    .await;
}
