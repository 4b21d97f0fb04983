//! `GET /jobs/ID`.

use std::net::SocketAddr;
use std::time::Duration;

use rouse::ends::Ends;
use rouse::http::{Access, Jobs, Pages, Readiness, Report, Token, bind, install_metrics, serve};
use rouse::store::connect::Connector;
use rouse::store::{Locked, Store};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::together::damage_first;
use crate::invoke::folder;
use crate::support::claims::{claim, result, settlement};
use crate::support::worker::{TIMEOUT, cancel, enqueue, until_true};
use crate::support::{Host, TestDb, free_port, rouse};

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// The HTTP part of a host.
struct Server {
    address: SocketAddr,
    ends: Ends,
    stopping: CancellationToken,
}

/// Serves jobs that this store reads.
async fn start(store: Store, ends: Ends) -> Server {
    let listener = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = listener.local_addr().unwrap();
    let stopping = CancellationToken::new();
    tokio::spawn(ends.clone().look_forever(store));
    let pages = Pages {
        dashboard: None,
        readiness: Readiness::new(|| Report::new(Ok(()), Ok(()), false)),
        metrics: install_metrics().unwrap(),
        invocations: None,
        jobs: Some(Jobs {
            access: Access::Tokens(vec![Token::new(TOKEN).unwrap()]),
            ends: ends.clone(),
            stopping: stopping.clone(),
        }),
    };
    tokio::spawn(serve(listener, pages, stopping.clone().cancelled_owned()));
    Server {
        address,
        ends,
        stopping,
    }
}

/// Sends a request for this path below `/jobs/`.
async fn send(address: SocketAddr, path: &str, token: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!(
        "GET /jobs/{path} HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer {token}\r\nconnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    stream
}

/// The status and the body.
async fn response(mut stream: TcpStream) -> (u16, Value) {
    let mut text = String::new();
    let read = tokio::time::timeout(TIMEOUT, stream.read_to_string(&mut text));
    read.await.expect("a response in time").unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, serde_json::from_str(body).unwrap())
}

async fn get(address: SocketAddr, path: &str) -> (u16, Value) {
    response(send(address, path, TOKEN).await).await
}

fn start_to_get(address: SocketAddr, path: String) -> JoinHandle<(u16, Value)> {
    tokio::spawn(async move { get(address, &path).await })
}

async fn until_waiting(ends: &Ends, waiters: usize) {
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    while ends.waiters() != waiters {
        assert!(tokio::time::Instant::now() < deadline, "{ends:?}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn a_job_is_shown_at_once_or_at_its_end_or_at_the_timeout() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let server = start(db.store(), Ends::default()).await;
    let id = enqueue(&client, "x", json!(1)).await;
    let live = json!({"id": id, "state": "queued", "ended": false, "attempt": 0, "result": null, "error": null});
    for path in [id.to_string(), format!("{id}?wait=50ms")] {
        assert_eq!(get(server.address, &path).await, (200, live.clone()));
    }
    // Another host runs it.
    let waiting = start_to_get(server.address, format!("{id}?wait=2m"));
    until_waiting(&server.ends, 1).await;
    let job = claim(&store, 1).await.remove(0);
    let batch = [settlement(
        &job,
        result("{\"large\": 12345678901234567890123}"),
    )];
    store.settle(&batch, Locked::Wait).await.unwrap();
    let (status, body) = waiting.await.unwrap();
    assert_eq!(
        (status, &body["state"], &body["ended"], &body["attempt"]),
        (200, &json!("succeeded"), &json!(true), &json!(1))
    );
    let (_, body) = get(server.address, &format!("{id}?wait=2m")).await;
    assert_eq!(body["state"], "succeeded", "it has ended already");

    let failing = enqueue(&client, "x", json!(2)).await;
    let waiting = start_to_get(server.address, format!("{failing}?wait=2m"));
    until_waiting(&server.ends, 1).await;
    client
        .execute("SELECT rouse.fail($1, 'why')", &[&failing])
        .await
        .unwrap();
    let (status, body) = waiting.await.unwrap();
    assert_eq!((status, &body["error"]["message"]), (200, &json!("why")));
}

#[tokio::test]
async fn unauthorized_callers_and_invalid_ids_and_waits_are_refused() {
    let db = TestDb::new().await;
    let server = start(db.store(), Ends::default()).await;
    let kind = async |path: &str, token: &str| {
        let (status, body) = response(send(server.address, path, token).await).await;
        (status, body["error"]["kind"].as_str().unwrap().to_owned())
    };
    for (path, token, status, expected) in [
        ("99", TOKEN, 404, "unknown_job"),
        ("99?wait=1m", TOKEN, 404, "unknown_job"),
        ("99", "0123456789abcdef", 401, "unauthorized"),
        ("x", TOKEN, 400, "invalid_id"),
        ("0", TOKEN, 400, "invalid_id"),
        ("1?wait=1h", TOKEN, 400, "invalid_wait"),
        ("1?timeout=1s", TOKEN, 400, "invalid_wait"),
    ] {
        assert_eq!(kind(path, token).await, (status, expected.into()), "{path}");
    }
}

#[tokio::test]
async fn waiters_are_limited_and_leave_with_their_connection_and_with_the_host() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue(&client, "x", json!(1)).await;
    let pauses = Duration::from_millis(100)..=Duration::from_secs(1);
    let server = start(db.store(), Ends::with(1, pauses)).await;
    let path = format!("{id}?wait=5m");
    let first = send(server.address, &path, TOKEN).await;
    until_waiting(&server.ends, 1).await;
    let (status, body) = get(server.address, &path).await;
    assert_eq!((status, &body["error"]["kind"]), (503, &json!("full")));
    drop(first);
    until_waiting(&server.ends, 0).await;
    let second = send(server.address, &path, TOKEN).await;
    until_waiting(&server.ends, 1).await;
    server.stopping.cancel();
    let (status, body) = response(second).await;
    assert_eq!((status, &body["error"]["kind"]), (503, &json!("stopping")));
    until_waiting(&server.ends, 0).await;
}

#[tokio::test]
async fn a_job_that_the_database_cannot_read_is_not_reported_as_refused() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue(&client, "x", json!(1)).await;
    cancel(&client, id).await;
    damage_first(&client, id, "XX001").await;
    let server = start(db.store(), Ends::default()).await;
    let (status, body) = get(server.address, &format!("{id}?wait=1m")).await;
    assert_eq!(
        (status, &body["error"]["kind"]),
        (500, &json!("unreadable"))
    );
    let why = body["error"]["message"].as_str().unwrap();
    assert!(why.contains("missing chunk number 0"), "{why}");
}

