//! Secrets that handlers send in requests and never hold.

use std::collections::BTreeMap;

use rouse::job::RunEnd;
use rouse::sandbox::{AbortHandle, HttpGrant, HttpScheme, Secret, SecretGrant, Secrets, Settings};
use rouse::setting::Overlay;
use serde_json::{Value, json};
use tokio::sync::OnceCell;
use tokio_postgres::Client;

use crate::http::metrics_with;
use crate::http_out::{Guests, MODULE, guest_folder};
use crate::sandbox_guest::bound;
use crate::support::web::web;
use crate::support::worker::{TIMEOUT, ended, enqueue};
use crate::support::{Host, TestDb, free_port, scratch};

const KEY: &str = "s3cret-of-the-mail-API";
const TOKEN: &str = "an0ther-one";

/// A secret for signatures only, which is never sent.
const HOOK: &str = "k3y-for-signatures";

/// A secret ninety times as long as its placeholder.
fn long() -> String {
    "0123456789abcdef".repeat(256)
}

fn url(host: &str, path: &str) -> String {
    format!("http://{host}:{}{path}", web().plain)
}

async fn guests() -> &'static Guests {
    static GUESTS: OnceCell<Guests> = OnceCell::const_new();
    GUESTS
        .get_or_init(|| async {
            let grant = |name: &str, header: &str, body| SecretGrant {
                handler: "test.http.secret".into(),
                name: name.into(),
                hosts: vec!["localhost".parse().expect("a host")],
                headers: vec![header.into()],
                body,
                sign: false,
            };
            let secret = |text: &str| Secret::new(text).expect("a secret");
            Guests::start(Settings {
                http_grants: vec![HttpGrant {
                    handler: "test.http.*".into(),
                    hosts: vec!["*".parse().expect("a host")],
                    schemes: vec![HttpScheme::Http],
                    ports: vec![web().plain],
                    methods: vec![],
                    private: true,
                }],
                secrets: Secrets(
                    [
                        ("KEY".into(), secret(KEY)),
                        ("TOKEN".into(), secret(TOKEN)),
                        ("HOOK".into(), secret(HOOK)),
                        ("LONG".into(), secret(&long())),
                    ]
                    .into(),
                ),
                secret_grants: vec![
                    grant("KEY", "authorization", false),
                    grant("TOKEN", "x-token", true),
                    SecretGrant {
                        hosts: vec![],
                        headers: vec![],
                        sign: true,
                        ..grant("HOOK", "", false)
                    },
                    SecretGrant {
                        hosts: vec!["127.0.0.1".parse().expect("a host")],
                        ..grant("LONG", "x-long", true)
                    },
                ],
                modules: bound("test.http.secret", MODULE),
                limits_of: BTreeMap::from([(
                    "test.http.secret".to_owned(),
                    Overlay::default().with("http_body_bytes", 500_000_u32),
                )]),
                ..Settings::default()
            })
            .await
        })
        .await
}

/// The guest's result: the responses and its placeholders.
async fn result(payload: Value) -> Value {
    match guests().await.run("test.http.secret", payload).await {
        RunEnd::Returned(bytes) => serde_json::from_slice(&bytes).expect("JSON"),
        end => panic!("expected a result, got {end:?}"),
    }
}

#[tokio::test]
async fn a_secret_is_sent_to_its_host_and_the_guest_sees_only_its_placeholder() {
    let result = result(json!({
        "secrets": ["KEY", "TOKEN"],
        "requests": [
            {"url": url("localhost", "/leak/head"), "headers": {"authorization": "Bearer {KEY}"}},
            {
                "method": "POST",
                "url": url("localhost", "/leak/body"),
                "headers": {"x-token": "{TOKEN}"},
                "body": "one {TOKEN}, two {TOKEN}, and {KEY}",
            },
        ],
    }))
    .await;
    let words = &result["words"];
    let (key, token) = (
        words["KEY"].as_str().unwrap(),
        words["TOKEN"].as_str().unwrap(),
    );
    assert!(key.starts_with("rouse-secret-") && key != token);

    let seen = web()
        .seen("/leak/head")
        .pop()
        .expect("a request that arrived");
    assert_eq!(seen["headers"]["authorization"], format!("Bearer {KEY}"));
    let seen = web()
        .seen("/leak/body")
        .pop()
        .expect("a request that arrived");
    assert_eq!(seen["headers"]["x-token"], TOKEN);
    // The key is not granted for bodies, so its placeholder is sent unchanged and is worthless.
    let body = format!("one {TOKEN}, two {TOKEN}, and {key}");
    assert_eq!(seen["body"], *body);
    assert_eq!(seen["headers"]["content-length"], body.len().to_string());

    // The server echoes all of it, in the head and in pieces of 3 bytes.
    let all = result.to_string();
    assert!(!all.contains(KEY) && !all.contains(TOKEN), "{all}");
    let responses = &result["responses"];
    assert_eq!(responses[0]["headers"]["x-leak"], format!("Bearer {key}"));
    let echoed = responses[1]["body"].as_str().expect("a body");
    assert!(
        echoed.contains(&format!("one {token}, two {token}")),
        "{echoed}"
    );
}

