//! Payloads and results are checked against the schemas of the module.

use rouse::job::{AbortReason, RunEnd};
use rouse::sandbox::AbortHandle;
use rouse::worker::Settings;
use serde_json::json;

use crate::commands::run;
use crate::sandbox_guest::{Handlers, guest, job, sandbox};
use crate::support::worker::{TestWorker, catalog_of, ended, enqueue};
use crate::support::{TestDb, attempt};

const ECHO: &str = "(call $return_ok (local.get $payload) (local.get $payload_len))";

/// The schema of an order with lines, each with an amount.
const ORDER: &str = r##"{"type": "object", "required": ["lines"], "properties": {
    "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}}},
    "$defs": {"line": {"type": "object", "required": ["amount"], "properties": {"amount": {"type": "integer"}}}}}"##;

/// A module with one handler that is tried twice.
fn module(name: &str, schemas: &str, run: &str) -> Vec<u8> {
    let retry = r#""max_attempts": 2, "retry_initial_ms": 1, "retry_jitter": 0"#;
    guest(
        &format!(r#"{{"handlers": [{{"name": "{name}", {retry}, {schemas}}}]}}"#),
        run,
    )
}

/// The end of one attempt, and whether an instance was started.
async fn run_end(handlers: &Handlers, name: &str, payload: &str) -> (RunEnd, bool) {
    let handler = handlers.handler(name);
    let run = attempt(&sandbox(), &handler, job(payload), AbortHandle::new()).await;
    let has_memory = run.used.is_some_and(|used| used.memory_bytes_peak > 0);
    (run.end, has_memory)
}

fn refused(end: RunEnd) -> String {
    match end {
        RunEnd::PayloadRefused(why) | RunEnd::ResultRefused(why) => why,
        other => panic!("expected a refusal, got {other:?}"),
    }
}

#[tokio::test]
async fn an_invalid_payload_ends_the_attempt_before_an_instance_starts() {
    let typed_input = module(
        "test.typed",
        &format!(r#""input_schema": {ORDER}"#),
        "unreachable",
    );
    let handlers = Handlers::with(&[("typed.wasm", &typed_input)]).await;
    let (end, instance) = run_end(&handlers, "test.typed", r#"{"lines": [{"amount": 7}]}"#).await;
    assert!(matches!(end, RunEnd::Trapped { .. }) && instance, "{end:?}");

    let (end, instance) = run_end(&handlers, "test.typed", r#"{"lines": [{"amount": "7"}]}"#).await;
    assert!(!instance, "{end:?}");
    assert_eq!(
        refused(end),
        "payload does not match the schema at /lines/0/amount: expected an integer, got \"7\" (#/$defs/line/properties/amount); `rouse handlers show test.typed --schema` shows the input_schema"
    );
    // The payload is not checked if the attempt has to stop.
    let handler = handlers.handler("test.typed");
    let abort = AbortHandle::new();
    abort.abort(AbortReason::Cancelled, std::time::Duration::ZERO);
    let run = attempt(&sandbox(), &handler, job("{}"), abort).await;
    assert_eq!(run.end, RunEnd::Aborted(AbortReason::Cancelled));
}

#[tokio::test]
async fn an_invalid_result_is_refused_after_the_run() {
    let typed_output = module("test.typed", r#""output_schema": {"maximum": 9}"#, ECHO);
    let handlers = Handlers::with(&[("typed.wasm", &typed_output)]).await;
    let (end, _) = run_end(&handlers, "test.typed", "9").await;
    assert_eq!(end, RunEnd::Returned(b"9".into()));
    let (end, instance) = run_end(&handlers, "test.typed", "1e400").await;
    assert!(instance);
    assert_eq!(
        refused(end),
        "result does not match the schema: expected at most 9, got 1e400 (#); `rouse handlers show test.typed --schema` shows the output_schema"
    );
}

#[tokio::test]
async fn the_numbers_of_a_schema_are_kept_as_the_module_wrote_them() {
    let schema = r#"{"enum": [99.43984295500535, 18446744073709551616, 1e400]}"#;
    let typed_input = module("test.typed", &format!(r#""input_schema": {schema}"#), ECHO);
    let handlers = Handlers::with(&[("typed.wasm", &typed_input)]).await;
    for payload in ["99.43984295500535", "18446744073709551616", "1e400"] {
        let (end, _) = run_end(&handlers, "test.typed", payload).await;
        assert_eq!(end, RunEnd::Returned(payload.into()));
    }
    let (end, _) = run_end(&handlers, "test.typed", "18446744073709551617").await;
    assert!(refused(end).contains("18446744073709551617"));
    // The command line also shows the numbers unchanged.
    let db = TestDb::new().await;
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("typed.wasm"), &typed_input).unwrap();
    let dir = folder.path().to_str().unwrap();
    let listed = r#""input_schema":{"enum":[99.43984295500535,18446744073709551616,1e400]}"#;
    for args in [
        &["handlers", "--handlers", dir, "--json"][..],
        &[
            "handlers",
            "show",
            "test.typed",
            "--handlers",
            dir,
            "--json",
        ],
    ] {
        let (code, shown) = run(&db, args);
        assert!(code == 0 && shown.contains(listed), "{shown}");
    }
    let (code, shown) = run(
        &db,
        &[
            "handlers",
            "show",
            "test.typed",
            "--handlers",
            dir,
            "--schema",
        ],
    );
    assert!(
        code == 0 && shown.contains("18446744073709551616,1e400]}"),
        "{shown}"
    );
}

#[tokio::test]
async fn a_missing_payload_is_valid_for_a_handler_without_input() {
    let nothing = module("test.typed", r#""input_schema": {"type": "null"}"#, ECHO);
    let handlers = Handlers::with(&[("typed.wasm", &nothing)]).await;
    for payload in ["{}", "null", " {} "] {
        let (end, _) = run_end(&handlers, "test.typed", payload).await;
        assert_eq!(end, RunEnd::Returned(payload.into()));
    }
    let (end, _) = run_end(&handlers, "test.typed", r#"{"a": 1}"#).await;
    assert!(refused(end).contains("expected null, got an object"));
}

#[tokio::test]
async fn a_module_with_an_invalid_schema_is_refused_with_the_location() {
    let invalid = module(
        "test.typed",
        r#""input_schema": {"properties": {"a": {"type": "int"}}}"#,
        ECHO,
    );
    let handlers = Handlers::with(&[("typed.wasm", &invalid)]).await;
    assert_eq!(
        handlers.refusal("typed.wasm"),
        "its manifest (describe) is invalid for the handler `test.typed`: input_schema: #/properties/a: \"type\" is \"int\", expected a JSON type, or an array of them"
    );
}

#[tokio::test]
async fn a_job_with_an_invalid_payload_fails_at_once_and_shows_the_location() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let typed_input = module("test.order", &format!(r#""input_schema": {ORDER}"#), ECHO);
    let catalog = catalog_of(&[("order.wasm", &typed_input)]).await;
    let worker = TestWorker::start_on(&db, Settings::default(), catalog);
    let good = enqueue(&client, "test.order", json!({"lines": [{"amount": 1}]})).await;
    assert_eq!(ended(&client, good).await.state, "succeeded");

    let id = enqueue(
        &client,
        "test.order",
        json!({"lines": [{"amount": 1}, {"amount": 1.5}]}),
    )
    .await;
    let job = ended(&client, id).await;
    assert_eq!(
        (job.state.as_str(), job.attempt),
        ("failed", 1),
        "no further attempt"
    );
    assert_eq!(job.error.unwrap()["kind"], "invalid_payload");
    let (_, shown) = run(&db, &["job", &id.to_string()]);
    assert!(shown.contains("kind: invalid_payload"), "{shown}");
    assert!(
        shown.contains(
            "payload does not match the schema at /lines/1/amount: expected an integer, got 1.5"
        ),
        "{shown}"
    );
    worker.drain().await;
}

#[tokio::test]
async fn a_job_with_an_invalid_result_is_retried_by_the_handlers_policy() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let typed_output = module("test.order", &format!(r#""output_schema": {ORDER}"#), ECHO);
    let catalog = catalog_of(&[("order.wasm", &typed_output)]).await;
    let worker = TestWorker::start_on(&db, Settings::default(), catalog);
    let id = enqueue(&client, "test.order", json!({"lines": [{}]})).await;
    let job = ended(&client, id).await;
    assert_eq!(
        (job.state.as_str(), job.attempt, job.result),
        ("failed", 2, None)
    );
    let rows = client
        .query(
            "SELECT detail->>'kind', detail->>'message' FROM rouse.history($1) WHERE event = 'failed'",
            &[&id],
        )
        .await
        .unwrap();
    assert_eq!(rows.len(), 2);
    for row in rows {
        let (kind, message): (String, String) = (row.get(0), row.get(1));
        assert_eq!(kind, "invalid_result");
        let expected =
            "result does not match the schema at /lines/0: missing required property \"amount\"";
        assert!(message.starts_with(expected), "{message}");
    }
    worker.drain().await;
}
