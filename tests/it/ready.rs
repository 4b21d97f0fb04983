//! The ready-made handlers that use HTTP, against servers on loopback.

use std::path::PathBuf;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ring::hmac;
use rouse::config::File;
use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::secrets::{holds_none_of, rows, set_private};
use crate::support::page::blocks_of;
use crate::support::web::{DIGITS, PAGE, web};
use crate::support::worker::{Shown, TIMEOUT, ended, enqueue, enqueue_sql, guests_dir, until};
use crate::support::{Host, TestDb, scratch};

/// A key of Standard Webhooks, and its bytes in base64.
const HOOK_KEY: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const HOOK_KEY_BYTES: &str = "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

const MAIL_KEY: &str = "re_s3cret-of-the-mail-API";

const MODULES: [&str; 3] = ["http_deliver.wasm", "http_fetch.wasm", "email_send.wasm"];

/// A host with these three handlers and a database of its own.
struct Ready {
    client: Client,
    host: Host,
    folder: PathBuf,
    _db: TestDb,
}

impl Ready {
    /// Starts with all the grants that the handlers need in these tests.
    async fn start() -> Self {
        let (plain, tls) = (web().plain, web().tls);
        let granted = |handler: &str, besides: &str| {
            format!(
                "[handlers.\"{handler}\"]\nretry_initial = \"10ms\"\n{besides}\n[[handlers.\"{handler}\".http]]\n\
                 hosts = [\"localhost\"]\nschemes = [\"http\", \"https\"]\nports = [{plain}, {tls}, 1]\nprivate = true\n"
            )
        };
        let authority = concat!(env!("CARGO_MANIFEST_DIR"), "/it/certificates/ca.crt");
        let config = [
            format!("http_ca_file = \"{authority}\"\n"),
            "[secrets.HOOK_KEY]\nenv = \"TEST_HOOK_KEY\"\n".into(),
            "[secrets.MAIL_KEY]\nfile = \"mail.key\"\n".into(),
            granted(
                "http.deliver",
                "module = \"http_deliver.wasm\"\nsecrets = [{ name = \"HOOK_KEY\", sign = true }]",
            ),
            granted(
                "http.fetch",
                "dirs = [{ dir = \"fetched\", at = \"/fetched\", mode = \"read-write\" }]",
            ),
            granted(
                "email.send",
                "module = \"email_send.wasm\"\nsecrets = [{ name = \"MAIL_KEY\", hosts = [\"localhost\"], headers = [\"authorization\", \"x-postmark-server-token\"] }]",
            ),
        ];
        Self::with(&config.concat()).await
    }

    async fn with(config: &str) -> Self {
        let folder = scratch("ready");
        let handlers = folder.join("handlers");
        for dir in [&handlers, &folder.join("fetched")] {
            std::fs::create_dir(dir).unwrap();
        }
        for module in MODULES {
            std::fs::copy(guests_dir().join(module), handlers.join(module))
                .expect("a built module");
        }
        std::fs::write(folder.join("rouse.toml"), config).unwrap();
        std::fs::write(folder.join("mail.key"), MAIL_KEY).unwrap();
        set_private(&folder.join("mail.key"));
        let db = TestDb::new().await;
        let host = Host::rouse(
            &[
                "serve",
                "--http",
                "off",
                "--handlers",
                handlers.to_str().unwrap(),
                "--config",
                folder.join("rouse.toml").to_str().unwrap(),
            ],
            &[
                ("DATABASE_URL", &db.url()),
                ("ROUSE_LOG", "info,rouse=trace,hyper=trace,hyper_util=trace"),
                ("TEST_HOOK_KEY", HOOK_KEY),
            ],
        );
        host.line(TIMEOUT, |line| line.contains("worker started"));
        Self {
            client: db.client().await,
            host,
            folder,
            _db: db,
        }
    }

    async fn ends(&self, handler: &str, payload: Value) -> Shown {
        let id = enqueue(&self.client, handler, payload).await;
        ended(&self.client, id).await
    }

