//! The guide to schedules: its SQL returns what the page shows, and its commands run.

use crate::support::page::{blocks, run_sql};
use crate::support::{TestDb, rouse_without_database, scratch};

#[tokio::test]
async fn the_sql_on_the_page_about_schedules_returns_what_the_page_shows() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let blocks = blocks("docs/guides/schedules.md");
    let sql: Vec<_> = blocks.iter().filter(|block| block.kind == "sql").collect();
    assert_eq!(sql.len(), 3);
    for block in sql {
        run_sql(&client, block).await;
    }
}

#[test]
fn the_commands_on_the_page_about_daylight_saving_print_what_the_page_shows() {
    let folder = scratch("page");
    let blocks = blocks("docs/guides/schedules.md");
    let shown = blocks
        .iter()
        .filter(|block| block.text.starts_with("$ rouse schedule next"));
    let mut count = 0;
    for block in shown {
        let (command, output) = block
            .text
            .split_once('\n')
            .expect("a command and its output");
        let args: Vec<&str> = command
            .trim_start_matches("$ rouse ")
            .split('\'')
            .enumerate()
            .flat_map(|(n, part)| match n % 2 {
                0 => part.split_whitespace().collect(),
                _ => vec![part],
            })
            .collect();
        assert_eq!(
            rouse_without_database(&args, &folder)
                .exits(0)
                .stdout
                .trim(),
            output.trim()
        );
        count += 1;
    }
    assert_eq!(count, 2);
}
