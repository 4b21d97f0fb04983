//! Usage and logs of attempts: kept with the attempts, and shown while they run.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rouse::job::{Attempt, Outcome, Usage};
use rouse::sandbox::{Catalog, Limits, Sandbox, Settings as SandboxSettings};
use rouse::store::{GuestRun, JsonText, Locked, LogLine};
use rouse::worker::Settings;
use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::support::claims::{claim, settlement};
use crate::support::proxy::{Proxy, Side};
use crate::support::worker::{
    TIMEOUT, TestWorker, cancel, catalog, ended, enqueue, guests_dir, until, until_true,
};
use crate::support::{Host, TestDb, command, folder, free_port, rouse_in, scratch};

async fn usage(client: &Client, id: i64) -> Value {
    let row = client
        .query_one("SELECT usage FROM rouse.job($1)", &[&id])
        .await
        .unwrap();
    row.get::<_, Option<Value>>(0).unwrap_or_default()
}

async fn lines(client: &Client, id: i64) -> Vec<(i32, i32, String, String)> {
    let rows = client
        .query(
            "SELECT attempt, line, level, text FROM rouse.job_log($1)",
            &[&id],
        )
        .await
        .unwrap();
    rows.iter()
        .map(|row| (row.get(0), row.get(1), row.get(2), row.get(3)))
        .collect()
}

#[tokio::test]
async fn the_usage_of_an_attempt_is_kept_and_summed_by_handler_and_tenant() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    let sql = "SELECT rouse.enqueue('test.flaky', '{\"fail_until\": 1}', tenant => 'acme')";
    let id: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
    let job = ended(&client, id).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 2));

    let used = usage(&client, id).await;
    let digest = catalog().await.current().handlers["test.flaky"]
        .module
        .digest
        .to_string();
    assert_eq!(used["sha256"], digest.as_str());
    assert!(used["cpu_ms"].as_f64() > Some(0.0), "{used}");
    assert!(used["memory_bytes"].as_u64() >= Some(1 << 16), "{used}");
    let failed: Value = client
        .query_one(
            "SELECT detail FROM rouse.history($1) WHERE event = 'failed'",
            &[&id],
        )
        .await
        .unwrap()
        .get(0);
    assert_eq!(failed["usage"]["sha256"], digest.as_str(), "{failed}");

    let sum = client
        .query_one(
            "SELECT tenant, attempts, cpu_seconds::float8 FROM rouse.usage WHERE handler = 'test.flaky'",
            &[],
        )
        .await
        .unwrap();
    let summed: (String, i64, f64) = (sum.get(0), sum.get(1), sum.get(2));
    assert_eq!((summed.0.as_str(), summed.1), ("acme", 2));
    assert!(summed.2 > 0.0);
    worker.drain().await;
}

#[tokio::test]
async fn every_figure_of_a_settlement_is_stored_unchanged() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let store = db.worker().await;
    let (known, unknown) = (
        enqueue(&client, "x", json!({})).await,
        enqueue(&client, "x", json!({})).await,
    );
    let jobs = claim(&store, 2).await;
    let done = || Outcome::Succeeded(JsonText("1".into()));
    let mut ran = settlement(&jobs[0], done());
    ran.guest_run = Some(GuestRun {
        usage: Usage {
            cpu: Duration::from_micros(1500),
            memory_bytes_peak: 65_536,
            host_calls: 7,
            bytes_in: 11,
            bytes_out: 13,
        },
        digest: [0xab; 32],
    });
    let batch = [ran, settlement(&jobs[1], done())];
    store.settle(&batch, Locked::Wait).await.unwrap();
    let expected = json!({
        "cpu_ms": 1.5, "memory_bytes": 65_536, "host_calls": 7, "bytes_in": 11, "bytes_out": 13, "sha256": "ab".repeat(32),
    });
    assert_eq!(usage(&client, known).await, expected);
    assert_eq!(usage(&client, unknown).await, Value::Null);
}

