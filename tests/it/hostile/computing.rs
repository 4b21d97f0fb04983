//! Guests that compute, trap and grow without end.

use super::{Ends, body, run, with};

#[tokio::test]
async fn guests_that_compute_forever_are_stopped_in_every_phase() {
    run(vec![
        body(
            "endless loop",
            "it yields at each tick, and is stopped within one",
            "(loop $ever (br $ever)) unreachable",
            Ends::Stopped,
        ),
        body(
            "endless copying",
            "one memory.copy of megabytes is short; the loop around it is stopped",
            "(drop (memory.grow (i32.const 400)))
             (loop $ever
                (memory.copy (i32.const 0) (i32.const 8000000) (i32.const 8000000))
                (br $ever))
             unreachable",
            Ends::Stopped,
        ),
        body(
            "endless filling",
            "the same holds for memory.fill",
            "(drop (memory.grow (i32.const 400)))
             (loop $ever (memory.fill (i32.const 200000) (i32.const 7) (i32.const 16000000)) (br $ever))
             unreachable",
            Ends::Stopped,
        ),
        body(
            "a wait that never ends",
            "the guest is dropped together with its host call",
            "(call $wait_for_abort) (loop $ever (br $ever)) unreachable",
            Ends::Stopped,
        ),
        body(
            "progress without end",
            "each report costs the host a bounded piece of work; the loop is stopped",
            "(loop $ever (call $progress (i32.const 255) (i32.const 4096) (i32.const 20)) (br $ever)) unreachable",
            Ends::Stopped,
        ),
        body(
            "log lines without end",
            "lines above the limit are dropped; the loop is stopped",
            "(loop $ever (call $log (i32.const 2) (i32.const 4096) (i32.const 20)) (br $ever)) unreachable",
            Ends::Stopped,
        ),
        with(
            "empty lines without end",
            "excess lines of one write are counted together, up to a limit; the loop is stopped",
            "(import \"wasi_snapshot_preview1\" \"fd_write\" (func $fd_write (param i32 i32 i32 i32) (result i32)))",
            "(memory.fill (i32.const 200000) (i32.const 10) (i32.const 60000))
             (i32.store (i32.const 300) (i32.const 200000)) (i32.store (i32.const 304) (i32.const 60000))
             (loop $ever (drop (call $fd_write (i32.const 1) (i32.const 300) (i32.const 1) (i32.const 320))) (br $ever)) unreachable",
            Ends::Stopped,
        ),
        with(
            "an allocator that never returns",
            "it runs in the guest and is stopped there, even before the handler is called",
            "(import \"wasi_snapshot_preview1\" \"random_get\" (func $random (param i32 i32) (result i32)))",
            "(loop $ever (drop (call $random (i32.const 200000) (i32.const 1000))) (br $ever)) unreachable",
            Ends::Stopped,
        ),
    ])
    .await;
}

#[tokio::test]
async fn each_trap_ends_only_its_own_attempt() {
    run(vec![
        body(
            "unreachable",
            "a trap",
            "unreachable",
            Ends::Trap("unreachable"),
        ),
        body(
            "division by zero",
            "a trap",
            "(i32.div_u (i32.const 1) (i32.const 0))",
            Ends::Trap("divide by zero"),
        ),
        body(
            "division that overflows",
            "a trap",
            "(i32.div_s (i32.const 0x80000000) (i32.const -1))",
            Ends::Trap("overflow"),
        ),
        body(
            "NaN converted to an integer",
            "a trap",
            "(i32.trunc_f32_s (f32.const nan))",
            Ends::Trap("conversion"),
        ),
        body(
            "reading beyond the memory",
            "a trap, and not a segmentation fault",
            "(i32.load (i32.const -4))",
            Ends::Trap("out of bounds"),
        ),
        body(
            "writing beyond the memory",
            "a trap",
            "(i32.store offset=4294967295 (i32.const -4) (i32.const 1)) unreachable",
            Ends::Trap("out of bounds"),
        ),
        body(
            "copying beyond the memory",
            "a trap",
            "(memory.copy (i32.const 0) (i32.const 0) (i32.const -1)) unreachable",
            Ends::Trap("out of bounds"),
        ),
        with(
            "a call through an empty table entry",
            "a trap",
            "(table 4 funcref) (type $none (func))",
            "(call_indirect (type $none) (i32.const 2)) unreachable",
            Ends::Trap("uninitialized"),
        ),
        with(
            "a call through an index beyond the table",
            "a trap",
            "(table 4 funcref) (type $none (func))",
            "(call_indirect (type $none) (i32.const 400)) unreachable",
            Ends::Trap("table"),
        ),
        with(
            "a call with another signature",
            "a trap",
            "(table 4 funcref) (type $one (func (param i32))) (func $f) (elem (i32.const 0) $f)",
            "(call_indirect (type $one) (i32.const 1) (i32.const 0)) unreachable",
            Ends::Trap("indirect call type mismatch"),
        ),
        with(
            "ending the process",
            "only the guest ends, not the host",
            "(import \"wasi_snapshot_preview1\" \"proc_exit\" (func $exit (param i32)))",
            "(call $exit (i32.const 0)) unreachable",
            Ends::Trap("ended its process"),
        ),
        body(
            "deep recursion",
            "each guest has its own stack",
            "(call $recurse) unreachable",
            Ends::StackOverflow,
        ),
    ])
    .await;
}

#[tokio::test]
async fn guests_that_grow_without_end_are_stopped_at_their_limit() {
    run(vec![
        body(
            "growing by 4 GiB at once",
            "refused; no memory is reserved for it",
            "(if (i32.ne (i32.const -1) (memory.grow (i32.const 65535))) (then (loop $ever (br $ever)))) unreachable",
            Ends::OutOfMemory,
        ),
        body(
            "growing page by page",
            "all pages count",
            "(loop $ever (br_if $ever (i32.ne (i32.const -1) (memory.grow (i32.const 1))))) unreachable",
            Ends::OutOfMemory,
        ),
        with(
            "a table that grows",
            "growing fails, and the guest continues",
            "(table $t 1 funcref)",
            "(loop $ever (br_if $ever (i32.ne (i32.const -1) (table.grow $t (ref.null func) (i32.const 100000)))))
             (call $return_ok (local.get $payload) (local.get $payload_len))",
            Ends::Returns("{}"),
        ),
        body(
            "handles without end",
            "the table of handles is bounded",
            "(loop $ever (drop (call $abort)) (br $ever)) unreachable",
            Ends::Trap("limits.resources in rouse.toml"),
        ),
        body(
            "pollables without end",
            "the resources behind handles are bounded too",
            "(loop $ever (drop (call $subscribe (call $abort))) (br $ever)) unreachable",
            Ends::Trap("limits.resources in rouse.toml"),
        ),
    ])
    .await;
}
