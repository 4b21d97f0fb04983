//! Stopping attempts, claims and workers.

use std::time::{Duration, Instant};

use rouse::worker::Settings;
use serde_json::json;
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::held_ends::HeldEnds;
use crate::support::worker::{
    TIMEOUT, TestWorker, UNREADABLE_PEEK, cancel, ended, enqueue, enqueue_sql, lease,
    prompt_heartbeats, show, until, until_true,
};

fn settings() -> Settings {
    Settings::default()
}

/// The number of attempts of a queued job that count.
async fn queued_attempts(client: &Client, id: i64) -> i32 {
    let sql = "SELECT attempt - uncounted FROM rouse.job WHERE id = $1 AND state = 'queued'";
    client.query_one(sql, &[&id]).await.unwrap().get(0)
}

/// True once this attempt has renewed the lease of its job.
async fn until_renewed(client: &Client, id: i64, attempt: i32) {
    let renewed = format!(
        "SELECT EXISTS (SELECT FROM rouse.record WHERE job = {id} AND event = 'renewed' AND attempt = {attempt})"
    );
    until_true(client, &renewed).await;
}

/// Waits until this many workers listen: when a worker starts to, it renews all leases.
async fn until_listening(client: &Client, workers: usize) {
    let listening = format!("SELECT count(DISTINCT worker) = {workers} FROM rouse.sleeper");
    until_true(client, &listening).await;
}

#[tokio::test]
async fn a_bound_job_is_renewed_with_the_lease_it_was_claimed_with() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // The handler's own lease is longer than that of the lane, which the database uses.
    let mut overrides = lease("noop", 20);
    overrides.0.extend(lease("test.sleep", 600).0);
    let bound = Settings {
        sources: [("legacy".to_string(), "test.sleep".to_string())].into(),
        overrides,
        ..settings()
    };
    let held = HeldEnds::of("test.sleep");
    let worker = TestWorker::start_with_middlewares(&db, bound, held.alone()).await;
    until_listening(&client, 1).await;
    let id = enqueue_sql(&client, "'noop', '{\"ms\": 1}', source => 'legacy'").await;
    until_renewed(&client, id, 1).await;
    held.release();
    let job = ended(&client, id).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
    worker.drain().await;
}

#[tokio::test]
async fn a_running_job_can_be_cancelled_and_its_outcome_is_refused() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let held = HeldEnds::of("test.sleep");
    let worker = TestWorker::start_with_middlewares(&db, settings(), held.alone()).await;
    let id = enqueue(&client, "test.sleep", json!({"ms": 1})).await;
    until(&client, id, |job| job.state == "running").await;
    let cancelled = cancel(&client, id).await;
    assert!(cancelled);
    held.release();
    worker.drain().await;
    let job = show(&client, id).await;
    assert_eq!((job.state.as_str(), job.result), ("cancelled", None));
}

#[tokio::test]
async fn a_lost_lease_aborts_the_attempt_with_the_reason() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let short = Settings {
        overrides: lease("test.wait-abort", 2),
        ..settings()
    };
    let worker = TestWorker::start(&db, short).await;
    let id = enqueue(&client, "test.wait-abort", json!({})).await;
    until(&client, id, |job| job.state == "running").await;
    cancel(&client, id).await;
    // Without the abort, which the renewal triggers, this handler would wait forever.
    worker.drain().await;
    assert_eq!(show(&client, id).await.state, "cancelled");
}

#[tokio::test]
async fn a_long_attempt_keeps_its_lease_by_renewals() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // Each worker has an id of its own.
    let short = || Settings {
        overrides: lease("test.sleep", 20),
        ..settings()
    };
    let held = HeldEnds::of("test.sleep");
    let worker = TestWorker::start_with_middlewares(&db, short(), held.alone()).await;
    let rival = TestWorker::start_with_middlewares(&db, short(), held.alone()).await;
    until_listening(&client, 2).await;
    let id = enqueue(&client, "test.sleep", json!({"ms": 1})).await;
    // Its first lease has ended by then.
    let later = format!(
        "SELECT EXISTS (SELECT FROM rouse.job WHERE id = {id} AND clock_timestamp() > claimed_at + interval '21 s')"
    );
    until_true(&client, &later).await;
    held.release();
    let job = ended(&client, id).await;
    assert_eq!(
        (job.state.as_str(), job.attempt),
        ("succeeded", 1),
        "the job was not taken over"
    );
    worker.drain().await;
    rival.drain().await;
}

