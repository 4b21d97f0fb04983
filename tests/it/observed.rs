//! The metrics and events that a host reports while it works, and the delay between jobs.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rouse::worker::{AttemptInfo, Middleware, Next, Override, Overrides, Running, Settings};
use serde_json::{Value, json};

use crate::support::claims::make_due;
use crate::support::worker::{
    TIMEOUT, TestWorker, ended, enqueue, enqueue_sql, guests_dir, until_true,
    without_returned_claims,
};
use crate::support::{Host, TestDb, free_port};

/// A host that serves metrics and logs every event as JSON.
fn serve(db: &TestDb) -> (Host, SocketAddr) {
    let address = format!("127.0.0.1:{}", free_port());
    let guests = guests_dir();
    let args = [
        "--log-format",
        "json",
        "serve",
        "--http",
        &address,
        "--handlers",
    ];
    let args: Vec<&str> = args.into_iter().chain(guests.to_str()).collect();
    let log = ("ROUSE_LOG", "info,rouse::job=debug");
    let host = Host::rouse(&args, &[("DATABASE_URL", &db.url()), log]);
    host.line(TIMEOUT, |line| line.contains("worker started"));
    (host, address.parse().unwrap())
}

/// The metrics page of a host that has run a job.
pub(crate) async fn metrics_page() -> String {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (host, address) = serve(&db);
    let id = enqueue_sql(&client, "'noop', queue => 'mail'").await;
    ended(&client, id).await;
    // The first request for the page makes the host read the gauges that come from the database.
    let wanted = ["rouse_attempts_total{", "rouse_oldest_transaction_seconds "];
    let page = crate::http::metrics_with(address, &wanted).await;
    host.signal(libc::SIGTERM);
    host.exit(TIMEOUT);
    page
}

/// The value of a metric on the page.
fn metric(page: &str, name: &str) -> f64 {
    let line = page.lines().find_map(|line| line.strip_prefix(name));
    let line = line.unwrap_or_else(|| panic!("{name} is missing: {page}"));
    line.trim().parse().unwrap()
}

#[tokio::test]
async fn a_wait_starts_when_the_job_is_ready_and_the_scheduling_delay_is_separate() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (host, address) = serve(&db);
    let daily = "'noop', queue => 'daily', run_at => clock_timestamp() + interval '3 s'";
    let daily = enqueue_sql(&client, daily).await;
    ended(
        &client,
        enqueue_sql(&client, "'noop', queue => 'mail'").await,
    )
    .await;
    ended(&client, daily).await;
    // The job of a dead worker has also waited for the end of its lease, so its wait does not count for the queue.
    let _dead = db.worker().await;
    let orphan = "INSERT INTO rouse.queue (name, paused_at) VALUES ('lost', now())";
    client.batch_execute(orphan).await.unwrap();
    let orphan = enqueue_sql(&client, "'noop', queue => 'lost'").await;
    client
        .execute(
            "UPDATE rouse.job SET state = 'running', attempt = 1, fence = 1, worker = (SELECT max(incarnation) FROM rouse.worker),
                 claimed_at = now(), lease_until = now() WHERE id = $1",
            &[&orphan],
        )
        .await
        .unwrap();
    client
        .batch_execute("SELECT rouse.resume_queue('lost')")
        .await
        .unwrap();
    ended(&client, orphan).await;
    // From the time at which the job was ready.
    let waits =
        "SELECT queue, extract(epoch FROM claimed_at - available_at)::float8 FROM rouse.jobs";
    let waits = client.query(waits, &[]).await.unwrap();
    let waits: HashMap<String, f64> = waits.iter().map(|row| (row.get(0), row.get(1))).collect();
    let (_, page) = crate::http::get(address, "/metrics").await;
    let count =
        |name: &str, queue: &str| metric(&page, &format!("{name}_count{{queue=\"{queue}\"}}"));
    let sum = |name: &str, queue: &str| metric(&page, &format!("{name}_sum{{queue=\"{queue}\"}}"));
    for queue in ["mail", "daily"] {
        assert!((count("rouse_wait_seconds", queue) - 1.0).abs() < 0.1);
        let waited = sum("rouse_wait_seconds", queue);
        assert!(
            (waited - waits[queue]).abs() < 1.0,
            "{queue}: {waited} s, and the job has waited {waits:?}"
        );
    }
    let delayed = sum("rouse_scheduled_delay_seconds", "daily");
    assert!((2.9..3.1).contains(&delayed), "{delayed}");
    assert!(count("rouse_scheduled_delay_seconds", "mail") < 0.1);
    assert!(!page.contains("rouse_wait_seconds_count{queue=\"lost\"}"));
    host.signal(libc::SIGTERM);
    host.exit(TIMEOUT);
}