    async fn succeeds(&self, handler: &str, payload: Value) -> Value {
        let job = self.ends(handler, payload).await;
        assert_eq!(job.state, "succeeded", "{job:?}");
        job.result.expect("a result")
    }

    /// Waits until the first attempt has failed and the job waits for the next one; returns its id.
    async fn waits(&self, handler: &str, payload: Value) -> (i64, Value) {
        let id = enqueue(&self.client, handler, payload).await;
        let waits = |job: &Shown| job.state == "queued" && job.error.is_some();
        let job = until(&self.client, id, |job| waits(job) || job.state == "failed").await;
        assert!(waits(&job), "the job waits for its next attempt: {job:?}");
        (id, job.error.unwrap_or_default())
    }
}

/// Asserts that a request names the handler that sent it.
fn assert_sent_by(handler: &str, request: &Value) {
    let agent = request["headers"]["user-agent"].as_str();
    let version = agent.and_then(|agent| agent.strip_prefix(&format!("rouse-{handler}/")));
    assert!(
        version.is_some_and(|version| !version.is_empty()),
        "{request}"
    );
}

fn http(path: &str) -> String {
    format!("http://localhost:{}{path}", web().plain)
}

fn https(path: &str) -> String {
    format!("https://localhost:{}{path}", web().tls)
}

/// The requests that arrived under this path, with their bodies.
fn arrived(path: &str) -> Vec<Value> {
    let seen = web().seen(path).into_iter();
    seen.filter(|one| one["whole"] == true).collect()
}

/// Whether a request carries the signature that its receiver computes.
fn is_signed(request: &Value) -> bool {
    let text = |name: &str| request["headers"][name].as_str().expect("a header");
    let (id, timestamp) = (text("webhook-id"), text("webhook-timestamp"));
    let body = request["body"].as_str().expect("a body");
    let key = STANDARD.decode(HOOK_KEY_BYTES).expect("base64");
    let key = hmac::Key::new(hmac::HMAC_SHA256, &key);
    let tag = text("webhook-signature").strip_prefix("v1,");
    let tag = STANDARD.decode(tag.expect("version 1")).expect("base64");
    hmac::verify(&key, format!("{id}.{timestamp}.{body}").as_bytes(), &tag).is_ok()
}

#[tokio::test]
async fn a_delivery_is_signed_and_retried_under_the_same_id_until_it_is_accepted() {
    let ready = Ready::start().await;
    let path = "/status/503/taken/once";
    let payload =
        json!({"url": https(path), "body": {"order": 17, "text": "ü"}, "secret": "HOOK_KEY"});
    let id = enqueue(&ready.client, "http.deliver", payload).await;
    let job = ended(&ready.client, id).await;
    assert_eq!(
        (job.state.as_str(), job.attempt),
        ("succeeded", 2),
        "{job:?}"
    );

    let requests = arrived(path);
    assert_eq!(requests.len(), 2);
    for request in &requests {
        assert_eq!(request["method"], "POST");
        // The body is formatted by jsonb.
        assert_eq!(request["body"], "{\"text\": \"ü\", \"order\": 17}");
        assert!(is_signed(request), "{request}");
        assert_sent_by("http-deliver", request);
        for key in ["webhook-id", "idempotency-key"] {
            assert_eq!(
                request["headers"][key],
                requests[0]["headers"]["webhook-id"]
            );
        }
    }
    let result = job.result.expect("a result");
    assert_eq!(result["status"], 200);
    assert_eq!(result["id"], requests[0]["headers"]["webhook-id"]);
    let known_by = result["id"].as_str().expect("an id");
    assert!(known_by.ends_with(&format!("_{id}")), "{known_by}");
    // One changed byte results in a different signature.
    let mut changed = requests[0].clone();
    changed["body"] = json!("{\"text\": \"ü\", \"order\": 170}");
    assert!(!is_signed(&changed));
}

