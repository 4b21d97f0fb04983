//! How a worker finds its jobs.

use std::time::{Duration, Instant};

use rouse::worker::{Intervals, Settings};
use serde_json::{Value, json};

use crate::support::worker::{TestWorker, catalog, ended, enqueue, put, show, until, until_true};
use crate::support::{TestDb, cut_all_others};

/// A poll interval so long that no poll ends a wait within a test.
const NEVER: Duration = Duration::from_secs(60);

fn settings() -> Settings {
    Settings::default()
}

/// A short sweep ten times a second.
fn hurried() -> Settings {
    Settings {
        intervals: Intervals {
            sweep: Duration::from_millis(100),
            ..Intervals::default()
        },
        ..settings()
    }
}

#[tokio::test]
async fn a_job_runs_end_to_end() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, settings()).await;
    // Wait until it listens: it then asks about all running jobs, which must not happen in the middle of this test.
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

/// As with a transaction pooler, which accepts a LISTEN and gives its session to another client.
#[tokio::test]
async fn a_worker_whose_notifications_do_not_arrive_polls() {
    let (db, elsewhere) = (TestDb::new().await, TestDb::new().await);
    let client = db.client().await;
    let worker =
        TestWorker::start_listening_at(elsewhere.connector(), &db, settings(), catalog().await);
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
    let asleep = Settings {
        poll_min: NEVER,
        poll_max: NEVER,
        ..settings()
    };
    let worker = TestWorker::start(&db, asleep).await;
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
    let asleep = Settings {
        poll_min: NEVER,
        poll_max: NEVER,
        ..settings()
    };
    let worker = TestWorker::start(&db, asleep).await;
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
    let asleep = Settings {
        poll_min: NEVER,
        poll_max: NEVER,
        ..settings()
    };
    let worker = TestWorker::start(&db, asleep).await;
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
    // Enqueued while the worker does not listen, and found by the look that follows the new LISTEN.
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
async fn a_late_committed_job_is_found() {
    let db = TestDb::new().await;
    let (mut late, client) = (db.client().await, db.client().await);
    let worker = TestWorker::start(&db, settings()).await;
    let transaction = late.transaction().await.unwrap();
    let row = transaction
        .query_one("SELECT rouse.enqueue('noop', '{\"n\": 1}')", &[])
        .await
        .unwrap();
    let early_turn: i64 = row.get(0);
    // Later turns of the same lane are claimed and finished: the cursor has passed the uncommitted one.
    for n in 0..3 {
        let id = enqueue(&client, "noop", json!({ "n": n })).await;
        assert!(id > early_turn);
        ended(&client, id).await;
    }
    transaction.commit().await.unwrap();
    let committed = Instant::now();
    assert_eq!(ended(&client, early_turn).await.state, "succeeded");
    // The short sweep finds it, not the sweep that comes every 30 s.
    assert!(committed.elapsed() < Duration::from_secs(15));
    worker.drain().await;
}

#[tokio::test]
async fn late_committed_jobs_are_found_without_a_notification() {
    let db = TestDb::new().await;
    let (mut late, client) = (db.client().await, db.client().await);
    let transaction = late.transaction().await.unwrap();
    let late = "SELECT rouse.enqueue('noop', '{\"n\": 1}'), rouse.enqueue('noop', '{\"n\": 1}', queue => 'other')";
    let row = transaction.query_one(late, &[]).await.unwrap();
    let late: [i64; 2] = [row.get(0), row.get(1)];
    // One lane is in the catalog, but this worker has never seen a job in it. The cursor passes the job of the other lane.
    let lane =
        "SELECT rouse._lane('noop', 'default', NULL, NULL, 'normal', NULL, NULL, '{}', '{}')";
    client.batch_execute(lane).await.unwrap();
    let worker = TestWorker::start(
        &db,
        Settings {
            notify: false,
            ..hurried()
        },
    )
    .await;
    // From the second sweep on, the worker does not look behind the cursor of the previous sweep.
    let started = Instant::now();
    while started.elapsed() < Duration::from_millis(700) {
        ended(&client, put(&client, "'noop', queue => 'other'").await).await;
    }
    transaction.commit().await.unwrap();
    let committed = Instant::now();
    for id in late {
        assert_eq!(ended(&client, id).await.state, "succeeded");
    }
    // A sweep notices the end of the transaction and causes a restart; the unconditional restart comes 30 s after the start.
    assert!(committed.elapsed() < Duration::from_secs(15));
    worker.drain().await;
}

#[tokio::test]
async fn a_late_commit_of_more_jobs_than_fit_between_two_sweeps_is_processed_completely() {
    let db = TestDb::new().await;
    let (mut late, client) = (db.client().await, db.client().await);
    let transaction = late.transaction().await.unwrap();
    let late = "SELECT max(id) FROM rouse.enqueue_many('test.sleep', ARRAY(
                    SELECT jsonb_build_object('ms', 100) FROM generate_series(1, 40))) AS id";
    let last: i64 = transaction.query_one(late, &[]).await.unwrap().get(0);
    let worker = TestWorker::start(
        &db,
        Settings {
            notify: false,
            slots: 2,
            ..hurried()
        },
    )
    .await;
    // The cursor passes them, and the sweeps forget its position before them.
    let started = Instant::now();
    while started.elapsed() < Duration::from_millis(700) {
        ended(&client, put(&client, "'test.sleep', '{\"ms\": 1}'").await).await;
    }
    transaction.commit().await.unwrap();
    let committed = Instant::now();
    assert_eq!(ended(&client, last).await.state, "succeeded");
    // They take 2 s. The unconditional restart comes 30 s after the start.
    assert!(committed.elapsed() < Duration::from_secs(15));
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
    let mine = enqueue("queue => 'a', tags => '{eu}'").await;
    let some = Settings {
        queues: vec!["a".into()],
        tags: vec!["eu".into()],
        ..settings()
    };
    let worker = TestWorker::start(&db, some).await;
    ended(&client, mine).await;
    worker.drain().await;
    for id in [other_queue, other_tag] {
        assert_eq!(show(&client, id).await.state, "queued");
    }
}

