//! `rouse invoke` runs a handler once, without the queue and without a database.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Instant;

use serde_json::{Value, json};

use crate::sandbox_guest::{guest_of_wasip1, manifest};
use crate::support::worker::{TIMEOUT, guests_dir};
use crate::support::{Host, folder_of, rouse, rouse_without_database, scratch};

/// A folder with the guests of `tests/guests` only, which compile in a second, and a `rouse.toml` with this text.
pub(crate) fn folder(config: &str) -> PathBuf {
    let folder = scratch("invoke");
    std::fs::create_dir(folder.join("handlers")).unwrap();
    for file in ["test_guests.wasm", "noop.wasm"] {
        std::fs::copy(guests_dir().join(file), folder.join("handlers").join(file)).unwrap();
    }
    std::fs::write(folder.join("rouse.toml"), config).unwrap();
    folder
}

/// `rouse invoke` in this folder, without a database.
fn invoke(folder: &Path, args: &[&str]) -> Command {
    let mut command = rouse();
    command.arg("invoke").args(args);
    if !args.contains(&"--handlers") {
        command.args(["--handlers", "handlers"]);
    }
    command
        .current_dir(folder)
        .env_remove("DATABASE_URL")
        .env_remove("ROUSE_LOG")
        .stdin(Stdio::null());
    command
}

fn texts(output: &Output) -> (i32, &str, &str) {
    (
        output.status.code().expect("an exit code"),
        std::str::from_utf8(&output.stdout).unwrap(),
        std::str::from_utf8(&output.stderr).unwrap(),
    )
}

