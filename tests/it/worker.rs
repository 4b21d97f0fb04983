//! A whole worker: from an enqueue in SQL to the outcome in SQL.

use std::time::{Duration, Instant};

use rouse::worker::Settings;
use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::worker::{TestWorker, ended, enqueue, show, until, until_true, until_within};

/// A poll that never ends a wait within a test.
const NEVER: Duration = Duration::from_secs(60);

fn settings() -> Settings {
    Settings::default()
}

async fn settled(client: &Client) -> bool {
    let row = client
        .query_one("SELECT NOT EXISTS (SELECT FROM rouse.job)", &[])
        .await;
    row.unwrap().get(0)
}

#[tokio::test]
async fn a_job_runs_end_to_end() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, settings()).await;
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
    assert_eq!(result["max_attempts"], 2, "the handler's own");
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
async fn jobs_that_waited_for_a_worker_run_when_one_comes() {
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
    assert!(sleepers.is_empty(), "it never asked to be notified");
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
        assert!(before.elapsed() < NEVER / 2, "the poll did it");
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
    assert!(before.elapsed() < NEVER / 2, "the poll did it");
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
    // Enqueued while nobody listens: found by the look that follows the new LISTEN.
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    assert_eq!(ended(&client, id).await.state, "succeeded");
    worker.drain().await;
}

#[tokio::test]
async fn a_worker_goes_on_after_all_its_connections_were_cut() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, settings()).await;
    let running = enqueue(&client, "test.sleep", json!({"ms": 300})).await;
    until(&client, running, |job| job.state == "running").await;
    client
        .query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE datname = current_database() AND pid <> pg_backend_pid()",
            &[],
        )
        .await
        .unwrap();
    let later = enqueue(&client, "noop", json!({"n": 1})).await;
    for id in [running, later] {
        let job = ended(&client, id).await;
        assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
    }
    worker.drain().await;
}

#[tokio::test]
async fn a_job_whose_producer_commits_late_is_still_found() {
    let db = TestDb::new().await;
    let (mut late, client) = (db.client().await, db.client().await);
    let worker = TestWorker::start(&db, settings()).await;
    let transaction = late.transaction().await.unwrap();
    let row = transaction
        .query_one("SELECT rouse.enqueue('noop', '{\"n\": 1}')", &[])
        .await
        .unwrap();
    let early_turn: i64 = row.get(0);
    // Later turns of the same lane are claimed and finished: the cursor has passed the open one.
    for n in 0..3 {
        let id = enqueue(&client, "noop", json!({ "n": n })).await;
        assert!(id > early_turn);
        ended(&client, id).await;
    }
    transaction.commit().await.unwrap();
    let committed = Instant::now();
    assert_eq!(ended(&client, early_turn).await.state, "succeeded");
    // The short sweep finds it, not the one that comes every 30 s.
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
async fn a_worker_serves_only_its_queues_and_only_jobs_whose_tags_it_has() {
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
async fn a_source_can_be_bound_to_a_handler_of_the_consumers_own() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let bound = Settings {
        sources: [("legacy".to_string(), "test.echo".to_string())].into(),
        ..settings()
    };
    let worker = TestWorker::start(&db, bound).await;
    let row = client
        .query_one("SELECT rouse.enqueue('noop', source => 'legacy')", &[])
        .await
        .unwrap();
    let job = ended(&client, row.get(0)).await;
    assert_eq!(job.result.unwrap()["handler"], "test.echo");
    worker.drain().await;
}

#[tokio::test]
async fn a_job_bound_to_another_handler_is_renewed_by_the_lease_that_it_was_claimed_with() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let bound = Settings {
        sources: [("legacy".to_string(), "test.sleep".to_string())].into(),
        overrides: crate::support::worker::lease("noop", 2),
        ..settings()
    };
    let worker = TestWorker::start(&db, bound).await;
    let row = client
        .query_one(
            "SELECT rouse.enqueue('noop', '{\"ms\": 4000}', source => 'legacy')",
            &[],
        )
        .await
        .unwrap();
    let job = ended(&client, row.get(0)).await;
    // The handler's own lease is longer than that of the lane, which the database knows of.
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
    worker.drain().await;
}

