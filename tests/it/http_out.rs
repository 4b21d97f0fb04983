//! Outgoing requests of guests: what is sent, what is denied, and how the attempt ends.

mod denials;

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rouse::job::{AbortReason, RunEnd};
use rouse::sandbox::{
    AbortHandle, Addresses, Catalog, HttpGrant, HttpScheme, HttpSettings, Limits, Resolver,
    RunReport, Sandbox, Settings,
};
use rouse::setting::Overlay;
use serde_json::{Value, json};
use tokio::sync::OnceCell;
use tokio::time::timeout;

use crate::sandbox_guest::{TIMEOUT, job};
use crate::support::web::web;
use crate::support::worker::guests_dir;
use crate::support::{attempt, scratch, until_quicker_than};

/// A public address that these tests treat as an address of this machine.
const OWN: &str = "93.184.215.14";

/// The resolver of these tests. `rebound.test` resolves to a different address each time.
#[derive(Debug, Default)]
struct Names {
    rebound: AtomicUsize,
}

impl Resolver for Names {
    fn resolve<'a>(&'a self, name: &'a str) -> Addresses<'a> {
        let addresses: &[&str] = match name {
            "localhost" | "here.web.test" | "there.web.test" => &["127.0.0.1"],
            "inside.test" => &["10.0.0.1", "192.168.0.1"],
            "mapped.test" => &["::ffff:127.0.0.1"],
            "translated.test" => &["64:ff9b::7f00:1"],
            "metadata.test" => &["169.254.169.254"],
            "zero.test" => &["0.0.0.0"],
            "own.test" => &[OWN],
            "rebound.test" => match self.rebound.fetch_add(1, Ordering::Relaxed) {
                0 => &["127.0.0.1"],
                _ => &["169.254.169.254"],
            },
            _ => &[],
        };
        let addresses: Vec<IpAddr> = addresses
            .iter()
            .map(|text| text.parse().expect("an address"))
            .collect();
        Box::pin(async move {
            match addresses.is_empty() {
                true => Err(io::Error::other("no such name")),
                false => Ok(addresses),
            }
        })
    }

    fn own(&self) -> io::Result<Vec<IpAddr>> {
        Ok(vec![OWN.parse().expect("an address")])
    }
}

fn grant(handler: &str, hosts: &[&str]) -> HttpGrant {
    HttpGrant {
        handler: handler.into(),
        hosts: hosts
            .iter()
            .map(|host| host.parse().expect("a host"))
            .collect(),
        schemes: vec![HttpScheme::Http, HttpScheme::Https],
        ports: vec![web().plain, web().tls],
        methods: vec![],
        private: true,
    }
}

fn certificate(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("it/certificates")
        .join(name)
}

/// The module of `tests/guests`.
pub(crate) const MODULE: &str = "test_guests.wasm";

/// A folder that contains only that module.
pub(crate) fn guest_folder() -> PathBuf {
    let folder = scratch("http-guests");
    std::fs::copy(guests_dir().join(MODULE), folder.join(MODULE)).expect("the guests are built");
    folder
}

/// Handlers with their own grants.
pub(crate) struct Guests {
    sandbox: Arc<Sandbox>,
    catalog: Catalog,
}

impl Guests {
    pub(crate) async fn start(settings: Settings) -> Self {
        let settings = Settings {
            attempts_max: 8,
            limits: Limits {
                memory_bytes: 32 << 20,
                ..Limits::default()
            },
            ..settings
        };
        let sandbox = Sandbox::start(settings).expect("a sandbox");
        let catalog = Catalog::open(sandbox.clone(), guest_folder()).await;
        Self {
            sandbox,
            catalog: catalog.expect("the guests load"),
        }
    }

    pub(crate) async fn run_with(
        &self,
        handler: &str,
        payload: Value,
        abort: AbortHandle,
    ) -> RunReport {
        let set = self.catalog.current();
        let handler = set
            .get(handler)
            .unwrap_or_else(|| panic!("{handler}; {:?}", set.refused));
        let running = attempt(&self.sandbox, handler, job(&payload.to_string()), abort);
        timeout(TIMEOUT, running).await.expect("the run ends")
    }

