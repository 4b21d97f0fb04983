//! Contracts in Postgres: typed functions, and checks of every enqueue.

mod hostile;
mod versions;

use std::path::Path;

use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::commands::run;
use crate::sandbox_guest::guest;
use crate::support::worker::guests_dir;
use crate::support::{TestDb, folder_of};

const ECHO: &str = "(call $return_ok (local.get $payload) (local.get $payload_len))";

const MAIL: &str = r#"{"type": "object", "required": ["to"], "properties": {
    "to": {"type": "string", "minLength": 3, "description": "Who gets it"},
    "subject": {"type": "string", "default": "it's new"},
    "copies": {"type": "integer", "maximum": 5},
    "lines": {"type": "array", "items": {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}}}}"#;

/// A module with these handlers and schemas.
fn module(handlers: &[(&str, &str)]) -> Vec<u8> {
    let handlers = handlers.iter().map(|(name, schema)| {
        format!(
            r#"{{"name": {}, "description": "Does it", "input_schema": {schema}}}"#,
            json!(name)
        )
    });
    let handlers: Vec<String> = handlers.collect();
    guest(
        &format!(r#"{{"handlers": [{}]}}"#, handlers.join(", ")),
        ECHO,
    )
}

/// Runs `rouse contract` for the folder of a test.
fn contract(db: &TestDb, folder: &Path, args: &[&str]) -> (i32, String) {
    let (handlers, config) = (folder.join("handlers-wasm"), folder.join("rouse.toml"));
    let folder = [
        "--handlers",
        handlers.to_str().unwrap(),
        "--config",
        config.to_str().unwrap(),
    ];
    run(db, &[&["contract"], args, &folder].concat())
}

/// Publishes, and returns the changes.
fn publish(db: &TestDb, folder: &Path) -> Value {
    let (code, output) = contract(db, folder, &["publish", "--json"]);
    assert_eq!(code, 0, "{output}");
    let published: Value = serde_json::from_str(&output).unwrap_or_else(|_| panic!("{output}"));
    published["changes"].clone()
}

/// The first value of a query.
async fn one<T: for<'a> tokio_postgres::types::FromSql<'a>>(client: &Client, sql: &str) -> T {
    let row = client.query_one(sql, &[]).await;
    row.unwrap_or_else(|error| panic!("{sql}: {error:?}"))
        .get(0)
}

/// The message of the error that a statement raises, and its hint.
async fn refused(client: &Client, sql: &str) -> (String, String) {
    let error = client.query(sql, &[]).await.expect_err(sql);
    let error = error.as_db_error().unwrap_or_else(|| panic!("{error:?}"));
    (
        error.message().to_owned(),
        error.hint().unwrap_or_default().to_owned(),
    )
}

async fn payload(client: &Client, id: i64) -> Value {
    one(
        client,
        &format!("SELECT payload FROM rouse.job WHERE id = {id}"),
    )
    .await
}

#[tokio::test]
async fn a_typed_function_enqueues_and_every_enqueue_is_checked() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder_of("", &[("mail.wasm", module(&[("mail.send", MAIL)]))]);
    let changes = publish(&db, &folder);
    assert_eq!(changes[0]["change"], "new");
    assert_eq!(changes[0]["function"], "jobs.mail_send");

    let call = "SELECT jobs.mail_send(\"to\" => 'a@b.c', copies => 2, rouse_queue => 'mails', rouse_unique_key => 'k')";
    let id = one(&client, call).await;
    let expected = json!({"to": "a@b.c", "subject": "it's new", "copies": 2});
    assert_eq!(payload(&client, id).await, expected);
    let queued = format!(
        "SELECT queue = 'mails' AND unique_key = 'k' AND handler = 'mail.send' FROM rouse.jobs WHERE id = {id}"
    );
    assert!(one::<bool>(&client, &queued).await);
    let nested = r#"SELECT jobs.mail_send('a@b.c', subject => NULL, lines => '[{"n": 1}]')"#;
    let id = one(&client, nested).await;
    assert_eq!(
        payload(&client, id).await,
        json!({"to": "a@b.c", "lines": [{"n": 1}]})
    );

    for (sql, message) in [
        (
            "SELECT rouse.enqueue('mail.send', '[]')",
            "payload does not match the contract of mail.send: expected object, got []",
        ),
        (
            "SELECT rouse.enqueue('mail.send', '{}')",
            "payload does not match the contract of mail.send: the property to is missing",
        ),
        (
            r#"SELECT rouse.enqueue('mail.send', '{"to": 7}')"#,
            "payload does not match the contract of mail.send at /to: expected string, got 7",
        ),
        (
            r#"SELECT rouse.enqueue('mail.send', '{"to": "abc", "copies": 1.5}')"#,
            "payload does not match the contract of mail.send at /copies: expected integer, got 1.5",
        ),
        (
            r#"SELECT rouse.enqueue('mail.send', '{"to": "abc", "lines": [{"n": 1}, {}]}')"#,
            "payload does not match the contract of mail.send at /lines/1: the property n is missing",
        ),
        (
            "SELECT jobs.mail_send('a')",
            "payload does not match the contract of mail.send at /to: expected at least 3 characters, got \"a\"",
        ),
        (
            r#"SELECT rouse.enqueue_many('mail.send', ARRAY['{"to": "abc"}', '{"to": "abc", "copies": 6}']::jsonb[])"#,
            "payload 2 does not match the contract of mail.send at /copies: expected at most 5, got 6",
        ),
    ] {
        let (found, hint) = refused(&client, sql).await;
        let (_, found) = found.split_once(": ").unwrap();
        assert_eq!(found, message, "{sql}");
        assert!(hint.contains("Nothing was enqueued"), "{hint}");
    }
    assert_eq!(
        one::<i64>(&client, "SELECT count(*) FROM rouse.job").await,
        2
    );

    // Other payloads are also checked, including that of the job that replaces the first.
    let mut edited: i64 = id;
    for _ in 0..2 {
        let invalid = format!("SELECT rouse.replace_payload({edited}, '{{}}')");
        let (found, _) = refused(&client, &invalid).await;
        assert!(found.contains("the property to is missing"), "{found}");
        let right = format!(r#"SELECT rouse.replace_payload({edited}, '{{"to": "abc"}}')"#);
        edited = one(&client, &right).await;
    }

    // A schedule is checked when it is created, with a due time.
    let schedule = |arguments: &str| {
        format!("SELECT rouse.schedule('s', 'mail.send', cron => '0 3 * * *', {arguments})")
    };
    for (arguments, problem) in [
        ("payload => '{}'", "the property to is missing"),
        (
            r#"payload => '{"to": "abc"}', due_key => 'copies'"#,
            "at /copies: expected integer",
        ),
    ] {
        let (found, _) = refused(&client, &schedule(arguments)).await;
        assert!(found.contains(problem), "{arguments}: {found}");
    }
    for arguments in ["due_key => 'to'", "source => 'bound'"] {
        let _: String = one(&client, &schedule(arguments)).await;
    }

    let comment = "SELECT obj_description('jobs.mail_send'::regproc)";
    let comment: String = one(&client, comment).await;
    assert!(
        comment.starts_with("Does it") && comment.contains("to: Who gets it"),
        "{comment}"
    );
}

#[tokio::test]
async fn a_job_without_a_payload_fits_the_contract_of_a_handler_that_accepts_null() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let optional = r#"{"anyOf": [{"type": "object", "required": ["to"]}, {"type": "null"}]}"#;
    let handlers = [
        ("a.none", r#"{"type": "null"}"#),
        ("a.optional", optional),
        ("mail.send", MAIL),
    ];
    publish(&db, &folder_of("", &[("it.wasm", module(&handlers))]));
    for name in ["a.none", "a.optional"] {
        // The first of them adds the lane, which has a copy of the contract.
        for payload in ["", ", '{}'", ", 'null'"] {
            let sql = format!("SELECT rouse.enqueue('{name}'{payload})");
            let _: i64 = one(&client, &sql).await;
        }
        let many = format!(
            "SELECT count(*) FROM rouse.enqueue_many('{name}', ARRAY['{{}}', 'null']::jsonb[])"
        );
        assert_eq!(one::<i64>(&client, &many).await, 2);
        for payload in [r#"{"a": 1}"#, "[]", "7"] {
            let sql = format!("SELECT rouse.enqueue('{name}', '{payload}')");
            let (found, _) = refused(&client, &sql).await;
            let contract = format!("does not match the contract of {name}");
            assert!(found.contains(&contract), "{payload}: {found}");
        }
    }
    let (found, _) = refused(&client, "SELECT rouse.enqueue('mail.send')").await;
    assert!(found.contains("the property to is missing"), "{found}");
}

#[tokio::test]
async fn the_bundled_handlers_have_contracts_and_run_what_their_functions_enqueue() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let guests = guests_dir();
    let args = [
        "contract",
        "publish",
        "--handlers",
        guests.to_str().unwrap(),
    ];
    let (code, output) = run(&db, &args);
    assert_eq!(code, 0, "{output}");
    assert!(output.contains("jobs.text_stats"), "{output}");
    let (code, output) = run(&db, &args);
    assert_eq!(code, 0);
    assert!(output.contains("nothing changed"), "{output}");
    let worker =
        crate::support::worker::TestWorker::start(&db, rouse::worker::Settings::default()).await;
    let id = one(&client, "SELECT jobs.text_stats('one two')").await;
    let ended = crate::support::worker::ended(&client, id).await;
    assert_eq!(ended.result.unwrap()["words"], 2);
    worker.drain().await;
}