#[tokio::test]
async fn a_host_whose_login_may_not_read_jobs_shows_none() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // Roles belong to the whole server, which other tests share.
    client
        .batch_execute(
            "DO $$ BEGIN CREATE ROLE waiting_worker LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$;
             GRANT rouse_worker TO waiting_worker",
        )
        .await
        .unwrap();
    let id = enqueue(&client, "x", json!(1)).await;
    let at = db.address();
    let url = db
        .url()
        .replace(&format!("//{}@", at.user), "//waiting_worker@");
    let store = Store::new(&Connector::from_url(&url, &|_| None).unwrap(), 2);
    let server = start(store, Ends::default()).await;
    let (status, body) = get(server.address, &format!("{id}?wait=1m")).await;
    assert_eq!((status, &body["error"]["kind"]), (403, &json!("refused")));
    let why = body["error"]["message"].as_str().unwrap();
    assert!(
        why.contains("permission denied") && why.contains("rouse_observer"),
        "{why}"
    );
}

#[tokio::test]
async fn a_host_shows_its_jobs_to_callers_with_the_token_even_without_invocations() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder("invoke_max = 0\n");
    let address = format!("127.0.0.1:{}", free_port());
    let start = |token: Option<&str>| {
        let mut command = rouse();
        command
            .args(["serve", "--http", &address, "--handlers", "handlers"])
            .current_dir(&folder)
            .env("DATABASE_URL", db.url())
            .env_remove("ROUSE_INVOKE_TOKEN")
            .env("ROUSE_LOG", "info");
        command.envs(token.map(|token| ("ROUSE_INVOKE_TOKEN", token)));
        let host = Host::spawn(command);
        host.line(TIMEOUT, |line| line.contains("worker started"));
        host
    };
    let host = start(Some(TOKEN));
    let address: SocketAddr = address.parse().unwrap();
    let later = "SELECT rouse.enqueue('noop', '{\"n\": 1}', run_at => now() + interval '1 day')";
    let id: i64 = client.query_one(later, &[]).await.unwrap().get(0);
    // The first look is held up until it is certain that it sees the job before its end.
    let locking = db.client().await;
    locking
        .batch_execute("BEGIN; LOCK TABLE ONLY rouse.finished")
        .await
        .unwrap();
    let waiting = start_to_get(address, format!("{id}?wait=2m"));
    until_true(
        &client,
        "SELECT EXISTS (SELECT FROM pg_stat_activity
                        WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%rouse.outcomes(%')",
    )
    .await;
    locking.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(get(address, &id.to_string()).await.1["state"], "queued");
    assert!(!waiting.is_finished());
    client
        .execute("SELECT rouse.reschedule($1)", &[&id])
        .await
        .unwrap();
    let (status, body) = waiting.await.unwrap();
    assert_eq!((status, &body["result"]), (200, &json!({"n": 1})));
    host.stop();

    let host = start(None);
    assert!(cancel(&client, enqueue(&client, "x", json!(1)).await).await);
    let (status, body) = get(address, &id.to_string()).await;
    assert_eq!((status, &body["error"]["kind"]), (403, &json!("off")));
    drop(host);
}