#[tokio::test]
async fn a_lane_committed_long_after_it_was_numbered_is_found() {
    let db = TestDb::new().await;
    let (mut late, client) = (db.client().await, db.client().await);
    let settings = Settings {
        intervals: Intervals {
            restart: Duration::from_secs(1),
            ..Intervals::default()
        },
        ..settings()
    };
    let worker = TestWorker::start(&db, settings).await;
    let transaction = late.transaction().await.unwrap();
    let row = transaction
        .query_one("SELECT rouse.enqueue('noop', queue => 'late')", &[])
        .await
        .unwrap();
    // More lanes than the window in which the catalog is read again, and a job that proves that they were read.
    client
        .query(
            "SELECT rouse.enqueue('no.such.handler', queue => 'q' || n) FROM generate_series(1, 400) AS n",
            &[],
        )
        .await
        .unwrap();
    let row_after = client
        .query_one("SELECT rouse.enqueue('noop', queue => 'after')", &[])
        .await
        .unwrap();
    ended(&client, row_after.get(0)).await;
    transaction.commit().await.unwrap();
    // The long sweep reads the whole catalog.
    let job = ended(&client, row.get(0)).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
    worker.drain().await;
}

#[tokio::test]
async fn a_scheduled_job_committed_after_its_time_is_found_by_its_notification() {
    let db = TestDb::new().await;
    let (mut late, client) = (db.client().await, db.client().await);
    // Only a notification can end these waits.
    let asleep = Settings {
        poll_min: NEVER,
        poll_max: NEVER,
        ..settings()
    };
    let worker = TestWorker::start(&db, asleep).await;
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
    let transaction = late.transaction().await.unwrap();
    let row = transaction
        .query_one(
            "SELECT rouse.enqueue('noop', '{\"n\": 1}', run_at => clock_timestamp() + interval '10 ms')",
            &[],
        )
        .await
        .unwrap();
    // Longer than a look reaches back after one that found no due job; then such a look, so that no sweep is near.
    tokio::time::sleep(Duration::from_millis(3000)).await;
    let id = enqueue(&client, "noop", json!({ "n": 2 })).await;
    ended(&client, id).await;
    transaction.commit().await.unwrap();
    assert_eq!(ended(&client, row.get(0)).await.state, "succeeded");
    worker.drain().await;
}

#[tokio::test]
async fn a_job_committed_behind_the_cursors_is_found_by_its_notification() {
    let db = TestDb::new().await;
    let (mut late, client) = (db.client().await, db.client().await);
    // Only a notification can end these waits.
    let asleep = Settings {
        poll_min: NEVER,
        poll_max: NEVER,
        ..hurried()
    };
    let worker = TestWorker::start(&db, asleep).await;
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
    let transaction = late.transaction().await.unwrap();
    let row = transaction
        .query_one("SELECT rouse.enqueue('noop', '{\"n\": 1}')", &[])
        .await
        .unwrap();
    // Enough looks, each more than two sweep intervals after the previous one, for the short sweep to forget.
    for n in 0..4 {
        let id = enqueue(&client, "noop", json!({ "n": n })).await;
        ended(&client, id).await;
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    transaction.commit().await.unwrap();
    let committed = Instant::now();
    assert_eq!(ended(&client, row.get(0)).await.state, "succeeded");
    assert!(
        committed.elapsed() < Duration::from_secs(10),
        "found by a sweep"
    );
    worker.drain().await;
}
