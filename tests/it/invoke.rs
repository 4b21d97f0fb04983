//! Handlers that are run once, without the queue and without a database.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::http::get;
use crate::support::worker::{PATIENCE, ended, enqueue, guests_dir};
use crate::support::{Host, TestDb, free_port, rouse_binary, scratch};

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// A folder with the guests of `tests/guests` alone, which compile in a second, and a `rouse.toml` with this text.
fn folder(config: &str) -> PathBuf {
    let folder = scratch("invoke");
    std::fs::create_dir(folder.join("handlers")).unwrap();
    for file in ["test_guests.wasm", "noop.wasm"] {
        std::fs::copy(guests_dir().join(file), folder.join("handlers").join(file)).unwrap();
    }
    std::fs::write(folder.join("rouse.toml"), config).unwrap();
    folder
}

/// `rouse invoke` in this folder, without any database.
fn invoke(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(rouse_binary());
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
        output.status.code().expect("it exits"),
        std::str::from_utf8(&output.stdout).unwrap(),
        std::str::from_utf8(&output.stderr).unwrap(),
    )
}

#[test]
fn a_handler_runs_from_the_shell_without_any_database() {
    let folder = folder("");
    let output = invoke(&folder, &["noop", r#"{"n": 7}"#]).output().unwrap();
    assert_eq!(texts(&output), (0, "{\"n\":7}\n", ""));

    // Granted where the settings say so, and told of what it was called with.
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
    let mut told: Value = serde_json::from_str(stdout).expect("nothing but the result");
    let requested_at = told["requested_at_ms"].take().as_i64();
    assert!(requested_at > Some(1_700_000_000_000), "{requested_at:?}");
    assert_eq!(
        told,
        json!({
            "payload": {"a": 1}, "id": 0, "handler": "test.echo", "queue": "mail", "tenant": "acme",
            "source": null, "attempt": 1, "max_attempts": 1, "requested_at_ms": null,
        })
    );
    assert!(
        stderr.contains("an info") && stderr.contains("half of it"),
        "what it says is on standard error: {stderr}"
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

    // The folder is not there, and nobody has looked.
    let output = invoke(&folder, &["noop", "{n: 9}", "--handlers", "/nowhere"])
        .output()
        .unwrap();
    let (code, stdout, stderr) = texts(&output);
    assert_eq!((code, stdout), (2, ""));
    assert!(stderr.contains("the payload is no JSON"), "{stderr}");
}

#[test]
fn each_end_of_an_invocation_has_its_exit_code() {
    let folder = folder("[handlers.\"test.spin\"]\ngrace = \"100ms\"\n");
    for (args, code, says) in [
        (
            &["test.fail", r#"{"as": "retryable"}"#][..],
            1,
            "message: not this time",
        ),
        (&["test.panic"], 1, "a panic on purpose"),
        (
            &["test.alloc", r#"{"bytes": 999999999}"#],
            1,
            "out_of_memory",
        ),
        (&["no.such"], 3, "there are: noop, test.alloc"),
        (
            &["test.spin", "--timeout", "100ms"],
            5,
            "test.spin ran too long",
        ),
        (
            &["noop", "--handlers", "/nowhere"],
            6,
            "there is no handlers folder /nowhere",
        ),
        (&["noop", "--config", "/nowhere.toml"], 6, "cannot read"),
    ] {
        let output = invoke(&folder, args).output().unwrap();
        let (got, stdout, stderr) = texts(&output);
        assert_eq!((got, stdout), (code, ""), "{args:?}: {stderr}");
        assert!(stderr.contains(says), "{args:?}: {stderr}");
    }
}

#[test]
fn one_json_object_says_what_came_of_it_and_what_it_took() {
    let folder = folder("memory_mb = 16\n");
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
        "the memory of rouse.toml holds: {record}"
    );
    assert!(record.get("result").is_none(), "{record}");
}

#[test]
fn ctrl_c_tells_the_handler_to_stop_and_a_second_one_does_not_wait_for_it() {
    let folder = folder("[handlers.\"test.ignore-abort\"]\ngrace = \"10m\"\n");
    let host = |handler: &str| {
        let host = Host::spawn(invoke(&folder, &[handler]));
        host.line(PATIENCE, |line| line.contains("progress"));
        host.signal(libc::SIGINT);
        host
    };
    let (status, output) = host("test.wait-abort").exit(PATIENCE);
    assert_eq!(status.code(), Some(130), "{output}");
    assert!(
        output.contains("test.wait-abort was stopped (cancelled)"),
        "{output}"
    );

    let deaf = host("test.ignore-abort");
    // Two of the same signal at once may be seen as one.
    let again = std::time::Instant::now() + PATIENCE;
    while std::fs::exists(format!("/proc/{}/exe", deaf.pid())).unwrap_or(false)
        && std::fs::read_link(format!("/proc/{}/exe", deaf.pid())).is_ok()
    {
        assert!(std::time::Instant::now() < again, "{}", deaf.output());
        deaf.signal(libc::SIGINT);
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert_eq!(deaf.exit(PATIENCE).0.code(), Some(130));
}

/// A host without a queue, and where it answers.
fn serve(folder: &Path, address: &str, variables: &[(&str, &str)]) -> (Host, SocketAddr) {
    let host = spawn(folder, &["--no-queue"], address, variables);
    host.line(PATIENCE, |line| line.contains("the queue is off"));
    let reachable = address.replace("0.0.0.0", "127.0.0.1");
    (host, reachable.parse().unwrap())
}

fn spawn(folder: &Path, args: &[&str], address: &str, variables: &[(&str, &str)]) -> Host {
    let mut command = Command::new(rouse_binary());
    command
        .args(["serve", "--http", address, "--handlers", "handlers"])
        .args(args)
        .current_dir(folder)
        .env_remove("DATABASE_URL")
        .env("ROUSE_LOG", "info,rouse::invoke=debug")
        .envs(variables.iter().copied());
    Host::spawn(command)
}

fn loopback() -> String {
    format!("127.0.0.1:{}", free_port())
}

/// What a host answers.
struct Answer {
    status: u16,
    head: String,
    body: Value,
}

/// A call whose answer has not been read.
struct Call(TcpStream);

impl Call {
    /// Sends the body with these headers, and `host` and `content-length` where nothing says otherwise.
    async fn send(
        address: SocketAddr,
        handler: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Self {
        let mut head = format!("POST /invoke/{handler} HTTP/1.1\r\nconnection: close\r\n");
        let length = body.len().to_string();
        let here = address.to_string();
        let says = |name: &str| headers.iter().any(|(said, _)| *said == name);
        let mut unsaid = Vec::new();
        if !says("host") {
            unsaid.push(("host", here.as_str()));
        }
        if !says("content-length") && !says("transfer-encoding") {
            unsaid.push(("content-length", length.as_str()));
        }
        for (name, value) in headers.iter().copied().chain(unsaid) {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream
            .write_all(format!("{head}\r\n{body}").as_bytes())
            .await
            .unwrap();
        Self(stream)
    }

    async fn answer(mut self) -> Answer {
        let mut text = String::new();
        let read = tokio::time::timeout(PATIENCE, self.0.read_to_string(&mut text));
        read.await.expect("it answers").unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        Answer {
            status: head.split(' ').nth(1).unwrap().parse().unwrap(),
            head: head.to_ascii_lowercase(),
            body: serde_json::from_str(body).unwrap_or(Value::Null),
        }
    }
}

const JSON: (&str, &str) = ("content-type", "application/json");

async fn post(address: SocketAddr, handler: &str, body: &str) -> Answer {
    Call::send(address, handler, &[JSON], body)
        .await
        .answer()
        .await
}

#[tokio::test]
async fn a_host_without_a_queue_needs_no_database_and_answers_each_end_with_its_status() {
    let folder = folder(
        "queue = \"off\"\n\
         [handlers.\"test.spin\"]\ntimeout = \"100ms\"\ngrace = \"100ms\"\n",
    );
    let address = loopback();
    let host = spawn(&folder, &[], &address, &[]);
    host.line(PATIENCE, |line| line.contains("the queue is off"));
    let address: SocketAddr = address.parse().unwrap();
    let (status, body) = get(address, "/readyz").await;
    assert!(status.contains("200"), "{body}");
    assert!(body.contains("\"database\":\"not used\""), "{body}");

    let done = post(address, "noop", "{\"n\": 7}").await;
    assert_eq!((done.status, done.body), (200, json!({"n": 7})));
    assert!(done.head.contains("content-type: application/json"));

    for (handler, body, status, kind) in [
        ("test.fail", r#"{"as": "details"}"#, 422, "guest_error"),
        ("test.trap", "{}", 422, "trap"),
        ("test.spin", "{}", 504, "timed_out"),
        ("no.such", "{}", 404, "unknown_handler"),
        ("noop", "{n: 7}", 400, "invalid_payload"),
        ("noop", "", 400, "invalid_payload"),
        ("noop", "{\"n\": \"\u{0}\"}", 400, "invalid_payload"),
    ] {
        let answer = post(address, handler, body).await;
        assert_eq!(answer.status, status, "{handler} {body}: {}", answer.body);
        assert_eq!(answer.body["error"]["kind"], kind, "{}", answer.body);
    }
    let failed = post(address, "test.fail", r#"{"as": "details"}"#).await;
    assert_eq!(failed.body["error"]["message"], "see the details");
    assert_eq!(failed.body["error"]["details"], json!({"code": [5, 5, 0]}));
    let unknown = post(address, "no.such", "{}").await;
    assert_eq!(unknown.body["error"]["handlers"][0], "noop");

    let (_, metrics) = get(address, "/metrics").await;
    for line in [
        "rouse_invocations_total{handler=\"noop\",outcome=\"succeeded\"} 1",
        "rouse_invocations_total{handler=\"test.spin\",outcome=\"timed_out\"} 1",
        "rouse_invocations_refused_total{reason=\"unknown_handler\"} 2",
        "rouse_invocations_refused_total{reason=\"invalid_payload\"} 3",
        "rouse_invocations_running 0",
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    assert!(!metrics.contains("no.such"), "callers choose no labels");

    host.signal(libc::SIGTERM);
    assert!(host.exit(PATIENCE).0.success());
}

#[tokio::test]
async fn a_body_that_is_too_large_is_refused_whether_its_size_is_said_or_not() {
    let folder = folder("invoke_payload_bytes_max = 64\n");
    let (_host, address) = serve(&folder, &loopback(), &[]);
    let said = [JSON, ("content-length", "65")];
    let answer = Call::send(address, "noop", &said, "").await.answer().await;
    assert_eq!(answer.status, 413, "{}", answer.body);
    assert_eq!(answer.body["error"]["kind"], "too_large");
    // All of it is one chunk, so that nothing is left unread when the answer comes.
    let chunk = format!("41\r\n\"{}\"\r\n0\r\n\r\n", "x".repeat(63));
    let unsaid = [JSON, ("transfer-encoding", "chunked")];
    let answer = Call::send(address, "noop", &unsaid, &chunk)
        .await
        .answer()
        .await;
    assert_eq!(answer.status, 413, "{}", answer.body);
    let most = format!("{{\"n\": 1, \"x\": \"{}\"}}", "x".repeat(47));
    assert_eq!(most.len(), 64);
    assert_ne!(post(address, "noop", &most).await.status, 413);
}

#[tokio::test]
async fn above_the_cap_calls_are_refused_at_once_and_a_caller_that_leaves_frees_its_place() {
    let folder = folder("invoke_max = 1\n");
    let (host, address) = serve(&folder, &loopback(), &[]);
    let first = Call::send(address, "test.wait-abort", &[JSON], "{}").await;
    host.line(PATIENCE, |line| line.contains("waiting for the abort"));
    let (_, metrics) = get(address, "/metrics").await;
    assert!(metrics.contains("rouse_invocations_running 1"), "{metrics}");

    let refused = post(address, "noop", "{\"n\": 1}").await;
    assert_eq!(refused.status, 429, "{}", refused.body);
    assert!(refused.head.contains("retry-after: 1"), "{}", refused.head);
    assert_eq!(refused.body["error"]["kind"], "full");

    drop(first);
    host.line(PATIENCE, |line| {
        line.contains("invocation ended") && line.contains("cancelled")
    });
    let (_, metrics) = get(address, "/metrics").await;
    assert!(
        metrics.contains(
            "rouse_invocations_total{handler=\"test.wait-abort\",outcome=\"cancelled\"} 1"
        ),
        "{metrics}"
    );
    // The count comes a moment before the place is free.
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while post(address, "noop", "{\"n\": 1}").await.status != 200 {
        assert!(tokio::time::Instant::now() < deadline, "{}", host.output());
    }
}

#[tokio::test]
async fn a_host_that_stops_refuses_new_calls_finishes_what_runs_and_then_stops_it() {
    let folder = folder("");
    let (host, address) = serve(&folder, &loopback(), &[]);
    let runs = Call::send(address, "test.wait-abort", &[JSON], "{}").await;
    host.line(PATIENCE, |line| line.contains("waiting for the abort"));
    host.signal(libc::SIGTERM);
    host.line(PATIENCE, |line| line.contains("stopping: "));
    let refused = post(address, "noop", "{\"n\": 1}").await;
    assert_eq!(refused.status, 503, "{}", refused.body);
    assert_eq!(refused.body["error"]["kind"], "stopping");
    assert!(get(address, "/readyz").await.0.contains("503"));
    host.signal(libc::SIGTERM);
    let stopped = runs.answer().await;
    assert_eq!(stopped.status, 503, "{}", stopped.body);
    assert_eq!(stopped.body["error"]["kind"], "shutdown");
    let (status, output) = host.exit(PATIENCE);
    assert!(status.success(), "{output}");
}

#[tokio::test]
async fn on_loopback_pages_of_others_and_other_names_are_refused() {
    let (_host, address) = serve(&folder(""), &loopback(), &[]);
    let call = async |headers: &[(&str, &str)]| {
        let call = Call::send(address, "noop", headers, "{\"n\": 1}").await;
        call.answer().await.status
    };
    assert_eq!(call(&[JSON, ("host", "localhost:1")]).await, 200);
    assert_eq!(call(&[JSON, ("host", "evil.example")]).await, 403);
    assert_eq!(call(&[JSON, ("origin", "http://evil.example")]).await, 403);
    assert_eq!(call(&[]).await, 415);
    assert_eq!(call(&[("content-type", "text/plain")]).await, 415);
    let (status, _) = get(address, "/invoke/noop").await;
    assert!(status.contains("405"), "{status}");
}

#[tokio::test]
async fn beyond_loopback_a_token_is_needed_and_is_printed_nowhere() {
    let folder = folder("");
    let everywhere = format!("0.0.0.0:{}", free_port());
    let (host, address) = serve(&folder, &everywhere, &[("ROUSE_INVOKE_TOKEN", TOKEN)]);
    let call = async |headers: &[(&str, &str)]| {
        let call = Call::send(address, "noop", headers, "{\"n\": 1}").await;
        call.answer().await
    };
    let right = format!("Bearer {TOKEN}");
    assert_eq!(call(&[JSON, ("authorization", &right)]).await.status, 200);
    let without = call(&[JSON]).await;
    assert_eq!(without.status, 401);
    assert!(without.head.contains("www-authenticate: bearer"));
    let wrong = format!("{right}0");
    assert_eq!(call(&[JSON, ("authorization", &wrong)]).await.status, 401);
    host.signal(libc::SIGTERM);
    let (_, output) = host.exit(PATIENCE);
    assert!(!output.contains(TOKEN), "{output}");

    // From a file, which only its owner may read.
    let folder = self::folder("invoke_token_file = \"token\"\n");
    std::fs::write(folder.join("token"), format!("{TOKEN}\n")).unwrap();
    let open = spawn(&folder, &["--no-queue"], &loopback(), &[]);
    let (status, output) = open.exit(PATIENCE);
    assert!(
        !status.success() && output.contains("chmod 600"),
        "{output}"
    );
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(folder.join("token"), private).unwrap();
    let (_host, address) = serve(&folder, &loopback(), &[]);
    assert_eq!(post(address, "noop", "{}").await.status, 401);
}

#[tokio::test]
async fn beyond_loopback_and_without_a_token_a_host_says_that_invocations_are_off() {
    let folder = folder("");
    let db = TestDb::new().await;
    let everywhere = format!("0.0.0.0:{}", free_port());
    let url = db.url();
    let host = spawn(&folder, &[], &everywhere, &[("DATABASE_URL", &url)]);
    host.line(PATIENCE, |line| {
        line.contains("WARN") && line.contains("invocations are off")
    });
    host.line(PATIENCE, |line| line.contains("worker started"));
    let address = everywhere.replace("0.0.0.0", "127.0.0.1").parse().unwrap();
    let answer = post(address, "noop", "{}").await;
    assert_eq!(answer.status, 403);
    assert_eq!(answer.body["error"]["kind"], "off");

    for (args, config, says) in [
        (&["--no-queue"][..], "", "nothing is left to do"),
        (
            &[],
            "queue = \"off\"\ninvoke_max = 0\n",
            "nothing is left to do",
        ),
        (
            &["--no-queue", "--database-url", "x"],
            "",
            "cannot be used with",
        ),
    ] {
        let folder = self::folder(config);
        let address = match config {
            "" => format!("0.0.0.0:{}", free_port()),
            _ => loopback(),
        };
        let (status, output) = spawn(&folder, args, &address, &[]).exit(PATIENCE);
        assert!(
            !status.success() && output.contains(says),
            "{args:?}: {output}"
        );
    }
    let bad = spawn(
        &folder,
        &["--no-queue"],
        &loopback(),
        &[("ROUSE_INVOKE_TOKEN", "guess me")],
    );
    let (status, output) = bad.exit(PATIENCE);
    assert!(!status.success());
    assert!(
        output.contains("ROUSE_INVOKE_TOKEN") && !output.contains("guess me"),
        "{output}"
    );
}

#[tokio::test]
async fn invocations_have_places_of_their_own_beside_the_slots_of_the_queue() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder("slots = 1\ninvoke_max = 1\n");
    let (address, url) = (loopback(), db.url());
    let host = spawn(&folder, &[], &address, &[("DATABASE_URL", &url)]);
    host.line(PATIENCE, |line| line.contains("worker started"));
    let address = address.parse().unwrap();
    let call = Call::send(address, "test.wait-abort", &[JSON], "{}").await;
    host.line(PATIENCE, |line| line.contains("waiting for the abort"));
    let job = enqueue(&client, "noop", json!({"n": 1})).await;
    assert_eq!(ended(&client, job).await.state, "succeeded");
    let job = enqueue(&client, "test.race", json!({"ms": 600_000})).await;
    crate::support::worker::until(&client, job, |job| job.state == "running").await;
    drop(call);
    host.line(PATIENCE, |line| line.contains("invocation ended"));
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while post(address, "noop", "{\"n\": 1}").await.status != 200 {
        assert!(tokio::time::Instant::now() < deadline, "{}", host.output());
    }
    let finished = client
        .query_one("SELECT count(*) FROM rouse.finished", &[])
        .await
        .unwrap();
    assert_eq!(
        finished.get::<_, i64>(0),
        1,
        "invocations leave nothing in the database"
    );
}