#[tokio::test]
async fn high_priority_goes_first_and_within_a_priority_the_oldest() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut expected = Vec::new();
    for priority in ["low", "normal", "high"] {
        let mut ids = Vec::new();
        for handler in ["noop", "test.echo", "noop"] {
            let row = client
                .query_one(
                    "SELECT rouse.enqueue($1, priority => $2)",
                    &[&handler, &priority],
                )
                .await
                .unwrap();
            ids.push(row.get::<_, i64>(0));
        }
        expected.splice(0..0, ids);
    }
    // One at a time, so that the order of the starts is the order of the claims.
    let one = Settings {
        slots: 1,
        ..settings()
    };
    let worker = TestWorker::start(&db, one).await;
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    worker.drain().await;
    let rows = client
        .query(
            "SELECT id, priority::text FROM rouse.jobs ORDER BY started_at",
            &[],
        )
        .await
        .unwrap();
    let priorities: Vec<String> = rows.iter().map(|row| row.get(1)).collect();
    assert_eq!(
        priorities,
        [
            "high", "high", "high", "normal", "normal", "normal", "low", "low", "low"
        ]
    );
    let first: i64 = rows[0].get(0);
    assert_eq!(first, expected[0]);
}

#[tokio::test]
async fn an_error_is_retried_with_backoff_and_the_job_then_succeeds() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, settings()).await;
    let id = enqueue(&client, "test.flaky", json!({"fail_until": 2})).await;
    let job = ended(&client, id).await;
    assert_eq!(
        (job.state.as_str(), job.attempt, job.result),
        ("succeeded", 3, Some(json!(3)))
    );
    let rows = client
        .query(
            "SELECT event, attempt, detail->>'message' FROM rouse.history($1)",
            &[&id],
        )
        .await
        .unwrap();
    let events: Vec<(String, Option<i32>, Option<String>)> = rows
        .iter()
        .map(|row| (row.get(0), row.get(1), row.get(2)))
        .collect();
    let event = |name: &str, attempt, message: Option<&str>| {
        (name.to_string(), attempt, message.map(str::to_string))
    };
    assert_eq!(
        events,
        [
            event("requested", None, None),
            event("started", Some(1), None),
            event("failed", Some(1), Some("attempt 1 fails")),
            event("started", Some(2), None),
            event("failed", Some(2), Some("attempt 2 fails")),
            event("started", Some(3), None),
            event("succeeded", Some(3), None),
        ]
    );
    worker.drain().await;
}

#[tokio::test]
async fn the_attempts_of_the_job_count_before_those_of_the_handler() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, settings()).await;
    let row = client
        .query_one(
            "SELECT rouse.enqueue('test.flaky', '{\"fail_until\": 100}', max_attempts => 2)",
            &[],
        )
        .await
        .unwrap();
    let job = ended(&client, row.get(0)).await;
    assert_eq!((job.state.as_str(), job.attempt), ("failed", 2));
    assert_eq!(job.error.unwrap()["guest_kind"], "flaky");
    worker.drain().await;
}

#[tokio::test]
async fn a_permanent_error_a_panic_and_a_trap_are_kept_with_their_message_and_place() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, settings()).await;
    let permanent = enqueue(&client, "test.fail", json!({"as": "permanent"})).await;
    let job = ended(&client, permanent).await;
    assert_eq!(
        (job.state.as_str(), job.attempt),
        ("failed", 1),
        "never again"
    );
    let error = job.error.unwrap();
    assert_eq!(
        (&error["kind"], &error["guest_kind"], &error["message"]),
        (&json!("guest_error"), &json!("hopeless"), &json!("never"))
    );

    let one_try = async |handler: &str| -> Value {
        let row = client
            .query_one("SELECT rouse.enqueue($1, max_attempts => 1)", &[&handler])
            .await
            .unwrap();
        let job = ended(&client, row.get(0)).await;
        assert_eq!(job.state, "failed");
        job.error.unwrap()
    };
    let panic = one_try("test.panic").await;
    assert_eq!(panic["kind"], "panic");
    assert!(
        panic["location"].as_str().unwrap().contains("failing.rs:"),
        "{panic}"
    );
    assert!(
        !panic["backtrace"].as_array().unwrap().is_empty(),
        "{panic}"
    );
    let trap = one_try("test.trap").await;
    assert_eq!(trap["kind"], "trap");
    assert!(
        trap["message"].as_str().unwrap().contains("unreachable"),
        "{trap}"
    );
    worker.drain().await;
}