#[tokio::test]
async fn diff_changes_nothing_and_exits_with_one_if_something_would_change() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder_of("", &[("mail.wasm", module(&[("mail.send", MAIL)]))]);
    let (code, output) = contract(&db, &folder, &["diff"]);
    assert_eq!(code, 1);
    assert!(output.contains("new      jobs.mail_send"), "{output}");
    assert_eq!(
        one::<i64>(&client, "SELECT count(*) FROM rouse.contracts").await,
        0
    );
    assert!(one::<bool>(&client, "SELECT to_regnamespace('jobs') IS NULL").await);
    publish(&db, &folder);
    let (code, output) = contract(&db, &folder, &["diff"]);
    assert_eq!(
        (code, output.trim()),
        (0, "nothing would change (1 unchanged)")
    );
    let fewer = MAIL
        .replace(r#""maximum": 5"#, r#""maximum": 6"#)
        .replace("subject", "title");
    std::fs::write(
        folder.join("handlers-wasm/mail.wasm"),
        module(&[("mail.send", &fewer)]),
    )
    .unwrap();
    let (code, output) = contract(&db, &folder, &["diff"]);
    assert_eq!(code, 1);
    assert!(
        output.contains("changed  jobs.mail_send  (mail.send 0.0.0; -subject +title)"),
        "{output}"
    );
}

