//! `POST /invoke/{handler}` runs a handler once.

mod tokens;

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use rouse::store::WorkerKey;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::block_in_place;

use crate::http::get;
use crate::invoke::folder;
use crate::support::database::registration;
use crate::support::proxy::{Proxy, Side};
use crate::support::worker::{TIMEOUT, ended, enqueue};
use crate::support::{Host, TestDb, free_port, rouse};

/// The token that the callers of these tests send by default.
pub(crate) const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// A host without a queue, and its address.
fn serve(folder: &Path, address: &str, variables: &[(&str, &str)]) -> (Host, SocketAddr) {
    let host = spawn(folder, &["--no-queue"], address, variables);
    host.line(TIMEOUT, |line| line.contains("modules loaded"));
    let reachable = address.replace("0.0.0.0", "127.0.0.1");
    (host, reachable.parse().unwrap())
}

fn spawn(folder: &Path, args: &[&str], address: &str, variables: &[(&str, &str)]) -> Host {
    let mut command = command(folder, args, address);
    command.envs(variables.iter().copied());
    Host::spawn(command)
}

fn command(folder: &Path, args: &[&str], address: &str) -> Command {
    let mut command = rouse();
    command
        .args(["serve", "--http", address, "--handlers", "handlers"])
        .args(args)
        .current_dir(folder)
        .env_remove("DATABASE_URL")
        .env("ROUSE_INVOKE_TOKEN", TOKEN)
        .env("ROUSE_LOG", "info,rouse::invoke=debug");
    command
}

/// Like [`spawn`], without a token.
fn spawn_without_token(folder: &Path, args: &[&str], address: &str, url: &str) -> Host {
    let mut command = command(folder, args, address);
    command.env_remove("ROUSE_INVOKE_TOKEN");
    if !url.is_empty() {
        command.env("DATABASE_URL", url);
    }
    Host::spawn(command)
}

fn loopback() -> String {
    format!("127.0.0.1:{}", free_port())
}

/// The response of a host.
pub(crate) struct Response {
    pub(crate) status: u16,
    head: String,
    pub(crate) body: Value,
}

/// A call whose response has not been read.
pub(crate) struct Call(TcpStream);

