//! Spans of batches, and of their jobs that run alone.

use serde_json::{Value, json};
use tokio_postgres::Client;

use super::{PRODUCER, TRACE, Traced, hex, one, producer, serve_from, spans_of_job};
use crate::support::collector::{Behaviour, attribute};
use crate::support::worker::{ended, guests_dir, until_true};
use crate::support::{TestDb, scratch};

/// A host with a handler that takes batches, once its gate is set.
async fn serving_batches(db: &TestDb, client: &Client) -> Traced {
    let config = scratch("traces").join("rouse.toml");
    std::fs::write(&config, "").unwrap();
    let batches = guests_dir().with_file_name("batch");
    let command = serve_from(db, "off", &batches, &config);
    let traced = Traced::start_as(command, Behaviour::Accept, &[]).await;
    until_true(
        client,
        "SELECT EXISTS (SELECT FROM rouse.gate WHERE name = 'batch.any/batch')",
    )
    .await;
    traced
}

/// Enqueues a batch: jobs with these payloads and traces, in one transaction.
async fn enqueue_batch(client: &Client, jobs: &[(Value, Option<String>)]) -> Vec<i64> {
    let (payloads, traces): (Vec<Value>, Vec<Option<String>>) = jobs.iter().cloned().unzip();
    let sql = "SELECT rouse.enqueue('batch.any', j.payload, trace => j.trace) \
               FROM unnest($1::jsonb[], $2::text[]) WITH ORDINALITY AS j(payload, trace, n) ORDER BY j.n";
    let rows = client.query(sql, &[&payloads, &traces]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_is_one_span_that_links_to_each_of_its_jobs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let traced = serving_batches(&db, &client).await;
    let ids = enqueue_batch(&client, &vec![(json!({}), None); 4]).await;
    for id in &ids {
        ended(&client, *id).await;
    }
    let spans = traced.stop().spans();
    let batch = one(spans_of_job(&spans, "process batch.any", ids[0]));
    let count = attribute(&batch.attributes, "messaging.batch.message_count");
    assert_eq!(count.as_deref(), Some("4"), "{spans:#?}");
    let linked: Vec<_> = batch.links[1..]
        .iter()
        .map(|link| attribute(&link.attributes, "messaging.message.id").unwrap())
        .collect();
    let others: Vec<_> = ids[1..].iter().map(ToString::to_string).collect();
    assert_eq!(linked, others);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_is_in_the_first_trace_that_is_recorded() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let traced = serving_batches(&db, &client).await;
    let unsampled = format!("00-{}-{PRODUCER}-00", "1".repeat(32));
    let jobs = [
        (json!({}), Some(unsampled)),
        (json!({}), Some(producer())),
        (json!({}), None),
        (json!({}), None),
    ];
    let ids = enqueue_batch(&client, &jobs).await;
    for id in &ids {
        ended(&client, *id).await;
    }
    let spans = traced.stop().spans();
    let enqueued = one(spans_of_job(&spans, "enqueue batch.any", ids[1]));
    assert_eq!(hex(&enqueued.trace_id), TRACE);
    let batch = one(spans_of_job(&spans, "process batch.any", ids[1]));
    assert_eq!(batch.parent_span_id, enqueued.span_id);
    assert_eq!(batch.links.len(), 4, "{batch:#?}");
    one(spans_of_job(&spans, "enqueue batch.any", ids[3]));
    assert_eq!(spans_of_job(&spans, "enqueue batch.any", ids[0]), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_job_of_a_batch_that_is_refused_or_runs_alone_has_an_attempt_below_its_enqueue() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let traced = serving_batches(&db, &client).await;
    let (good, bad) = (json!({}), json!({"does": "nothing that exists"}));
    // One job is left, and runs alone without a batch.
    let refused = [bad.clone(), good.clone(), bad.clone(), bad].map(|job| (job, None));
    let refused = enqueue_batch(&client, &refused).await;
    // After the panic of the batch, each job runs alone.
    let panics = json!({"does": "panics"});
    let broken = [good.clone(), panics, good.clone(), good].map(|job| (job, None));
    let broken = enqueue_batch(&client, &broken).await;
    for id in refused.iter().chain(&broken) {
        ended(&client, *id).await;
    }
    let spans = traced.stop().spans();
    for id in refused.iter().chain(&broken) {
        let enqueued = one(spans_of_job(&spans, "enqueue batch.any", *id));
        let attempts = spans_of_job(&spans, "process batch.any", *id);
        assert!(!attempts.is_empty(), "{id}: {spans:#?}");
        for attempt in attempts {
            assert_eq!(attempt.parent_span_id, enqueued.span_id, "{id}");
        }
    }
    let attempt = one(spans_of_job(&spans, "process batch.any", refused[0]));
    let value = |key: &str| attribute(&attempt.attributes, key).unwrap_or_default();
    assert_eq!(
        (value("rouse.outcome"), value("error.type")),
        ("failed".into(), "invalid_payload".into())
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_a_batch_that_go_back_to_the_queue_have_attempts_that_say_so() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let traced = serving_batches(&db, &client).await;
    // The second job uses up the run timeout, first within the batch and then alone.
    let jobs = [json!({}), json!({"does": "spins"}), json!({}), json!({})].map(|job| (job, None));
    let ids = enqueue_batch(&client, &jobs).await;
    for id in &ids {
        ended(&client, *id).await;
    }
    let spans = traced.stop().spans();
    for id in &ids[2..] {
        let enqueued = one(spans_of_job(&spans, "enqueue batch.any", *id));
        let mut released = spans_of_job(&spans, "process batch.any", *id);
        released.retain(|span| {
            attribute(&span.attributes, "rouse.outcome").as_deref() == Some("released")
        });
        assert_eq!(one(released).parent_span_id, enqueued.span_id, "{id}");
    }
}