#[tokio::test]
async fn json_keeps_every_digit_on_its_way_to_a_receiver_and_from_a_server() {
    let ready = Ready::start().await;
    for body in [DIGITS, "null"] {
        let path = format!("/digits/{}", body.len());
        let payload = format!("{{\"url\": \"{}\", \"body\": {body}}}", http(&path));
        let id = enqueue_sql(&ready.client, &format!("'http.deliver', '{payload}'")).await;
        let job = ended(&ready.client, id).await;
        assert_eq!(job.state, "succeeded", "{job:?}");
        assert_eq!(arrived(&path)[0]["body"], body);
    }

    let payload = json!({"url": http("/page/digits")});
    let id = enqueue(&ready.client, "http.fetch", payload).await;
    let job = ended(&ready.client, id).await;
    assert_eq!(job.state, "succeeded", "{job:?}");
    let sql = "SELECT result ->> 'json' FROM rouse.job($1)";
    let json: String = ready.client.query_one(sql, &[&id]).await.unwrap().get(0);
    assert_eq!(json, DIGITS);
}

#[tokio::test]
async fn a_busy_receiver_sets_the_time_of_the_next_attempt() {
    let ready = Ready::start().await;
    let date = "SELECT to_char(now() AT TIME ZONE 'UTC' + interval '2 hours', 'Dy, DD Mon YYYY HH24:MI:SS \"GMT\"')";
    let date: String = ready.client.query_one(date, &[]).await.unwrap().get(0);
    for (status, wait, seconds) in [
        (429, "3600", 3600.0),
        (503, date.replace(' ', "%20").as_str(), 7200.0),
    ] {
        let url = http(&format!("/status/{status}/busy?retry-after={wait}"));
        let payload = json!({"url": url, "body": 1});
        let (id, error) = ready.waits("http.deliver", payload).await;
        assert_eq!(error["guest_kind"], format!("http_{status}"));
        let left = "SELECT extract(epoch FROM available_at - now())::float8 FROM rouse.job($1)";
        let left: f64 = ready.client.query_one(left, &[&id]).await.unwrap().get(0);
        assert!((seconds - 60.0..seconds + 1.0).contains(&left), "{left} s");
    }
}

#[tokio::test]
async fn an_unreachable_receiver_is_retried_and_a_refusal_is_final() {
    let ready = Ready::start().await;
    let slow = json!({"url": http("/silence/deliver"), "timeout_ms": 50});
    let unreachable = json!({"url": "http://localhost:1/"});
    for (payload, kind) in [(slow, "http_timeout"), (unreachable, "http")] {
        let job = enqueue_for_two_attempts(&ready.client, payload).await;
        let job = ended(&ready.client, job).await;
        assert_eq!((job.state.as_str(), job.attempt), ("failed", 2), "{job:?}");
        assert_eq!(job.error.expect("an error")["guest_kind"], kind);
    }

    let elsewhere = http("/redirected-delivery");
    for (path, kind) in [
        ("/status/404/refused".to_owned(), "http_404"),
        ("/status/410/refused".to_owned(), "http_410"),
        (format!("/redirect/308?to={elsewhere}"), "redirected"),
    ] {
        let payload = json!({"url": http(&path), "body": 1, "secret": "HOOK_KEY"});
        let job = ready.ends("http.deliver", payload).await;
        assert_eq!((job.state.as_str(), job.attempt), ("failed", 1), "{job:?}");
        assert_eq!(job.error.expect("an error")["guest_kind"], kind);
    }
    assert!(arrived("/redirected-delivery").is_empty());
}

/// Enqueues a delivery with at most two attempts.
async fn enqueue_for_two_attempts(client: &Client, payload: Value) -> i64 {
    let sql = "SELECT rouse.enqueue('http.deliver', $1, max_attempts => 2)";
    client.query_one(sql, &[&payload]).await.unwrap().get(0)
}

