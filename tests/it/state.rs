//! State that handlers keep between their jobs: its scope, its quota, and access to it.

mod operators;
mod writes;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use rouse::job::{AbortReason, RunEnd};
use rouse::sandbox::{
    AbortHandle, Catalog, Journal, JournalFuture, NewValue, Sandbox, Settings as SandboxSettings,
    StateQuota, StateStore, StoredValue, WriteOutcome,
};
use rouse::worker::Settings;
use serde_json::{Value, json};
use tokio::sync::{Notify, OnceCell};
use tokio_postgres::Client;

use crate::http_out::guest_folder;

use crate::support::proxy::{Held, Proxy, Side};
use crate::support::worker::{TIMEOUT, TestWorker, ended, enqueue, enqueue_sql, lease, until_true};
use crate::support::{TestDb, code_cache, folder, rouse_binary, rouse_in};

/// A quota small enough to be used up.
const SMALL: StateQuota = StateQuota {
    keys_max: 3,
    bytes_max: 100,
    value_bytes_max: 60,
};

const LARGE: StateQuota = StateQuota {
    keys_max: 1_000,
    bytes_max: 1 << 20,
    value_bytes_max: 64 << 10,
};

fn sandbox() -> Arc<Sandbox> {
    static SANDBOX: OnceLock<Arc<Sandbox>> = OnceLock::new();
    let sandbox = SANDBOX.get_or_init(|| {
        Sandbox::start(SandboxSettings {
            attempts_max: 16,
            state: [
                ("test.state.one".into(), LARGE),
                ("test.state.other".into(), SMALL),
            ]
            .into(),
            compiler: Some(rouse_binary()),
            cache_dir: Some(code_cache()),
            ..SandboxSettings::default()
        })
        .expect("a sandbox")
    });
    sandbox.clone()
}

async fn catalog() -> Arc<Catalog> {
    static CATALOG: OnceCell<Arc<Catalog>> = OnceCell::const_new();
    let catalog = CATALOG.get_or_init(|| async {
        let catalog = Catalog::open(sandbox(), guest_folder()).await;
        Arc::new(catalog.expect("the guests load"))
    });
    catalog.await.clone()
}

async fn worker(db: &TestDb) -> TestWorker {
    TestWorker::start_in(db, Settings::default(), sandbox(), catalog().await)
}

/// A worker whose statements go through the proxy, once it listens for notifications: when it starts to, it renews the
/// leases of its jobs, and a write of state that meets the renewal gets an error as the response.
async fn worker_behind(db: &TestDb, proxy: &Proxy) -> TestWorker {
    let parts = proxy.parts(db, sandbox(), catalog().await);
    let worker = TestWorker::start_with(parts, Settings::default());
    until_true(
        &db.client().await,
        "SELECT EXISTS (SELECT FROM rouse.sleeper)",
    )
    .await;
    worker
}

/// Makes the handler perform these calls, even after failures, in a job of this tenant (SQL); returns the results.
async fn results(client: &Client, handler: &str, tenant: &str, calls: Value) -> Vec<Value> {
    let payload = json!({"calls": calls, "continue_after_errors": true});
    let id = enqueue_sql(
        client,
        &format!("'{handler}', '{payload}', tenant => {tenant}"),
    )
    .await;
    let job = ended(client, id).await;
    let result = job.result.unwrap_or_else(|| panic!("{:?}", job.error));
    result.as_array().expect("a list").clone()
}

/// All kept state: handler, tenant, key, value as text.
async fn kept(client: &Client) -> Vec<(String, String, String, String)> {
    let sql = "SELECT handler, tenant, key, convert_from(value, 'UTF8') FROM rouse.handler_state ORDER BY 1, 2, 3";
    let rows = client.query(sql, &[]).await.unwrap();
    rows.iter()
        .map(|row| (row.get(0), row.get(1), row.get(2), row.get(3)))
        .collect()
}

fn entry(handler: &str, tenant: &str, key: &str, value: &str) -> (String, String, String, String) {
    (handler.into(), tenant.into(), key.into(), value.into())
}

#[tokio::test]
async fn state_is_kept_for_the_next_job_even_if_the_attempt_fails() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = worker(&db).await;
    let calls = json!({"calls": [{"set": ["cursor", {"at": 7}]}, "fail"]});
    let failed = ended(&client, enqueue(&client, "test.state.one", calls).await).await;
    assert_eq!(failed.state, "failed");
    let found = results(
        &client,
        "test.state.one",
        "NULL",
        json!([
            {"get": "cursor"}, {"bytes": "cursor"}, {"delete": "cursor"}, {"delete": "cursor"}, {"get": "cursor"},
            {"set": ["n", "text"]}, {"add": ["n", 1]}, {"keys": ""}
        ]),
    )
    .await;
    assert_eq!(found[0], json!({"at": 7}), "the write is not undone");
    assert_eq!(found[1], json!(b"{\"at\":7}"));
    assert_eq!(found[2..5], [json!(true), json!(false), json!(null)]);
    assert_eq!(found[6]["kind"], "state_changed", "{}", found[6]);
    assert_eq!(found[7], json!(["n"]));
    let calls: i32 = client
        .query_one("SELECT max(host_calls) FROM rouse.finished", &[])
        .await
        .unwrap()
        .get(0);
    assert!(
        calls >= 9,
        "each call counts, and listing keys takes two: {calls}"
    );
    worker.drain().await;
}

