//! `rouse serve`: how hosts share jobs, stop, and survive failures.

use std::path::Path;
use std::process::Command;

use serde_json::json;
use tokio_postgres::Client;

use super::{config, serve};
use crate::support::database::{connect, migrate};
use crate::support::held_up::{IS_HELD_UP, hold_up, hold_up_ends};
use crate::support::worker::{
    TIMEOUT, UNREADABLE_PEEK, ended, enqueue, guests_dir, show, until, until_true,
};
use crate::support::{Host, TestDb, command_without_database, folder, scratch};

#[tokio::test]
async fn two_hosts_share_five_thousand_jobs_and_each_job_runs_exactly_once() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let config = config("");
    let hosts = [serve(&db, &config, &[]), serve(&db, &config, &[])];
    let mut enqueued = 0;
    // On a slow machine, one host may run all jobs before the other one looks.
    for _ in 0..5 {
        client
            .query(
                "SELECT count(*) FROM (SELECT rouse.enqueue_many('noop', array_agg(jsonb_build_object('n', n))) FROM generate_series(1, 5000) AS n) AS q",
                &[],
            )
            .await
            .unwrap();
        enqueued += 5000;
        until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
        let both = "SELECT count(DISTINCT worker) = 2 FROM rouse.finished";
        if client.query_one(both, &[]).await.unwrap().get(0) {
            break;
        }
    }
    let row = client
        .query_one(
            "SELECT count(*), count(DISTINCT id), count(*) FILTER (WHERE state = 'succeeded' AND attempt = 1 AND uncounted = 0
                        AND result->'n' = payload->'n'),
                    count(DISTINCT worker), (SELECT count(*) FROM rouse.attempt)
             FROM rouse.finished",
            &[],
        )
        .await
        .unwrap();
    let counts: Vec<i64> = (0..5).map(|n| row.get(n)).collect();
    assert_eq!(
        counts,
        [enqueued, enqueued, enqueued, 2, 0],
        "finished, jobs, first attempts, workers, failed attempts"
    );
    for host in hosts {
        host.stop();
    }
}

#[test]
fn a_host_does_not_start_if_nobody_writes_to_a_pipe_that_a_setting_names() {
    let no_queue = ["serve", "--no-queue", "--http", "127.0.0.1:0"];
    let with_config = [&no_queue[..], &["--config", "fifo"]].concat();
    let token = ("ROUSE_INVOKE_TOKEN", "0123456789abcdef");
    let database = (
        "DATABASE_URL",
        "postgres://a@127.0.0.1:1/b?sslmode=verify-ca&sslrootcert=fifo",
    );
    let cases: [(&[&str], &str, _); 4] = [
        (&with_config[..], "", token),
        (&no_queue, "invoke_token_file = \"fifo\"\n", ("LANG", "C")),
        (&no_queue, "http_ca_file = \"fifo\"\n", token),
        (&["serve"], "", database),
    ];
    // All at once: each waits for 30 s.
    let hosts = cases.map(|(args, config, (name, value))| {
        let folder = folder(config, &[]);
        let made = Command::new("mkfifo")
            .args(["-m", "600", "fifo"])
            .current_dir(&folder)
            .status();
        assert!(made.expect("the system has mkfifo").success());
        let mut command = command_without_database(args, &folder);
        command.env(name, value);
        Host::spawn(command)
    });
    for host in hosts {
        let (status, output) = host.exit(TIMEOUT);
        assert_eq!(status.code(), Some(1), "{output}");
        for part in ["fifo", "could not be read within 30 s"] {
            assert!(output.contains(part), "{part}: {output}");
        }
    }
}

#[tokio::test]
async fn a_host_that_is_stopped_during_its_start_exits_with_zero() {
    // A server that accepts connections and never responds.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("postgres://a@{}/b", silent.local_addr().unwrap());
    let guests = guests_dir();
    let folder = guests.to_str().unwrap();
    let host = Host::rouse(
        &["serve", "--http", "off", "--handlers", folder],
        &[("DATABASE_URL", &url), ("ROUSE_LOG", "info")],
    );
    let (_asks, _) = tokio::task::spawn_blocking(move || silent.accept())
        .await
        .unwrap()
        .unwrap();
    let output = host.stop();
    assert!(output.contains("before anything was started"), "{output}");
}