#[tokio::test]
async fn a_fetched_document_is_in_the_result_or_in_a_file() {
    let ready = Ready::start().await;
    let sha256 = |bytes: &[u8]| {
        let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
        let hex = digest.as_ref().iter().map(|byte| format!("{byte:02x}"));
        hex.collect::<String>()
    };
    let url = https("/page/json");
    let fetched = ready.succeeds("http.fetch", json!({"url": url})).await;
    assert_eq!(
        fetched,
        json!({
            "status": 200, "url": url, "content_type": "application/json", "etag": "\"v1\"", "not_modified": false,
            "bytes": PAGE.len(), "sha256": sha256(PAGE), "json": {"chf": 1.07},
        })
    );
    let again = json!({"url": url, "etag": fetched["etag"]});
    let again = ready.succeeds("http.fetch", again).await;
    assert_eq!(
        (&again["status"], &again["not_modified"]),
        (&json!(304), &json!(true))
    );
    assert_eq!(again.get("json"), None);

    let bytes = ready
        .succeeds("http.fetch", json!({"url": http("/page/bytes")}))
        .await;
    assert_eq!(bytes["base64"], STANDARD.encode(b"\xff\0\xfe"));
    let request = arrived("/page/bytes")
        .pop()
        .expect("a request that arrived");
    assert_sent_by("http-fetch", &request);

    let to = "/fetched/of/today.json";
    let redirected = http(&format!("/redirect/302?to={url}"));
    let file = ready
        .succeeds("http.fetch", json!({"url": redirected, "to": to}))
        .await;
    assert_eq!((&file["path"], &file["url"]), (&json!(to), &json!(url)));
    assert_eq!(file["sha256"], sha256(PAGE));
    let folder = ready.folder.join("fetched/of");
    assert_eq!(std::fs::read(folder.join("today.json")).unwrap(), PAGE);
    assert_eq!(
        std::fs::read_dir(&folder).unwrap().count(),
        1,
        "no partial file is left"
    );

    let payload = json!({"url": http("/bytes/1001"), "bytes_max": 1000});
    let large = ready.ends("http.fetch", payload).await;
    assert_eq!(large.error.expect("an error")["guest_kind"], "too_large");
    let payload = json!({"url": url, "to": "/elsewhere/x"});
    let outside = ready.ends("http.fetch", payload).await;
    assert_eq!((outside.state.as_str(), outside.attempt), ("failed", 1));
}

#[tokio::test]
async fn a_mail_is_retried_under_the_same_key_if_the_provider_fails() {
    let ready = Ready::start().await;
    let mail = |provider: &str, path: &str| {
        json!({
            "provider": provider, "url": https(path), "secret": "MAIL_KEY",
            "from": "a@a.example", "to": ["b@b.example", "c@c.example"], "subject": "Hi", "text": "Hello",
        })
    };
    let path = "/status/500/mail/once";
    let job = ready.ends("email.send", mail("resend", path)).await;
    assert_eq!(
        (job.state.as_str(), job.attempt),
        ("succeeded", 2),
        "{job:?}"
    );
    let requests = arrived(path);
    assert_eq!(requests.len(), 2);
    let result = job.result.expect("a result");
    for request in requests {
        let headers = &request["headers"];
        assert_eq!(headers["authorization"], format!("Bearer {MAIL_KEY}"));
        assert_eq!(headers["idempotency-key"], result["id"]);
        assert_sent_by("email-send", &request);
        let body: Value = serde_json::from_str(request["body"].as_str().unwrap()).unwrap();
        assert_eq!(body["to"], json!(["b@b.example", "c@c.example"]));
    }

    let path = "/postmark";
    ready.succeeds("email.send", mail("postmark", path)).await;
    let request = arrived(path).pop().expect("a request that arrived");
    assert_eq!(request["headers"]["x-postmark-server-token"], MAIL_KEY);
    let body: Value = serde_json::from_str(request["body"].as_str().unwrap()).unwrap();
    assert_eq!(body["To"], "b@b.example, c@c.example");

    let job = ready
        .ends("email.send", mail("resend", "/status/422/mail"))
        .await;
    assert_eq!((job.state.as_str(), job.attempt), ("failed", 1), "{job:?}");
}

