//! examples/flows: an order that is undone, a fan-out with one summary, and an approval that waits for three days.

use std::fs;

use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::support::page::{blocks, blocks_of, repository, run_sql};
use crate::support::worker::{ended, enqueue, guests_dir, until_true};
use crate::support::{Host, TestDb, command, folder_of};

const PAGE: &str = "examples/flows/README.md";

/// The guides with blocks of the example.
const PAGES: [&str; 2] = [
    "docs/guides/jobs-from-handlers.md",
    "docs/guides/durable-waits.md",
];

/// Runs a host with the example and the settings of its page.
fn serve(db: &TestDb) -> Host {
    let module = fs::read(guests_dir().join("flows.wasm")).unwrap();
    let folder = folder_of(&blocks_of(PAGE, "toml")[0], &[("flows.wasm", module)]);
    Host::spawn(command(&db.url(), &["serve", "--http", "off"], &folder))
}

/// The jobs that the attempts of this one have enqueued: handlers and states.
async fn made(client: &Client, parent: i64) -> Vec<String> {
    let sql = "SELECT handler || ' ' || state FROM rouse.jobs WHERE parent = $1 ORDER BY id";
    let rows = client.query(sql, &[&parent]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

#[tokio::test]
async fn the_flows_of_the_example_end_as_its_page_says() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let sql = blocks_of(PAGE, "sql");
    client.batch_execute(&sql[0]).await.unwrap();
    let host = serve(&db);

    let shipped = ended(&client, 1).await;
    assert_eq!(shipped.result, Some(json!("3 pieces of order 17")));
    assert_eq!(
        made(&client, 1).await,
        ["charge", "reserve", "ship"].map(|part| format!("shop.{part} succeeded"))
    );
    let refunded = ended(&client, 2).await.error.unwrap();
    assert_eq!(refunded["guest_kind"], "refunded");
    assert_eq!(
        made(&client, 2).await,
        [
            "shop.charge succeeded",
            "shop.reserve failed",
            "shop.refund succeeded"
        ]
    );

    until_true(
        &client,
        "SELECT coalesce(wait ->> 'kind' = 'signal', false) FROM rouse.jobs WHERE id = 3",
    )
    .await;
    client.batch_execute(&sql[1]).await.unwrap();
    let approved = ended(&client, 3).await;
    assert_eq!(
        approved.result,
        Some(json!({"decision": "approved", "by": "Ada"}))
    );

    until_true(&client, "SELECT rouse.chain_result(4) IS NOT NULL").await;
    let row = client.query_one("SELECT rouse.chain_result(4)", &[]).await;
    let summary: Value = row.unwrap().get(0);
    assert_eq!(
        (&summary["photos"], &summary["failed"]),
        (&json!(999), &json!(["1000.txt"]))
    );
    assert_eq!(made(&client, 4).await.len(), 1_000);
    host.stop();
}

#[tokio::test]
async fn an_approval_expires_after_three_days_and_asks_once() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue(&client, "expense.approve", json!({"cents": 1_250})).await;
    let host = serve(&db);
    until_true(
        &client,
        &format!(
            "SELECT coalesce(wait ->> 'kind' = 'signal', false) FROM rouse.jobs WHERE id = {id}"
        ),
    )
    .await;
    let sql = "SELECT available_at > now() + interval '71 hours' FROM rouse.jobs WHERE id = $1";
    let waits: bool = client.query_one(sql, &[&id]).await.unwrap().get(0);
    assert!(waits);
    // The three days end now.
    let sql = "SELECT rouse.reschedule($1)";
    client.query_one(sql, &[&id]).await.unwrap();
    let job = ended(&client, id).await;
    assert_eq!(job.result, Some(json!({"decision": "expired"})));
    assert_eq!(job.attempt, 2);
    let asked = "SELECT count(*) = 1 FROM rouse.job_log($1) WHERE text LIKE 'please approve%'";
    until_true(&client, &asked.replace("$1", &id.to_string())).await;
    host.stop();
}

#[test]
fn the_blocks_of_rust_on_the_pages_are_part_of_the_example() {
    let mut sources = String::new();
    for file in ["order.rs", "photos.rs", "approval.rs"] {
        sources += &fs::read_to_string(repository().join("examples/flows/src").join(file)).unwrap();
    }
    for page in PAGES {
        let blocks = blocks_of(page, "rust,ignore");
        assert_eq!(blocks.len(), 3, "{page}");
        for block in blocks {
            assert!(sources.contains(&block), "{page}: {block}");
        }
    }
}

#[tokio::test]
async fn the_sql_on_the_page_about_durable_waits_returns_what_the_page_shows() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let blocks = blocks(PAGES[1]);
    let sql: Vec<_> = blocks.iter().filter(|block| block.kind == "sql").collect();
    assert_eq!(sql.len(), 2);
    for block in sql {
        run_sql(&client, block).await;
    }
}
