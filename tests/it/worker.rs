//! How a worker finds its jobs.

mod late_commits;

use std::time::{Duration, Instant};

use rouse::worker::{Intervals, Settings};
use serde_json::{Value, json};

use crate::support::worker::{TestWorker, catalog, ended, enqueue, show, until, until_true};
use crate::support::{TestDb, cut_all_others};

/// A poll interval so long that no poll ends a wait within a test.
const NEVER: Duration = Duration::from_secs(60);

fn settings() -> Settings {
    Settings::default()
}

/// A short sweep ten times a second.
fn with_fast_sweeps() -> Settings {
    Settings {
        intervals: Intervals {
            sweep: Duration::from_millis(100),
            ..Intervals::default()
        },
        ..settings()
    }
}

/// With these settings, only a notification ends the wait of a worker.
fn without_polls(settings: Settings) -> Settings {
    Settings {
        poll_min: NEVER,
        poll_max: NEVER,
        ..settings
    }
}

#[tokio::test]
async fn a_job_runs_end_to_end() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, settings()).await;
    // Waits until the worker listens. When it starts to listen, it queries the state of all running jobs, which must
    // not happen in the middle of this test.
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
    let id: i64 = client
        .query_one(
            "SELECT rouse.enqueue('test.echo', '{\"a\": [1, \"ü\"]}', tenant => 'acme', source => 'cron')",
            &[],
        )
        .await
        .unwrap()
        .get(0);
    let job = ended(&client, id).await;
    assert_eq!(job.state, "succeeded");
    let result = job.result.unwrap();
    assert_eq!(result["payload"], json!({"a": [1, "ü"]}));
    assert_eq!(result["id"], id);
    assert_eq!(result["handler"], "test.echo");
    assert_eq!(result["queue"], "default");
    assert_eq!(result["tenant"], "acme");
    assert_eq!(result["source"], "cron");
    assert_eq!(result["attempt"], 1);
    assert_eq!(result["max_attempts"], 2, "the handler's own limit");
    let row = client
        .query_one(
            "SELECT requested_at <= claimed_at AND claimed_at <= started_at AND started_at <= finished_at,
                    (extract(epoch FROM requested_at) * 1000)::bigint, rouse.result($1)
             FROM rouse.job($1)",
            &[&id],
        )
        .await
        .unwrap();
    assert!(
        row.get::<_, bool>(0),
        "requested, claimed, started, finished"
    );
    assert!((row.get::<_, i64>(1) - result["requested_at_ms"].as_i64().unwrap()).abs() <= 1);
    assert_eq!(row.get::<_, Value>(2), result);
    let events: Vec<String> = client
        .query("SELECT event FROM rouse.history($1)", &[&id])
        .await
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert_eq!(events, ["requested", "started", "succeeded"]);
    worker.drain().await;
}

#[tokio::test]
async fn waiting_jobs_run_when_a_worker_starts() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue(&client, "noop", json!({"n": 7})).await;
    let worker = TestWorker::start(&db, settings()).await;
    assert_eq!(ended(&client, id).await.result, Some(json!({"n": 7})));
    worker.drain().await;
}

#[tokio::test]
async fn a_job_runs_with_notifications_off() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let off = Settings {
        notify: false,
        ..settings()
    };
    let worker = TestWorker::start(&db, off).await;
    until_true(&client, "SELECT count(*) = 1 FROM rouse.worker").await;
    for _ in 0..3 {
        let id = enqueue(&client, "noop", json!({"n": 1})).await;
        assert_eq!(ended(&client, id).await.state, "succeeded");
    }
    let sleepers = client
        .query("SELECT FROM rouse.sleeper", &[])
        .await
        .unwrap();
    assert!(sleepers.is_empty(), "it never requested notifications");
    worker.drain().await;
}