#[tokio::test]
async fn one_poisonous_result_fails_alone_and_never_its_batch() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // Everything is queued before the worker starts, so that outcomes are settled together.
    let nul = enqueue(&client, "test.nul-result", json!({})).await;
    let big = enqueue(&client, "test.big-result", json!({"bytes": 2 << 20})).await;
    let nul_error = enqueue(&client, "test.fail", json!({"as": "nul"})).await;
    let mut good = Vec::new();
    for n in 0..50 {
        good.push(enqueue(&client, "noop", json!({ "n": n })).await);
    }
    let worker = TestWorker::start(&db, settings()).await;
    for id in good {
        assert_eq!(ended(&client, id).await.state, "succeeded");
    }
    let error = ended(&client, nul).await.error.unwrap();
    assert_eq!(error["kind"], "invalid_result");
    assert!(
        error["message"].as_str().unwrap().contains("NUL"),
        "{error}"
    );
    let error = ended(&client, big).await.error.unwrap();
    assert_eq!(error["kind"], "output_too_large");
    let error = ended(&client, nul_error).await.error.unwrap();
    assert_eq!(error["message"], "before\u{fffd}after");
    worker.drain().await;
}

#[tokio::test]
async fn a_result_that_only_postgres_refuses_fails_alone_too() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // JSON by the book, but nested deeper than Postgres can follow: the host cannot know, the
    // settlement says so.
    let deep = format!("{}{}", "[".repeat(20_000), "]".repeat(20_000));
    let catalog = crate::support::worker::catalog_of(&[(
        "huge.wasm",
        &crate::sandbox_guest::returns("test.huge", &deep),
    )])
    .await;
    let worker = TestWorker::start_on(&db, settings(), catalog);
    let mut ids = Vec::new();
    for _ in 0..8 {
        ids.push(enqueue(&client, "test.huge", json!({})).await);
    }
    for id in ids {
        let job = ended(&client, id).await;
        assert_eq!(job.state, "failed");
        let error = job.error.unwrap();
        assert_eq!(error["kind"], "invalid_result");
        assert!(
            error["message"]
                .as_str()
                .unwrap()
                .contains("Postgres cannot store"),
            "{error}"
        );
    }
    worker.drain().await;
}

#[tokio::test]
async fn an_outcome_that_cannot_be_written_holds_up_no_other_and_ends_with_its_lease() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let refused = enqueue(&client, "test.echo", json!({})).await;
    let refuse = format!("ALTER TABLE rouse.finished ADD CONSTRAINT no CHECK (id <> {refused})");
    client.batch_execute(&refuse).await.unwrap();
    let short = Settings {
        overrides: crate::support::worker::lease("test.echo", 2),
        ..settings()
    };
    let worker = TestWorker::start(&db, short).await;
    until(&client, refused, |job| job.state == "running").await;
    for n in 0..5 {
        let id = enqueue(&client, "noop", json!({ "n": n })).await;
        assert_eq!(ended(&client, id).await.state, "succeeded");
    }
    // Its lease is not renewed for ever: another attempt begins.
    until(&client, refused, |job| job.attempt > 1).await;
    worker.drain().await;
}

#[tokio::test]
async fn an_open_cancellation_holds_up_no_other_settlement() {
    let db = TestDb::new().await;
    let (mut other, client) = (db.client().await, db.client().await);
    let worker = TestWorker::start(&db, settings()).await;
    let locked = enqueue(&client, "test.sleep", json!({"ms": 200})).await;
    until(&client, locked, |job| job.state == "running").await;
    let transaction = other.transaction().await.unwrap();
    transaction
        .query("SELECT rouse.cancel($1)", &[&locked])
        .await
        .unwrap();
    for n in 0..5 {
        let id = enqueue(&client, "noop", json!({ "n": n })).await;
        assert_eq!(ended(&client, id).await.state, "succeeded");
    }
    assert_eq!(
        show(&client, locked).await.state,
        "running",
        "as everybody else sees it"
    );
    transaction.rollback().await.unwrap();
    assert_eq!(ended(&client, locked).await.state, "succeeded");
    worker.drain().await;
}

#[tokio::test]
async fn a_running_job_can_be_cancelled_and_its_outcome_is_refused() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, settings()).await;
    let id = enqueue(&client, "test.sleep", json!({"ms": 300})).await;
    until(&client, id, |job| job.state == "running").await;
    let cancelled: bool = client
        .query_one("SELECT rouse.cancel($1)", &[&id])
        .await
        .unwrap()
        .get(0);
    assert!(cancelled);
    worker.drain().await;
    let job = show(&client, id).await;
    assert_eq!((job.state.as_str(), job.result), ("cancelled", None));
}