#[tokio::test]
async fn a_server_that_needs_longer_for_each_renewal_loses_no_lease() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let short = Settings {
        overrides: lease("test.sleep", 24),
        ..settings()
    };
    let held = HeldEnds::of("test.sleep");
    let worker = TestWorker::start_with_middlewares(&db, short, held.alone()).await;
    until_listening(&client, 1).await;
    let id = enqueue(&client, "test.sleep", json!({"ms": 1})).await;
    let running =
        format!("SELECT EXISTS (SELECT FROM rouse.job WHERE id = {id} AND state = 'running')");
    until_true(&client, &running).await;
    // The first renewal is given up after 1 s.
    client
        .batch_execute(
            "CREATE FUNCTION public.slow() RETURNS trigger LANGUAGE plpgsql AS
                 $$ BEGIN PERFORM pg_sleep(1.2); RETURN NEW; END $$;
             CREATE TRIGGER slow BEFORE UPDATE ON rouse.job FOR EACH ROW
                 WHEN (NEW.fence = OLD.fence AND NEW.lease_until > OLD.lease_until)
                 EXECUTE FUNCTION public.slow()",
        )
        .await
        .unwrap();
    until_renewed(&client, id, 1).await;
    held.release();
    let job = ended(&client, id).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
    worker.drain().await;
}

#[tokio::test]
async fn an_attempt_that_runs_too_long_is_stopped_and_its_job_times_out() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let hurried = Settings {
        overrides: crate::support::worker::timeout("test.*", Duration::from_millis(200)),
        ..settings()
    };
    let worker = TestWorker::start(&db, hurried).await;
    for handler in ["test.spin", "test.ignore-abort"] {
        let id = enqueue(&client, handler, json!({})).await;
        let job = ended(&client, id).await;
        assert_eq!(job.state, "timed_out", "{handler}");
        assert_eq!(job.error.unwrap()["kind"], "timed_out");
    }
    // The settlement flags the worker, and the worker counts timeouts in its statistics.
    let flag = client
        .query_one(
            "SELECT timeouts, timed_out_since < timed_out_at, timed_out_handler, timed_out_job = (SELECT max(id) FROM rouse.finished)
             FROM rouse.workers",
            &[],
        )
        .await
        .unwrap();
    assert_eq!(flag.get::<_, i64>(0), 2);
    assert!(flag.get::<_, bool>(1) && flag.get::<_, bool>(3));
    assert_eq!(flag.get::<_, &str>(2), "test.ignore-abort");
    prompt_heartbeats(&client).await;
    until_true(
        &client,
        "SELECT coalesce((stats ->> 'timed_out')::int, 0) = 2 FROM rouse.workers",
    )
    .await;
    worker.drain().await;
}

#[tokio::test]
async fn a_draining_worker_finishes_its_attempts_and_claims_no_more() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let one = Settings {
        slots: 1,
        ..settings()
    };
    let held = HeldEnds::of("test.sleep");
    let worker = TestWorker::start_with_middlewares(&db, one, held.alone()).await;
    let running = enqueue(&client, "test.sleep", json!({"ms": 1})).await;
    // The attempt must have started: a claim that has not started would be released.
    let started = format!("SELECT progress IS NOT NULL FROM rouse.job({running})");
    until_true(&client, &started).await;
    let waiting = enqueue(&client, "noop", json!({"n": 1})).await;
    // The signal comes before the end of the attempt.
    tokio::join!(worker.drain(), async { held.release() });
    assert_eq!(show(&client, running).await.state, "succeeded");
    let job = show(&client, waiting).await;
    assert_eq!((job.state.as_str(), job.attempt), ("queued", 0));
    let stopped: bool = client
        .query_one("SELECT stopped_at IS NOT NULL FROM rouse.worker", &[])
        .await
        .unwrap()
        .get(0);
    assert!(stopped);
}

#[tokio::test]
async fn a_worker_that_stops_at_once_releases_its_jobs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, settings()).await;
    let id = enqueue(&client, "test.wait-abort", json!({})).await;
    until(&client, id, |job| job.state == "running").await;
    worker.stop_now().await;
    assert_eq!(queued_attempts(&client, id).await, 0);
}

#[tokio::test]
async fn claims_that_cannot_start_soon_are_released() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // A backlog of short jobs, so that the worker claims ahead; then attempts that fill its slots.
    let backlog = "SELECT count(rouse.enqueue('noop', '{\"n\": 1}')) FROM generate_series(1, 5000)";
    client.query(backlog, &[]).await.unwrap();
    let two = Settings {
        slots: 2,
        ..settings()
    };
    let held = HeldEnds::after(500);
    let greedy = TestWorker::start_with_middlewares(&db, two, held.alone()).await;
    // Claims that cannot start are released with a new turn.
    until_true(
        &client,
        "SELECT EXISTS (SELECT FROM rouse.job WHERE state = 'queued' AND turn <> id AND attempt = 0)",
    )
    .await;
    let many = Settings {
        slots: 20,
        ..settings()
    };
    let helper = TestWorker::start(&db, many).await;
    until_true(&client, "SELECT count(*) = 2 FROM rouse.job").await;
    held.release();
    until_true(
        &client,
        "SELECT count(*) FILTER (WHERE state = 'succeeded' AND attempt = 1) = 5000 FROM rouse.finished",
    )
    .await;
    greedy.drain().await;
    helper.drain().await;
}