    pub(crate) async fn run(&self, handler: &str, payload: Value) -> RunEnd {
        self.run_with(handler, payload, AbortHandle::new())
            .await
            .end
    }

    /// The responses to these requests.
    pub(crate) async fn responses(&self, handler: &str, requests: Value) -> Vec<Value> {
        let payload = json!({"requests": requests, "continue_after_errors": true});
        let RunEnd::Returned(bytes) = self.run(handler, payload).await else {
            panic!("the guest continues after failed requests");
        };
        let result: Value = serde_json::from_slice(&bytes).expect("JSON");
        result["responses"].as_array().expect("a list").clone()
    }

    /// The response of the echo server to this request.
    async fn echo(&self, handler: &str, request: Value) -> Value {
        let response = self.responses(handler, json!([request])).await.remove(0);
        let body = response["body"].as_str();
        let body = body.unwrap_or_else(|| panic!("expected a response, got {response}"));
        serde_json::from_str(body).expect("the echo is JSON")
    }

    /// The message of the denial that this request must get.
    pub(crate) async fn denial(&self, handler: &str, payload: Value) -> String {
        match self.run(handler, payload).await {
            RunEnd::Denied { denial, .. } => denial,
            end => panic!("expected a denial, got {end:?}"),
        }
    }
}

/// One sandbox, shared by most tests.
async fn guests() -> &'static Guests {
    static GUESTS: OnceCell<Guests> = OnceCell::const_new();
    GUESTS
        .get_or_init(|| async {
            let get_only = HttpGrant {
                methods: vec!["GET".into()],
                schemes: vec![HttpScheme::Http],
                ..grant("test.http.other", &["here.web.test"])
            };
            let public = HttpGrant {
                private: false,
                ..grant("test.http.public", &["*"])
            };
            // An address that is listed literally is granted even if it is private.
            let listed = HttpGrant {
                private: false,
                ..grant("test.http.other", &["127.0.0.1"])
            };
            let private = grant("test.http.private", &["localhost", "*.web.test", "*.test"]);
            Guests::start(Settings {
                http_grants: vec![private, get_only, public, listed],
                http: HttpSettings {
                    ca_file: Some(certificate("ca.crt")),
                    resolver: Arc::new(Names::default()),
                    ..HttpSettings::default()
                },
                ..Settings::default()
            })
            .await
        })
        .await
}

fn http(host: &str, path: &str) -> String {
    format!("http://{host}:{}{path}", web().plain)
}

fn https(path: &str) -> String {
    format!("https://localhost:{}{path}", web().tls)
}

#[tokio::test]
async fn a_request_is_sent_completely_and_counted() {
    let url = http("localhost", "/all?of=it");
    let request = json!({
        "method": "POST", "url": url, "headers": {"x-own": "1"}, "body": "hello",
    });
    let echo = guests()
        .await
        .echo("test.http.private", request.clone())
        .await;
    assert_eq!(echo["method"], "POST");
    assert_eq!(echo["path"], "/all?of=it");
    assert_eq!(echo["body"], "hello");
    assert_eq!(echo["version"], "HTTP/1.1");
    assert_eq!(echo["headers"]["x-own"], "1");
    assert_eq!(echo["headers"]["content-length"], "5");
    let host = format!("localhost:{}", web().plain);
    assert_eq!(echo["headers"]["host"], *host);

    let payload = json!({"requests": [request]});
    let abort = AbortHandle::new();
    let run = guests()
        .await
        .run_with("test.http.private", payload, abort)
        .await;
    let whole =
        "POST /all?of=it HTTP/1.1\r\n\r\nx-own: 1\r\ncontent-length: 5\r\nhello".len() as u64;
    let used = run.used.expect("a guest ran");
    assert_eq!(used.bytes_out, whole);
    assert!((100..2000).contains(&used.bytes_in), "{}", used.bytes_in);
}

