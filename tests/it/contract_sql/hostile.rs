//! Modules that attack the database with their names, schemas, defaults and comments.

use serde_json::{Map, Value, json};

use super::{ECHO, contract, module, one, payload, publish};
use crate::sandbox_guest::guest;
use crate::support::{TestDb, folder_of};

/// Texts that end a literal, an identifier, a dollar quote, a comment, or a jsonpath.
const HOSTILE: &[&str] = &[
    "a'; DROP TABLE rouse.job; --",
    "a\"; DROP TABLE rouse.job; --",
    "$$; DROP TABLE rouse.job; $$",
    "\\",
    "\\'",
    "/* ",
    "*/",
    "\" ? (1 == 1) || \"",
    "%s %I %L",
    "a\nb",
    "$1 $x$",
    "${x}",
    "é\u{202e}",
];

#[tokio::test]
async fn text_of_a_module_is_never_executed() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut properties = Map::new();
    for text in HOSTILE {
        properties.insert(
            (*text).to_owned(),
            json!({"type": "string", "default": text, "description": text, "enum": [text, "x"], "pattern": "^[^\u{0}]*$"}),
        );
    }
    let required: Vec<&str> = HOSTILE[..3].to_vec();
    let schema = json!({"type": "object", "properties": properties, "required": required});
    let description = HOSTILE.concat();
    let manifest = json!({"handlers": [{"name": "bad.one", "version": "1'; DROP TABLE rouse.job; --", "description": description, "input_schema": schema}]});
    let folder = folder_of("", &[("bad.wasm", guest(&manifest.to_string(), ECHO))]);
    let changes = publish(&db, &folder);
    assert_eq!(changes[0]["change"], "new", "{changes}");
    // The three required parameters are given; the others have their defaults.
    let id = one(&client, "SELECT jobs.bad_one('x', 'x', 'x')").await;
    let payload = payload(&client, id).await;
    for (place, text) in HOSTILE.iter().enumerate() {
        let expected = if place < 3 { "x" } else { *text };
        assert_eq!(payload[*text], expected, "{text}");
    }
    let invalid = "SELECT jobs.bad_one('y', 'x', 'x')";
    let error = client.query(invalid, &[]).await.unwrap_err();
    assert!(
        error
            .as_db_error()
            .unwrap()
            .message()
            .contains("expected one of"),
        "{error:?}"
    );
    let comment: String = one(&client, "SELECT obj_description('jobs.bad_one'::regproc)").await;
    assert!(comment.contains("DROP TABLE"), "it is only text");
    assert_eq!(
        one::<i64>(&client, "SELECT count(*) FROM rouse.job").await,
        1
    );
    let (code, output) = contract(&db, &folder, &["diff"]);
    assert_eq!(code, 0, "the same again: {output}");
}

#[tokio::test]
async fn properties_that_cannot_be_parameters_leave_the_payload_as_one_argument() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let many: Map<String, Value> = (0..1_000)
        .map(|n| (format!("p{n}"), json!({"type": "string"})))
        .collect();
    for (place, properties) in [
        json!({"rouse_queue": {"type": "string"}}),
        json!({"": {"type": "string"}}),
        json!({"x".repeat(64): {"type": "string"}}),
        json!({"a\u{0}": {"type": "string"}}),
        json!({"$1": {"type": "string"}}),
        json!(many),
    ]
    .into_iter()
    .enumerate()
    {
        let schema = json!({"type": "object", "properties": properties}).to_string();
        let name = format!("bad.n{place}");
        let folder = folder_of("", &[("bad.wasm", module(&[(&name, &schema)]))]);
        let (code, output) = contract(&db, &folder, &["publish", &name]);
        assert_eq!(code, 0, "{output}");
        let call =
            format!("SELECT jobs.bad_n{place}(payload => '{{\"other\": 1}}', rouse_queue => 'q')");
        let id = one(&client, &call).await;
        assert_eq!(payload(&client, id).await, json!({"other": 1}));
    }
}

/// The function of a handler named p has the variables p.name and p.value, and its statement has columns p.name and
/// p.value.
#[tokio::test]
async fn names_of_a_handler_and_of_its_properties_cannot_be_ambiguous() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let schema = r#"{"type": "object", "required": ["name", "value"], "properties": {
        "name": {"type": "string"}, "value": {"type": "string"}, "p": {"type": "string"}}}"#;
    let folder = folder_of("", &[("p.wasm", module(&[("p", schema)]))]);
    publish(&db, &folder);
    let call = "SELECT jobs.p(name => 'n', value => 'v', p => 'x')";
    let id = one(&client, call).await;
    let expected = json!({"name": "n", "value": "v", "p": "x"});
    assert_eq!(payload(&client, id).await, expected);
}

#[tokio::test]
async fn handlers_whose_functions_would_have_the_same_name_get_different_ones() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let long = format!("{}.{}", "a".repeat(60), "b".repeat(60));
    let other = format!("{}.{}", "a".repeat(60), "c".repeat(60));
    let names = ["a.b", "a-b", "a_b", &long, &other];
    let handlers: Vec<(&str, &str)> = names.iter().map(|name| (*name, "true")).collect();
    let folder = folder_of("", &[("bad.wasm", module(&handlers))]);
    let before = publish(&db, &folder);
    let functions: std::collections::BTreeSet<&str> = before
        .as_array()
        .unwrap()
        .iter()
        .map(|change| change["function"].as_str().unwrap())
        .collect();
    assert_eq!(functions.len(), names.len(), "{before}");
    assert!(functions.contains("jobs.a_b"));
    for change in before.as_array().unwrap() {
        let function = change["function"].as_str().unwrap();
        let id: i64 = one(&client, &format!("SELECT {function}('1')")).await;
        let handler: String = one(
            &client,
            &format!("SELECT handler FROM rouse.jobs WHERE id = {id}"),
        )
        .await;
        assert_eq!(handler, change["handler"].as_str().unwrap());
    }
    // The functions keep their names, whatever is published later.
    let (code, output) = contract(&db, &folder, &["diff", "a.b"]);
    assert_eq!(code, 0, "{output}");
}

#[tokio::test]
async fn a_schema_that_postgres_cannot_check_is_published_without_a_check() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut deep = json!({"type": "string"});
    for _ in 0..40 {
        deep = json!({"items": deep});
    }
    let schemas = [
        deep.to_string(),
        json!({"enum": (0..500).map(|n| format!("value {n}")).collect::<Vec<_>>()}).to_string(),
        json!({"not": {"type": "string"}}).to_string(),
        json!({"pattern": "(a{200}){200}"}).to_string(),
    ];
    for (place, schema) in schemas.iter().enumerate() {
        let name = format!("bad.s{place}");
        let folder = folder_of("", &[("bad.wasm", module(&[(&name, schema)]))]);
        let (code, output) = contract(&db, &folder, &["publish", &name]);
        assert_eq!(code, 0, "{output}");
        let checked = format!("SELECT checked FROM rouse.contracts WHERE handler = '{name}'");
        assert!(!one::<bool>(&client, &checked).await, "{name}");
        let id: i64 = one(&client, &format!("SELECT rouse.enqueue('{name}', '7')")).await;
        assert!(id > 0);
    }
}