#[tokio::test]
async fn a_removed_handler_finishes_its_attempts_and_its_queued_jobs_wait() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (catalog, folder) =
        crate::support::worker::watched(&["test_guests.wasm", "noop.wasm"]).await;
    let worker = TestWorker::start_on(&db, settings(), catalog.clone());
    let running = enqueue(&client, "test.sleep", json!({"ms": 1000})).await;
    until(&client, running, |job| job.state == "running").await;
    let mut changes = catalog.changed();
    std::fs::remove_file(folder.path().join("test_guests.wasm")).unwrap();
    changes
        .wait_for(|_| catalog.current().get("test.sleep").is_none())
        .await
        .unwrap();
    let waiting = enqueue(&client, "test.sleep", json!({"ms": 1})).await;
    assert_eq!(
        ended(&client, running).await.state,
        "succeeded",
        "the removed handler drains"
    );
    let other = enqueue(&client, "noop", json!({"n": 1})).await;
    assert_eq!(
        ended(&client, other).await.state,
        "succeeded",
        "the other handlers serve"
    );
    // A claim that was under way when the handler was removed is released.
    until(&client, waiting, |job| job.state == "queued").await;
    // The handler comes back, and the waiting job runs.
    std::fs::copy(
        crate::support::worker::guests_dir().join("test_guests.wasm"),
        folder.path().join("test_guests.wasm"),
    )
    .unwrap();
    assert_eq!(ended(&client, waiting).await.state, "succeeded");
    worker.drain().await;
}

#[tokio::test]
async fn a_drain_that_takes_too_long_aborts_and_releases_its_attempts() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let impatient = Settings {
        drain_timeout: Duration::from_millis(100),
        ..settings()
    };
    let worker = TestWorker::start(&db, impatient).await;
    let id = enqueue(&client, "test.wait-abort", json!({})).await;
    until(&client, id, |job| job.state == "running").await;
    worker.drain().await;
    assert_eq!(queued_attempts(&client, id).await, 0);
}

#[tokio::test]
async fn a_rolling_restart_of_three_hosts_under_load_uses_up_no_attempt() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let hosts = || async { TestWorker::start(&db, settings()).await };
    let mut workers = [hosts().await, hosts().await, hosts().await];
    let work = "SELECT count(*) FROM (
                    SELECT rouse.enqueue_many('test.sleep', array_agg(jsonb_build_object('ms', n % 40)))
                    FROM generate_series(1, 500) AS n) AS q";
    let number = async |sql: &str| -> i64 { client.query_one(sql, &[]).await.unwrap().get(0) };
    let (mut enqueued, until) = (0, Instant::now() + TIMEOUT);
    for _ in 0..2 {
        for worker in &mut workers {
            // Each host is replaced while there is work for all of them.
            loop {
                let finished = number("SELECT count(*) FROM rouse.finished").await;
                client.query(work, &[]).await.unwrap();
                enqueued += 500;
                until_true(
                    &client,
                    &format!("SELECT count(*) > {finished} + 100 FROM rouse.finished"),
                )
                .await;
                let old = std::mem::replace(worker, hosts().await);
                old.drain().await;
                if number("SELECT count(*) FROM rouse.job").await > 0 {
                    break;
                }
                assert!(Instant::now() < until, "no host was replaced under load");
            }
        }
    }
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    for worker in workers {
        worker.drain().await;
    }
    let row = client
        .query_one(
            "SELECT count(*) FILTER (WHERE state = 'succeeded' AND attempt = 1 AND uncounted = 0), count(DISTINCT worker),
                    (SELECT count(*) FROM rouse.attempt)
             FROM rouse.finished",
            &[],
        )
        .await
        .unwrap();
    let counts: Vec<i64> = (0..3).map(|n| row.get(n)).collect();
    assert_eq!(
        (counts[0], counts[2]),
        (enqueued, 0),
        "on attempt 1; failed"
    );
    assert!(counts[1] >= 6, "{} workers took part", counts[1]);
}

#[tokio::test]
async fn a_worker_whose_claimer_panics_gives_its_jobs_back_and_unregisters() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, settings()).await;
    let id = enqueue(&client, "test.wait-abort", json!({})).await;
    until(&client, id, |job| job.state == "running").await;
    // The claimer panics when it reads this response.
    client.batch_execute(UNREADABLE_PEEK).await.unwrap();
    let why = worker.failed().await;
    assert!(why.contains("the claimer has panicked"), "{why}");
    assert_eq!(show(&client, id).await.state, "queued");
    let workers = "SELECT bool_and(state = 'unregistered') FROM rouse.workers";
    until_true(&client, workers).await;
}
