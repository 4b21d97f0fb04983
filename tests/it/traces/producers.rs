//! Traces that producers provide: in SQL, in a setting, on the command line.

use rouse::worker::Settings;

use super::{PRODUCER, TRACE, producer, trace_of};
use crate::support::database::refusal;
use crate::support::page::blocks_of;
use crate::support::worker::{TestWorker, ended, enqueue_sql};
use crate::support::{TestDb, rouse};

#[tokio::test]
async fn every_function_that_enqueues_keeps_the_trace_and_a_retry_has_it_too() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let given = producer();
    let (large, arg) = ("x".repeat(5000), format!("trace => '{given}'"));
    for call in [
        format!("SELECT rouse.enqueue('noop', {arg})"),
        format!("SELECT rouse.enqueue('noop', unique_key => 'a', {arg})"),
        format!("SELECT rouse.enqueue('noop', '\"{large}\"', {arg})"),
        format!("SELECT rouse.enqueue('new.handler', tenant => 't', timeout => '5s', {arg})"),
        format!("SELECT id FROM rouse.enqueue_unique('noop', 'b', {arg})"),
        format!("SELECT * FROM rouse.enqueue_many('noop', ARRAY['1']::jsonb[], {arg})"),
    ] {
        let id: i64 = client.query_one(&call, &[]).await.unwrap().get(0);
        assert_eq!(
            trace_of(&client, id).await.as_deref(),
            Some(&*given),
            "{call}"
        );
    }
    let set = format!("SET rouse.traceparent = '{given}'");
    client.batch_execute(&set).await.unwrap();
    for call in [
        "SELECT rouse.enqueue('noop')",
        "SELECT * FROM rouse.enqueue_many('noop', ARRAY['1']::jsonb[])",
    ] {
        let id: i64 = client.query_one(call, &[]).await.unwrap().get(0);
        assert_eq!(
            trace_of(&client, id).await.as_deref(),
            Some(&*given),
            "{call}"
        );
    }
    let flow = "SELECT rouse.enqueue_flow('[{\"name\": \"a\", \"handler\": \"noop\"}]')";
    let flow: i64 = client.query_one(flow, &[]).await.unwrap().get(0);
    let sql = "SELECT trace FROM rouse.job WHERE flow = $1";
    let trace: Option<String> = client.query_one(sql, &[&flow]).await.unwrap().get(0);
    assert_eq!(trace.as_deref(), Some(&*given));

    // Instrumentation must not make the code that it observes fail, and an argument takes precedence over a setting.
    client
        .batch_execute("SET rouse.traceparent = 'rubbish'")
        .await
        .unwrap();
    let id = enqueue_sql(&client, "'noop'").await;
    assert_eq!(trace_of(&client, id).await, None);
    let id = enqueue_sql(&client, &format!("'noop', {arg}")).await;
    assert_eq!(trace_of(&client, id).await.as_deref(), Some(&*given));
    client
        .batch_execute("RESET rouse.traceparent")
        .await
        .unwrap();
    for call in [
        "rouse.enqueue('noop', trace => 'rubbish')",
        "rouse.enqueue('noop', trace => '')",
        "rouse.enqueue_unique('noop', 'c', trace => '00-0-0-0')",
        "rouse.enqueue_many('noop', ARRAY['1']::jsonb[], trace => '00-')",
    ] {
        let refused = refusal(&client, &format!("SELECT {call}")).await;
        assert!(
            refused.contains("trace must be a W3C traceparent"),
            "{refused}"
        );
    }

    client
        .execute("SELECT rouse.cancel($1)", &[&id])
        .await
        .unwrap();
    let again: i64 = client
        .query_one("SELECT rouse.retry($1)", &[&id])
        .await
        .unwrap()
        .get(0);
    assert_ne!(again, id);
    assert_eq!(trace_of(&client, again).await.as_deref(), Some(&*given));
}

#[tokio::test]
async fn rouse_enqueue_takes_the_trace_of_its_environment() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let enqueued = |variable: &str, args: &[&str]| {
        let output = rouse()
            .args(["enqueue", "noop"])
            .args(args)
            .env("DATABASE_URL", db.url())
            .env("TRACEPARENT", variable)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        text.parse::<i64>()
            .map_err(|_| String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let other = producer().replace("-01", "-00");
    let id = enqueued(&producer(), &[]).unwrap();
    assert_eq!(trace_of(&client, id).await, Some(producer()));
    let id = enqueued(&producer(), &["--trace", &other]).unwrap();
    assert_eq!(trace_of(&client, id).await, Some(other));
    let id = enqueued("", &[]).unwrap();
    assert_eq!(trace_of(&client, id).await, None);
    let refused = enqueued("", &["--trace", "rubbish"]).unwrap_err();
    assert!(
        refused.contains("trace must be a W3C traceparent"),
        "{refused}"
    );
}

#[tokio::test]
async fn a_trace_counts_for_the_size_of_a_claim() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let sql = format!("'noop', '1', trace => '{}'", producer());
    let id = enqueue_sql(&client, &sql).await;
    let sql = "SELECT bytes FROM rouse.job WHERE id = $1";
    let bytes: i32 = client.query_one(sql, &[&id]).await.unwrap().get(0);
    assert_eq!(bytes, 1 + 55);
    let worker = TestWorker::start(&db, Settings::default()).await;
    ended(&client, id).await;
    worker.drain().await;
}

#[tokio::test]
async fn the_sql_on_the_page_enqueues_jobs_with_their_trace() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for block in blocks_of("docs/guides/traces.md", "sql") {
        client.batch_execute(&block).await.unwrap();
    }
    let sql = "SELECT count(*) = 2 AND bool_and(trace = $1) FROM rouse.job";
    let trace = format!("00-{TRACE}-{PRODUCER}-01");
    let are_traced: bool = client.query_one(sql, &[&trace]).await.unwrap().get(0);
    assert!(are_traced);
}
