//! Health and metrics over HTTP.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use rouse::http::{HttpError, Pages, Readiness, Report, bind, install_metrics, serve};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::oneshot,
    task::JoinHandle,
};

use crate::support::until_quicker_than;
use crate::support::worker::TIMEOUT;

struct Running {
    address: SocketAddr,
    report: Arc<Mutex<Report>>,
    stop: oneshot::Sender<()>,
    server: JoinHandle<()>,
}

async fn start() -> Running {
    start_at("127.0.0.1:0").await
}

async fn start_at(address: &str) -> Running {
    let listener = bind(address.parse().unwrap()).await.unwrap();
    let address = listener.local_addr().unwrap();
    let starting = Report::new(Err("not connected yet".into()), Ok(()), false);
    let report = Arc::new(Mutex::new(starting));
    let shared = Arc::clone(&report);
    let pages = Pages {
        readiness: Readiness::new(move || shared.lock().unwrap().clone()),
        metrics: install_metrics().unwrap(),
        invocations: None,
        jobs: None,
        dashboard: None,
    };
    let (stop, stopped) = oneshot::channel();
    let server = tokio::spawn(serve(listener, pages, async {
        // Dropping the sender also stops the server.
        let _ = stopped.await;
    }));
    Running {
        address,
        report,
        stop,
        server,
    }
}

/// The status line and the body.
pub(crate) async fn get(address: SocketAddr, path: &str) -> (String, String) {
    get_as(address, path, &format!("Host: {address}\r\n")).await
}

