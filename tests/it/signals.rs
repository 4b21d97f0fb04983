//! A signal at any stage of its start ends a command gracefully, and leaves none of its processes running.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use crate::support::worker::{TIMEOUT, enqueue, guests_dir};
use crate::support::{Host, TestDb, rouse, scratch};

/// The log level at which the stages of a start are logged.
const STAGES: (&str, &str) = ("ROUSE_LOG", "info,rouse::cli=debug,rouse::postgres=debug");

/// Starts a command again and again, and sends SIGTERM after its first line, after its second, and so on, until all of
/// `last` are among the lines; the lines of its two outputs come in no particular order. `ended` is called each time
/// after the exit, with the exit code and the output.
fn at_every_stage(
    start: impl Fn() -> Host,
    last: &[&str],
    code: i32,
    ended: impl Fn(&str),
) -> Vec<String> {
    for stage in 1.. {
        let host = start();
        let lines = host.first_lines(TIMEOUT, stage);
        host.signal(libc::SIGTERM);
        let (status, output) = host.exit(TIMEOUT);
        assert_eq!(status.code(), Some(code), "after line {stage}: {output}");
        ended(&output);
        let is_there = |last: &&str| lines.iter().any(|line| line.contains(last));
        if last.iter().all(is_there) {
            return lines;
        }
    }
    unreachable!("it returns after the last stage")
}

/// A folder with one module, which loads quickly.
fn folder_with(module: &str) -> PathBuf {
    let folder = scratch("one-module");
    fs::copy(guests_dir().join(module), folder.join(module)).unwrap();
    folder
}

/// Command lines of running processes that contain this directory.
fn running_in(dir: &Path) -> Vec<String> {
    let dir = dir.to_str().unwrap();
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let lines = processes.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    lines
        .map(|line| String::from_utf8_lossy(&line).replace('\0', " "))
        .filter(|line| line.contains(dir))
        .collect()
}

/// Asserts that a private Postgres in this data directory was stopped properly and has left nothing behind.
fn assert_clean(data: &Path, output: &str) {
    assert_eq!(running_in(data), Vec::<String>::new(), "{output}");
    assert!(!data.join("cluster/postmaster.pid").exists(), "{output}");
    let log = fs::read_to_string(data.join("server.log")).unwrap_or_default();
    if log.contains("ready to accept connections") {
        assert!(
            log.contains("database system is shut down"),
            "{output}\n{log}"
        );
    }
}

#[test]
fn dev_stops_gracefully_at_every_stage_of_its_first_and_its_second_start() {
    let handlers = folder_with("noop.wasm");
    let data = RefCell::new(PathBuf::new());
    let start = || {
        let data = data.borrow();
        let folders = [data.to_str().unwrap(), handlers.to_str().unwrap()];
        let args = ["dev", "--data-dir", folders[0], "--handlers", folders[1]];
        Host::rouse(&args, &[STAGES])
    };
    let first = || {
        data.replace(scratch("dev-signals").join("pg"));
        start()
    };
    let assert_clean = |output: &str| assert_clean(&data.borrow(), output);
    let lines = at_every_stage(first, &["migrating the database"], 0, assert_clean);
    for stage in ["creating a Postgres cluster", "creating the database"] {
        assert!(
            lines.iter().any(|line| line.contains(stage)),
            "{stage}: {lines:?}"
        );
    }
    let lines = at_every_stage(start, &["worker started", "try: "], 0, assert_clean);
    for stage in ["starting Postgres", "loading the handlers"] {
        assert!(
            lines.iter().any(|line| line.contains(stage)),
            "{stage}: {lines:?}"
        );
    }
}

#[test]
fn the_private_postgres_stops_gracefully_at_every_stage_of_its_start() {
    let data = scratch("postgres-signals").join("pg");
    let start = || {
        let args = ["postgres", "--data-dir", data.to_str().unwrap()];
        Host::rouse(&args, &[STAGES])
    };
    at_every_stage(start, &["postgres: "], 0, |output| {
        assert_clean(&data, output)
    });
}