#[tokio::test]
async fn a_secret_is_not_sent_to_other_hosts() {
    let guests = guests().await;
    for (request, part) in [
        (
            json!({"url": url("127.0.0.1", "/stolen"), "headers": {"authorization": "{KEY}"}}),
            "hosts = [\"127.0.0.1\"]\nheaders = [\"authorization\"]",
        ),
        (
            json!({"url": url("localhost", "/stolen"), "headers": {"x-other": "{KEY}"}}),
            "headers = [\"x-other\"]",
        ),
        (
            json!({"url": url("localhost", "/stolen?key={KEY}")}),
            "into the path",
        ),
    ] {
        let payload = json!({"secrets": ["KEY"], "requests": [request]});
        let denial = guests.denial("test.http.secret", payload).await;
        assert!(
            denial.contains("the secret KEY") && denial.contains(part),
            "{denial}"
        );
    }
    for (handler, name) in [("test.http.other", "KEY"), ("test.http.secret", "NONE")] {
        let payload = json!({"secrets": [name], "requests": []});
        let denial = guests.denial(handler, payload).await;
        assert!(denial.contains(&format!("name = \"{name}\"")), "{denial}");
    }
    assert!(web().seen("/stolen").is_empty());
    // A placeholder of another attempt is an ordinary word.
    let other = "rouse-secret-00000000000000000000000000000000";
    let request = json!({"url": url("localhost", "/word"), "headers": {"authorization": other}});
    result(json!({"secrets": ["KEY"], "requests": [request]})).await;
    let seen = web().seen("/word").pop().expect("a request that arrived");
    assert_eq!(seen["headers"]["authorization"], other);
}

#[tokio::test]
async fn a_server_cannot_test_guesses_of_a_secret_it_never_receives() {
    let post = |host: &str, guess: &str| json!({"method": "POST", "url": url(host, "/guess"), "headers": {"x-guess": guess}, "body": guess});
    let result = result(json!({
        "secrets": ["KEY"],
        "requests": [post("127.0.0.1", KEY), post("localhost", HOOK), post("localhost", KEY)],
    }))
    .await;
    let echoed = |at: usize| result["responses"][at]["body"].as_str().expect("a body");
    // The key goes to this server under another name only, and the other secret only signs.
    for (at, guess) in [(0, KEY), (1, HOOK)] {
        assert_eq!(echoed(at).matches(guess).count(), 2, "{}", echoed(at));
    }
    // A response that happens to contain a secret is masked if the server may know it.
    let word = result["words"]["KEY"].as_str().expect("a word");
    assert_eq!(echoed(2).matches(word).count(), 2, "{}", echoed(2));
    assert!(!echoed(2).contains(KEY), "{}", echoed(2));
}

#[tokio::test]
async fn a_body_is_limited_and_counted_with_its_secrets_inserted() {
    let send = async |times: usize| {
        let body = "{LONG}".repeat(times);
        let request =
            json!({"method": "POST", "url": url("127.0.0.1", "/multiplied"), "body": body});
        let payload =
            json!({"secrets": ["LONG"], "requests": [request], "continue_after_errors": true});
        let run = guests()
            .await
            .run_with("test.http.secret", payload, AbortHandle::new())
            .await;
        let RunEnd::Returned(bytes) = run.end else {
            panic!("expected a result, got {:?}", run.end);
        };
        let mut result: Value = serde_json::from_slice(&bytes).expect("JSON");
        let used = run.used.expect("a guest ran");
        (result["responses"][0].take(), used.bytes_out)
    };
    let (response, bytes_out) = send(10).await;
    assert_eq!(response["status"], 200, "{response}");
    let arrived = web()
        .seen("/multiplied")
        .pop()
        .expect("a request that arrived");
    assert_eq!(arrived["body"], long().repeat(10));
    assert!((40_960..42_000).contains(&bytes_out), "{bytes_out}");

    // With placeholders, these are 7 and 14 KB.
    for (times, most) in [(150, "500000 bytes"), (300, "1048576 bytes")] {
        let (response, bytes_out) = send(times).await;
        let error = response["error"].as_str().expect("an error");
        assert!(error.contains(most), "{error}");
        assert!(bytes_out < 1000, "{bytes_out}");
    }
}