#[tokio::test]
async fn sigterm_stops_claiming_finishes_what_runs_and_exits_with_status_zero() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // The attempt waits until its first step is recorded.
    let other = hold_up(&db, &client, "rouse.step", "true").await;
    let host = serve(&db, &config(""), &["--slots", "1"]);
    let running = enqueue(&client, "test.steps", json!({"between": "nothing"})).await;
    // A claim that has not started yet would be released.
    until_true(&client, IS_HELD_UP).await;
    host.signal(libc::SIGTERM);
    host.line(TIMEOUT, |line| line.contains("stopping"));
    let waiting = enqueue(&client, "noop", json!({"n": 1})).await;
    other.batch_execute("COMMIT").await.unwrap();
    let (status, output) = host.exit(TIMEOUT);
    assert!(status.success(), "{output}");
    assert_eq!(show(&client, running).await.state, "succeeded");
    assert_eq!(show(&client, waiting).await.state, "queued");
}

/// Waits until the attempt of a job has started: a claim that has not started may be given back.
fn until_started(host: &Host, id: i64) {
    host.line(TIMEOUT, |line| {
        line.contains("started") && line.contains(&format!("job.id={id} "))
    });
}

/// Whether no settlement waits for the lock of [`hold_up_ends`], for [`until_true`].
const NONE_IS_HELD_UP: &str = "SELECT NOT EXISTS (
    SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory')";

#[tokio::test]
async fn a_job_whose_worker_is_killed_runs_again_elsewhere_after_its_lease() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let config = config("");
    // The job does not end before the host is killed.
    let other = hold_up_ends(&db, &client, "true").await;
    let victim = serve(&db, &config, &["--worker-id", "victim"]);
    let id = enqueue(&client, "test.sleep", json!({"ms": 1500})).await;
    until_started(&victim, id);
    victim.kill();
    until_true(&client, NONE_IS_HELD_UP).await;
    other.batch_execute("COMMIT").await.unwrap();
    client
        .batch_execute("UPDATE rouse.job SET lease_until = clock_timestamp()")
        .await
        .unwrap();
    let successor = serve(&db, &config, &["--worker-id", "successor"]);
    let job = ended(&client, id).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 2));
    let rows = client
        .query(
            "SELECT event, worker FROM rouse.history($1) WHERE event NOT IN ('renewed', 'released')",
            &[&id],
        )
        .await
        .unwrap();
    let events: Vec<(String, Option<String>)> =
        rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    let event = |event: &str, worker: Option<&str>| (event.to_string(), worker.map(str::to_string));
    assert_eq!(
        events,
        [
            event("requested", None),
            event("claimed", Some("victim")),
            event("lost", Some("victim")),
            event("started", Some("successor")),
            event("succeeded", Some("successor")),
        ]
    );
    drop(successor);
}

#[tokio::test]
async fn a_host_that_was_frozen_past_its_lease_cannot_settle_the_job() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let short = config("[handlers.\"test.*\"]\nlease = \"2s\"");
    // The job does not end before the host is frozen.
    let other = hold_up_ends(&db, &client, "true").await;
    let frozen = serve(&db, &short, &["--worker-id", "frozen"]);
    let id = enqueue(&client, "test.race", json!({"ms": 3000})).await;
    until_started(&frozen, id);
    frozen.signal(libc::SIGSTOP);
    until_true(&client, NONE_IS_HELD_UP).await;
    other.batch_execute("COMMIT").await.unwrap();
    // Its own leases are longer.
    let successor = serve(&db, &config(""), &["--worker-id", "successor"]);
    until(&client, id, |job| job.attempt == 2).await;
    frozen.signal(libc::SIGCONT);
    // According to its own clock, its leases ended while it was frozen, and the guest's sleep may also have ended:
    // either the host stops the attempt first, or the database refuses the outcome.
    frozen.line(TIMEOUT, |line| {
        // The guest, the check of the leases or the database may notice it first.
        [
            "aborted",
            "lease lost",
            "outcome refused: the lease is lost",
        ]
        .iter()
        .any(|noticed| line.contains(noticed))
    });
    let job = ended(&client, id).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 2));
    assert_eq!(job.result, Some(json!({"slept_ms": 3000})));
    let owner: String = client
        .query_one(
            "SELECT w.worker_id FROM rouse.finished AS f JOIN rouse.worker AS w ON w.incarnation = f.worker WHERE f.id = $1",
            &[&id],
        )
        .await
        .unwrap()
        .get(0);
    assert_eq!(owner, "successor");
    drop(successor);
}

