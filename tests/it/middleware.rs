//! Middleware around each attempt, and the events of its transitions.

use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rouse::job::{AbortReason, Attempt, RunEnd};
use rouse::worker::{AttemptInfo, Middleware, Next, Override, Overrides, Running, Settings};
use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::support::proxy::{Proxy, Side};
use crate::support::worker::{
    TIMEOUT, TestWorker, cancel, ended, enqueue, guests_dir, lease, until_true,
    without_returned_claims,
};
use crate::support::{Host, TestDb, built, code_cache, folder, free_port, rouse_in};

/// The actions of the middleware, in order.
type Notes = Arc<Mutex<Vec<String>>>;

fn note(notes: &Notes, event: String) {
    notes
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push(event);
}

/// Records when it is entered and left.
struct Recorder(&'static str, Notes);

impl Middleware for Recorder {
    fn around<'a>(&'a self, attempt: &'a AttemptInfo<'a>, next: Next<'a>) -> Running<'a> {
        Box::pin(async move {
            note(&self.1, format!("{} in, {}", self.0, attempt.handler));
            let run = next.run().await;
            note(&self.1, format!("{} out, {:?}", self.0, run.end));
            run
        })
    }
}

/// Takes its time before the guest runs, and records whether the report includes this time.
struct Slow(Notes);

impl Middleware for Slow {
    fn around<'a>(&'a self, _: &'a AttemptInfo<'a>, next: Next<'a>) -> Running<'a> {
        Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(100)).await;
            let started_at = Instant::now();
            let run = next.run().await;
            let includes = run.wall > started_at.elapsed();
            note(&self.0, format!("includes: {includes}"));
            run
        })
    }
}

/// Does not run a guest in the first attempt: returns this end instead, or panics.
struct Substitute(Option<RunEnd>);

impl Middleware for Substitute {
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

/// Never ends; notifies when it is entered.
struct Hanging(Arc<Notify>);

impl Middleware for Hanging {
    fn around<'a>(&'a self, _: &'a AttemptInfo<'a>, next: Next<'a>) -> Running<'a> {
        Box::pin(async move {
            self.0.notify_one();
            let _run = next.run().await;
            std::future::pending::<rouse::sandbox::RunReport>().await
        })
    }
}

#[tokio::test]
async fn middleware_that_never_ends_does_not_outlast_an_immediate_stop() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let entered = Arc::new(Notify::new());
    let around: Vec<Arc<dyn Middleware>> = vec![Arc::new(Hanging(entered.clone()))];
    let worker = TestWorker::start_with_middlewares(&db, Settings::default(), around).await;
    enqueue(&client, "noop", json!({"n": 1})).await;
    entered.notified().await;
    worker.stop_now().await;
    until_true(
        &client,
        "SELECT bool_and(state = 'unregistered') FROM rouse.workers",
    )
    .await;
}

/// Unregistering frees its jobs, and other workers run them.
#[tokio::test]
async fn a_worker_whose_settler_has_ended_waits_for_its_attempts_before_it_unregisters() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let notes = Notes::default();
    let grace = Override::default().with("grace", Duration::from_secs(1));
    let settings = Settings {
        overrides: Overrides([("test.*".to_owned(), grace)].into()),
        ..Settings::default()
    };
    let around: Vec<Arc<dyn Middleware>> = vec![Arc::new(Recorder("it", notes.clone()))];
    let worker = TestWorker::start_with_middlewares(&db, settings, around).await;
    enqueue(&client, "test.ignore-abort", json!({})).await;
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.progress)").await;
    // The settler panics when it reads this response.
    client
        .batch_execute(
            "CREATE OR REPLACE FUNCTION rouse.settle(
                 p_worker bigint, p_key bytea, p_settlements rouse.settlement[], p_jobs rouse.new_job[], p_skip_locked boolean)
             RETURNS TABLE (id bigint, locked boolean) LANGUAGE sql AS 'SELECT 1::bigint, NULL::boolean'",
        )
        .await
        .unwrap();
    enqueue(&client, "noop", json!({"n": 1})).await;
    let why = worker.failed().await;
    assert!(why.contains("the settler ended early"), "{why}");
    let stopped = format!("it out, {:?}", RunEnd::Aborted(AbortReason::Shutdown));
    let notes = notes.lock().unwrap().clone();
    assert!(notes.contains(&stopped), "{notes:?}");
    until_true(
        &client,
        "SELECT bool_and(state = 'unregistered') FROM rouse.workers",
    )
    .await;
}

