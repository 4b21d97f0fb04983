//! Statistics of workers.

use std::time::Duration;

use rouse::store::Stats;
use rouse::worker::Settings;
use serde_json::json;

use crate::support::TestDb;
use crate::support::worker::{TestWorker, ended, enqueue, prompt_heartbeats, retries, until_true};

/// The statistics exist as soon as the worker is registered, and distinguish failed jobs from failed attempts.
#[tokio::test]
async fn failed_jobs_and_failed_attempts_are_counted_separately_from_the_start() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let settings = Settings {
        overrides: retries("test.*", 2, Duration::from_millis(1)),
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, settings).await;
    until_true(&client, "SELECT count(*) = 1 FROM rouse.workers").await;
    let stats = "SELECT stats -> 'failed' = '0' AND stats -> 'attempts_failed' = '0' AND stats -> 'memory_bytes' > '0'
                 FROM rouse.workers";
    let row = client.query_one(stats, &[]).await.unwrap();
    assert!(row.get::<_, bool>(0));
    let id = enqueue(&client, "test.flaky", json!({"fail_until": 9})).await;
    assert_eq!(ended(&client, id).await.state, "failed");
    prompt_heartbeats(&client).await;
    until_true(
        &client,
        "SELECT stats -> 'failed' = '1' AND stats -> 'attempts_failed' = '2' FROM rouse.workers",
    )
    .await;
    worker.drain().await;
}

#[tokio::test]
async fn workers_report_their_stats() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = db.worker().await;
    let stats = Stats {
        active: 3,
        completed: 5,
        ..Stats::default()
    };
    let can = json!({"email.send": {"version": "1.2.0", "grants": ["files"]}});
    worker.heartbeat(Some(&can), &stats, true).await.unwrap();
    let row = client
        .query_one(
            "SELECT state, stats ->> 'completed', handlers, capabilities -> 'email.send' ->> 'version' FROM rouse.workers",
            &[],
        )
        .await
        .unwrap();
    assert_eq!(row.get::<_, &str>(0), "draining");
    assert_eq!(row.get::<_, &str>(1), "5");
    assert_eq!(row.get::<_, Vec<String>>(2), ["email.send"]);
    assert_eq!(row.get::<_, &str>(3), "1.2.0");
    client
        .batch_execute("UPDATE rouse.worker SET stats_at = now() - interval '121 s'")
        .await
        .unwrap();
    let shown: bool = client
        .query_one("SELECT stats IS NOT NULL FROM rouse.workers", &[])
        .await
        .unwrap()
        .get(0);
    assert!(!shown, "stats are shown for two minutes");
}