#[tokio::test]
async fn serve_reports_its_health_and_its_metrics() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let port = crate::support::free_port();
    let address = format!("127.0.0.1:{port}");
    let guests = guests_dir();
    let start = || {
        Host::rouse(
            &[
                "serve",
                "--http",
                &address,
                "--handlers",
                guests.to_str().unwrap(),
            ],
            &[("DATABASE_URL", &db.url())],
        )
    };
    let host = start();
    host.line(TIMEOUT, |line| line.contains("worker started"));
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    ended(&client, id).await;
    let get = async |path: &str| crate::http::get(address.parse().unwrap(), path).await;
    assert!(get("/healthz").await.0.contains("200"));
    assert!(get("/readyz").await.0.contains("200"));
    // The first read of the page starts the queries of the database, whose results are shown by later reads.
    let of_the_database = [
        "rouse_dead_rows ",
        "rouse_xmin_age_transactions ",
        "rouse_notification_queue_usage ",
        "rouse_oldest_transaction_seconds ",
    ];
    let first = get("/metrics").await.1;
    for gauge in of_the_database {
        assert!(!first.contains(gauge), "{gauge}: {first}");
    }
    let counted = [
        "rouse_jobs_claimed_total 1",
        "rouse_attempts_total{handler=\"noop\",outcome=\"succeeded\"} 1",
    ];
    let wanted = [&counted[..], &of_the_database].concat();
    crate::http::metrics_with(address.parse().unwrap(), &wanted).await;

    let second = start();
    let (status, output) = second.exit(TIMEOUT);
    assert!(!status.success());
    assert!(output.contains("choose another with --http"), "{output}");
    host.stop();
}

/// A host whose log is not read.
fn serve_unread(db: &TestDb, config: &Path, address: &str) -> Host {
    let mut command = crate::support::rouse();
    command
        .args(["serve", "--http", address, "--handlers"])
        .arg(guests_dir())
        .arg("--config")
        .arg(config)
        .env("DATABASE_URL", db.url())
        .env("ROUSE_LOG", "info,rouse=debug");
    Host::spawn_with_unread_stderr(command)
}

/// Enqueues jobs whose log lines are several times as large as a pipe (64 KiB), and smaller than the maximum that may
/// wait.
async fn enqueue_for_a_full_pipe(client: &Client) {
    client
        .query(
            "SELECT rouse.enqueue_many('noop', array_fill('{\"n\": 1}'::jsonb, ARRAY[500]))",
            &[],
        )
        .await
        .unwrap();
}

#[tokio::test]
async fn a_host_whose_log_is_not_read_keeps_its_leases_and_answers_requests() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let config = config("[handlers.\"test.*\"]\nlease = \"5s\"");
    let address = format!("127.0.0.1:{}", crate::support::free_port());
    let mut host = serve_unread(&db, &config, &address);
    let long = enqueue(&client, "test.sleep", json!({"ms": 8000})).await;
    until(&client, long, |job| job.state == "running").await;
    enqueue_for_a_full_pipe(&client).await;
    let others = format!("SELECT NOT EXISTS (SELECT FROM rouse.job WHERE id <> {long})");
    until_true(&client, &others).await;
    let health = crate::http::get(address.parse().unwrap(), "/healthz").await;
    assert!(health.0.contains("200"), "{health:?}");
    let job = ended(&client, long).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
    host.signal(libc::SIGTERM);
    until_true(
        &client,
        "SELECT bool_and(state = 'unregistered') FROM rouse.workers",
    )
    .await;
    // Now it is read, and no line is missing.
    host.read_stderr();
    let (status, output) = host.exit(TIMEOUT);
    assert!(status.success(), "{output}");
    assert!(output.contains("worker stopped"), "{output}");
}

#[tokio::test]
async fn a_panic_is_reported_and_stops_the_host_although_the_log_is_not_read() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut host = serve_unread(&db, &config(""), "off");
    enqueue_for_a_full_pipe(&client).await;
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    // The claimer panics when it reads this response.
    client.batch_execute(UNREADABLE_PEEK).await.unwrap();
    until_true(
        &client,
        "SELECT bool_and(state = 'unregistered') FROM rouse.workers",
    )
    .await;
    host.read_stderr();
    let (status, output) = host.exit(TIMEOUT);
    assert_eq!(status.code(), Some(1), "{output}");
    assert!(output.contains("' panicked at "), "{output}");
    assert!(output.contains("the claimer has panicked"), "{output}");
}