#[tokio::test]
async fn keys_never_appear_in_stored_or_printed_text_and_sign_only_as_granted() {
    let ready = Ready::start().await;
    // Servers that echo everything they received, in responses that become results, and in errors.
    for status in [200, 400] {
        let url = http(&format!("/status/{status}/echoed"));
        let payload = json!({"url": url, "body": {"n": status}, "secret": "HOOK_KEY"});
        let job = ready.ends("http.deliver", payload).await;
        let shown = format!("{:?}{:?}", job.result, job.error);
        assert!(shown.contains("connection"), "the echo is kept: {shown}");
        let payload = json!({
            "url": url, "secret": "MAIL_KEY", "from": "a", "to": "b", "subject": "c", "html": "d",
        });
        ready.ends("email.send", payload).await;
    }
    let sent = arrived("/status/200/echoed");
    assert!(
        sent.iter()
            .any(|one| one["headers"]["authorization"] == format!("Bearer {MAIL_KEY}"))
    );
    assert!(
        sent.iter()
            .any(|one| one["headers"]["webhook-signature"].is_string())
    );

    // A key for signatures is never sent, and a key that is sent never signs.
    let payload = json!({"url": http("/never"), "body": 1, "secret": "MAIL_KEY"});
    let denied = ready.ends("http.deliver", payload).await;
    let error = denied.error.expect("an error");
    assert_eq!(
        (error["kind"].as_str(), denied.attempt),
        (Some("denied"), 1)
    );
    let message = error["message"].as_str().expect("a message");
    assert!(
        message.contains("{ name = \"MAIL_KEY\", sign = true },"),
        "{message}"
    );
    assert!(arrived("/never").is_empty());

    let all = [rows(&ready.client).await, ready.host.output()].join("\n");
    assert!(all.contains("http.deliver") && all.contains("email.send"));
    holds_none_of(&all, &[HOOK_KEY_BYTES, MAIL_KEY]);
}

#[tokio::test]
async fn a_password_in_a_url_appears_in_no_error() {
    let ready = Ready::start().await;
    let url = http("/never").replace("localhost", "ada:hunter2@localhost");
    for handler in ["http.deliver", "http.fetch"] {
        let denied = ready.ends(handler, json!({"url": url})).await;
        let error = denied.error.expect("an error").to_string();
        assert!(
            error.contains("denied") && error.contains(&http("/never")),
            "{error}"
        );
        assert!(!error.contains("hunter2"), "{error}");
    }
}

#[tokio::test]
async fn the_settings_and_payloads_on_the_pages_are_valid() {
    let pages = ["http-deliver", "http-fetch", "email-send"];
    let mut pages: Vec<_> = pages
        .map(|name| format!("handlers/{name}/README.md"))
        .into();
    pages.push("docs/reference/shipped-handlers.md".to_owned());
    let toml = scratch("pages").join("rouse.toml");
    // Without any grant: a payload that is understood is denied, and nothing leaves the machine.
    let ready = Ready::with("").await;
    for page in pages {
        let grants = blocks_of(&page, "toml");
        let calls = blocks_of(&page, "sql");
        assert!(!grants.is_empty() && !calls.is_empty(), "{page}");
        for grant in grants {
            std::fs::write(&toml, &grant).unwrap();
            let (file, folder) =
                File::read(Some(&toml)).unwrap_or_else(|why| panic!("{page}: {why}"));
            assert!(!file.sandbox(&folder, 1).http_grants.is_empty(), "{page}");
        }
        for call in calls {
            ready
                .client
                .batch_execute(&call)
                .await
                .unwrap_or_else(|why| panic!("{page}: {why:?}"));
        }
    }
    let jobs = ready
        .client
        .query("SELECT id, handler FROM rouse.jobs", &[])
        .await
        .unwrap();
    assert!(jobs.len() >= 5, "{}", jobs.len());
    for job in jobs {
        let handler: String = job.get(1);
        let ended = ended(&ready.client, job.get(0)).await;
        let error = ended.error.expect("nothing is granted");
        assert_eq!(error["kind"], "denied", "{handler}: {error}");
    }
}