#[tokio::test]
async fn only_the_owner_publishes_and_a_function_of_another_login_stays() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder_of(
        "",
        &[(
            "mail.wasm",
            module(&[("mail.send", MAIL), ("mail.other", "true")]),
        )],
    );
    let role = format!("contract_{}", db.address().database);
    let sql = format!("CREATE ROLE {role} LOGIN IN ROLE rouse_operator");
    client.batch_execute(&sql).await.unwrap();
    let url = db.url();
    let (_, rest) = url.split_once('@').unwrap();
    let url = format!("postgres://{role}@{rest}");
    for args in [&["publish"][..], &["delete", "--all"]] {
        let mut args = args.to_vec();
        args.extend(["--database-url", &url]);
        let (code, output) = match args[0] {
            "delete" => run(&db, &[&["contract"], &args[..]].concat()),
            _ => contract(&db, &folder, &args),
        };
        assert_eq!(code, 1, "{output}");
        assert!(
            output.contains("only a member of rouse_owner can publish and delete contracts"),
            "{output}"
        );
    }
    client
        .batch_execute("CREATE SCHEMA jobs; GRANT CREATE, USAGE ON SCHEMA jobs TO rouse_owner; CREATE FUNCTION jobs.mail_send() RETURNS int LANGUAGE sql AS 'SELECT 1'")
        .await
        .unwrap();
    let (code, output) = contract(&db, &folder, &["publish"]);
    assert_eq!(code, 1);
    assert!(
        output
            .contains("function jobs.mail_send already exists, and does not belong to a contract"),
        "{output}"
    );
    assert_eq!(
        one::<i64>(&client, "SELECT count(*) FROM rouse.contracts").await,
        0
    );
    let (code, output) = contract(&db, &folder, &["publish", "--schema", "work", "mail.*"]);
    assert_eq!(code, 0, "{output}");
    assert_eq!(one::<i32>(&client, "SELECT jobs.mail_send()").await, 1);
    assert!(one::<i64>(&client, "SELECT work.mail_other('7')").await > 0);
    for schema in ["rouse", "pg_catalog", "information_schema"] {
        let (code, output) = contract(&db, &folder, &["publish", "--schema", schema]);
        assert_eq!(code, 1);
        assert!(output.contains("cannot be in schema"), "{output}");
    }
    let (code, output) = contract(&db, &folder, &["publish", "no.such"]);
    assert_eq!(code, 1);
    assert!(
        output.contains("no handler of the folder is called no.such"),
        "{output}"
    );
}

#[tokio::test]
async fn producers_may_call_the_functions_and_others_may_not() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder_of("", &[("mail.wasm", module(&[("mail.send", MAIL)]))]);
    publish(&db, &folder);
    let name = &db.address().database;
    for (role, member, may) in [("p", "rouse_producer", true), ("n", "pg_monitor", false)] {
        let sql = format!(
            "CREATE ROLE contract_{role}_{name} IN ROLE {member}; SET ROLE contract_{role}_{name}"
        );
        client.batch_execute(&sql).await.unwrap();
        let called = client.query("SELECT jobs.mail_send('a@b.c')", &[]).await;
        assert_eq!(called.is_ok(), may, "{member}: {called:?}");
        let published = client
            .query("SELECT rouse.publish_contracts('[]')", &[])
            .await;
        assert!(published.is_err(), "{member}");
        client.batch_execute("RESET ROLE").await.unwrap();
    }
}