#[tokio::test]
async fn each_transition_is_logged_as_an_event_with_numeric_ids() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (host, _) = serve(&db);
    let at_once = enqueue(&client, "noop", json!({})).await;
    ended(&client, at_once).await;
    // It is not due yet when it is enqueued, however slow the machine is.
    let later = "'noop', run_at => now() + interval '1 h'";
    let later = enqueue_sql(&client, later).await;
    make_due(&client, later).await;
    ended(&client, later).await;
    let cancelled = "'noop', queue => 'a', run_at => now() + interval '1 h'";
    let cancelled = enqueue_sql(&client, cancelled).await;
    client
        .execute("SELECT rouse.cancel($1)", &[&cancelled])
        .await
        .unwrap();
    host.signal(libc::SIGTERM);
    let (_, output) = host.exit(TIMEOUT);
    let events: Vec<Value> = output
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .filter(|line: &Value| line["event"].is_string())
        .collect();
    let job_events = |id: i64| -> Vec<&str> {
        let of_job = events.iter().filter(|event| event["job.id"] == id);
        let names = of_job.filter_map(|event| event["event"].as_str());
        without_returned_claims(names.collect(), |name| name)
    };
    let run = ["enqueued", "claimed", "started", "succeeded"];
    assert_eq!(job_events(at_once), run, "{output}");
    assert_eq!(job_events(later)[0], "promoted");
    assert_eq!(job_events(later)[1..], run);
    let worker_events: Vec<(&str, bool)> = events
        .iter()
        .filter(|event| event["target"] == "rouse::worker")
        .map(|event| {
            (
                event["event"].as_str().unwrap(),
                event["incarnation"].is_i64(),
            )
        })
        .collect();
    assert_eq!(
        worker_events,
        [("started", true), ("stopping", true), ("stopped", true)]
    );
}

/// The handler, the start and the end of each attempt, in the order of their ends.
#[derive(Default)]
struct Spans(Mutex<Vec<(String, Instant, Instant)>>);

impl Middleware for Spans {
    fn around<'a>(&'a self, attempt: &'a AttemptInfo<'a>, next: Next<'a>) -> Running<'a> {
        Box::pin(async move {
            let started_at = Instant::now();
            let run = next.run().await;
            let span = (attempt.handler.to_owned(), started_at, Instant::now());
            self.0.lock().unwrap().push(span);
            run
        })
    }
}

/// One slot, three jobs of a handler with the worker's delay, and three jobs of a handler without a delay.
#[tokio::test]
async fn a_slot_waits_between_jobs_as_configured_for_the_worker_or_the_handler() {
    const DELAY: Duration = Duration::from_millis(400);
    let db = TestDb::new().await;
    let client = db.client().await;
    for handler in ["noop", "test.sleep"] {
        for _ in 0..3 {
            enqueue(&client, handler, json!({"ms": 1})).await;
        }
    }
    let no_delay = Override::default().with("job_delay", Duration::ZERO);
    let settings = Settings {
        slots: 1,
        job_delay: DELAY,
        overrides: Overrides([("test.*".to_owned(), no_delay)].into()),
        ..Settings::default()
    };
    let spans = Arc::<Spans>::default();
    let worker = TestWorker::start_with_middlewares(&db, settings, vec![spans.clone()]).await;
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    worker.drain().await;
    let spans = spans.0.lock().unwrap();
    assert_eq!(spans.len(), 6);
    let mut short = 0;
    // Measured on this host: a slow machine only makes a gap longer.
    for pair in spans.windows(2) {
        let (handler, gap) = (&pair[0].0, pair[1].1 - pair[0].2);
        match handler.as_str() {
            "noop" => assert!(gap >= DELAY, "{handler}: {gap:?}"),
            _ => short += usize::from(gap < DELAY),
        }
    }
    assert!(short > 0, "the other handler does not wait");
}

#[tokio::test]
async fn a_worker_that_stops_does_not_wait_for_the_delay_between_jobs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue(&client, "noop", json!({})).await;
    let settings = Settings {
        slots: 1,
        job_delay: Duration::from_secs(3600),
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, settings).await;
    ended(&client, id).await;
    let waiting = enqueue(&client, "noop", json!({})).await;
    tokio::time::timeout(TIMEOUT, worker.drain())
        .await
        .expect("the worker stops at once");
    let state = "SELECT state::text FROM rouse.jobs WHERE id = $1";
    let state: String = client.query_one(state, &[&waiting]).await.unwrap().get(0);
    assert_eq!(state, "queued", "its slot was waiting");
}