#[tokio::test]
async fn a_lease_that_is_lost_aborts_the_attempt_with_the_reason() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let short = Settings {
        overrides: crate::support::worker::lease("test.wait-abort", 2),
        ..settings()
    };
    let worker = TestWorker::start(&db, short).await;
    let id = enqueue(&client, "test.wait-abort", json!({})).await;
    until(&client, id, |job| job.state == "running").await;
    client
        .query("SELECT rouse.cancel($1)", &[&id])
        .await
        .unwrap();
    // Without the abort, which the renewal finds, this handler would wait for ever.
    worker.drain().await;
    assert_eq!(show(&client, id).await.state, "cancelled");
}

#[tokio::test]
async fn a_long_attempt_keeps_its_lease_by_renewing_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let short = Settings {
        overrides: crate::support::worker::lease("test.sleep", 2),
        ..settings()
    };
    let worker = TestWorker::start(&db, short.clone()).await;
    let rival = TestWorker::start(&db, short).await;
    let id = enqueue(&client, "test.sleep", json!({"ms": 5000})).await;
    let job = ended(&client, id).await;
    assert_eq!(
        (job.state.as_str(), job.attempt),
        ("succeeded", 1),
        "nobody took it over"
    );
    worker.drain().await;
    rival.drain().await;
}

#[tokio::test]
async fn an_attempt_that_runs_too_long_is_stopped_and_the_job_ends_as_timed_out() {
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
    worker.drain().await;
}

#[tokio::test]
async fn a_worker_that_drains_finishes_what_runs_and_claims_nothing_more() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let one = Settings {
        slots: 1,
        ..settings()
    };
    let worker = TestWorker::start(&db, one).await;
    let running = enqueue(&client, "test.sleep", json!({"ms": 300})).await;
    until(&client, running, |job| job.state == "running").await;
    let waiting = enqueue(&client, "noop", json!({"n": 1})).await;
    worker.drain().await;
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
async fn a_worker_that_must_stop_at_once_gives_its_jobs_back_unspent() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, settings()).await;
    let id = enqueue(&client, "test.wait-abort", json!({})).await;
    until(&client, id, |job| job.state == "running").await;
    worker.stop_now().await;
    let job = show(&client, id).await;
    assert_eq!(
        (job.state.as_str(), job.attempt),
        ("queued", 0),
        "the attempt does not count"
    );
}

#[tokio::test]
async fn claims_that_cannot_start_soon_are_given_back() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // Short jobs first, so that the worker claims ahead; then long ones that fill its slots.
    for n in 0..300 {
        enqueue(&client, "noop", json!({ "n": n })).await;
    }
    let mut long = Vec::new();
    for _ in 0..20 {
        long.push(enqueue(&client, "test.sleep", json!({"ms": 1500})).await);
    }
    let two = Settings {
        slots: 2,
        ..settings()
    };
    let greedy = TestWorker::start(&db, two.clone()).await;
    until_true(
        &client,
        "SELECT count(*) >= 2 FROM rouse.jobs WHERE handler = 'test.sleep' AND state = 'running'",
    )
    .await;
    let many = Settings {
        slots: 20,
        ..settings()
    };
    let helper = TestWorker::start(&db, many).await;
    for id in long {
        let job = ended(&client, id).await;
        assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
    }
    assert!(settled(&client).await);
    greedy.drain().await;
    helper.drain().await;
}

#[tokio::test]
async fn a_handler_that_is_removed_drains_and_its_waiting_jobs_wait_on() {
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
        "it drains"
    );
    let other = enqueue(&client, "noop", json!({"n": 1})).await;
    assert_eq!(
        ended(&client, other).await.state,
        "succeeded",
        "the rest serve"
    );
    assert_eq!(show(&client, waiting).await.state, "queued");
    // It comes back, and the job that waited runs.
    std::fs::copy(
        crate::support::worker::guests_dir().join("test_guests.wasm"),
        folder.path().join("test_guests.wasm"),
    )
    .unwrap();
    assert_eq!(ended(&client, waiting).await.state, "succeeded");
    worker.drain().await;
}

#[tokio::test]
async fn an_outcome_can_be_settled_although_todays_partition_is_missing() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, settings()).await;
    let first = enqueue(&client, "noop", json!({"n": 1})).await;
    ended(&client, first).await;
    client
        .batch_execute(
            "DO $$ DECLARE t text; BEGIN
                FOR t IN SELECT inhrelid::regclass FROM pg_inherits WHERE inhparent = 'rouse.finished'::regclass LOOP
                    EXECUTE 'DROP TABLE ' || t;
                END LOOP;
            END $$",
        )
        .await
        .unwrap();
    let second = enqueue(&client, "noop", json!({"n": 2})).await;
    assert_eq!(ended(&client, second).await.state, "succeeded");
    worker.drain().await;
}

