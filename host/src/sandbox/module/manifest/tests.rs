//! Valid manifests, and those that are refused.

use serde_json::{Value, json};

use super::*;
use crate::job::cron;
use crate::job::declared_gate::GateLimit;
use crate::sanitize::is_unsafe;

/// The limits that `#[handler]` enforces at compile time.
#[path = "../../../../../sdk/macros/src/limits.rs"]
mod sdk;

fn one(handler: Value) -> Result<HandlerManifest, String> {
    let manifest = Manifest::parse(&json!({ "handlers": [handler] }).to_string())?;
    Ok(manifest.handlers.into_iter().next().expect("one handler"))
}

fn refused(handler: Value) -> String {
    one(handler).expect_err("must be refused")
}

#[test]
fn a_handler_needs_only_a_name() {
    for written in [
        json!({ "name": "text.stats" }),
        json!({ "name": "text.stats", "max_attempts": null, "retry_initial_ms": null, "lease_ms": null, "concurrency": null,
                "instances": null, "capabilities": null, "gates": null, "input_schema": null, "a_field_of_the_future": 7 }),
    ] {
        let handler = one(written).unwrap();
        assert_eq!(handler.name, "text.stats");
        assert_eq!(handler.version, "0.0.0");
        assert_eq!(handler.input_schema.written(), "true");
        assert_eq!(handler.retry, RetryPolicy::default());
        assert_eq!(handler.lease, Duration::from_secs(60));
        assert_eq!(handler.timeout, Duration::from_secs(3600));
        assert_eq!(handler.grace, Duration::from_secs(5));
        assert_eq!(handler.concurrency, None);
        assert_eq!(handler.instances, Instances::Fresh);
        assert!(handler.gates.is_empty());
        assert!(handler.capabilities.is_empty());
    }
}

#[test]
fn read_every_field() {
    let manifest = Manifest::parse(
        r#"{"sdk":"rouse-sdk 0.1.0","handlers":[{"name":"text.stats","version":"0.1.0",
        "description":"Counts.","input_schema":{"type":"object"},"output_schema":true,
        "max_attempts":3,"retry_initial_ms":100,"retry_multiplier":1.5,"retry_max_ms":2000,"retry_jitter":0,
        "lease_ms":2000,"timeout_ms":3000,"grace_ms":0,"concurrency":4,
        "gates":[{"kind":"max_concurrent","max":5,"key":["tenant"]}],
        "instances":"reuse","capabilities":["dirs"]}]}"#,
    )
    .unwrap();
    assert_eq!(manifest.sdk.as_deref(), Some("rouse-sdk 0.1.0"));
    assert!(manifest.unknown.is_empty(), "{:?}", manifest.unknown);
    let handler = &manifest.handlers[0];
    assert_eq!(handler.version, "0.1.0");
    assert_eq!(handler.description, "Counts.");
    assert_eq!(handler.input_schema.written(), r#"{"type":"object"}"#);
    assert_eq!(handler.retry.max_attempts, 3);
    assert_eq!(handler.retry.initial, Duration::from_millis(100));
    assert_eq!(handler.retry.multiplier, 1.5);
    assert_eq!(handler.retry.max, Duration::from_secs(2));
    assert_eq!(handler.retry.jitter, 0.0);
    assert_eq!(handler.lease, Duration::from_secs(2));
    assert_eq!(handler.timeout, Duration::from_secs(3));
    assert_eq!(handler.grace, Duration::ZERO);
    assert_eq!(handler.concurrency, Some(4));
    let limit = GateLimit::MaxConcurrent { max: 5 };
    let key = vec!["tenant".to_owned()];
    assert_eq!(handler.gates, [DeclaredGate { limit, key }]);
    assert_eq!(handler.instances, Instances::Reuse);
    assert_eq!(handler.capabilities, ["dirs".parse().unwrap()]);
}

#[test]
fn a_long_initial_wait_raises_the_maximum() {
    let handler = one(json!({ "name": "a", "retry_initial_ms": 14_400_000 })).unwrap();
    assert_eq!(handler.retry.max, Duration::from_secs(14_400));
}