#[tokio::test]
async fn a_host_whose_database_hangs_stops_at_the_second_signal() {
    let dir = scratch("hangs");
    let settings = crate::support::postgres_settings(dir.join("pg"));
    let server = tokio::task::spawn_blocking(move || rouse::postgres::Server::start(&settings))
        .await
        .unwrap()
        .expect("a server");
    let url = server.url("postgres");
    migrate(&url).await.unwrap();
    let guests = guests_dir();
    let host = Host::rouse(
        &[
            "serve",
            "--http",
            "off",
            "--handlers",
            guests.to_str().unwrap(),
        ],
        &[("DATABASE_URL", &url)],
    );
    host.line(TIMEOUT, |line| line.contains("worker started"));
    let client = connect(&url).await;
    // When the worker sleeps, the connections that test for a pooler are closed.
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
    let rows = client
        .query(
            "SELECT pid FROM pg_stat_activity WHERE application_name = 'rouse'",
            &[],
        )
        .await
        .unwrap();
    let backends: Vec<i32> = rows.iter().map(|row| row.get(0)).collect();
    assert!(!backends.is_empty());
    let signal = |signal: &str| {
        for pid in &backends {
            let sent = std::process::Command::new("kill")
                .args([signal, &pid.to_string()])
                .status();
            assert!(sent.unwrap().success());
        }
    };
    signal("-STOP");
    host.signal(libc::SIGTERM);
    host.line(TIMEOUT, |line| line.contains("stopping"));
    host.signal(libc::SIGTERM);
    let (_, output) = host.exit(TIMEOUT);
    signal("-CONT");
    assert!(output.contains("worker stopped"), "{output}");
    tokio::task::spawn_blocking(move || server.stop())
        .await
        .unwrap();
}

#[tokio::test]
async fn a_host_whose_log_pipe_is_closed_keeps_working_and_stops_on_a_signal() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let guests = guests_dir();
    let mut host = crate::support::rouse()
        .args([
            "serve",
            "--http",
            "off",
            "--worker-id",
            "unread",
            "--handlers",
        ])
        .arg(&guests)
        .env("DATABASE_URL", db.url())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop((host.stdout.take(), host.stderr.take()));
    // The attempts of this host write to its log, and so does each step of its stop.
    let id = enqueue(&client, "test.print", json!({"line": "unread", "times": 3})).await;
    let job = ended(&client, id).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
    let pid = libc::pid_t::try_from(host.id()).unwrap();
    let sent = std::process::Command::new("kill")
        .args(["-TERM", &pid.to_string()])
        .status();
    assert!(sent.unwrap().success());
    let status = tokio::task::spawn_blocking(move || host.wait())
        .await
        .unwrap();
    assert!(status.unwrap().success());
    until_true(
        &client,
        "SELECT state = 'unregistered' FROM rouse.workers WHERE worker_id = 'unread'",
    )
    .await;
}

#[tokio::test]
async fn a_host_that_cannot_claim_is_not_ready_even_if_it_renews_leases() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let address = format!("127.0.0.1:{}", crate::support::free_port());
    let config = config("[handlers.\"test.sleep\"]\nlease = \"5s\"\n");
    let host = serve(&db, &config, &["--http", &address]);
    let running = enqueue(&client, "test.sleep", json!({"ms": 600_000})).await;
    until(&client, running, |job| job.state == "running").await;
    let ready = async || {
        let (head, _) = crate::http::get(address.parse().unwrap(), "/readyz").await;
        head.contains("200")
    };
    assert!(ready().await);
    let broken = "ALTER FUNCTION rouse.peek RENAME TO peek_away";
    client.batch_execute(broken).await.unwrap();
    let started = std::time::Instant::now();
    while ready().await {
        assert!(started.elapsed() < TIMEOUT, "the host cannot claim");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    for _ in 0..3 {
        let lease = "SELECT lease_until::text FROM rouse.job";
        let lease: String = client.query_one(lease, &[]).await.unwrap().get(0);
        let renewed = format!("SELECT lease_until > '{lease}' FROM rouse.job");
        until_true(&client, &renewed).await;
        assert!(!ready().await);
    }
    host.signal(libc::SIGKILL);
}