#[tokio::test]
async fn a_lane_that_is_committed_long_after_it_was_numbered_is_found() {
    let db = TestDb::new().await;
    let (mut late, client) = (db.client().await, db.client().await);
    let worker = TestWorker::start(&db, settings()).await;
    let transaction = late.transaction().await.unwrap();
    let row = transaction
        .query_one("SELECT rouse.enqueue('noop', queue => 'late')", &[])
        .await
        .unwrap();
    // More lanes than the window in which the catalog is read again, and one that proves them read.
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
    // The long sweep, every 30 s, reads the whole catalog.
    let job = until_within(&client, row.get(0), Duration::from_secs(50), |job| {
        job.state == "succeeded"
    })
    .await;
    assert_eq!(job.attempt, 1);
    worker.drain().await;
}

#[tokio::test]
async fn an_orphan_goes_ahead_of_older_queued_jobs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut older = Vec::new();
    for n in 0..5 {
        older.push(enqueue(&client, "noop", json!({ "n": n })).await);
    }
    let orphan = enqueue(&client, "noop", json!({"n": 9})).await;
    // As a worker that died leaves it.
    client
        .execute(
            "UPDATE rouse.job SET state = 'running', attempt = 1, fence = 1, worker = 1,
                claimed_at = now() - interval '2 min', lease_until = now() - interval '1 min' WHERE id = $1",
            &[&orphan],
        )
        .await
        .unwrap();
    let one = Settings {
        slots: 1,
        ..settings()
    };
    let worker = TestWorker::start(&db, one).await;
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    worker.drain().await;
    let rows = client
        .query("SELECT id FROM rouse.finished ORDER BY started_at", &[])
        .await
        .unwrap();
    let order: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(order[0], orphan, "then {older:?}");
    assert_eq!(order[1..], older);
}

#[tokio::test]
async fn a_drain_that_takes_too_long_aborts_what_runs_and_gives_it_back() {
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
    let job = show(&client, id).await;
    assert_eq!((job.state.as_str(), job.attempt), ("queued", 0));
}

#[tokio::test]
async fn the_operators_retries_count_before_those_of_the_module() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let strict = Settings {
        overrides: crate::support::worker::tries("test.*", 3, Duration::from_millis(1)),
        ..settings()
    };
    let worker = TestWorker::start(&db, strict).await;
    let id = enqueue(&client, "test.flaky", json!({"fail_until": 100})).await;
    let job = ended(&client, id).await;
    assert_eq!(
        (job.state.as_str(), job.attempt),
        ("failed", 3),
        "the module asks for 10"
    );
    worker.drain().await;
}

#[tokio::test]
async fn a_job_whose_source_is_bound_to_a_missing_handler_says_so_and_is_tried_again() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let bound = Settings {
        sources: [("cron".to_string(), "no.such.handler".to_string())].into(),
        ..settings()
    };
    let worker = TestWorker::start(&db, bound).await;
    let row = client
        .query_one("SELECT rouse.enqueue('noop', source => 'cron')", &[])
        .await
        .unwrap();
    let job = until(&client, row.get(0), |job| job.error.is_some()).await;
    assert_eq!(job.state, "queued");
    let error = job.error.unwrap();
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("no.such.handler"),
        "{error}"
    );
    worker.drain().await;
}

#[tokio::test]
async fn a_job_that_is_committed_behind_the_cursors_is_found_by_its_notification() {
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
        .query_one("SELECT rouse.enqueue('noop', '{\"n\": 1}')", &[])
        .await
        .unwrap();
    // Enough looks, each more than a second after the one before, for the short sweep to forget.
    for n in 0..4 {
        let id = enqueue(&client, "noop", json!({ "n": n })).await;
        ended(&client, id).await;
        tokio::time::sleep(Duration::from_millis(1100)).await;
    }
    transaction.commit().await.unwrap();
    let committed = Instant::now();
    assert_eq!(ended(&client, row.get(0)).await.state, "succeeded");
    assert!(
        committed.elapsed() < Duration::from_secs(10),
        "a sweep did it"
    );
    worker.drain().await;
}