#[test]
fn the_private_postgres_runs_although_its_standard_output_cannot_be_written_to() {
    let data = scratch("postgres-unread").join("pg");
    let rouse = rouse();
    let mut command = Command::new("sh");
    command
        .args(["-c", "exec \"$0\" postgres --data-dir \"$1\" > /dev/full"])
        .arg(rouse.get_program())
        .arg(&data)
        .envs(
            rouse
                .get_envs()
                .filter_map(|(key, value)| Some((key, value?))),
        )
        .envs([STAGES]);
    let host = Host::spawn(command);
    host.line(TIMEOUT, |line| {
        line.contains("the private Postgres is ready")
    });
    let output = host.stop();
    assert_clean(&data, &output);
}

#[tokio::test]
async fn serve_stops_gracefully_at_every_stage_of_its_start() {
    let db = TestDb::new().await;
    let (url, handlers) = (db.url(), folder_with("noop.wasm"));
    let start = || {
        let args = [
            "serve",
            "--http",
            "off",
            "--handlers",
            handlers.to_str().unwrap(),
        ];
        Host::rouse(&args, &[("DATABASE_URL", &url), STAGES])
    };
    at_every_stage(start, &["worker started"], 0, |_| {});
    let client = db.client().await;
    let row = client.query_one(
        "SELECT count(*) FROM rouse.workers WHERE state <> 'unregistered'",
        &[],
    );
    let listed: i64 = row.await.unwrap().get(0);
    assert_eq!(listed, 0, "each has unregistered");
}

#[tokio::test]
async fn a_host_stops_gracefully_when_its_terminal_is_closed_unless_it_was_started_with_nohup() {
    let db = TestDb::new().await;
    let handlers = folder_with("noop.wasm");
    let start = |program: &[&str]| {
        let rouse = rouse();
        let program = program.iter().map(OsStr::new);
        let mut words = program.chain([rouse.get_program()]);
        let mut command = Command::new(words.next().unwrap());
        command
            .args(words)
            .args(["serve", "--http", "off", "--handlers"])
            .arg(&handlers)
            .envs(
                rouse
                    .get_envs()
                    .filter_map(|(key, value)| Some((key, value?))),
            )
            .env("DATABASE_URL", db.url());
        let host = Host::spawn(command);
        host.line(TIMEOUT, |line| line.contains("worker started"));
        host
    };
    // The tests themselves may have been started with nohup.
    let host = start(&["env", "--default-signal=HUP"]);
    host.signal(libc::SIGHUP);
    let (status, output) = host.exit(TIMEOUT);
    assert_eq!(status.code(), Some(0), "{output}");
    assert!(
        output.contains("stopping: no new attempts start"),
        "{output}"
    );

    let host = start(&["nohup"]);
    let status = fs::read_to_string(format!("/proc/{}/status", host.pid())).unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = u64::from_str_radix(ignored.unwrap().trim(), 16).unwrap();
    assert_eq!(ignored & 1, 1, "SIGHUP is number 1: {status}");
    host.stop();
}

#[tokio::test]
async fn drain_reports_an_early_signal_at_every_stage_of_its_start() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // More work than all of these commands could do, however long they run before their signal.
    client
        .query(
            "SELECT count(rouse.enqueue('test.sleep', '{\"ms\": 1000}')) FROM generate_series(1, 5000)",
            &[],
        )
        .await
        .unwrap();
    let (url, guests) = (db.url(), folder_with("test_guests.wasm"));
    let start = || {
        let args = [
            "queue",
            "drain",
            "default",
            "--handlers",
            guests.to_str().unwrap(),
        ];
        Host::rouse(&args, &[("DATABASE_URL", &url), STAGES])
    };
    at_every_stage(start, &["worker started"], 130, |_| {});
}

#[tokio::test]
async fn a_signal_ends_following_a_jobs_log() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue(&client, "no.such.handler", json!({}))
        .await
        .to_string();
    let host = Host::rouse(
        &["job", "logs", &id, "--follow"],
        &[("DATABASE_URL", &db.url())],
    );
    host.line(TIMEOUT, |line| {
        line.contains("no running worker has the handler")
    });
    host.stop();
}