#[test]
fn a_handler_runs_from_the_shell_without_a_database() {
    let folder = folder("");
    let output = invoke(&folder, &["noop", r#"{"n": 7}"#]).output().unwrap();
    assert_eq!(texts(&output), (0, "{\"n\":7}\n", ""));

    // The handler gets the tenant and the queue of the command line, and an id that no queued job can have.
    let args = [
        "test.echo",
        r#"{"a": 1}"#,
        "--tenant",
        "acme",
        "--queue",
        "mail",
    ];
    let output = invoke(&folder, &args).output().unwrap();
    let (code, stdout, stderr) = texts(&output);
    assert_eq!(code, 0, "{stderr}");
    let mut shown: Value = serde_json::from_str(stdout).expect("nothing but the result");
    let requested_at = shown["requested_at_ms"].take().as_i64();
    assert!(requested_at > Some(1_700_000_000_000), "{requested_at:?}");
    let id = shown["id"].take().as_i64();
    assert!(
        id.is_some_and(|id| id < 0),
        "a queued job cannot have this id: {id:?}"
    );
    assert_eq!(
        shown,
        json!({
            "payload": {"a": 1}, "id": null, "handler": "test.echo", "queue": "mail", "tenant": "acme",
            "source": null, "attempt": 1, "max_attempts": 1, "requested_at_ms": null,
        })
    );
    assert!(
        stderr.contains("an info") && stderr.contains("half of it"),
        "its log is on standard error: {stderr}"
    );
}

#[test]
fn the_payload_can_come_from_standard_input_and_is_checked_before_anything_is_compiled() {
    let folder = folder("");
    let mut child = invoke(&folder, &["noop", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut stdin, b"{\"n\": 9}").unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    assert_eq!(texts(&output).1, "{\"n\":9}\n");

    // The folder does not exist, and the command did not look for it.
    let output = invoke(&folder, &["noop", "{n: 9}", "--handlers", "/nowhere"])
        .output()
        .unwrap();
    let (code, stdout, stderr) = texts(&output);
    assert_eq!((code, stdout), (2, ""));
    assert!(stderr.contains("the payload is not JSON"), "{stderr}");
}

#[test]
fn each_end_of_an_invocation_has_its_exit_code() {
    let folder = folder("[handlers.\"test.spin\"]\ngrace = \"100ms\"\n");
    for (args, code, expected) in [
        (
            &["test.fail", r#"{"as": "retryable"}"#][..],
            1,
            "message: not this time",
        ),
        (
            &["test.fail", r#"{"as": "gracefully"}"#],
            1,
            "payload does not match the schema at /as: expected",
        ),
        (&["test.panic"], 1, "a panic on purpose"),
        (
            &["test.alloc", r#"{"bytes": 999999999}"#],
            1,
            "out_of_memory",
        ),
        (&["no.such"], 3, "its handlers are noop, test.alloc"),
        (
            &["test.spin", "--timeout", "100ms"],
            5,
            "message: it ran longer than --timeout 100ms",
        ),
        (
            &["noop", "--handlers", "/nowhere"],
            6,
            "the handlers folder /nowhere does not exist",
        ),
        (&["noop", "--config", "/nowhere.toml"], 6, "cannot read"),
    ] {
        let output = invoke(&folder, args).output().unwrap();
        let (got, stdout, stderr) = texts(&output);
        assert_eq!((got, stdout), (code, ""), "{args:?}: {stderr}");
        assert!(stderr.contains(expected), "{args:?}: {stderr}");
    }
}

#[test]
fn one_json_object_reports_the_result_and_the_usage() {
    let folder = folder("[limits]\nmemory_mb = 16\n");
    let output = invoke(&folder, &["noop", r#"{"n": 1}"#, "--json"])
        .output()
        .unwrap();
    let record: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(record["outcome"], "succeeded");
    assert_eq!(record["result"], json!({"n": 1}));
    assert!(record["wall_ms"].as_f64() > Some(0.0), "{record}");
    assert!(record["cpu_ms"].as_f64() > Some(0.0), "{record}");
    assert!(record["memory_bytes"].as_u64() > Some(0), "{record}");

    let output = invoke(&folder, &["test.alloc", r#"{"bytes": 33554432}"#, "--json"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let record: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(record["outcome"], "failed");
    assert_eq!(
        record["error"]["kind"], "out_of_memory",
        "the memory limit of rouse.toml applies: {record}"
    );
    assert!(record.get("result").is_none(), "{record}");
}

#[test]
fn a_profile_names_the_computing_functions_with_their_source_lines() {
    let folder = folder("");
    let module = "text_stats.wasm";
    std::fs::copy(
        guests_dir().join(module),
        folder.join("handlers").join(module),
    )
    .unwrap();
    let words: Vec<String> = (0..60_000).map(|n| format!("word{}", n % 5_000)).collect();
    let payload = json!({"text": words.join(" "), "top": 0}).to_string();
    let profile = || {
        let mut child = invoke(&folder, &["text.stats", "-", "--profile", "out.json"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        std::io::Write::write_all(&mut stdin, payload.as_bytes()).unwrap();
        drop(stdin);
        let output = child.wait_with_output().unwrap();
        let (code, stdout, stderr) = texts(&output);
        assert_eq!(code, 0, "{stderr}");
        assert!(stdout.contains("\"words\":60000"), "{stdout}");
        let profile = std::fs::read(folder.join("out.json")).unwrap();
        let profile: Value = serde_json::from_slice(&profile).expect("JSON");
        (profile, stderr.to_owned())
    };
    // On a busy machine, the handler may end before the thread that takes the samples has run a few times.
    let until = Instant::now() + TIMEOUT;
    let (profile, stderr) = loop {
        let (profile, stderr) = profile();
        let samples = profile["threads"][0]["samples"]["stack"].as_array();
        if samples.is_some_and(|samples| samples.len() >= 5) {
            break (profile, stderr);
        }
        assert!(Instant::now() < until, "{profile}");
    };
    assert!(
        stderr.contains("samples of text.stats are in out.json"),
        "{stderr}"
    );
    assert_eq!(profile["meta"]["product"], "text.stats");
    let thread = &profile["threads"][0];
    let number = |table: &str, column: &str, row: usize| {
        let value = thread[table][column][row].as_u64();
        value.and_then(|value| usize::try_from(value).ok())
    };
    let text = |row: Option<usize>| row.and_then(|row| thread["stringArray"][row].as_str());
    let is_in_the_handler = |stack: &u64| {
        let mut stack = usize::try_from(*stack).ok();
        while let Some(row) = stack {
            let frame = number("stackTable", "frame", row).expect("a number in each row");
            let function = number("frameTable", "func", frame).expect("a number in each row");
            let name = text(number("funcTable", "name", function));
            let file = text(number("funcTable", "fileName", function));
            if name.is_some_and(|name| name.ends_with("stats"))
                && file.is_some_and(|file| file.ends_with("text-stats/src/lib.rs"))
                && number("frameTable", "line", frame).is_some_and(|line| line > 0)
            {
                return true;
            }
            stack = number("stackTable", "prefix", row);
        }
        false
    };
    let samples = thread["samples"]["stack"].as_array().expect("a column");
    let stacks = samples.iter().filter_map(Value::as_u64);
    let in_the_handler = stacks.filter(is_in_the_handler).count();
    assert!(
        in_the_handler * 2 >= samples.len(),
        "{in_the_handler} of {}: {}",
        samples.len(),
        thread["stringArray"]
    );

    // The payload is checked before anything is compiled.
    let args = [
        "noop",
        "--profile",
        "/nowhere/out.json",
        "--handlers",
        "/nowhere",
    ];
    let output = invoke(&folder, &args).output().unwrap();
    let (code, _, stderr) = texts(&output);
    assert_eq!(code, 6);
    assert!(stderr.contains("/nowhere/out.json"), "{stderr}");
}

#[test]
fn a_signal_aborts_the_handler_and_a_second_one_stops_it_at_once() {
    let folder = folder("[handlers.\"test.ignore-abort\"]\ngrace = \"10m\"\n");
    let host = |handler: &str, signal: i32| {
        let host = Host::spawn(invoke(&folder, &[handler]));
        host.line(TIMEOUT, |line| line.contains("progress"));
        host.signal(signal);
        host
    };
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let (status, output) = host("test.wait-abort", signal).exit(TIMEOUT);
        assert_eq!(status.code(), Some(130), "{output}");
        assert!(
            output.contains("test.wait-abort was stopped (cancelled)"),
            "{output}"
        );
    }

    let ignoring = host("test.ignore-abort", libc::SIGINT);
    // Two signals of the same kind in quick succession may be merged into one.
    let again = Instant::now() + TIMEOUT;
    while std::fs::exists(format!("/proc/{}/exe", ignoring.pid())).unwrap_or(false)
        && std::fs::read_link(format!("/proc/{}/exe", ignoring.pid())).is_ok()
    {
        assert!(Instant::now() < again, "{}", ignoring.output());
        ignoring.signal(libc::SIGINT);
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert_eq!(ignoring.exit(TIMEOUT).0.code(), Some(130));
}

#[test]
fn the_first_reading_of_the_monotonic_clock_is_above_zero() {
    // Reads the clock as Go's runtime does when a module starts, and traps if it shows 0. In a process of its own, so
    // that nothing has read the clock before.
    let guest = guest_of_wasip1(
        r#"(import "wasi_snapshot_preview1" "clock_time_get"
            (func $clock_time_get (param i32 i64 i32) (result i32)))"#,
        &manifest("test.clock", "1"),
        "(drop (call $clock_time_get (i32.const 1) (i64.const 1) (i32.const 2048)))
         (if (i64.eqz (i64.load (i32.const 2048))) (then unreachable))
         (call $return_ok (local.get $payload) (local.get $payload_len))",
    );
    let folder = folder_of("", &[("clock.wasm", guest)]);
    let ran = rouse_without_database(&["invoke", "test.clock", "7"], &folder);
    assert_eq!(ran.exits(0).stdout, "7\n");
}