#[tokio::test]
async fn the_fields_of_a_request_are_limited_with_their_secrets_inserted() {
    let send = async |times: usize| {
        let headers = json!({"x-long": "{LONG}".repeat(times)});
        let request = json!({"url": url("127.0.0.1", "/long-head"), "headers": headers});
        let payload =
            json!({"secrets": ["LONG"], "requests": [request], "continue_after_errors": true});
        let mut result = result(payload).await;
        result["responses"][0].take()
    };
    let response = send(10).await;
    assert_eq!(response["status"], 200, "{response}");
    let arrived = web()
        .seen("/long-head")
        .pop()
        .expect("a request that arrived");
    assert_eq!(arrived["headers"]["x-long"], long().repeat(10));

    // With placeholders, these are 900 bytes.
    let response = send(20).await;
    let error = response["error"].as_str().expect("an error");
    assert!(error.contains("65536 bytes"), "{error}");
}

#[tokio::test]
async fn a_secret_never_appears_in_stored_or_printed_text() {
    let folder = scratch("secrets");
    let http_port = free_port();
    std::fs::write(folder.join("token"), format!("{TOKEN}\n")).unwrap();
    set_private(&folder.join("token"));
    let port = web().plain;
    let config = format!(
        "[secrets.KEY]\nenv = \"TEST_MAIL_KEY\"\n[secrets.TOKEN]\nfile = \"token\"\n\
         [[handlers.\"test.http.*\".http]]\nhosts = [\"localhost\"]\nschemes = [\"http\"]\nports = [{port}]\nprivate = true\n\
         [handlers.\"test.http.secret\"]\nmodule = \"test_guests.wasm\"\nsecrets = [\
         {{ name = \"KEY\", hosts = [\"localhost\"], headers = [\"Authorization\"] }}, \
         {{ name = \"TOKEN\", hosts = [\"localhost\"], body = true }}]\n"
    );
    let toml = folder.join("rouse.toml");
    std::fs::write(&toml, config).unwrap();
    let guests = guest_folder();
    let db = TestDb::new().await;
    let host = Host::rouse(
        &[
            "serve",
            "--http",
            &format!("127.0.0.1:{http_port}"),
            "--handlers",
            guests.to_str().unwrap(),
            "--config",
            toml.to_str().unwrap(),
        ],
        &[
            ("DATABASE_URL", &db.url()),
            (
                "ROUSE_LOG",
                "info,rouse=trace,hyper=trace,hyper_util=trace,h2=trace,rustls=trace,wasmtime_wasi_http=trace,tokio_postgres=trace",
            ),
            ("TEST_MAIL_KEY", KEY),
        ],
    );
    host.line(TIMEOUT, |line| line.contains("worker started"));
    let client = db.client().await;
    let request = json!({
        "method": "POST",
        "url": url("localhost", "/leak/kept"),
        "headers": {"authorization": "Bearer {KEY}"},
        "body": "{TOKEN}",
    });
    let payload = |report: bool| json!({"secrets": ["KEY", "TOKEN"], "requests": [request], "report": report});
    // One job whose result contains the echo; one that logs, reports and records it, and then fails with it.
    for (report, state) in [(false, "succeeded"), (true, "failed")] {
        let id = enqueue(&client, "test.http.secret", payload(report)).await;
        assert_eq!(ended(&client, id).await.state, state);
    }
    let seen = web()
        .seen("/leak/kept")
        .pop()
        .expect("a request that arrived");
    assert_eq!(seen["headers"]["authorization"], format!("Bearer {KEY}"));
    assert_eq!(seen["body"], TOKEN);

    let address = ([127, 0, 0, 1], http_port).into();
    let metrics = metrics_with(address, &["rouse_attempts_total"]).await;
    let all = [metrics, rows(&client).await, host.output()].join("\n");
    assert!(all.contains("rouse-secret-"), "the placeholders appear");
    holds_none_of(&all, &[KEY, TOKEN]);
}

/// All rows of all tables and views, one line per row.
pub(crate) async fn rows(client: &Client) -> String {
    let tables = "SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                  WHERE n.nspname LIKE 'rouse%' AND c.relkind IN ('r', 'p', 'v')";
    let mut rows = Vec::new();
    for table in client.query(tables, &[]).await.unwrap() {
        let table: String = table.get(0);
        let query = format!("SELECT t::text FROM {table} AS t");
        for row in client.query(&query, &[]).await.unwrap() {
            rows.push(format!("{table}: {}", row.get::<_, String>(0)));
        }
    }
    assert!(rows.len() > 10, "the tables were read");
    rows.join("\n")
}

/// Asserts that no line contains one of these secrets.
pub(crate) fn holds_none_of(text: &str, secrets: &[&str]) {
    for secret in secrets {
        let with: Vec<&str> = text.lines().filter(|line| line.contains(secret)).collect();
        assert!(with.is_empty(), "{with:?}");
    }
}

pub(crate) fn set_private(path: &std::path::Path) {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}