/// The metrics page, once it contains all of this. A host counts an attempt after the database has settled its job.
pub(crate) async fn metrics_with(address: SocketAddr, wanted: &[&str]) -> String {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let (_, page) = get(address, "/metrics").await;
        let Some(missing) = wanted.iter().find(|line| !page.contains(**line)) else {
            return page;
        };
        assert!(Instant::now() < deadline, "{missing} is missing: {page}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Like [`get`], with this `Host` header.
async fn get_as(address: SocketAddr, path: &str, host: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\n{host}Connection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).await.unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    let status = head.lines().next().unwrap();
    (status.to_owned(), body.to_owned())
}

#[tokio::test]
async fn a_running_host_is_healthy_and_is_ready_once_database_and_handlers_are() {
    let running = start().await;
    let (status, _) = get(running.address, "/healthz").await;
    assert_eq!(status, "HTTP/1.1 200 OK");
    let (status, body) = get(running.address, "/readyz").await;
    assert_eq!(status, "HTTP/1.1 503 Service Unavailable");
    let body: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(body["ready"], false);
    assert_eq!(body["database"], "not connected yet");

    *running.report.lock().unwrap() = Report::new(Ok(()), Ok(()), false);
    let (status, _) = get(running.address, "/readyz").await;
    assert_eq!(status, "HTTP/1.1 200 OK");

    *running.report.lock().unwrap() = Report::new(Ok(()), Err("none is loaded".into()), false);
    let (status, body) = get(running.address, "/readyz").await;
    assert_eq!(status, "HTTP/1.1 503 Service Unavailable");
    assert!(body.contains("none is loaded"), "{body}");
}

#[tokio::test]
async fn a_web_page_on_a_rebound_name_cannot_read_metrics_or_readiness_on_loopback() {
    let running = start().await;
    *running.report.lock().unwrap() = Report::new(Ok(()), Ok(()), false);
    let port = running.address.port();
    for path in ["/readyz", "/metrics"] {
        for here in ["localhost", "LocalHost", "127.0.0.1", "[::1]"] {
            let host = format!("Host: {here}:{port}\r\n");
            let (status, _) = get_as(running.address, path, &host).await;
            assert_eq!(status, "HTTP/1.1 200 OK", "{path} of {here}");
        }
        let rebound = format!("Host: rebound.example:{port}\r\n");
        for host in [
            rebound.as_str(),
            "Host: localhost.rebound.example\r\n",
            "Host: \r\n",
        ] {
            let (status, body) = get_as(running.address, path, host).await;
            assert_eq!(status, "HTTP/1.1 403 Forbidden", "{path} of {host:?}");
            assert!(body.contains("must be localhost"), "{body}");
        }
    }
    let (status, _) = get_as(running.address, "/healthz", "Host: rebound.example\r\n").await;
    assert_eq!(status, "HTTP/1.1 200 OK", "the health page reveals nothing");
    // An operator who opens the port to a network knows the names under which it is called.
    let open = start_at("0.0.0.0:0").await;
    let here = SocketAddr::from(([127, 0, 0, 1], open.address.port()));
    let (status, _) = get_as(here, "/metrics", "Host: jobs.example\r\n").await;
    assert_eq!(status, "HTTP/1.1 200 OK");
}

#[tokio::test]
async fn the_metrics_page_shows_all_counters() {
    let running = start().await;
    metrics::counter!("rouse_test_total", "kind" => "shown").increment(3);
    metrics::histogram!("rouse_test_seconds").record(0.003);
    let (status, body) = get(running.address, "/metrics").await;
    assert_eq!(status, "HTTP/1.1 200 OK");
    assert!(
        body.contains("rouse_test_total{kind=\"shown\"} 3"),
        "{body}"
    );
    assert!(
        body.contains("rouse_test_seconds_bucket{le=\"0.0025\"} 0"),
        "{body}"
    );
    assert!(
        body.contains("rouse_test_seconds_bucket{le=\"0.005\"} 1"),
        "{body}"
    );
}

#[tokio::test]
async fn an_address_in_use_is_an_error_that_names_the_remedy() {
    let running = start().await;
    let error = bind(running.address).await.unwrap_err();
    assert!(matches!(error, HttpError::Taken { .. }), "{error}");
    let text = error.to_string();
    let address = running.address.to_string();
    assert!(text.contains(&address) && text.contains("--http"), "{text}");
}

#[tokio::test]
async fn the_server_stops_despite_an_idle_connection() {
    let running = start().await;
    // Kept alive, and answered once, so that the server knows about this connection.
    let mut idle = TcpStream::connect(running.address).await.unwrap();
    idle.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        .await
        .unwrap();
    let mut first = [0; 1];
    idle.read_exact(&mut first).await.unwrap();
    running.stop.send(()).unwrap();
    running.server.await.unwrap();
    assert!(TcpStream::connect(running.address).await.is_err());
}

/// The bytes that the server still sends on this connection until it closes it.
async fn rest(mut stream: TcpStream) -> String {
    let mut rest = String::new();
    let read = tokio::time::timeout(TIMEOUT, stream.read_to_string(&mut rest));
    // The connection is reset if unread bytes were sent to it.
    let _ = read.await.expect("the server closes the connection");
    rest
}

#[tokio::test]
async fn a_connection_that_sends_an_incomplete_request_is_closed() {
    let running = start().await;
    let silent = TcpStream::connect(running.address).await.unwrap();
    let mut slow = TcpStream::connect(running.address).await.unwrap();
    slow.write_all(b"GET /healthz HTTP/1.1\r\nHost:")
        .await
        .unwrap();
    let mut idle = TcpStream::connect(running.address).await.unwrap();
    idle.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        .await
        .unwrap();
    let (silent, slow, idle) = tokio::join!(rest(silent), rest(slow), rest(idle));
    assert_eq!(silent, "");
    assert!(!slow.contains("200 OK"), "{slow}");
    assert!(idle.ends_with("ok\n"), "answered, and closed later: {idle}");
}

#[tokio::test]
async fn a_request_is_answered_despite_many_idle_connections() {
    let running = start().await;
    // Before any of the connections is closed for its silence, after 10 s.
    until_quicker_than(Duration::from_secs(5), async || {
        let mut open = Vec::new();
        for n in 0..400 {
            let mut stream = TcpStream::connect(running.address).await.unwrap();
            let half = [&b""[..], b"GET /healthz HTTP/1.1\r\nHost:"][n % 2];
            stream.write_all(half).await.unwrap();
            open.push(stream);
        }
        let response = tokio::time::timeout(TIMEOUT, get(running.address, "/healthz"));
        let (status, _) = response.await.expect("a response");
        assert_eq!(status, "HTTP/1.1 200 OK");
        // The oldest connections were closed to make room.
        for stream in open.drain(..100) {
            assert_eq!(rest(stream).await, "");
        }
    })
    .await;
}