#[tokio::test]
async fn tls_requests_use_http2_and_verify_the_certificate_of_the_host() {
    let guests = guests().await;
    let request = json!({"url": https("/tls"), "method": "PUT", "body": "over tls"});
    let echo = guests.echo("test.http.private", request).await;
    assert_eq!(echo["version"], "HTTP/2.0");
    assert_eq!(echo["body"], "over tls");
    let authority = format!("localhost:{}", web().tls);
    assert_eq!(echo["authority"], *authority);
    assert_eq!(echo["headers"]["host"], Value::Null);

    let elsewhere = format!("https://here.web.test:{}/tls-elsewhere", web().tls);
    let responses = guests
        .responses("test.http.private", json!([{"url": elsewhere}]))
        .await;
    let error = responses[0]["error"].as_str().expect("an error");
    assert!(error.contains("certificate"), "{error}");
    assert!(web().seen("/tls-elsewhere").is_empty());
}

#[tokio::test]
async fn connections_are_reused_only_by_the_same_handler() {
    let guests = guests().await;
    let connections = async |handler: &str, count: usize| {
        let request = json!({"url": http("here.web.test", "/kept")});
        let responses = guests.responses(handler, vec![request; count].into()).await;
        let connection = |response: &Value| {
            let body = response["body"].as_str().expect("a body");
            let echo: Value = serde_json::from_str(body).expect("JSON");
            echo["connection"].as_u64().expect("a number")
        };
        responses.iter().map(connection).collect::<HashSet<u64>>()
    };
    // A connection may be returned to the pool just after the next request has opened a new
    // one.
    let own = connections("test.http.private", 20).await;
    assert!(own.len() < 15, "{own:?}");
    let again = connections("test.http.private", 1).await;
    assert!(own.is_superset(&again), "the next attempt reuses them too");
    let others = connections("test.http.other", 20).await;
    assert!(own.is_disjoint(&others), "{own:?} {others:?}");
}

#[tokio::test]
async fn the_number_and_the_size_of_requests_are_limited() {
    let private = grant("test.http.*", &["localhost"]);
    let guests = Guests::start(Settings {
        http_grants: vec![private],
        http: HttpSettings {
            timeout: Duration::from_secs(1),
            resolver: Arc::new(Names::default()),
            ..HttpSettings::default()
        },
        // Limits of this handler only.
        limits_of: BTreeMap::from([(
            "test.http.private".to_owned(),
            Overlay::default()
                .with("http_requests", 4_u32)
                .with("http_bytes", 40_000_u32)
                .with("http_body_bytes", 20_000_u32),
        )]),
        ..Settings::default()
    })
    .await;
    let get = |path: &str| json!({"url": http("localhost", path)});
    let error = |response: &Value| response["error"].as_str().unwrap_or_default().to_owned();

    let responses = guests
        .responses(
            "test.http.private",
            json!([get("/bytes/19000"), get("/bytes/20001")]),
        )
        .await;
    assert_eq!(responses[0]["body"].as_str().map(str::len), Some(19_000));
    assert!(error(&responses[1]).contains("20000"), "{}", responses[1]);

    let upload =
        json!({"url": http("localhost", "/upload"), "method": "POST", "body_bytes": 20_001});
    let responses = guests.responses("test.http.private", json!([upload])).await;
    assert!(error(&responses[0]).contains("20000"), "{}", responses[0]);

    let bytes = get("/bytes/19000");
    let responses = guests
        .responses("test.http.private", json!([bytes, bytes, bytes]))
        .await;
    assert_eq!(responses[1]["status"], 200);
    assert!(
        error(&responses[2]).contains("limits.http_bytes"),
        "{}",
        responses[2]
    );

    let small = get("/many");
    let responses = guests
        .responses(
            "test.http.private",
            json!([small, small, small, small, small]),
        )
        .await;
    assert_eq!(responses[3]["status"], 200);
    assert!(
        error(&responses[4]).contains("limits.http_requests"),
        "{}",
        responses[4]
    );

    until_quicker_than(Duration::from_secs(10), async || {
        let responses = guests
            .responses("test.http.private", json!([get("/silence"), get("/half")]))
            .await;
        assert_eq!(responses[0]["kind"], "http_timeout");
        assert!(error(&responses[1]).contains("timeout"), "{}", responses[1]);
    })
    .await;

    // This sandbox has no `ca_file`, so it does not trust the authority of the server.
    let tls = json!([{"url": https("/untrusted")}]);
    let responses = guests.responses("test.http.private", tls).await;
    assert!(
        error(&responses[0]).contains("certificate"),
        "{}",
        responses[0]
    );
}

