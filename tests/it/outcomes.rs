//! The outcome of a job after an attempt has ended.

mod connections;
mod locked;
mod slots;
mod unwritten;

use std::time::Duration;

use rouse::worker::Settings;
use serde_json::{Value, json};

use self::unwritten::refuse_ends;
use crate::support::TestDb;
use crate::support::worker::{TestWorker, ended, enqueue, until_true};

fn settings() -> Settings {
    Settings::default()
}

#[tokio::test]
async fn an_error_is_retried_with_backoff_and_the_job_then_succeeds() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, settings()).await;
    // Waits until the worker listens. When it starts to listen, it queries the state of all running jobs, which must
    // not happen in the middle of this test.
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
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
async fn the_attempt_limit_of_the_job_overrides_the_handlers() {
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
async fn a_permanent_error_a_panic_and_a_trap_keep_their_message_and_location() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, settings()).await;
    let permanent = enqueue(&client, "test.fail", json!({"as": "permanent"})).await;
    let job = ended(&client, permanent).await;
    assert_eq!(
        (job.state.as_str(), job.attempt),
        ("failed", 1),
        "no further attempt"
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
async fn one_invalid_result_fails_alone_and_not_its_batch() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // All jobs are queued before the worker starts, so their outcomes are settled together.
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
    assert_eq!(error["message"], "before\\u{0}after");
    worker.drain().await;
}

#[tokio::test]
async fn a_result_that_only_postgres_refuses_fails_alone_too() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // Valid JSON, but nested deeper than Postgres can parse: the host cannot know, and the settlement fails.
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

/// The error of the trigger has the code of a missing partition.
#[tokio::test]
async fn a_trigger_of_the_operator_that_refuses_a_result_fails_the_job() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let refused = "'the books are closed' USING ERRCODE = 'check_violation'";
    refuse_ends(&client, "NEW.state = 'succeeded'", refused).await;
    let worker = TestWorker::start(&db, settings()).await;
    let id = enqueue(&client, "noop", json!({})).await;
    let job = ended(&client, id).await;
    assert_eq!((job.state.as_str(), job.attempt), ("failed", 1));
    let error = job.error.unwrap();
    assert_eq!(error["kind"], "invalid_result");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("the books are closed"), "{message}");
    worker.drain().await;
}

#[tokio::test]
async fn the_operators_retry_policy_overrides_the_modules() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let strict = Settings {
        overrides: crate::support::worker::retries("test.*", 3, Duration::from_millis(1)),
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
async fn a_job_that_runs_out_of_memory_is_retried_once_with_twice_as_much() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let several = Settings {
        overrides: crate::support::worker::retries("test.alloc", 5, Duration::from_secs(3600)),
        ..settings()
    };
    let worker = TestWorker::start(&db, several).await;
    // The limit is 32 MiB, and the next attempt starts at once.
    let id = enqueue(&client, "test.alloc", json!({"bytes": 40 << 20})).await;
    let job = ended(&client, id).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 2));
    let id = enqueue(&client, "test.alloc", json!({"bytes": 100 << 20})).await;
    let job = ended(&client, id).await;
    assert_eq!((job.state.as_str(), job.attempt), ("failed", 2));
    let error = job.error.unwrap();
    assert_eq!(error["kind"], "out_of_memory");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("64 MiB of memory"), "{message}");
    worker.drain().await;
}

#[tokio::test]
async fn a_job_that_is_denied_a_grant_is_never_retried() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, settings()).await;
    let id = enqueue(&client, "test.connect", json!({"to": "127.0.0.1:1"})).await;
    let job = ended(&client, id).await;
    assert_eq!((job.state.as_str(), job.attempt), ("failed", 1));
    let error = job.error.unwrap();
    assert_eq!(error["kind"], "denied");
    let message = error["message"].as_str().unwrap();
    assert!(
        message.starts_with("the handler tried to open a socket"),
        "{message}"
    );
    worker.drain().await;
}