#[test]
fn errors_about_bad_values_name_the_handler() {
    for (field, value) in [
        ("lease_ms", json!(0)),
        ("lease_ms", json!(-1)),
        ("lease_ms", json!(1_999)),
        ("lease_ms", json!(24 * 60 * 60 * 1_000 + 1)),
        ("timeout_ms", json!(1.5)),
        ("timeout_ms", json!(u64::MAX)),
        ("timeout_ms", json!(30 * DAY_MS + 1)),
        ("grace_ms", json!(3_600_000)),
        ("concurrency", json!(0)),
        ("concurrency", json!(1_000_001)),
        ("concurrency", json!("three")),
        ("gates", json!({})),
        ("gates", json!([{ "kind": "throttle" }])),
        ("capabilities", json!(["rm -rf"])),
        ("input_schema", json!("object")),
        (
            "output_schema",
            json!({ "properties": { "a": { "type": "int" } } }),
        ),
        ("max_attempts", json!(0)),
        ("retry_multiplier", json!(0.5)),
        ("retry_jitter", json!(1.5)),
        ("retry_jitter", json!(-0.1)),
        ("retry_initial_ms", json!(0)),
        ("retry_max_ms", json!(30 * DAY_MS + 1)),
        ("retry_max_ms", json!(1000)),
    ] {
        let mut handler = json!({ "name": "text.stats" });
        handler[field] = value.clone();
        let why = refused(handler);
        assert!(why.contains("text.stats"), "{field} {value}: {why}");
    }
    assert!(refused(json!({ "name": "a", "grace_ms": 999_999_999 })).contains("grace_ms"));
    let why = refused(json!({ "name": "a", "lease_ms": 1_999 }));
    assert!(
        why.contains("lease_ms is 1999; expected 2000 to 86400000"),
        "{why}"
    );
    let why = refused(json!({ "name": "a", "capabilities": ["rm -rf"] }));
    assert!(why.contains("a capability must be a word such as"), "{why}");
    let why = refused(json!({ "name": "a", "capabilities": vec!["dirs"; 65] }));
    assert!(why.contains("it has more than 64 capabilities"), "{why}");
    let schema = json!({ "properties": { "b": { "pattern": "(?=c)" } } });
    let why = refused(json!({ "name": "a", "output_schema": schema }));
    assert!(
        why.contains("output_schema: #/properties/b: \"(?=c)\": "),
        "{why}"
    );
}

#[test]
fn errors_about_a_schema_are_safe_to_print() {
    let nasty = "\u{1b}[2J\u{9b}\u{202e}\u{2066}\n";
    let parsed = refused(json!({ "name": "a",
        "input_schema": { "properties": { nasty: { "type": nasty } } } }));
    let handler = one(json!({ "name": "a",
        "input_schema": { "properties": { nasty: { "const": nasty } } } }));
    let value = json!({ nasty: format!("{nasty}.") }).to_string();
    let checked = handler.unwrap().input_schema.check(value.as_bytes());
    for why in [parsed, checked.unwrap_err()] {
        assert!(why.contains("\\u{9b}\\u{202e}\\u{2066}"), "{why}");
        assert!(!why.contains(is_unsafe), "{why}");
    }
}

#[test]
fn names_are_words_separated_by_dots() {
    let long = "a".repeat(128);
    for good in ["a", "text.stats", "a-b_c.d0", "0.1", long.as_str()] {
        assert!(one(json!({ "name": good })).is_ok(), "{good}");
    }
    let too_long = "a".repeat(129);
    for bad in [
        "", ".", "a.", ".a", "a..b", "A", "a b", "-a", "a._b", "ä", "a\u{0}", &too_long,
    ] {
        assert!(one(json!({ "name": bad })).is_err(), "{bad:?}");
    }
    assert!(refused(json!({ "version": "1" })).contains("without a name"));
}

