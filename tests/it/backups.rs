//! Backups and the erasure of personal data, with the statements of the guides.

use std::path::Path;
use std::process::Command;

use rouse::worker::Settings;
use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::commands::run;
use crate::support::page::blocks_of;
use crate::support::worker::{TestWorker, ended, enqueue, enqueue_sql};
use crate::support::{TestDb, scratch, skip};

/// The statements on a page that contain this text.
fn statements(page: &str, text: &str) -> String {
    let mut blocks = blocks_of(page, "sql").into_iter();
    let found = blocks.find(|block| block.contains(text));
    found.unwrap_or_else(|| panic!("no statements with {text} in {page}"))
}

async fn one<T: for<'a> tokio_postgres::types::FromSql<'a>>(client: &Client, sql: &str) -> T {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

fn execute(program: &Path, args: &[&str]) {
    let output = Command::new(program).args(args).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// A payload that is stored in `rouse.payload`.
fn large() -> Value {
    json!({"line": "x".repeat(4096), "times": 1})
}

#[tokio::test]
async fn a_database_that_was_restored_from_a_dump_continues_with_its_jobs() {
    let (db, restored) = (TestDb::new().await, TestDb::unmigrated().await);
    let client = db.client().await;
    let bin: String = one(
        &client,
        "SELECT setting FROM pg_config WHERE name = 'BINDIR'",
    )
    .await;
    let bin = Path::new(&bin);
    if !bin.join("pg_dump").exists() {
        skip("there is no pg_dump beside the server (apt-get install postgresql-client)");
        return;
    }
    let worker = TestWorker::start(&db, Settings::default()).await;
    let before = enqueue(&client, "test.print", large()).await;
    assert_eq!(ended(&client, before).await.state, "succeeded");
    worker.drain().await;
    let small = enqueue(&client, "test.print", json!({"line": "x", "times": 1})).await;
    let last = enqueue(&client, "test.print", large()).await;
    client
        .batch_execute("SELECT rouse.schedule('nightly', 'test.print', '{}', cron => '0 3 * * *')")
        .await
        .unwrap();

    let dump = scratch("dump").join("app.dump");
    let dump = dump.to_str().unwrap();
    let file = format!("--file={dump}");
    execute(&bin.join("pg_dump"), &["--format=custom", &file, &db.url()]);
    let into = format!("--dbname={}", restored.url());
    execute(&bin.join("pg_restore"), &["--exit-on-error", &into, dump]);
    let client = restored.client().await;
    client
        .batch_execute(&statements("docs/guides/backups.md", "setval"))
        .await
        .unwrap();
    let (code, output) = run(&restored, &["migrate"]);
    assert_eq!(code, 0, "{output}");
    assert!(!output.contains("applied"), "nothing is missing: {output}");

    let worker = TestWorker::start(&restored, Settings::default()).await;
    for id in [before, small, last] {
        assert_eq!(ended(&client, id).await.state, "succeeded");
    }
    let next = enqueue(&client, "test.print", large()).await;
    assert!(next > last + 1_000_000_000, "{next} after {last}");
    assert_eq!(ended(&client, next).await.state, "succeeded");
    worker.drain().await;
    let schedules = "SELECT string_agg(name, ',') FROM rouse.schedules";
    assert_eq!(one::<String>(&client, schedules).await, "nightly");
}

#[tokio::test]
async fn the_statements_of_the_guide_erase_the_ended_jobs_of_a_tenant() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    let of = async |tenant: &str| {
        let payload = large();
        let id = enqueue_sql(
            &client,
            &format!("'test.print', '{payload}', tenant => '{tenant}'"),
        )
        .await;
        assert_eq!(ended(&client, id).await.state, "succeeded");
        id
    };
    let (erased, other) = (of("customer-42").await, of("customer-43").await);
    worker.drain().await;
    let kept = async |id: i64| -> Vec<i64> {
        let tables = ["finished", "payload", "attempt", "log"];
        let mut counts = Vec::new();
        for table in tables {
            let key = if table == "finished" { "id" } else { "job" };
            let sql = format!("SELECT count(*) FROM rouse.{table} WHERE {key} = {id}");
            counts.push(one::<i64>(&client, &sql).await);
        }
        counts
    };
    let of_other = kept(other).await;
    assert_eq!(kept(erased).await, of_other);
    assert!(of_other[0] == 1 && of_other[1] == 1, "{of_other:?}");

    let statements = statements(
        "docs/guides/jobs-and-queues.md",
        "CREATE TEMPORARY TABLE erased",
    );
    client
        .batch_execute(&format!("SET ROLE rouse_owner; {statements} RESET ROLE"))
        .await
        .unwrap();
    assert_eq!(kept(erased).await, [0; 4]);
    assert_eq!(kept(other).await, of_other);
}