/// Loses a held response once its statement is committed, that is, when this SQL is true.
async fn lose_response(proxy: &Proxy, response: &Held, client: &Client, committed: &str) {
    response.caught().await;
    until_true(client, committed).await;
    proxy.go_down();
    proxy.come_up();
}

#[tokio::test]
async fn a_deletion_that_is_retried_because_its_response_was_lost_returns_false() {
    let db = TestDb::new().await;
    let (client, proxy) = (db.client().await, Proxy::start(&db).await);
    let worker = worker_behind(&db, &proxy).await;
    let response = proxy.hold("rouse.erase_state(", Side::Response);
    let deleted = "SELECT NOT EXISTS (SELECT FROM rouse.handler_state)";
    let lose_response = lose_response(&proxy, &response, &client, deleted);
    let calls = json!([{"set": ["k", 1]}, {"delete": "k"}, {"get": "k"}]);
    let found = results(&client, "test.state.one", "NULL", calls);
    let (found, ()) = tokio::join!(found, lose_response);
    assert_eq!(found[1..], [json!(false), json!(null)]);
    worker.drain().await;
}

#[tokio::test]
async fn an_update_that_is_retried_because_its_response_was_lost_is_applied_once() {
    let db = TestDb::new().await;
    let (client, proxy) = (db.client().await, Proxy::start(&db).await);
    let worker = worker_behind(&db, &proxy).await;
    let response = proxy.hold("rouse.write_state(", Side::Response);
    let written = "SELECT EXISTS (SELECT FROM rouse.handler_state)";
    let lose_response = lose_response(&proxy, &response, &client, written);
    // If the retry returned false, the update would read 1 and write 2.
    let calls = json!([{"add": ["k", 1]}, {"get": "k"}]);
    let found = results(&client, "test.state.one", "NULL", calls);
    let (found, ()) = tokio::join!(found, lose_response);
    assert_eq!(found, [json!(1), json!(1)]);
    worker.drain().await;
}

#[tokio::test]
async fn each_handler_has_separate_state_for_each_tenant() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = worker(&db).await;
    let tenants = ["NULL", "'acme'", "'acme/x'", "'NULL'"];
    let handlers = ["test.state.one", "test.state.other"];
    for handler in handlers {
        for tenant in tenants {
            let value = format!("{handler} {tenant}");
            let calls =
                json!([{"get": "k"}, {"keys": ""}, {"set": ["k", value.replace('\'', "")]}]);
            let found = results(&client, handler, tenant, calls).await;
            assert_eq!(found[..2], [json!(null), json!([])], "{value}");
        }
    }
    for handler in handlers {
        for tenant in tenants {
            let found = results(&client, handler, tenant, json!([{"get": "k"}])).await;
            let value = format!("{handler} {tenant}").replace('\'', "");
            assert_eq!(found, [json!(value)]);
        }
    }
    worker.drain().await;
}

#[tokio::test]
async fn state_is_limited_by_quotas_for_keys_total_bytes_and_value_size() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = worker(&db).await;
    let text = |chars: usize| "x".repeat(chars);
    // In JSON, each text has two more bytes, and each key one more.
    let found = results(
        &client,
        "test.state.other",
        "NULL",
        json!([
            {"set": ["a", text(59)]}, {"set": ["a", text(58)]}, {"set": ["b", text(37)]}, {"set": ["b", text(36)]},
            {"set": ["b", 1]}, {"set": ["c", 1]}, {"set": ["d", 1]}, {"delete": "c"}, {"set": ["d", 1]}, {"keys": ""}
        ]),
    )
    .await;
    let refused = |at: usize, parts: &[&str]| {
        assert_eq!(found[at]["kind"], "state_refused", "{at}: {}", found[at]);
        let message = found[at]["message"].as_str().unwrap();
        for part in parts {
            assert!(message.contains(part), "{part:?} is missing in {message:?}");
        }
    };
    refused(
        0,
        &[
            "key a is 61 bytes long; at most 60 are allowed",
            "value_bytes_max",
        ],
    );
    assert_eq!(found[1], json!(null));
    refused(
        2,
        &[
            "is 40 bytes long",
            "the other keys are 61",
            "at most 100",
            "bytes_max of the state of test.state.other",
        ],
    );
    assert_eq!(found[3..6], [json!(null), json!(null), json!(null)]);
    refused(6, &["the key d", "the maximum of 3 keys (keys_max"]);
    assert_eq!(found[7..9], [json!(true), json!(null)]);
    assert_eq!(found[9], json!(["a", "b", "d"]));
    worker.drain().await;
}

