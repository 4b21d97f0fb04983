//! Files that must not be loaded, and modules that misdescribe themselves.

use crate::sandbox_guest::{
    Handlers, echo, guest, guest_of_wasip1, guest_that, job, manifest, sandbox,
};
use crate::support::attempt;

use rouse::job::RunEnd;
use rouse::sandbox::AbortHandle;

/// A name, a guarantee, the file, and words of the refusal.
type Refused = (&'static str, &'static str, Vec<u8>, &'static str);

fn wat(text: &str) -> Vec<u8> {
    wat::parse_str(text).expect("valid WebAssembly text")
}

/// A component of one module with a memory of this many pages.
fn with_memory(pages: &str) -> Vec<u8> {
    wat(&format!(
        "(component (core module $m (memory {pages})) (core instance (instantiate $m)))"
    ))
}

fn described(text: &str) -> Vec<u8> {
    guest(text, "unreachable")
}

fn cases() -> Vec<Refused> {
    let many: Vec<String> = (0..1_001)
        .map(|n| format!(r#"{{"name":"h.n{n}"}}"#))
        .collect();
    let with = |items: &str| guest_of_wasip1(items, &manifest("test.files", "1"), "unreachable");
    vec![
        (
            "an import that the host does not provide",
            "it is named",
            wat(r#"(module (import "env" "system" (func (param i32))) (func (export "go")))"#),
            "env",
        ),
        (
            "shared memory and threads",
            "off",
            wat("(module (memory 1 1 shared))"),
            "",
        ),
        ("64-bit memory", "off", wat("(module (memory i64 1))"), ""),
        (
            "a component with shared memory",
            "disabled for components too",
            wat("(component (core module (memory 1 1 shared)))"),
            "it cannot be compiled",
        ),
        (
            "a component with 64-bit memory",
            "disabled for components too",
            wat("(component (core module (memory i64 1)))"),
            "it cannot be compiled",
        ),
        (
            "a memory that starts with 2 GiB",
            "it is refused permanently, with its size",
            with_memory("32768"),
            "it exceeds what this host allows for one module: memory has a minimum byte size of 2147483648",
        ),
        (
            "five memories",
            "it is refused permanently",
            with(&"(memory 1)".repeat(4)),
            "it exceeds what this host allows for one module: defined memories count of 5",
        ),
        (
            "a table of a million elements",
            "it is refused permanently",
            with("(table 1000000 funcref)"),
            "it exceeds what this host allows for one module: table index 0",
        ),
        (
            "a component with garbage collection",
            "off",
            wat("(component (core module (type (struct (field i32)))))"),
            "it cannot be compiled",
        ),
        (
            "a component with exceptions",
            "off",
            wat("(component (core module (tag)))"),
            "it cannot be compiled",
        ),
        (
            "a start function that loops",
            "it may use 500 ms of CPU time",
            with("(func $spin (loop $ever (br $ever))) (start $spin)"),
            "more than 500 ms",
        ),
        (
            "a start function that traps",
            "it is refused with the trap",
            with("(func $trap unreachable) (start $trap)"),
            "unreachable",
        ),
        (
            "a table of a million elements",
            "tables have at most 20,000 elements",
            with("(table 1000000 funcref)"),
            "",
        ),
        (
            "a describe that loops",
            "the same limit applies",
            guest_that("(loop $ever (br $ever)) unreachable", "", "unreachable"),
            "more than 500 ms",
        ),
        (
            "a describe that allocates all memory",
            "it may use 32 MiB",
            guest_that(
                "(loop $ever (br_if $ever (i32.ne (i32.const -1) (memory.grow (i32.const 16))))) unreachable",
                "",
                "unreachable",
            ),
            "more than 32 MiB",
        ),
        (
            "a describe that returns a pointer beyond its memory",
            "pointers are checked",
            guest_that("(i32.const -16)", "", "unreachable"),
            "it failed while it described itself",
        ),
        (
            "no manifest",
            "it is parsed strictly",
            described("no JSON"),
            "does not parse",
        ),
        (
            "a manifest that is nested 10,000 deep",
            "the depth is bounded",
            described(&format!("{}{}", "[".repeat(10_000), "]".repeat(10_000))),
            "does not parse",
        ),
        (
            "a manifest without handlers",
            "it is useless, so it is refused",
            described(r#"{"handlers":[]}"#),
            "no handlers",
        ),
        (
            "a manifest with a thousand and one handlers",
            "too many",
            described(&format!(r#"{{"handlers":[{}]}}"#, many.join(","))),
            "lists 1001 handlers",
        ),
        (
            "a handler that is listed twice",
            "names are unique",
            described(r#"{"handlers":[{"name":"a"},{"name":"a"}]}"#),
            "twice",
        ),
        (
            "a handler whose name is an escape sequence",
            "names are plain, and the refusal is harmless",
            described("{\"handlers\":[{\"name\":\"\\u001b[2J\"}]}"),
            "has a handler named `\\u{1b}[2J`",
        ),
        (
            "a handler that wants a lease of a million years",
            "settings have bounds",
            described(r#"{"handlers":[{"name":"a","lease_ms":31536000000000000}]}"#),
            "lease_ms",
        ),
        (
            "half a module",
            "it is refused as a whole",
            echo("test.echo", "1")[..500].to_vec(),
            // The library that parses it panics, in the child process where that does no harm.
            "",
        ),
        (
            "a module with a changed byte",
            "it is validated before it is compiled",
            {
                let mut bytes = echo("test.echo", "1");
                let middle = bytes.len() / 3;
                bytes[middle] ^= 0xff;
                bytes
            },
            "",
        ),
        (
            "compiled code",
            "it could do anything, so it is never loaded",
            b"\x7fELF\x02\x01\x01".to_vec(),
            "compiled code",
        ),
    ]
}

#[tokio::test]
async fn no_refused_module_delays_or_harms_the_others() {
    let cases = cases();
    let names: Vec<String> = (0..cases.len()).map(|n| format!("m{n:02}.wasm")).collect();
    let good = echo("test.echo", "1");
    let mut files: Vec<(&str, &[u8])> = names
        .iter()
        .zip(&cases)
        .map(|(name, case)| (name.as_str(), case.2.as_slice()))
        .collect();
    files.push(("zz-good.wasm", &good));
    let handlers = Handlers::with(&files).await;
    for ((name, guarantee, _, words), file) in cases.iter().zip(&names) {
        println!("{name}: {guarantee}");
        let set = handlers.catalog.current();
        let refusal = set.refused.iter().find(|refused| refused.file == *file);
        let why = &refusal.unwrap_or_else(|| panic!("{name}: not served")).why;
        assert!(why.contains(words), "{name}: {why}");
        assert!(!why.contains('\u{1b}'), "{name}: {why:?}");
    }
    let good = handlers.handler("test.echo");
    let run = attempt(&sandbox(), &good, job("1"), AbortHandle::new()).await;
    assert_eq!(run.end, RunEnd::Returned(b"1".into()));
}
