//! The first screen of the README: its handler, its calls, and the output on a terminal.

use std::fs;

use crate::support::page::{Block, blocks, is_as_shown, run_sql};
use crate::support::worker::{TIMEOUT, guests_dir, until_true};
use crate::support::{Host, command_without_database, connect, scratch};

/// The first block of this kind.
fn first<'a>(blocks: &'a [Block], kind: &str) -> &'a Block {
    let found = blocks.iter().find(|block| block.kind == kind);
    found.unwrap_or_else(|| panic!("the README has no block {kind}"))
}

/// Turns a line of the page into a pattern in which a duration matches any duration.
fn as_pattern(line: &str) -> String {
    match line.split_once(" after ") {
        Some((before, rest)) => match rest.split_once(',') {
            Some((_, behind)) => format!("{before} after …,{behind}"),
            None => format!("{before} after …"),
        },
        None => line.to_owned(),
    }
}

#[tokio::test]
async fn the_calls_and_the_terminal_output_match_the_readme() {
    let page = blocks("README.md");
    let folder = scratch("readme").join("greet");
    let handlers = folder.join("handlers-wasm");
    fs::create_dir_all(&handlers).unwrap();
    // `cargo xtask check` verifies that the README's handler is the one of examples/greet.
    fs::copy(guests_dir().join("greet.wasm"), handlers.join("greet.wasm")).unwrap();
    let mut dev = command_without_database(&["dev"], &folder);
    dev.env_remove("ROUSE_DATA_DIR");
    let dev = Host::spawn(dev);
    let url = dev.line(TIMEOUT, |line| line.starts_with("postgres: "));
    let client = connect(url.trim_start_matches("postgres: ")).await;

    let sql = first(&page, "sql");
    for line in sql.text.lines() {
        let call = Block {
            kind: sql.kind.clone(),
            text: format!("{line}\n"),
            before: String::new(),
            line: sql.line,
        };
        run_sql(&client, &call).await;
        until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    }
    let no_name = "SELECT rouse.enqueue('demo.greet', '{\"name\": \"\"}')";
    client.batch_execute(no_name).await.unwrap();

    for shown in first(&page, "text").text.lines().skip(1) {
        let shown = match shown.split_once(':').map(|(word, _)| word.trim()) {
            Some(word @ ("postgres" | "metrics")) => format!("{word}: …"),
            Some("open") => "open: http://…/ui/ (the dashboard)".to_owned(),
            Some("try") => "try: psql 'postgres://…'".to_owned(),
            Some("ready") => "ready: 1 handler from …/greet/handlers-wasm".to_owned(),
            _ => as_pattern(shown),
        };
        dev.line(TIMEOUT, |line| is_as_shown(line, &shown));
    }
    dev.signal(libc::SIGINT);
    assert!(dev.exit(TIMEOUT).0.success());
}