#[tokio::test]
async fn middleware_nests_in_order_and_sees_how_the_run_ended() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let notes = Notes::default();
    let around: Vec<Arc<dyn Middleware>> = vec![
        Arc::new(Recorder("outer", notes.clone())),
        Arc::new(Recorder("inner", notes.clone())),
    ];
    let worker = TestWorker::start_with_middlewares(&db, Settings::default(), around).await;
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
async fn the_time_of_a_run_does_not_include_that_of_middleware() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let notes = Notes::default();
    let around: Vec<Arc<dyn Middleware>> = vec![Arc::new(Slow(notes.clone()))];
    let worker = TestWorker::start_with_middlewares(&db, Settings::default(), around).await;
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    ended(&client, id).await;
    worker.drain().await;
    assert_eq!(*notes.lock().unwrap(), ["includes: false"]);
}

#[tokio::test]
async fn middleware_can_end_the_attempt_without_a_guest() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let substitute = Substitute(Some(RunEnd::Returned(b"\"not the guest\"".to_vec())));
    let worker =
        TestWorker::start_with_middlewares(&db, Settings::default(), vec![Arc::new(substitute)])
            .await;
    let id = enqueue(&client, "test.spin", json!({})).await;
    let job = ended(&client, id).await;
    assert_eq!(job.result, Some(json!("not the guest")));
    worker.drain().await;
}

#[tokio::test]
async fn middleware_that_panics_loses_only_the_attempt() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let settings = Settings {
        slots: 1,
        overrides: lease("noop", 2),
        ..Settings::default()
    };
    let worker =
        TestWorker::start_with_middlewares(&db, settings, vec![Arc::new(Substitute(None))]).await;
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    let job = ended(&client, id).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 2));
    worker.drain().await;
}

#[tokio::test]
async fn every_transition_is_logged_as_an_event_with_the_same_fields() {
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
    host.line(TIMEOUT, |line| line.contains("worker started"));

    let id = enqueue(&client, "test.flaky", json!({"fail_until": 1})).await;
    ended(&client, id).await;
    let failing = enqueue(&client, "test.fail", json!({"as": "permanent"})).await;
    ended(&client, failing).await;
    let cancelled = enqueue(&client, "test.wait-abort", json!({})).await;
    host.line(TIMEOUT, |line| {
        line.contains("started") && line.contains(&format!("\"job.id\":{cancelled},"))
    });
    cancel(&client, cancelled).await;
    host.line(TIMEOUT, |line| line.contains("\"dropped\""));
    host.signal(libc::SIGTERM);
    let (_, output) = host.exit(TIMEOUT);

    let events = |id: i64| -> Vec<(String, i64)> {
        let events = output
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok())
            .filter(|line| line["target"] == "rouse::job" && line["job.id"] == id)
            // The cancellation itself is an admin action, and its event comes from the audit outbox.
            .filter(|line| line["by"].is_null())
            // A promotion does not belong to an attempt yet.
            .filter(|line| line["event"] != "promoted")
            .map(|line| {
                assert_eq!(line["worker.id"], "seen", "{line}");
                assert!(line["handler"].is_string(), "{line}");
                assert!(line["elapsed_ms"].is_u64(), "{line}");
                let event = line["event"].as_str().expect("a name").to_owned();
                (event, line["attempt"].as_i64().expect("a number"))
            })
            .collect();
        without_returned_claims(events, |event| &event.0)
    };
    let event = |name: &str, attempt| (name.to_owned(), attempt);
    assert_eq!(
        events(id),
        [
            event("enqueued", 1),
            event("claimed", 1),
            event("started", 1),
            event("retried", 1),
            event("claimed", 2),
            event("started", 2),
            event("succeeded", 2),
        ]
    );
    let expected = [
        event("enqueued", 1),
        event("claimed", 1),
        event("started", 1),
        event("failed", 1),
    ];
    assert_eq!(events(failing), expected);
    let expected = [
        event("enqueued", 1),
        event("claimed", 1),
        event("started", 1),
        event("aborted", 1),
        event("dropped", 1),
    ];
    assert_eq!(events(cancelled), expected);
}