#[test]
fn limit_the_manifest_as_a_whole() {
    let parse = |text: &str| Manifest::parse(text).expect_err("must be refused");
    assert!(parse("").contains("does not parse"));
    assert!(parse("[]").contains("does not parse"));
    assert!(parse(r#"{"handlers":[]}"#).contains("no handlers"));
    let word = json!({"handlers": [{"name": "a", "instances": "re\nuse\u{202e}\u{9b}"}]});
    let why = parse(&word.to_string());
    assert!(why.contains("`re use\\u{202e}\\u{9b}`"), "{why}");
    assert!(parse(r#"{"handlers":[{"name":"a"},{"name":"a"}]}"#).contains("twice"));
    let deep = format!("{}1{}", "[".repeat(500), "]".repeat(500));
    let why = parse(&format!(r#"{{"handlers":{deep}}}"#));
    assert!(why.contains("without a name"), "{why}");
    let why = parse(&format!(
        r#"{{"handlers":[{{"name":"a","input_schema":{{"const":{deep}}}}}]}}"#
    ));
    assert!(why.contains("nested deeper than 128 levels"), "{why}");
    assert!(parse(&format!(r#"{{"sdk":"{}"}}"#, "x".repeat(1 << 20))).contains("1 MiB"));
    let many: Vec<Value> = (0..1_001)
        .map(|n| json!({ "name": format!("h{n}") }))
        .collect();
    assert!(parse(&json!({ "handlers": many }).to_string()).contains("at most 1000 are allowed"));
}

#[test]
fn errors_about_gates_name_the_handler_and_the_gate() {
    let gates = json!([{ "kind": "singleton" }, { "kind": "throttle", "max": 0, "period_ms": 1 }]);
    let why = refused(json!({ "name": "a", "gates": gates }));
    assert_eq!(
        why,
        "is invalid for the handler `a`: gates[1]: max is 0; expected 1 to 1000 for a throttle without a burst"
    );
    let gates = vec![json!({ "kind": "singleton" }); 9];
    let why = refused(json!({ "name": "a", "gates": gates }));
    assert!(
        why.contains("at most 8 gates are allowed; there are 9"),
        "{why}"
    );
    let nasty = json!([{ "kind": "singleton", "key": ["\u{9b}\u{202e}\n"] }]);
    let why = refused(json!({ "name": "a", "gates": nasty }));
    assert!(!why.contains(is_unsafe), "{why}");
}

#[test]
fn report_unknown_keys_without_refusing_them() {
    let manifest = json!({
        "sdk": "of its own", "licence": "MIT",
        "handlers": [
            {"name": "a", "timeout": "5s", "schedule": {"cron": "0 3 * * *", "time_zome": "UTC"}, "input_schema": {"x-own": 1}},
            {"name": "b", "\u{9b}\n": {"deep": 1}},
        ],
    });
    let manifest = Manifest::parse(&manifest.to_string()).unwrap();
    assert_eq!(manifest.handlers.len(), 2);
    assert_eq!(
        manifest.unknown,
        [
            "`licence`",
            "`schedule.time_zome` of the handler `a`",
            "`timeout` of the handler `a`",
            "`\\u{9b} ` of the handler `b`",
        ]
    );

    let many: String = (0..1_000).map(|n| format!(r#","k{n}":0"#)).collect();
    let long = "x".repeat(100_000);
    let manifest = format!(r#"{{"{long}":0{many},"handlers":[{{"name":"a"{many}}}]}}"#);
    let manifest = Manifest::parse(&manifest).unwrap();
    assert_eq!(manifest.unknown.len(), UNKNOWN_MAX);
    assert!(manifest.unknown[0].len() <= UNKNOWN_BYTES_MAX + "`…`".len());
}

#[test]
fn statements_are_checked_and_request_permission() {
    let statement =
        json!({"name": "mark_paid", "sql": "UPDATE orders", "rows": 1, "on_error": "retry"});
    let handler = one(json!({"name": "a", "statements": [statement]})).unwrap();
    assert_eq!(handler.statements[0].rows, Some(1));
    assert_eq!(handler.capabilities, ["sql:mark_paid".parse().unwrap()]);
    for (statement, why) in [
        (
            json!({"name": "A", "sql": "SELECT 1"}),
            "is not a valid name",
        ),
        (json!({"name": "a"}), "missing field `sql`"),
        (
            json!({"name": "a", "sql": "SELECT 1", "row": 1}),
            "unknown field `row`",
        ),
        (
            json!({"name": "a", "sql": "SELECT 1", "rows": -1}),
            "invalid value",
        ),
        (
            json!({"name": "a", "sql": "SELECT 1", "on_error": "ignore"}),
            "unknown variant",
        ),
    ] {
        let error = one(json!({"name": "a", "statements": [statement]})).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn a_schedule_is_checked_and_requests_permission() {
    let schedule = json!({"cron": " 0  3 * * *", "time_zone": "Europe/Berlin"});
    let handler =
        one(json!({ "name": "a", "schedule": schedule, "capabilities": ["state"] })).unwrap();
    let declared = handler.schedule.unwrap();
    assert_eq!(
        (&*declared.cron, &*declared.time_zone),
        ("0 3 * * *", "Europe/Berlin")
    );
    let words = ["state", "schedule"].map(|word| word.parse().unwrap());
    assert_eq!(handler.capabilities, words);
    let handler = one(json!({ "name": "a", "schedule": {"cron": "0 3 * * *"} })).unwrap();
    assert_eq!(handler.schedule.unwrap().time_zone, "UTC");
    for (schedule, why) in [
        (
            json!({"cron": "0 25 * * *"}),
            "schedule: the cron expression is invalid",
        ),
        (
            json!({"cron": "0 3 * * *", "time_zone": "Mars"}),
            "the time zone \"Mars\" is unknown",
        ),
        (json!({}), "missing field `cron`"),
    ] {
        let error = one(json!({ "name": "a", "schedule": schedule })).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn the_options_of_a_job_have_the_same_limits() {
    let sql = include_str!("../../../../../migrations/functions/enqueue.sql");
    let limits = format!(
        "CASE p_name WHEN 'lease' THEN {} WHEN 'timeout' THEN {} ELSE",
        HandlerManifest::LEASE_MS_MAX,
        HandlerManifest::WAIT_MS_MAX
    );
    assert!(sql.contains(&limits), "{limits}");
    let limits = format!(
        "CASE p_name WHEN 'lease' THEN {} ELSE 1 END",
        HandlerManifest::LEASE_MS_MIN
    );
    assert!(sql.contains(&limits), "{limits}");
}

#[test]
fn the_sdk_has_the_same_limits() {
    assert_eq!(sdk::NAME_CHARS_MAX, NAME_CHARS_MAX);
    assert_eq!(sdk::ATTEMPTS_MAX, ATTEMPTS_MAX);
    assert_eq!(sdk::MULTIPLIER_MAX, MULTIPLIER_MAX);
    let initial = Duration::from_millis(sdk::RETRY_INITIAL_MS);
    assert_eq!(initial, RetryPolicy::default().initial);
    assert_eq!(sdk::WAIT_MS_MAX, HandlerManifest::WAIT_MS_MAX);
    assert_eq!(sdk::LEASE_MS_MIN, HandlerManifest::LEASE_MS_MIN);
    assert_eq!(sdk::LEASE_MS_MAX, HandlerManifest::LEASE_MS_MAX);
    assert_eq!(sdk::GRACE_MS_MAX, HandlerManifest::GRACE_MS_MAX);
    assert_eq!(u64::from(sdk::CONCURRENCY_MAX), CONCURRENCY_MAX);
    assert_eq!(sdk::CRON_CHARS_MAX, cron::CHARS_MAX);
    assert_eq!(sdk::GATES_MAX, gates::GATES_MAX);
    assert_eq!(u64::from(sdk::GATE_COUNT_MAX), gates::COUNT_MAX);
    assert_eq!(u64::from(sdk::GATE_STARTS_MAX), gates::STARTS_MAX);
    assert_eq!(u64::from(sdk::GATE_BATCH_MAX), gates::BATCH_MAX);
    assert_eq!(sdk::GATE_PERIOD_MS_MAX, gates::PERIOD_MS_MAX);
    assert_eq!(sdk::STATEMENTS_MAX, statements::STATEMENTS_MAX);
    assert_eq!(sdk::STATEMENT_NAME_CHARS_MAX, statements::NAME_CHARS_MAX);
    assert_eq!(sdk::STATEMENT_BYTES_MAX, statements::SQL_BYTES_MAX);
    assert_eq!(sdk::CAPABILITIES_MAX, CAPABILITIES_MAX);
    assert_eq!(sdk::CAPABILITY_BYTES_MAX, capability::DETAIL_BYTES_MAX);
}
