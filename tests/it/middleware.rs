//! What happens around each attempt: middlewares, and the events of its transitions.

use std::sync::{Arc, Mutex, PoisonError};

use rouse::job::{Attempt, RunEnd};
use rouse::worker::{AttemptInfo, Middleware, Next, Running, Settings};
use serde_json::{Value, json};

use crate::support::Host;
use crate::support::TestDb;
use crate::support::worker::{PATIENCE, TestWorker, ended, enqueue, guests_dir, lease};

/// What the middlewares have done, in order.
type Notes = Arc<Mutex<Vec<String>>>;

fn note(notes: &Notes, what: String) {
    notes
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push(what);
}

/// Notes when it is entered and left.
struct Noting(&'static str, Notes);

impl Middleware for Noting {
    fn around<'a>(&'a self, attempt: &'a AttemptInfo<'a>, next: Next<'a>) -> Running<'a> {
        Box::pin(async move {
            note(&self.1, format!("{} in, {}", self.0, attempt.handler));
            let run = next.run().await;
            note(&self.1, format!("{} out, {:?}", self.0, run.end));
            run
        })
    }
}

/// Lets no guest run in the first attempt: says how it ended instead, or panics.
struct Deputy(Option<RunEnd>);

impl Middleware for Deputy {
    fn around<'a>(&'a self, attempt: &'a AttemptInfo<'a>, next: Next<'a>) -> Running<'a> {
        Box::pin(async move {
            if attempt.attempt > Attempt(1) {
                return next.run().await;
            }
            let end = self.0.clone().expect("a panic on purpose");
            next.instead(end)
        })
    }
}

#[tokio::test]
async fn middlewares_nest_in_their_order_and_see_how_the_run_ended() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let notes = Notes::default();
    let around: Vec<Arc<dyn Middleware>> = vec![
        Arc::new(Noting("outer", notes.clone())),
        Arc::new(Noting("inner", notes.clone())),
    ];
    let worker = TestWorker::start_within(&db, Settings::default(), around).await;
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    ended(&client, id).await;
    worker.drain().await;
    let returned = format!("{:?}", RunEnd::Returned(br#"{"n":1}"#.to_vec()));
    assert_eq!(
        *notes.lock().unwrap(),
        [
            "outer in, noop".to_owned(),
            "inner in, noop".to_owned(),
            format!("inner out, {returned}"),
            format!("outer out, {returned}"),
        ]
    );
}

#[tokio::test]
async fn a_middleware_may_end_the_attempt_without_a_guest() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let deputy = Deputy(Some(RunEnd::Returned(b"\"not the guest\"".to_vec())));
    let worker = TestWorker::start_within(&db, Settings::default(), vec![Arc::new(deputy)]).await;
    let id = enqueue(&client, "test.spin", json!({})).await;
    let job = ended(&client, id).await;
    assert_eq!(job.result, Some(json!("not the guest")));
    worker.drain().await;
}

#[tokio::test]
async fn a_middleware_that_panics_loses_the_attempt_and_neither_the_worker_nor_the_slot() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let one = Settings {
        slots: 1,
        overrides: lease("noop", 2),
        ..Settings::default()
    };
    let worker = TestWorker::start_within(&db, one, vec![Arc::new(Deputy(None))]).await;
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    let job = ended(&client, id).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 2));
    worker.drain().await;
}

#[tokio::test]
async fn every_transition_is_an_event_with_the_same_fields() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let guests = guests_dir();
    let args = [
        "--log-format",
        "json",
        "serve",
        "--worker-id",
        "seen",
        "--handlers",
    ];
    let args: Vec<&str> = args.into_iter().chain([guests.to_str().unwrap()]).collect();
    let url = db.url();
    let variables = [
        ("DATABASE_URL", url.as_str()),
        ("ROUSE_LOG", "info,rouse::job=debug"),
    ];
    let host = Host::rouse(&args, &variables);
    host.line(PATIENCE, |line| line.contains("worker started"));

    let id = enqueue(&client, "test.flaky", json!({"fail_until": 1})).await;
    ended(&client, id).await;
    let failing = enqueue(&client, "test.fail", json!({"as": "permanent"})).await;
    ended(&client, failing).await;
    let cancelled = enqueue(&client, "test.wait-abort", json!({})).await;
    host.line(PATIENCE, |line| {
        line.contains("started") && line.contains(&format!("\"job.id\":\"{cancelled}\""))
    });
    client
        .query("SELECT rouse.cancel($1)", &[&cancelled])
        .await
        .unwrap();
    host.line(PATIENCE, |line| line.contains("\"dropped\""));
    host.signal(libc::SIGTERM);
    let (_, output) = host.exit(PATIENCE);

    let events = |id: i64| -> Vec<(String, i64)> {
        output
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok())
            .filter(|line| {
                line["target"] == "rouse::job" && line["job.id"].as_str() == Some(&id.to_string())
            })
            .map(|line| {
                assert_eq!(line["worker.id"], "seen", "{line}");
                assert!(line["handler"].is_string(), "{line}");
                assert!(line["elapsed_ms"].is_u64(), "{line}");
                let event = line["event"].as_str().expect("a name").to_owned();
                (event, line["attempt"].as_i64().expect("a number"))
            })
            .collect()
    };
    let event = |name: &str, attempt| (name.to_owned(), attempt);
    assert_eq!(
        events(id),
        [
            event("claimed", 1),
            event("started", 1),
            event("retried", 1),
            event("claimed", 2),
            event("started", 2),
            event("succeeded", 2),
        ]
    );
    let told = [event("claimed", 1), event("started", 1), event("failed", 1)];
    assert_eq!(events(failing), told);
    let told = [
        event("claimed", 1),
        event("started", 1),
        event("aborted", 1),
        event("dropped", 1),
    ];
    assert_eq!(events(cancelled), told);
}
