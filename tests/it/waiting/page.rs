//! The guide to waiting: its SQL returns what the page shows.

use crate::support::TestDb;
use crate::support::page::{blocks, run_sql};

#[tokio::test]
async fn the_sql_on_the_page_returns_what_the_page_shows() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let blocks = blocks("docs/guides/waiting.md");
    let sql: Vec<_> = blocks.iter().filter(|block| block.kind == "sql").collect();
    assert_eq!(sql.len(), 1);
    for block in sql {
        run_sql(&client, block).await;
    }
}