impl Call {
    /// Sends the body with these headers, and `host`, `content-length` and the token unless they are overridden; an
    /// empty value removes a header.
    async fn send(
        address: SocketAddr,
        handler: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Self {
        let mut head = format!("POST /invoke/{handler} HTTP/1.1\r\nconnection: close\r\n");
        let length = body.len().to_string();
        let here = address.to_string();
        let is_given = |name: &str| headers.iter().any(|(given, _)| *given == name);
        let right = format!("Bearer {TOKEN}");
        let mut defaults = Vec::new();
        if !is_given("host") {
            defaults.push(("host", here.as_str()));
        }
        if !is_given("authorization") {
            defaults.push(("authorization", right.as_str()));
        }
        if !is_given("content-length") && !is_given("transfer-encoding") {
            defaults.push(("content-length", length.as_str()));
        }
        let all = headers.iter().copied().chain(defaults);
        for (name, value) in all.filter(|(_, value)| !value.is_empty()) {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream
            .write_all(format!("{head}\r\n{body}").as_bytes())
            .await
            .unwrap();
        Self(stream)
    }

    async fn response(mut self) -> Response {
        let mut text = String::new();
        let read = tokio::time::timeout(TIMEOUT, self.0.read_to_string(&mut text));
        read.await.expect("a response in time").unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        Response {
            status: head.split(' ').nth(1).unwrap().parse().unwrap(),
            head: head.to_ascii_lowercase(),
            body: serde_json::from_str(body).unwrap_or(Value::Null),
        }
    }
}

const JSON: (&str, &str) = ("content-type", "application/json");

pub(crate) async fn post(address: SocketAddr, handler: &str, body: &str) -> Response {
    Call::send(address, handler, &[JSON], body)
        .await
        .response()
        .await
}

#[tokio::test]
async fn a_host_without_a_queue_needs_no_database_and_maps_each_end_to_its_status() {
    let folder = folder(
        "queue = \"off\"\n\
         [handlers.\"test.spin\"]\ntimeout = \"100ms\"\ngrace = \"100ms\"\n",
    );
    let address = loopback();
    let host = spawn(&folder, &[], &address, &[]);
    host.line(TIMEOUT, |line| line.contains("modules loaded"));
    let address: SocketAddr = address.parse().unwrap();
    let (status, body) = get(address, "/readyz").await;
    assert!(status.contains("200"), "{body}");
    assert!(body.contains("\"database\":\"not used\""), "{body}");

    let done = post(address, "noop", "{\"n\": 7}").await;
    assert_eq!((done.status, done.body), (200, json!({"n": 7})));
    assert!(done.head.contains("content-type: application/json"));

    for (handler, body, status, kind) in [
        ("test.fail", r#"{"as": "details"}"#, 422, "guest_error"),
        ("test.fail", r#"{"as": 7}"#, 400, "invalid_payload"),
        ("test.trap", "{}", 422, "trap"),
        ("test.spin", "{}", 504, "timed_out"),
        ("no.such", "{}", 404, "unknown_handler"),
        ("noop", "{n: 7}", 400, "invalid_payload"),
        ("noop", "", 400, "invalid_payload"),
        ("noop", "{\"n\": \"\u{0}\"}", 400, "invalid_payload"),
    ] {
        let response = post(address, handler, body).await;
        assert_eq!(
            response.status, status,
            "{handler} {body}: {}",
            response.body
        );
        assert_eq!(response.body["error"]["kind"], kind, "{}", response.body);
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
    assert!(!metrics.contains("no.such"), "callers cannot choose labels");

    host.stop();
}

#[tokio::test]
async fn a_body_that_is_too_large_is_refused_with_or_without_a_content_length() {
    let folder = folder("invoke_payload_bytes_max = 64\n");
    let (_host, address) = serve(&folder, &loopback(), &[]);
    let with_length = [JSON, ("content-length", "65")];
    let response = Call::send(address, "noop", &with_length, "")
        .await
        .response()
        .await;
    assert_eq!(response.status, 413, "{}", response.body);
    assert_eq!(response.body["error"]["kind"], "too_large");
    // All of it in one chunk, so that nothing is left unread when the response arrives.
    let chunk = format!("41\r\n\"{}\"\r\n0\r\n\r\n", "x".repeat(63));
    let chunked = [JSON, ("transfer-encoding", "chunked")];
    let response = Call::send(address, "noop", &chunked, &chunk)
        .await
        .response()
        .await;
    assert_eq!(response.status, 413, "{}", response.body);
    let largest = format!("{{\"n\": 1, \"x\": \"{}\"}}", "x".repeat(47));
    assert_eq!(largest.len(), 64);
    assert_ne!(post(address, "noop", &largest).await.status, 413);
}

#[tokio::test]
async fn calls_above_the_cap_are_refused_and_a_disconnected_caller_frees_its_slot() {
    let folder = folder("invoke_max = 1\n");
    let (host, address) = serve(&folder, &loopback(), &[]);
    let first = Call::send(address, "test.wait-abort", &[JSON], "{}").await;
    host.line(TIMEOUT, |line| line.contains("waiting for the abort"));
    let (_, metrics) = get(address, "/metrics").await;
    assert!(metrics.contains("rouse_invocations_running 1"), "{metrics}");

    // The call is refused before its body has arrived.
    let later = [JSON, ("content-length", "8")];
    let refused = Call::send(address, "noop", &later, "")
        .await
        .response()
        .await;
    assert_eq!(refused.status, 429, "{}", refused.body);
    assert!(refused.head.contains("retry-after: 1"), "{}", refused.head);
    assert_eq!(refused.body["error"]["kind"], "full");

    drop(first);
    host.line(TIMEOUT, |line| {
        line.contains("invocation ended") && line.contains("cancelled")
    });
    let (_, metrics) = get(address, "/metrics").await;
    assert!(
        metrics.contains(
            "rouse_invocations_total{handler=\"test.wait-abort\",outcome=\"cancelled\"} 1"
        ),
        "{metrics}"
    );
    // The counter changes a moment before the slot is free.
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    while post(address, "noop", "{\"n\": 1}").await.status != 200 {
        assert!(tokio::time::Instant::now() < deadline, "{}", host.output());
    }
    let unknown = Call::send(address, "no.such", &later, "").await;
    assert_eq!(
        unknown.response().await.status,
        404,
        "the host does not wait for this body either"
    );
}

#[tokio::test]
async fn invocations_still_running_after_the_drain_time_are_stopped() {
    let folder = folder("drain_timeout = \"500ms\"\n");
    let (host, address) = serve(&folder, &loopback(), &[]);
    let running = Call::send(address, "test.wait-abort", &[JSON], "{}").await;
    host.line(TIMEOUT, |line| line.contains("waiting for the abort"));
    host.signal(libc::SIGTERM);
    let stopped = running.response().await;
    assert_eq!(stopped.status, 503, "{}", stopped.body);
    assert_eq!(stopped.body["error"]["kind"], "shutdown");
    let (status, output) = host.exit(TIMEOUT);
    assert!(status.success(), "{output}");
    assert!(
        output.contains("stopping invocations that have not finished"),
        "{output}"
    );
}

#[tokio::test]
async fn a_stopping_host_refuses_new_calls_and_lets_running_ones_finish() {
    let folder = folder("");
    let (host, address) = serve(&folder, &loopback(), &[]);
    let running = Call::send(address, "test.wait-abort", &[JSON], "{}").await;
    host.line(TIMEOUT, |line| line.contains("waiting for the abort"));
    host.signal(libc::SIGTERM);
    host.line(TIMEOUT, |line| line.contains("stopping: "));
    // The line is written just before the host stops accepting calls.
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    let refused = loop {
        let response = post(address, "noop", "{\"n\": 1}").await;
        if response.status != 200 {
            break response;
        }
        assert!(
            tokio::time::Instant::now() < deadline,
            "calls are still accepted"
        );
    };
    assert_eq!(refused.status, 503, "{}", refused.body);
    assert_eq!(refused.body["error"]["kind"], "stopping");
    assert!(get(address, "/readyz").await.0.contains("503"));
    host.signal(libc::SIGTERM);
    let stopped = running.response().await;
    assert_eq!(stopped.status, 503, "{}", stopped.body);
    assert_eq!(stopped.body["error"]["kind"], "shutdown");
    let (status, output) = host.exit(TIMEOUT);
    assert!(status.success(), "{output}");
}

/// Sends no token.
const NONE: (&str, &str) = ("authorization", "");

#[tokio::test]
async fn invocations_have_their_own_slots_separate_from_those_of_queues() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder("slots = 1\ninvoke_max = 1\n");
    let (address, url) = (loopback(), db.url());
    let host = spawn(&folder, &[], &address, &[("DATABASE_URL", &url)]);
    host.line(TIMEOUT, |line| line.contains("modules loaded"));
    let address = address.parse().unwrap();
    let call = Call::send(address, "test.wait-abort", &[JSON], "{}").await;
    host.line(TIMEOUT, |line| line.contains("waiting for the abort"));
    let job = enqueue(&client, "noop", json!({"n": 1})).await;
    assert_eq!(ended(&client, job).await.state, "succeeded");
    let job = enqueue(&client, "test.race", json!({"ms": 600_000})).await;
    crate::support::worker::until(&client, job, |job| job.state == "running").await;
    drop(call);
    host.line(TIMEOUT, |line| line.contains("invocation ended"));
    let deadline = tokio::time::Instant::now() + TIMEOUT;
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_failure_of_the_worker_is_logged_before_running_invocations_have_ended() {
    let db = TestDb::new().await;
    let holder = registration("mail", WorkerKey::random());
    db.store().register(&holder).await.unwrap();
    let folder = folder("");
    // This start fills the cache, so that the next one does not compile its modules while its registration waits.
    drop(serve(&folder, &loopback(), &[]));
    let proxy = Proxy::start(&db).await;
    let registering = proxy.hold("rouse.register(", Side::Statement);
    let address = loopback();
    let host = spawn(
        &folder,
        &["--worker-id", "mail"],
        &address,
        &[("DATABASE_URL", proxy.url())],
    );
    // The proxy runs on the threads of this test, so that a wait must not block them.
    let until =
        |text: &'static str| block_in_place(|| host.line(TIMEOUT, |line| line.contains(text)));
    until("modules loaded");
    registering.caught().await;
    let call = Call::send(address.parse().unwrap(), "test.wait-abort", &[JSON], "{}").await;
    until("waiting for the abort");
    registering.release();
    until("the worker has failed");
    drop(call);
    let (status, output) = host.exit(TIMEOUT);
    assert_eq!(status.code(), Some(1), "{output}");
}

#[tokio::test]
async fn readyz_reports_a_missing_handlers_folder_while_its_handlers_still_serve() {
    let folder = folder("");
    let (_host, address) = serve(&folder, &loopback(), &[]);
    let until_ready = async |status: &str, part: &str| {
        let deadline = tokio::time::Instant::now() + TIMEOUT;
        loop {
            let (head, body) = get(address, "/readyz").await;
            if head.contains(status) && body.contains(part) {
                return;
            }
            assert!(tokio::time::Instant::now() < deadline, "{head}: {body}");
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    until_ready("200", "\"handlers\":\"ok\"").await;
    let (handlers, elsewhere) = (folder.join("handlers"), folder.join("elsewhere"));
    std::fs::rename(&handlers, &elsewhere).unwrap();
    until_ready("503", "the handlers folder cannot be read: No such file").await;
    assert_eq!(post(address, "noop", "{\"n\": 7}").await.status, 200);
    std::fs::rename(&elsewhere, &handlers).unwrap();
    until_ready("200", "\"handlers\":\"ok\"").await;
}

#[tokio::test]
async fn a_missing_handler_is_a_transient_error_while_modules_are_being_loaded() {
    let folder = folder("");
    let bomb = folder.join("handlers/bomb.wasm");
    std::fs::write(&bomb, crate::compiling::bomb_of_time()).unwrap();
    let (host, address) = serve(&folder, &loopback(), &[]);
    host.line(TIMEOUT, |line| line.contains("slow=\"bomb.wasm\""));
    assert_eq!(post(address, "noop", "{\"n\": 7}").await.status, 200);
    let early = post(address, "perhaps.later", "{}").await;
    assert_eq!(early.status, 503, "{}", early.body);
    assert_eq!(early.body["error"]["kind"], "loading");
    assert!(early.head.contains("retry-after"), "{}", early.head);

    std::fs::remove_file(&bomb).unwrap();
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    while post(address, "perhaps.later", "{}").await.status != 404 {
        assert!(tokio::time::Instant::now() < deadline, "{}", host.output());
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}