#[tokio::test]
async fn lost_and_failed_attempts_are_logged_as_events_and_counted() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (waiting, failed) = (
        enqueue(&client, "noop", json!({"n": 1})).await,
        enqueue(&client, "noop", json!({"n": 2})).await,
    );
    // In the state in which crashed workers leave them, before this one starts.
    for (id, lost) in [(waiting, 1), (failed, 2)] {
        client
            .execute(
                "UPDATE rouse.job SET state = 'running', attempt = $2 + 1, uncounted = $2, fence = 1, worker = -1,
                    claimed_at = now() - interval '2 min', lease_until = now() - interval '1 min' WHERE id = $1",
                &[&id, &lost],
            )
            .await
            .unwrap();
        client
            .execute(
                "INSERT INTO rouse.attempt (job, attempt, lost, worker, claimed_at, ended_at, error)
                 SELECT $1, a, true, -1 - a, now(), now(), '{\"kind\": \"lost\"}' FROM generate_series(1, $2::integer) AS a",
                &[&id, &lost],
            )
            .await
            .unwrap();
    }
    let refused = enqueue(&client, "test.echo", json!({})).await;
    let refuse = format!("ALTER TABLE rouse.finished ADD CONSTRAINT no CHECK (id <> {refused})");
    client.batch_execute(&refuse).await.unwrap();

    let folder = tempfile::tempdir().unwrap();
    let settings = folder.path().join("rouse.toml");
    std::fs::write(&settings, "[handlers.\"test.echo\"]\nlease = \"2s\"\n").unwrap();
    let address = format!("127.0.0.1:{}", free_port());
    let (guests, url) = (guests_dir(), db.url());
    let args = [
        "--log-format",
        "json",
        "serve",
        "--http",
        &address,
        "--config",
        settings.to_str().unwrap(),
        "--handlers",
        guests.to_str().unwrap(),
    ];
    let host = Host::rouse(&args, &[("DATABASE_URL", url.as_str())]);
    let event = |name: &str, id: i64| -> Value {
        let line = host.line(TIMEOUT, |line| {
            line.contains(&format!("\"event\":\"{name}\""))
                && line.contains(&format!("\"job.id\":{id},"))
        });
        let event: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(event["target"], "rouse::job");
        event
    };
    for (name, id, lost) in [("lost", waiting, 2), ("failed", failed, 3)] {
        let event = event(name, id);
        assert_eq!(
            (&event["attempt"], &event["uncounted"]),
            (&lost.into(), &lost.into())
        );
        assert_eq!(event["handler"], "noop");
        let elapsed_ms = event["elapsed_ms"].as_u64().unwrap();
        assert!(elapsed_ms >= 120_000, "time since the claim: {event}");
    }
    assert_eq!(event("given_up", refused)["handler"], "test.echo");
    let wanted = [
        "rouse_jobs_lost_total{handler=\"noop\",next=\"queued\"} 1",
        "rouse_jobs_lost_total{handler=\"noop\",next=\"failed\"} 1",
        "rouse_attempts_total{handler=\"test.echo\",outcome=\"given_up\"} 1",
    ];
    crate::http::metrics_with(address.parse().unwrap(), &wanted).await;
}

/// Starts a host with a JSON log.
fn host_that_logs(db: &TestDb, worker_id: &str) -> Host {
    host_that_logs_at(&db.url(), worker_id)
}

/// The same, with this connection string.
fn host_that_logs_at(url: &str, worker_id: &str) -> Host {
    let guests = guests_dir();
    let args = [
        "--log-format",
        "json",
        "serve",
        "--http",
        "off",
        "--worker-id",
        worker_id,
        "--handlers",
        guests.to_str().unwrap(),
    ];
    Host::rouse(&args, &[("DATABASE_URL", url)])
}