#[tokio::test]
async fn concurrent_updates_of_attempts_are_all_counted() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = worker(&db).await;
    let calls = json!({"calls": [{"add": ["n", 25]}]});
    let mut ids = Vec::new();
    for _ in 0..6 {
        ids.push(enqueue(&client, "test.state.one", calls.clone()).await);
    }
    for id in ids {
        let job = ended(&client, id).await;
        assert_eq!(job.state, "succeeded", "{:?}", job.error);
    }
    assert_eq!(
        kept(&client).await,
        [entry("test.state.one", "", "n", "150")]
    );
    worker.drain().await;
}

/// Counts the calls.
#[derive(Default)]
struct Counting {
    waits: Notify,
    calls: AtomicUsize,
}

impl Counting {
    fn called<T: Send + 'static>(&self, response: T) -> JournalFuture<'_, Result<T, String>> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        Box::pin(async { Ok(response) })
    }
}

impl StateStore for Counting {
    fn get<'a>(&'a self, _: &'a str) -> JournalFuture<'a, Result<Option<StoredValue>, String>> {
        self.called(None)
    }

    fn keys<'a>(
        &'a self,
        _: &'a str,
        _: Option<&'a str>,
        _: u32,
    ) -> JournalFuture<'a, Result<Vec<String>, String>> {
        self.called(Vec::new())
    }

    fn set<'a>(&'a self, _: NewValue<'a>) -> JournalFuture<'a, Result<WriteOutcome, String>> {
        self.called(WriteOutcome::Done)
    }

    fn delete<'a>(&'a self, _: &'a str) -> JournalFuture<'a, Result<bool, String>> {
        self.called(true)
    }
}

impl Journal for Counting {
    fn recorded(&self) -> JournalFuture<'_, Arc<HashMap<String, rouse::job::RecordedStep>>> {
        Box::pin(async { Arc::default() })
    }

    fn result<'a>(&'a self, _: &'a str) -> JournalFuture<'a, Result<Vec<u8>, String>> {
        Box::pin(async { Err("no steps".into()) })
    }

    fn record<'a>(&'a self, _: &'a str, _: &'a [u8]) -> JournalFuture<'a, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }

    fn progress(&self, _: u8, _: &str) {
        self.waits.notify_one();
    }

    fn state(&self) -> Option<&dyn StateStore> {
        Some(self)
    }
}

#[tokio::test]
async fn state_is_neither_read_nor_written_after_the_abort() {
    let catalog = catalog().await;
    let set = catalog.current();
    let handler = set.get("test.state.one").expect("the guest");
    let (abort, journal) = (AbortHandle::new(), Arc::new(Counting::default()));
    let one_of_each =
        json!([{"get": "k"}, {"set": ["k", 1]}, {"delete": "k"}, {"keys": ""}, {"add": ["k", 1]}]);
    let mut calls = one_of_each.as_array().unwrap().clone();
    calls.push(json!("wait"));
    calls.extend(one_of_each.as_array().unwrap().iter().cloned());
    let payload = json!({"calls": calls, "continue_after_errors": true}).to_string();
    let running = sandbox().run(
        handler,
        crate::sandbox_guest::job(&payload),
        abort.clone(),
        Some(journal.clone() as Arc<dyn Journal>),
    );
    let running = sandbox().guests().spawn(running);
    journal.waits.notified().await;
    // `add` reads and writes.
    assert_eq!(journal.calls.load(Ordering::Relaxed), 6);
    abort.abort(AbortReason::Cancelled, TIMEOUT);
    let run = tokio::time::timeout(TIMEOUT, running)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(run.end, RunEnd::Aborted(AbortReason::Cancelled));
    assert_eq!(journal.calls.load(Ordering::Relaxed), 6);
    let calls = run.used.expect("a guest ran").host_calls;
    assert!(calls >= 11, "the guest did call the host: {calls}");
}

#[tokio::test]
async fn an_attempt_that_has_lost_its_job_learns_it_from_its_next_write() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // No renewal is due that would reveal the loss.
    let settings = Settings {
        overrides: lease("test.state.one", 86_400),
        ..Settings::default()
    };
    let worker = TestWorker::start_in(&db, settings, sandbox(), catalog().await);
    let calls = json!({"calls": [{"set": ["first", 1]}, {"add": ["n", 1_000_000]}]});
    enqueue(&client, "test.state.one", calls).await;
    until_true(&client, "SELECT count(*) = 2 FROM rouse.handler_state").await;
    // As if another worker had the job, without any notification.
    client
        .batch_execute("UPDATE rouse.job SET fence = fence # 1")
        .await
        .unwrap();
    let before = kept(&client).await;
    worker.drain().await;
    assert_eq!(kept(&client).await, before);
}

