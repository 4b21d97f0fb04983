//! The guide to testing a producer, and the reference for the settings of a database: checks that what they show is
//! true.

use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::page::{blocks, run_sql};
use crate::support::{CommandOutput, TestDb, code_cache, folder, rouse_binary};

#[tokio::test]
async fn the_blocks_of_the_page_show_what_happens() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder("", &["text_stats.wasm"]);
    // The commands as the guide prints them, with this build's `rouse` first on the path.
    let bin = rouse_binary();
    let path = std::env::var("PATH").unwrap();
    let path = format!("{}:{path}", bin.parent().unwrap().display());
    let blocks = blocks("docs/guides/testing-producers.md");
    let kinds: Vec<&str> = blocks.iter().map(|block| block.kind.as_str()).collect();
    assert_eq!(kinds, ["sql", "sql", "console", "sql"]);
    for block in &blocks {
        match block.kind.as_str() {
            "sql" => run_sql(&client, block).await,
            _ => {
                let mut shell = Command::new("sh");
                shell
                    .args(["-c", &block.text])
                    .env("PATH", &path)
                    .env("DATABASE_URL", db.url())
                    .env("ROUSE_CACHE_DIR", code_cache())
                    .env_remove("ROUSE_LOG")
                    .current_dir(&folder)
                    .stdin(Stdio::null());
                CommandOutput::run(&mut shell)
                    .exits(0)
                    .prints("1 succeeded, 0 failed");
            }
        }
    }
}

#[tokio::test]
async fn the_reference_has_each_setting_of_a_database_with_its_default() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let row = client
        .query_one(
            "SELECT to_jsonb(l) - 'only_row' FROM rouse.limits AS l",
            &[],
        )
        .await
        .unwrap();
    let settings: Value = row.get(0);
    let page = include_str!("../../docs/reference/sql.md");
    let (_, section) = page.split_once("\n## Settings of a database\n").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let listed = section.lines().filter(|line| line.starts_with("| `"));
    let settings = settings.as_object().unwrap();
    assert_eq!(listed.count(), settings.len());
    for (name, default) in settings {
        let row = format!("| `{name}` | `{default}` |");
        assert!(section.contains(&row), "{row} is missing");
    }
}