#[tokio::test]
async fn each_admin_action_is_logged_by_exactly_one_host() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let ask = async |sql: &str| -> i64 {
        let row = client.query_one(sql, &[]).await.unwrap();
        row.get(0)
    };
    // While no host is running.
    client
        .batch_execute("SELECT rouse.pause_queue('mail')")
        .await
        .unwrap();
    let id = ask("SELECT rouse.enqueue('noop', queue => 'mail')").await;
    cancel(&client, id).await;
    let again = ask(&format!("SELECT rouse.retry({id})")).await;
    let outbox_is_empty = "SELECT NOT EXISTS (SELECT FROM rouse.audit_outbox)";
    let [one, other] = [host_that_logs(&db, "one"), host_that_logs(&db, "other")];
    for host in [&one, &other] {
        host.line(TIMEOUT, |line| line.contains("worker started"));
    }
    until_true(&client, outbox_is_empty).await;
    // While hosts are running: logged with a heartbeat, or by the next host that starts.
    client
        .batch_execute("SELECT rouse.resume_queue('mail')")
        .await
        .unwrap();
    let third = host_that_logs(&db, "third");
    until_true(&client, outbox_is_empty).await;
    // The lines arrive a moment later.
    let hosts = [one, other, third];
    let written = || -> usize {
        let actions = hosts
            .iter()
            .map(|host| host.output().matches("admin action").count());
        actions.sum()
    };
    let until = Instant::now() + TIMEOUT;
    while written() < 4 && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let output = hosts.map(|host| {
        host.signal(libc::SIGTERM);
        host.exit(TIMEOUT).1
    });
    let logged: Vec<Value> = output
        .iter()
        .flat_map(|output| output.lines())
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|line| line["message"] == "admin action")
        .collect();
    let only = |event: &str| -> &Value {
        let mut matching = logged.iter().filter(|line| line["event"] == event);
        let line = matching
            .next()
            .unwrap_or_else(|| panic!("{event}: {output:?}"));
        assert!(
            matching.next().is_none(),
            "{event} is logged twice: {output:?}"
        );
        assert_eq!(line["target"], "rouse::job");
        assert!(line["by"].is_string() && line["at"].is_string(), "{line}");
        assert!(line["worker.id"].is_string(), "{line}");
        line
    };
    assert_eq!(logged.len(), 4, "{logged:?}");
    let paused = only("paused");
    assert_eq!(paused["queue"], "mail");
    assert!(paused.get("job.id").is_none() && paused.get("handler").is_none());
    let cancelled = only("cancelled");
    assert_eq!(cancelled["job.id"], id);
    assert_eq!(
        (&cancelled["handler"], &cancelled["queue"]),
        (&json!("noop"), &json!("mail"))
    );
    let retried = only("retried");
    let detail: Value = serde_json::from_str(retried["detail"].as_str().unwrap()).unwrap();
    assert_eq!(detail["as"], again);
    assert_eq!(only("resumed")["queue"], "mail");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_admin_action_is_logged_although_the_response_that_contained_it_was_lost() {
    let db = TestDb::new().await;
    let (client, proxy) = (db.client().await, Proxy::start(&db).await);
    client
        .batch_execute("SELECT rouse.pause_queue('mail')")
        .await
        .unwrap();
    let response = proxy.hold("rouse.take_audit_outbox(", Side::Response);
    let host = host_that_logs_at(proxy.url(), "one");
    response.caught().await;
    let is_taken = "SELECT taken_by IS NOT NULL FROM rouse.audit_outbox";
    until_true(&client, is_taken).await;
    proxy.go_down();
    proxy.refused_until(|refused| !refused.is_empty()).await;
    proxy.come_up();
    host.line(TIMEOUT, |line| line.contains("admin action"));
    let outbox_is_empty = "SELECT NOT EXISTS (SELECT FROM rouse.audit_outbox)";
    until_true(&client, outbox_is_empty).await;
    assert_eq!(host.output().matches("admin action").count(), 1);
}

#[tokio::test]
async fn a_host_that_does_not_log_admin_actions_leaves_them_to_others_for_a_day() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    cancel(&client, id).await;
    enqueue(&client, "noop", json!({"n": 1})).await;
    let folder = folder("", &["noop.wasm"]);
    let drain = async || rouse_in(&db, &["queue", "drain", "default"], &folder).await;
    drain().await.exits(0);
    let outbox_rows = "SELECT count(*) FROM rouse.audit_outbox";
    let left: i64 = client.query_one(outbox_rows, &[]).await.unwrap().get(0);
    assert_eq!(left, 1);
    client
        .batch_execute("UPDATE rouse.audit_outbox SET at = at - interval '25 hours'")
        .await
        .unwrap();
    enqueue(&client, "noop", json!({"n": 1})).await;
    drain().await.exits(0);
    let left: i64 = client.query_one(outbox_rows, &[]).await.unwrap().get(0);
    assert_eq!(left, 0);
}

#[tokio::test]
async fn a_host_that_cannot_read_the_audit_outbox_keeps_working() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute("DROP FUNCTION rouse.take_audit_outbox")
        .await
        .unwrap();
    let host = host_that_logs(&db, "one");
    host.line(TIMEOUT, |line| {
        line.contains("cannot read the audit outbox")
    });
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    assert_eq!(ended(&client, id).await.state, "succeeded");
}

/// `examples/embed`: custom middleware, with the command line and the settings of the shipped binary.
#[tokio::test]
async fn a_program_of_twenty_lines_adds_middleware_to_the_rouse_command() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    let expected = format!("job {id} (noop) took ");
    let guests = guests_dir();
    let program = || {
        let mut command = Command::new(built("rouse-with-stopwatch"));
        command
            .env("ROUSE_CACHE_DIR", code_cache())
            .env("DATABASE_URL", db.url());
        command
    };
    let mut serve = program();
    serve
        .args(["serve", "--http", "off", "--handlers"])
        .arg(&guests);
    let host = Host::spawn(serve);
    host.line(TIMEOUT, |line| line.contains(&expected));
    host.stop();

    let id = enqueue(&client, "noop", json!({"n": 2})).await;
    let expected = format!("job {id} (noop) took ");
    let mut drain = program();
    drain
        .args(["queue", "drain", "default", "--handlers"])
        .arg(&guests);
    let (status, output) = Host::spawn(drain).exit(TIMEOUT);
    assert!(status.success() && output.contains(&expected), "{output}");
}
