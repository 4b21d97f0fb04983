//! The dashboard: its pages, access to it, and its behaviour in a real browser.

mod access;
mod browser;
mod changes;
mod open_pages;
mod pages;
mod workers;

use std::net::SocketAddr;

use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use rouse::store::{Registration, WorkerKey};

use crate::support::database::registration;
use crate::support::worker::TIMEOUT;
use crate::support::{Host, TestDb};

/// A text that a browser would run, that changes the direction of the text after it, and that a terminal would obey.
const HOSTILE: &str = "</td></pre><script>window.hacked=1</script><img src=x onerror=window.hacked=1>\u{202e}\u{1b}[31m";

/// `rouse ui` on a database.
struct Dashboard {
    _host: Host,
    address: SocketAddr,
}

impl Dashboard {
    /// Starts the dashboard on a free port of this machine.
    fn start(db: &TestDb, variables: &[(&str, &str)]) -> Self {
        Self::start_at(db, "127.0.0.1:0", variables)
    }

    fn start_at(db: &TestDb, http: &str, variables: &[(&str, &str)]) -> Self {
        let url = db.url();
        let mut all = vec![("DATABASE_URL", url.as_str())];
        all.extend(variables);
        let host = Host::rouse(&["ui", "--http", http], &all);
        let line = host.line(TIMEOUT, |line| line.starts_with("dashboard: "));
        let address = line.trim_start_matches("dashboard: http://");
        let address = address.split_once('/').expect("a path").0;
        let address: SocketAddr = address.parse().expect("an address");
        Self {
            _host: host,
            address: SocketAddr::from(([127, 0, 0, 1], address.port())),
        }
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}/ui{path}", self.address)
    }

    /// Gets a page, like a browser on this machine.
    async fn get(&self, path: &str) -> Response {
        self.send("GET", path, &[], "").await
    }

    /// Sends a form, like a page of the dashboard.
    async fn post(&self, path: &str, form: &str) -> Response {
        self.send("POST", path, &[("Sec-Fetch-Site", "same-origin")], form)
            .await
    }

    async fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Response {
        let host = match headers.iter().any(|(name, _)| *name == "Host") {
            true => String::new(),
            false => format!("Host: {}\r\n", self.address),
        };
        let headers: String = headers
            .iter()
            .map(|(name, value)| format!("{name}: {value}\r\n"))
            .collect();
        let request = format!(
            "{method} /ui{path} HTTP/1.1\r\n{host}{headers}Content-Type: application/x-www-form-urlencoded\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        );
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut response = Vec::new();
        stream.read_to_end(&mut response).await.unwrap();
        let response = String::from_utf8(response).unwrap();
        let (head, body) = response.split_once("\r\n\r\n").unwrap();
        Response {
            status: head[9..12].parse().unwrap(),
            head: head.to_owned(),
            body: body.to_owned(),
        }
    }

    /// Opens the updates of a page.
    async fn follow(&self, path: &str) -> TcpStream {
        self.follow_as("", path).await
    }

    /// The same with this cookie.
    async fn follow_as(&self, cookie: &str, path: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let request = format!(
            "GET /ui/live{path} HTTP/1.1\r\nHost: {}\r\nCookie: {cookie}\r\n\r\n",
            self.address
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }

    /// Follows a page until it contains this text.
    async fn until(&self, path: &str, wanted: &str) {
        let mut stream = self.follow(path).await;
        read_until(&mut stream, &mut String::new(), wanted).await;
    }

    /// The token of the forms of this page.
    async fn form_token(&self, path: &str) -> String {
        let page = self.get(path).await.body;
        form_token(&page).unwrap_or_else(|| panic!("no form in {page}"))
    }
}

fn form_token(page: &str) -> Option<String> {
    let (_, rest) = page.split_once(r#"name="csrf" value=""#)?;
    Some(rest.split_once('"')?.0.to_owned())
}

/// A response.
#[derive(Debug)]
struct Response {
    status: u16,
    head: String,
    body: String,
}

impl Response {
    /// The cookie that it sets, as a browser sends it.
    fn cookie(&self) -> String {
        let cookie = self.header("set-cookie").expect("a cookie");
        cookie.split(';').next().unwrap_or_default().to_owned()
    }

    /// The value of a header.
    fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines();
        lines.find_map(|line| {
            let (key, value) = line.split_once(": ")?;
            key.eq_ignore_ascii_case(name).then_some(value)
        })
    }
}

/// Reads a stream until the text has arrived.
async fn read_until(stream: &mut TcpStream, seen: &mut String, wanted: &str) {
    let reading = async {
        let mut part = [0; 4096];
        while !seen.contains(wanted) {
            let count = stream.read(&mut part).await.unwrap();
            assert!(count > 0, "the stream has ended: {seen}");
            seen.push_str(&String::from_utf8_lossy(&part[..count]));
        }
    };
    if timeout(TIMEOUT, reading).await.is_err() {
        panic!("{wanted:?} did not arrive; received: {seen}");
    }
}

/// A database with something on each page: jobs in all states, with hostile strings, a flow, a schedule, a gate, a
/// paused queue, a worker.
async fn shop() -> TestDb {
    let db = TestDb::new().await;
    let store = db.store();
    let worker = Registration {
        capabilities: json!({"shop.mail": {"version": "1.2.0", "sha256": "ab".repeat(32), "grants": ["http: api.example.com"]}}),
        slots: 8,
        ..registration("shop-1", WorkerKey::random())
    };
    store.register(&worker).await.unwrap();
    let client = db.client().await;
    client
        .execute(
            "SELECT rouse.enqueue('shop.mail', jsonb_build_object('text', $1::text), tenant => $2, source => 'web', queue => 'mail')",
            &[&HOSTILE, &&HOSTILE[..60]],
        )
        .await
        .unwrap();
    client
        .batch_execute(
            "SELECT rouse.enqueue('shop.mail', jsonb_build_object('n', n), queue => 'mail') FROM generate_series(1, 20) AS n;
             SELECT rouse.enqueue('no.such', '{}');
             SELECT rouse.enqueue_flow('[{\"name\": \"a\", \"handler\": \"shop.mail\"}, {\"name\": \"b\", \"handler\": \"shop.mail\", \"after\": [\"a\"]},
                                         {\"name\": \"c\", \"handler\": \"shop.mail\", \"after\": [\"a\"]}]', 'order');
             SELECT rouse.schedule('nightly', 'shop.mail', '{}', '30 3 * * *');
             SELECT rouse.set_gate('mail/limit', 'max_concurrent', 'shop.mail', key => '{tenant}', max => 5);
             SELECT rouse.pause_queue('paused')",
        )
        .await
        .unwrap();
    let failed: Vec<i64> = ids(
        &client,
        "SELECT id FROM rouse.jobs WHERE queue = 'mail' ORDER BY id LIMIT 3",
    )
    .await;
    for id in &failed {
        client
            .execute("SELECT rouse.fail($1, $2)", &[id, &HOSTILE])
            .await
            .unwrap();
    }
    db
}

async fn ids(client: &tokio_postgres::Client, sql: &str) -> Vec<i64> {
    let rows = client.query(sql, &[]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

/// All pages of [`shop`].
async fn paths(client: &tokio_postgres::Client) -> Vec<String> {
    let job = ids(client, "SELECT min(id) FROM rouse.jobs").await[0];
    let queued = ids(
        client,
        "SELECT min(id) FROM rouse.jobs WHERE state = 'queued'",
    )
    .await[0];
    let flow = ids(client, "SELECT id FROM rouse.flow").await[0];
    let mut paths: Vec<String> = [
        "/",
        "/jobs",
        "/jobs?state=failed",
        "/flows",
        "/schedules",
        "/schedules/nightly",
        "/queues",
        "/queues/mail",
        "/queues/paused",
        "/workers",
        "/workers/shop-1",
        "/handlers",
        "/handlers/shop.mail",
        "/handlers/no.such",
        "/audit",
        "/audit?who=nobody",
    ]
    .map(str::to_owned)
    .into();
    paths.extend([
        format!("/jobs/{job}"),
        format!("/jobs/{queued}"),
        format!("/flows/{flow}"),
    ]);
    paths
}
