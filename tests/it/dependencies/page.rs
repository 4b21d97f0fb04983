//! The guides to dependencies and flows: their SQL returns what the pages show.

use crate::support::TestDb;
use crate::support::page::{blocks, run_sql};

#[tokio::test]
async fn the_sql_on_the_page_about_dependencies_returns_what_the_page_shows() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let blocks = blocks("docs/guides/dependencies.md");
    let sql: Vec<_> = blocks.iter().filter(|block| block.kind == "sql").collect();
    assert_eq!(sql.len(), 5);
    for block in sql {
        run_sql(&client, block).await;
    }
}

#[tokio::test]
async fn the_sql_on_the_page_about_flows_returns_what_the_page_shows() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let blocks = blocks("docs/guides/flows.md");
    let sql: Vec<_> = blocks.iter().filter(|block| block.kind == "sql").collect();
    assert_eq!(sql.len(), 3);
    for block in sql {
        run_sql(&client, block).await;
    }
}