/// A transaction pooler has this effect: it accepts a LISTEN and gives its session to another client.
#[tokio::test]
async fn a_worker_whose_notifications_do_not_arrive_polls() {
    let (db, elsewhere) = (TestDb::new().await, TestDb::new().await);
    let client = db.client().await;
    let worker = TestWorker::start_listening_through(
        elsewhere.connector(),
        &db,
        settings(),
        catalog().await,
    );
    until_true(
        &elsewhere.client().await,
        "SELECT count(*) = 1 FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'",
    )
    .await;
    for _ in 0..3 {
        let id = enqueue(&client, "noop", json!({"n": 1})).await;
        assert_eq!(ended(&client, id).await.state, "succeeded");
    }
    let sleepers = client
        .query("SELECT FROM rouse.sleeper", &[])
        .await
        .unwrap();
    assert!(
        sleepers.is_empty(),
        "it requested notifications that it cannot receive"
    );
    worker.drain().await;
}

#[tokio::test]
async fn a_notification_wakes_a_worker_long_before_its_next_poll() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, without_polls(settings())).await;
    for n in 0..3 {
        until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
        let before = Instant::now();
        let id = enqueue(&client, "noop", json!({ "n": n })).await;
        assert_eq!(ended(&client, id).await.state, "succeeded");
        assert!(before.elapsed() < NEVER / 2, "found by the poll");
    }
    worker.drain().await;
}

#[tokio::test]
async fn a_new_lane_and_a_scheduled_job_wake_a_sleeping_worker_too() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, without_polls(settings())).await;
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
    let before = Instant::now();
    let row = client
        .query_one(
            "SELECT rouse.enqueue('noop', queue => 'brand-new', run_at => clock_timestamp() + interval '300 ms')",
            &[],
        )
        .await
        .unwrap();
    let id: i64 = row.get(0);
    assert_eq!(ended(&client, id).await.state, "succeeded");
    assert!(before.elapsed() < NEVER / 2, "found by the poll");
    let early: bool = client
        .query_one(
            "SELECT started_at < available_at FROM rouse.job($1)",
            &[&id],
        )
        .await
        .unwrap()
        .get(0);
    assert!(!early, "never before its time");
    worker.drain().await;
}

#[tokio::test]
async fn a_worker_whose_listening_connection_was_cut_listens_again() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, without_polls(settings())).await;
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
    let cut = client
        .query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE datname = current_database() AND query LIKE 'LISTEN%'",
            &[],
        )
        .await
        .unwrap();
    assert_eq!(cut.len(), 1);
    // The job is enqueued while the worker does not listen, and is found by the look that follows the new LISTEN.
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    assert_eq!(ended(&client, id).await.state, "succeeded");
    worker.drain().await;
}

#[tokio::test]
async fn a_worker_continues_after_all_its_connections_were_cut() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, settings()).await;
    let running = enqueue(&client, "test.sleep", json!({"ms": 300})).await;
    until(&client, running, |job| job.state == "running").await;
    cut_all_others(&client).await;
    let later = enqueue(&client, "noop", json!({"n": 1})).await;
    for id in [running, later] {
        let job = ended(&client, id).await;
        assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
    }
    worker.drain().await;
}

#[tokio::test]
async fn a_job_for_a_handler_that_this_host_does_not_have_waits() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, settings()).await;
    let unknown = enqueue(&client, "no.such.handler", json!({})).await;
    let known = enqueue(&client, "noop", json!({"n": 1})).await;
    ended(&client, known).await;
    worker.drain().await;
    let job = show(&client, unknown).await;
    assert_eq!(
        (job.state.as_str(), job.attempt),
        ("queued", 0),
        "never claimed"
    );
}

#[tokio::test]
async fn a_worker_serves_only_its_queues_and_jobs_whose_tags_it_has() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let enqueue = async |arguments: &str| -> i64 {
        let sql = format!("SELECT rouse.enqueue('noop', {arguments})");
        client.query_one(&sql, &[]).await.unwrap().get(0)
    };
    let other_queue = enqueue("queue => 'b'").await;
    let other_tag = enqueue("queue => 'a', tags => '{gpu,eu}'").await;
    let served = enqueue("queue => 'a', tags => '{eu}'").await;
    let some = Settings {
        queues: vec!["a".into()],
        tags: vec!["eu".into()],
        ..settings()
    };
    let worker = TestWorker::start(&db, some).await;
    ended(&client, served).await;
    worker.drain().await;
    for id in [other_queue, other_tag] {
        assert_eq!(show(&client, id).await.state, "queued");
    }
}