#[tokio::test]
async fn the_output_of_a_guest_is_kept_with_its_attempt_and_printed_by_job_logs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    let payload = json!({"line": "\u{1b}[2J ü", "times": 2});
    let id = enqueue(&client, "test.print", payload).await;
    assert_eq!(ended(&client, id).await.state, "succeeded");
    // A worker that stops writes all pending lines.
    worker.drain().await;
    let kept = lines(&client, id).await;
    let numbers: Vec<i32> = kept.iter().map(|line| line.1).collect();
    assert_eq!(
        numbers,
        (1..=i32::try_from(kept.len()).unwrap()).collect::<Vec<_>>()
    );
    assert!(
        kept.iter().any(|(attempt, _, level, text)| *attempt == 1
            && level == "info"
            && text == "out: \\u{1b}[2J ü"),
        "{kept:?}"
    );

    let folder = scratch("logs");
    let id = id.to_string();
    let printed = rouse_in(&db, &["job", "logs", &id], &folder).await;
    printed.exits(0).prints("out: \\u{1b}[2J ü");
    assert_eq!(printed.stdout.lines().count(), kept.len());
    let printed = rouse_in(
        &db,
        &["job", "logs", &id, "--json", "--attempt", "1"],
        &folder,
    )
    .await;
    let first: Value = serde_json::from_str(printed.stdout.lines().next().unwrap()).unwrap();
    assert_eq!((&first["line"], &first["attempt"]), (&json!(1), &json!(1)));
    let none = rouse_in(&db, &["job", "logs", &id, "--attempt", "2"], &folder).await;
    assert_eq!(none.exits(0).stdout, "");
    rouse_in(&db, &["job", "logs", "999999"], &folder)
        .await
        .exits(3)
        .prints("no job 999999");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn following_a_job_prints_its_lines_as_they_come_and_ends_with_the_job() {
    let db = TestDb::new().await;
    let (client, proxy) = (db.client().await, Proxy::start(&db).await);
    let store = db.worker().await;
    let id = enqueue(&client, "x", json!({})).await;
    let job = claim(&store, 1).await.remove(0);
    let say = |line: u32, text: &str| LogLine {
        id: job.id,
        attempt: Attempt(1),
        line,
        age: Duration::ZERO,
        level: "warn",
        text: text.into(),
    };
    assert_eq!(
        store.append_log(&[say(1, "first")], false).await.unwrap(),
        1
    );
    let args = ["job", "logs", &id.to_string(), "--follow"];
    let follower = Host::spawn(command(proxy.url(), &args, &scratch("follow")));
    follower.line(TIMEOUT, |line| line.ends_with("1 WARN  first"));
    assert_eq!(
        store.append_log(&[say(2, "second")], false).await.unwrap(),
        1
    );
    follower.line(TIMEOUT, |line| line.ends_with("second"));
    let read = || proxy.hold("rouse.job_log(", Side::Statement);
    let before_the_end = read();
    before_the_end.caught().await;
    let done = settlement(&job, Outcome::Succeeded(JsonText("1".into())));
    store.settle(&[done], Locked::Wait).await.unwrap();
    let after_the_end = read();
    before_the_end.release();
    after_the_end.caught().await;
    let last = read();
    after_the_end.release();
    last.caught().await;
    // The last lines of an attempt may arrive after its settlement: the follower has read the lines once more.
    assert_eq!(
        store.append_log(&[say(3, "third")], false).await.unwrap(),
        1
    );
    last.release();
    let (status, output) = follower.exit(TIMEOUT);
    assert!(status.success() && output.contains("third"), "{output}");
}

/// An attempt is given back by a host that stops, for example.
#[tokio::test]
async fn the_last_lines_of_an_attempt_that_was_given_back_are_stored() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (store, other) = (db.worker().await, db.worker().await);
    enqueue(&client, "x", json!({})).await;
    let job = claim(&store, 1).await.remove(0);
    let released = settlement(&job, Outcome::Released);
    store.settle(&[released], Locked::Wait).await.unwrap();
    let line = LogLine {
        id: job.id,
        attempt: Attempt(1),
        line: 1,
        age: Duration::ZERO,
        level: "warn",
        text: "the last".into(),
    };
    let lines = std::slice::from_ref(&line);
    assert_eq!(store.append_log(lines, false).await.unwrap(), 1);
    assert_eq!(
        other.append_log(lines, false).await.unwrap(),
        0,
        "not its job"
    );
}

