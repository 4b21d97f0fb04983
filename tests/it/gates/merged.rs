//! Jobs that several gates, or a gate and a unique key, keep from being enqueued.

use std::time::Duration;

use rouse::job::{ErrorKind, Outcome};
use rouse::store::Locked;
use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::commands;
use crate::support::TestDb;
use crate::support::claims::{claim_one, error, settlement};

async fn run(client: &Client, sql: &str) {
    client.batch_execute(sql).await.unwrap();
}

/// The id that a query returns.
async fn id(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn a_gate_stays_open_if_a_later_gate_merges_the_job() {
    let db = TestDb::new().await;
    let client = db.client().await;
    run(
        &client,
        "SELECT rouse.set_gate('1-hourly', 'singleton', handler => 'report.make', key => '{source}', during => 'period', period => '1 hour');
         SELECT rouse.set_gate('2-one', 'singleton', handler => 'report.make', during => 'running')",
    )
    .await;
    let make = async |source: &str| {
        let sql = format!("SELECT rouse.enqueue('report.make', source => '{source}')");
        id(&client, &sql).await
    };
    let first = make("a").await;
    assert_eq!(make("b").await, first, "the second gate is closed");
    run(&client, &format!("SELECT rouse.complete({first})")).await;
    let second = make("b").await;
    assert_ne!(second, first, "the first gate has let no job of b through");
    assert_eq!(make("b").await, second);
    let live = "SELECT count(*) FROM rouse.job";
    let live: i64 = client.query_one(live, &[]).await.unwrap().get(0);
    assert_eq!(live, 1);
}

#[tokio::test]
async fn a_gate_stays_open_if_a_live_job_has_the_unique_key() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let make = async || {
        id(
            &client,
            "SELECT id FROM rouse.enqueue_unique('report.make', 'monthly')",
        )
        .await
    };
    let first = make().await;
    run(
        &client,
        "SELECT rouse.set_gate('hourly', 'singleton', handler => 'report.make', during => 'period', period => '1 hour')",
    )
    .await;
    assert_eq!(make().await, first);
    let second = id(&client, "SELECT rouse.enqueue('report.make')").await;
    assert_ne!(second, first, "the gate has let no job through yet");
    let exists = "SELECT count(*) FROM rouse.job WHERE id = $1";
    let exists: i64 = client.query_one(exists, &[&second]).await.unwrap().get(0);
    assert_eq!(exists, 1);
}

#[tokio::test]
async fn a_gate_keeps_its_running_job_if_the_next_one_gives_way_to_it() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    run(
        &client,
        "SELECT rouse.set_gate('one', 'singleton', handler => 'report.make')",
    )
    .await;
    let keyed = "SELECT id FROM rouse.enqueue_unique('report.make', 'monthly')";
    let first = id(&client, keyed).await;
    let job = claim_one(&store).await;
    assert_eq!(job.id.0, first);
    // The gate is open while the job runs, and then the unique key decides.
    assert_eq!(id(&client, keyed).await, first);
    let retry = Outcome::Retry {
        again: Duration::from_secs(3600).into(),
        error: error(ErrorKind::GuestError),
    };
    let retry = settlement(&job, retry);
    store.settle(&[retry], Locked::Wait).await.unwrap();
    let other = id(&client, "SELECT rouse.enqueue('report.make')").await;
    assert_eq!(other, first, "it is queued again");
}

#[tokio::test]
async fn a_receipt_shows_that_a_gate_has_merged_the_job() {
    let db = TestDb::new().await;
    let client = db.client().await;
    run(
        &client,
        "SELECT rouse.set_gate('last', 'singleton', handler => 'report.make', on_conflict => 'replace')",
    )
    .await;
    let receipt = async |arguments: &str| -> (i64, bool, Vec<String>) {
        let sql = format!(
            "SELECT id, created, differs FROM rouse.enqueue_and_report('report.make', {arguments})"
        );
        let row = client.query_one(&sql, &[]).await.unwrap();
        (row.get(0), row.get(1), row.get(2))
    };
    let (first, created, differs) = receipt("NULL").await;
    assert!(created && differs.is_empty(), "{differs:?}");
    assert_eq!(receipt(r#"'{"n": 1}'"#).await, (first, false, vec![]));
    let keyed = r#"'{"n": 2}', unique_key => 'k'"#;
    assert_eq!(receipt(keyed).await, (first, false, vec![]));

    let (code, output) = commands::run(&db, &["enqueue", "report.make", "--json"]);
    assert_eq!(code, 0, "{output}");
    let output: Value = serde_json::from_str(&output).unwrap();
    assert_eq!(
        output,
        json!({"id": first, "created": false, "differs": []})
    );
    let text = format!("{first}\nrouse: no job was added: a gate has merged it with job {first}");
    let (_, output) = commands::run(&db, &["enqueue", "report.make"]);
    assert_eq!(output, text);
    let live = "SELECT count(*) FROM rouse.job";
    assert_eq!(id(&client, live).await, 1);
}