#[tokio::test]
async fn state_without_a_grant_is_denied_with_the_lines_that_allow_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = worker(&db).await;
    let payload = json!({"calls": [{"set": ["k", 1]}]});
    let id = enqueue(&client, "test.state.none", payload.clone()).await;
    let job = ended(&client, id).await;
    worker.drain().await;
    assert_eq!((job.state.as_str(), job.attempt), ("failed", 1));
    let error = job.error.unwrap();
    assert_eq!(error["kind"], "denied");
    let message = error["message"].as_str().unwrap();
    assert!(
        message.contains("the handler test.state.none tried to use its state"),
        "{message}"
    );
    let (_, lines) = message.split_once(":\n").expect("lines to copy");
    let lines = lines.split("\n\n").next().expect("the lines to copy");

    enqueue(&client, "test.state.none", payload).await;
    let folder = folder(lines, &["test_guests.wasm"]);
    rouse_in(&db, &["queue", "drain", "default"], &folder)
        .await
        .exits(0);
    assert_eq!(
        kept(&client).await,
        [entry("test.state.none", "", "k", "1")]
    );
}

#[tokio::test]
async fn a_job_that_drops_state_from_its_grants_is_denied_with_the_reason() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = worker(&db).await;
    let calls = json!({"calls": [{"set": ["k", 1]}]});
    enqueue(&client, "test.state.one", calls.clone()).await;
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    let before = kept(&client).await;
    let sql = format!("'test.state.one', '{calls}', grants => '{{\"state\": false}}'");
    let id = enqueue_sql(&client, &sql).await;
    let job = ended(&client, id).await;
    worker.drain().await;
    assert_eq!((job.state.as_str(), job.attempt), ("failed", 1));
    let error = job.error.unwrap();
    assert_eq!(error["kind"], "denied");
    let message = error["message"].as_str().unwrap();
    assert!(
        message.contains("the grants of this job leave out") && !message.contains("rouse.toml"),
        "{message}"
    );
    assert_eq!(kept(&client).await, before);
    assert_eq!(before.len(), 1);
}

#[tokio::test]
async fn hostile_keys_are_refused_and_hostile_values_are_plain_bytes() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = worker(&db).await;
    let found = results(
        &client,
        "test.state.one",
        "NULL",
        json!([
            {"set": ["", 1]}, {"set": ["\u{1b}[2J", 1]}, {"set": ["a\nb", 1]}, {"set": ["a\u{9b}", 1]}, {"set-long": 201},
            {"set-long": 1_048_576}, {"get": "\u{7f}"}, {"keys": "\u{1}"},
            {"set-long": 200}, {"set": ["%_''; --", "x"]}, {"set": ["ключ", 1]}, {"keys": "%"}, {"keys": "к"}, {"keys": "_"}
        ]),
    )
    .await;
    for refused in &found[..8] {
        assert_eq!(refused["kind"], "state_refused", "{refused}");
        assert!(
            refused["message"].as_str().unwrap().contains("printable"),
            "{refused}"
        );
    }
    assert_eq!(found[8..11], [json!(null), json!(null), json!(null)]);
    assert_eq!(
        found[11..],
        [json!(["%_'; --"]), json!(["ключ"]), json!([])]
    );
    worker.drain().await;
}

#[tokio::test]
async fn keys_are_listed_page_by_page_in_order() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = worker(&db).await;
    // A page has 200 keys.
    let calls =
        json!([{"fill": ["a/", 450, 1]}, {"fill": ["b/", 1, 1]}, {"keys": "a/"}, {"keys": ""}]);
    let found = results(&client, "test.state.one", "'acme'", calls).await;
    let all: Vec<String> = (0..450).map(|n| format!("a/{n:05}")).collect();
    assert_eq!(found[2], json!(all));
    assert_eq!(found[3].as_array().unwrap().len(), 451);
    worker.drain().await;
}

#[tokio::test]
async fn state_without_the_queue_is_an_error() {
    let granted = crate::invoke::folder("[handlers.\"test.state.one\".state]\n");
    let mut command = crate::support::rouse();
    command
        .args([
            "invoke",
            "test.state.one",
            r#"{"calls": [{"get": "k"}]}"#,
            "--handlers",
            "handlers",
        ])
        .current_dir(&granted)
        .env_remove("DATABASE_URL")
        .env_remove("ROUSE_LOG");
    let output = tokio::task::spawn_blocking(move || command.output())
        .await
        .unwrap()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(
        stderr.contains("invoked without the queue has no state"),
        "{stderr}"
    );
}