#[tokio::test]
async fn lines_whose_response_was_lost_are_stored_once() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let proxy = Proxy::start(&db).await;
    let worker = TestWorker::start_through(
        proxy.store(),
        db.connector(),
        Settings::default(),
        catalog().await,
    );
    let response = proxy.hold("rouse.append_log(", Side::Response);
    let payload = json!({"line": "once", "times": 2});
    let id = enqueue(&client, "test.print", payload).await;
    response.caught().await;
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.log)").await;
    let first = lines(&client, id).await;
    // The database has stored the lines, but the worker does not know this.
    let again = proxy.hold("rouse.append_log(", Side::Statement);
    proxy.go_down();
    proxy.come_up();
    again.caught().await;
    response.release();
    again.release();
    assert_eq!(ended(&client, id).await.state, "succeeded");
    // A worker that stops writes all pending lines.
    worker.drain().await;
    let kept = lines(&client, id).await;
    assert!(kept.starts_with(&first), "{kept:?}");
    let numbers: Vec<i32> = kept.iter().map(|line| line.1).collect();
    let expected: Vec<i32> = (1..).take(kept.len()).collect();
    assert_eq!(numbers, expected, "{kept:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_line_that_cannot_be_stored_does_not_cost_other_jobs_their_lines() {
    let db = TestDb::new().await;
    let (mut client, watcher) = (db.client().await, db.client().await);
    let refuse = "ALTER TABLE rouse.log ADD CONSTRAINT no CHECK (text NOT LIKE '%unstorable%')";
    client.batch_execute(refuse).await.unwrap();
    let address = format!("127.0.0.1:{}", free_port());
    let folder = folder("", &["test_guests.wasm"]);
    let _host = Host::spawn(command(&db.url(), &["serve", "--http", &address], &folder));
    let print = async |line: &str| {
        let payload = json!({"line": line, "times": 1});
        enqueue(&watcher, "test.print", payload).await
    };
    ended(&watcher, print("started").await).await;
    // While these lines cannot be stored, those of the next two jobs wait for the same batch.
    let transaction = client.transaction().await.unwrap();
    let lock = "LOCK TABLE rouse.log IN SHARE MODE";
    transaction.batch_execute(lock).await.unwrap();
    let first = print("first").await;
    until_true(
        &watcher,
        "SELECT EXISTS (
             SELECT FROM pg_stat_activity
             WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%rouse.append_log(%')",
    )
    .await;
    let (bad, good) = (print("unstorable").await, print("good").await);
    for id in [first, bad, good] {
        assert_eq!(ended(&watcher, id).await.state, "succeeded");
    }
    transaction.rollback().await.unwrap();
    let stored = format!("SELECT count(*) = 2 FROM rouse.job_log({good})");
    until_true(&watcher, &stored).await;
    let lost = "rouse_log_lines_lost_total 2\n";
    crate::http::metrics_with(address.parse().unwrap(), &[lost]).await;
    assert!(lines(&watcher, bad).await.is_empty());
}

/// A worker that stops spends at most 5 s on the last lines.
#[tokio::test]
async fn a_stop_does_not_wait_until_a_slow_database_has_stored_all_lines() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // 2,000 lines are stored at a time.
    client
        .batch_execute(
            "CREATE FUNCTION public.slow() RETURNS trigger LANGUAGE plpgsql AS
                 $$ BEGIN PERFORM pg_sleep(2); RETURN NULL; END $$;
             CREATE TRIGGER slow BEFORE INSERT ON rouse.log FOR EACH STATEMENT EXECUTE FUNCTION public.slow()",
        )
        .await
        .unwrap();
    let settings = Settings {
        slots: 10,
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, settings).await;
    for _ in 0..40 {
        enqueue(&client, "test.print", json!({"line": "x", "times": 500})).await;
    }
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    let started = Instant::now();
    worker.drain().await;
    let took = started.elapsed();
    let stored = client.query_one("SELECT count(*) FROM rouse.log", &[]);
    let stored: i64 = stored.await.unwrap().get(0);
    // The machine may pause during the stop, or before it.
    assert!(
        stored < 40 * 500 || took < Duration::from_secs(15),
        "{stored} lines after {took:?}"
    );
}

#[tokio::test]
async fn a_repeated_call_stores_only_the_lines_that_are_missing() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (store, other) = (db.worker().await, db.worker().await);
    let id = enqueue(&client, "x", json!({})).await;
    let job = claim(&store, 1).await.remove(0);
    let say = |attempt: i32, line: u32| LogLine {
        id: job.id,
        attempt: Attempt(attempt),
        line,
        age: Duration::ZERO,
        level: "info",
        text: format!("{attempt}.{line}"),
    };
    let stored = store.append_log(&[say(1, 1), say(1, 2)], false).await;
    assert_eq!(stored.unwrap(), 2);
    // The next attempt.
    let released = settlement(&job, Outcome::Released);
    store.settle(&[released], Locked::Wait).await.unwrap();
    assert_eq!(claim(&store, 1).await[0].attempt, Attempt(2));
    let again = [say(1, 1), say(1, 2), say(1, 3), say(2, 1)];
    for _ in 0..2 {
        let stored = store.append_log(&again, true).await;
        assert_eq!(stored.unwrap(), 4, "those that are there count");
    }
    assert_eq!(other.append_log(&again, true).await.unwrap(), 0);
    let texts: Vec<String> = lines(&client, id).await.into_iter().map(|l| l.3).collect();
    assert_eq!(texts, ["1.1", "1.2", "1.3", "2.1"]);
}

#[tokio::test]
async fn following_a_job_without_a_worker_reports_why() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue(&client, "no.such", json!({})).await.to_string();
    let args = ["job", "logs", &id, "--follow"];
    let follower = Host::spawn(command(&db.url(), &args, &scratch("follow")));
    follower.line(TIMEOUT, |line| {
        line.contains("no running worker has the handler no.such")
    });
}