#[tokio::test]
async fn thousands_of_header_fields_are_refused_in_either_direction() {
    let guests = guests().await;
    let end = guests.run("test.http.fields", json!(5000)).await;
    let RunEnd::Trapped { message, .. } = end else {
        panic!("expected a trap, got {end:?}");
    };
    assert!(message.contains("size of fields"), "{message}");
    for url in [http("localhost", "/fields/5000"), https("/fields/5000")] {
        let responses = guests
            .responses("test.http.private", json!([{"url": url}]))
            .await;
        assert!(responses[0]["error"].is_string(), "{}", responses[0]);
    }
}

#[tokio::test]
async fn an_abort_reaches_a_guest_that_waits_for_a_server() {
    let guests = guests().await;
    let mut rounds = 0;
    // Otherwise, the host would wait a minute for the response.
    until_quicker_than(Duration::from_secs(5), async || {
        rounds += 1;
        let path = format!("/silence/abort/{rounds}/");
        let abort = AbortHandle::new();
        let payload = json!({"requests": [{"url": http("localhost", &path)}]});
        let abort_while_waiting = async {
            while web().seen(&path).is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            abort.abort(AbortReason::Cancelled, TIMEOUT);
        };
        let (run, ()) = tokio::join!(
            guests.run_with("test.http.private", payload, abort.clone()),
            abort_while_waiting
        );
        assert_eq!(run.end, RunEnd::Aborted(AbortReason::Cancelled));
    })
    .await;
}

#[tokio::test]
async fn a_guest_continues_after_a_request_timeout() {
    let request = json!([{"url": http("localhost", "/silence"), "timeout_ms": 50}]);
    let responses = guests().await.responses("test.http.private", request).await;
    assert_eq!(responses[0]["kind"], "http_timeout");
    assert!(
        responses[0]["error"]
            .as_str()
            .is_some_and(|error| error.contains("within 50ms"))
    );
}

#[tokio::test]
#[ignore = "takes 72 s"]
async fn a_response_may_start_as_late_as_the_timeout_of_its_request_permits() {
    let request = json!([{"url": http("localhost", "/late"), "timeout_ms": 100_000}]);
    let guests = guests().await;
    let set = guests.catalog.current();
    let handler = set.get("test.http.private").expect("it is served");
    let payload = json!({"requests": request, "continue_after_errors": true}).to_string();
    let run = attempt(&guests.sandbox, handler, job(&payload), AbortHandle::new()).await;
    let RunEnd::Returned(bytes) = run.end else {
        panic!("{:?}", run.end);
    };
    let result: Value = serde_json::from_slice(&bytes).expect("JSON");
    assert!(result.to_string().contains("late"), "{result}");
    assert!(!result.to_string().contains("http_timeout"), "{result}");
}

#[tokio::test]
async fn an_unknown_name_and_a_closed_port_are_transient_errors() {
    let guests = guests().await;
    let closed_port = crate::support::free_port();
    let free = HttpGrant {
        ports: vec![closed_port],
        ..grant("test.http.private", &["localhost"])
    };
    let requests = json!([{"url": http("unknown.test", "/")}]);
    let responses = guests.responses("test.http.private", requests).await;
    assert_eq!(responses[0]["kind"], "http");
    assert!(
        responses[0]["error"]
            .as_str()
            .is_some_and(|error| error.contains("no such name"))
    );
    let guests = Guests::start(Settings {
        http_grants: vec![free],
        ..Settings::default()
    })
    .await;
    let requests = json!([{"url": format!("http://localhost:{closed_port}/")}]);
    let responses = guests.responses("test.http.private", requests).await;
    assert_eq!(responses[0]["kind"], "http");
    assert!(
        responses[0]["error"]
            .as_str()
            .is_some_and(|error| error.contains("refused"))
    );
}
