//! Sections for debuggers: the child process reads them, with the same limits.

use super::{limited, sandbox};
use crate::sandbox_guest::{Handlers, echo};

/// A module with a custom section for each of these names and contents.
fn with_sections(sections: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let escaped =
        |bytes: &[u8]| -> String { bytes.iter().map(|byte| format!("\\{byte:02x}")).collect() };
    let sections: String = sections
        .iter()
        .map(|(name, bytes)| format!("(@custom \"{name}\" \"{}\")", escaped(bytes)))
        .collect();
    wat::parse_str(format!("(component (core module (func) {sections}))"))
        .expect("the sections are WebAssembly text")
}

/// Line tables of many units, each of which refers to the same long list of abbreviations: a reader has to process the
/// product of both.
fn bomb_of_lines() -> Vec<u8> {
    let kinds: Vec<u8> = (0..50_000_u32)
        .flat_map(|n| {
            let number = [
                0x80 | (n & 0x7f) as u8,
                0x80 | ((n >> 7) & 0x7f) as u8,
                (n >> 14) as u8 | 4,
            ];
            // A compilation unit without children or attributes.
            [&number[..], &[0x11, 0, 0, 0]].concat()
        })
        .chain([0])
        .collect();
    // Eight bytes follow: version 4, abbreviations at 0, addresses of 4 bytes, and the first abbreviation.
    let unit = [8, 0, 0, 0, 4, 0, 0, 0, 0, 0, 4, 1];
    with_sections(&[
        (".debug_abbrev", [&[1, 0x11, 0, 0, 0][..], &kinds].concat()),
        (".debug_info", unit.repeat(50_000)),
    ])
}

#[tokio::test]
async fn line_tables_that_take_too_long_to_read_are_limited_like_compilation() {
    let sandbox = sandbox(limited(1, 2 << 30));
    let handlers = Handlers::on(
        sandbox,
        &[
            ("bomb.wasm", &bomb_of_lines()),
            ("echo.wasm", &echo("test.echo", "1")),
        ],
    )
    .await;
    let why = handlers.refusal("bomb.wasm");
    assert!(
        why.contains("of CPU time to compile") || why.contains("of memory to compile"),
        "{why}"
    );
    handlers.handler("test.echo");
}

#[tokio::test]
async fn invalid_line_tables_are_ignored() {
    let sandbox = sandbox(limited(10, 2 << 30));
    let rubbish = with_sections(&[
        (".debug_info", vec![0xff; 4096]),
        (".debug_line", vec![0x80; 4096]),
    ]);
    let handlers = Handlers::on(sandbox, &[("rubbish.wasm", &rubbish)]).await;
    // The module compiles, and is refused for the exports that it lacks.
    let why = handlers.refusal("rubbish.wasm");
    assert!(why.contains("does not export"), "{why}");
}

#[tokio::test]
async fn a_function_with_a_name_of_megabytes_is_refused_and_the_others_serve() {
    let sandbox = sandbox(limited(10, 2 << 30));
    let named = |bytes: usize| {
        let name = "n".repeat(bytes);
        wat::parse_str(format!(
            "(component (core module (func (@name \"{name}\"))))"
        ))
        .unwrap()
    };
    let handlers = Handlers::on(
        sandbox,
        &[
            ("long.wasm", &named(20 << 20)),
            ("just.wasm", &named(64 << 10)),
            ("echo.wasm", &echo("test.echo", "1")),
        ],
    )
    .await;
    let why = handlers.refusal("long.wasm");
    assert!(
        why.contains("a name of 20971520 bytes; at most 65536"),
        "{why}"
    );
    let why = handlers.refusal("just.wasm");
    assert!(why.contains("does not export"), "{why}");
    handlers.handler("test.echo");
}