#[tokio::test]
async fn the_logs_of_a_job_that_panicked_end_with_its_error() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let once = Settings {
        overrides: crate::support::worker::retries("test.panic", 1, Duration::ZERO),
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, once).await;
    let id = enqueue(&client, "test.panic", json!({})).await;
    assert_eq!(ended(&client, id).await.state, "failed");
    worker.drain().await;
    let id = id.to_string();
    let logs = rouse_in(&db, &["job", "logs", &id], &scratch("logs")).await;
    let last = logs.exits(0).stderr.lines().last().unwrap_or_default();
    assert!(
        last.starts_with(&format!(
            "rouse: the last error of job {id}, which has failed: "
        )) && last.contains("a panic on purpose"),
        "{last:?}"
    );
}

#[tokio::test]
async fn a_worker_cannot_write_logs_of_another_workers_job() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (owner, other) = (db.worker().await, db.worker().await);
    let id = enqueue(&client, "x", json!({})).await;
    let job = claim(&owner, 1).await.remove(0);
    let line = LogLine {
        id: job.id,
        attempt: Attempt(1),
        line: 1,
        age: Duration::ZERO,
        level: "info",
        text: "mine".into(),
    };
    assert_eq!(
        other
            .append_log(std::slice::from_ref(&line), false)
            .await
            .unwrap(),
        0
    );
    let used = rouse::store::RunningUsage {
        id: job.id,
        fence: job.fence,
        usage: Usage::default(),
    };
    other.report_usage(&[used]).await.unwrap();
    let (logged, running) = (
        lines(&client, id).await,
        client
            .query("SELECT FROM rouse.running", &[])
            .await
            .unwrap(),
    );
    assert!(logged.is_empty() && running.is_empty());
    owner.report_usage(&[used]).await.unwrap();
    until_true(&client, "SELECT count(*) = 1 FROM rouse.running").await;
    owner.report_usage(&[]).await.unwrap();
    until_true(&client, "SELECT count(*) = 0 FROM rouse.running").await;
}

#[tokio::test]
async fn top_shows_running_attempts_and_their_usage() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    let folder = scratch("top");
    rouse_in(&db, &["top"], &folder)
        .await
        .exits(0)
        .prints("no attempt is running");
    let id = enqueue(&client, "test.ignore-abort", json!({})).await;
    until(&client, id, |job| job.state == "running").await;
    until_true(
        &client,
        "SELECT EXISTS (SELECT FROM rouse.top WHERE cpu_us > 0)",
    )
    .await;
    let shown = rouse_in(&db, &["top", "--json"], &folder).await;
    let shown = &shown.exits(0).json()["running"][0];
    assert_eq!(shown["id"], id);
    assert_eq!(shown["handler"], "test.ignore-abort");
    assert!(shown["memory_bytes"].as_u64() >= Some(1 << 16), "{shown}");
    assert!(shown["running_s"].as_f64() > Some(0.0), "{shown}");
    rouse_in(&db, &["top", "--sort", "cpu"], &folder)
        .await
        .exits(0)
        .prints("test.ignore-abort")
        .prints("asleep");
    assert!(cancel(&client, id).await);
    worker.drain().await;
}

#[tokio::test]
async fn a_guest_that_exceeds_its_cpu_time_is_stopped_and_retried() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let settings = SandboxSettings {
        attempts_max: 2,
        limits: Limits {
            cpu: Duration::from_millis(100),
            ..Limits::default()
        },
        ..SandboxSettings::default()
    };
    let sandbox = Sandbox::start(settings).unwrap();
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(
        guests_dir().join("test_guests.wasm"),
        folder.path().join("test_guests.wasm"),
    )
    .unwrap();
    let catalog = Catalog::open(sandbox.clone(), folder.path()).await.unwrap();
    let worker = TestWorker::start_in(&db, Settings::default(), sandbox, Arc::new(catalog));
    let id = enqueue(&client, "test.spin", json!({})).await;
    let job = ended(&client, id).await;
    assert_eq!(job.state, "failed");
    let error = job.error.unwrap();
    assert_eq!(error["kind"], "out_of_cpu");
    assert_eq!(
        error["message"],
        "the handler used more than its 0.1 s of CPU time (`cpu` in rouse.toml)"
    );
    let used = usage(&client, id).await;
    // The stored time has whole microseconds.
    assert!(used["cpu_ms"].as_f64() >= Some(100.0), "{used}");
    // Another attempt that only waits is not stopped, no matter how long it takes.
    let waiting = enqueue(&client, "test.sleep", json!({"ms": 300})).await;
    assert_eq!(ended(&client, waiting).await.state, "succeeded");
    worker.drain().await;
}
