//! Contracts over time: several versions in use, handlers that no worker has, handlers without a contract.

use rouse::worker::Settings;
use serde_json::Value;
use tokio_postgres::Client;

use super::{MAIL, contract, module, one, publish, refused};
use crate::commands::run;
use crate::support::worker::{TestWorker, catalog_of, until_true};
use crate::support::{TestDb, folder_of};

const TEXT: &str = r#"{"type": "string"}"#;
const NUMBER: &str = r#"{"type": "number"}"#;

async fn accepts(client: &Client, payload: &str) -> bool {
    let sql = format!("SELECT rouse.enqueue('x.y', '{payload}')");
    client.query(&sql, &[]).await.is_ok()
}

#[tokio::test]
async fn payloads_that_a_version_in_use_accepts_are_accepted() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (old, new) = (module(&[("x.y", TEXT)]), module(&[("x.y", NUMBER)]));
    let folder = folder_of("", &[("x.wasm", &old)]);
    publish(&db, &folder);
    assert!(accepts(&client, "\"a\"").await && !accepts(&client, "7").await);

    // A worker still runs the old module when the new one is published.
    let catalog = catalog_of(&[("x.wasm", &old)]).await;
    let worker = TestWorker::start_on(&db, Settings::default(), catalog);
    until_true(
        &client,
        "SELECT count(*) = 1 FROM rouse.handlers WHERE handler = 'x.y'",
    )
    .await;
    std::fs::write(folder.join("handlers-wasm/x.wasm"), &new).unwrap();
    let changes = publish(&db, &folder);
    assert_eq!(changes[0]["versions"], 2, "{changes}");
    assert!(accepts(&client, "\"a\"").await && accepts(&client, "7").await);
    assert!(!accepts(&client, "null").await, "neither accepts it");
    let (_, hint) = refused(&client, "SELECT rouse.enqueue('x.y', 'null')").await;
    assert!(
        hint.contains("and 1 more that are in use do not accept it either"),
        "{hint}"
    );

    // The old version is removed with its last worker.
    worker.drain().await;
    until_true(
        &client,
        "SELECT count(*) = 0 FROM rouse.handlers WHERE handler = 'x.y'",
    )
    .await;
    publish(&db, &folder);
    assert!(!accepts(&client, "\"a\"").await && accepts(&client, "7").await);
}

#[tokio::test]
async fn the_function_of_a_removed_handler_raises_an_error_until_it_is_deleted() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder_of(
        "",
        &[
            ("mail.wasm", module(&[("mail.send", MAIL)])),
            ("x.wasm", module(&[("x.y", TEXT)])),
        ],
    );
    publish(&db, &folder);
    std::fs::remove_file(folder.join("handlers-wasm/mail.wasm")).unwrap();
    let (code, output) = contract(&db, &folder, &["publish"]);
    assert_eq!(code, 0);
    assert!(output.contains("removed  jobs.mail_send"), "{output}");
    let (message, hint) = refused(&client, "SELECT jobs.mail_send('a@b.c')").await;
    assert_eq!(
        message,
        "jobs.mail_send: handler mail.send was removed: no worker has it"
    );
    assert!(hint.contains("rouse contract delete mail.send"), "{hint}");
    // A publication of some handlers does not remove any others.
    let (code, output) = contract(&db, &folder, &["publish", "x.*"]);
    assert_eq!((code, output.trim()), (0, "nothing changed (1 unchanged)"));

    // The contract comes back with its module, and is deleted by `rouse contract delete`.
    std::fs::write(
        folder.join("handlers-wasm/mail.wasm"),
        module(&[("mail.send", MAIL)]),
    )
    .unwrap();
    publish(&db, &folder);
    assert!(one::<i64>(&client, "SELECT jobs.mail_send('a@b.c')").await > 0);
    let (code, output) = run(&db, &["contract", "delete", "mail.send", "no.such"]);
    assert_eq!(code, 1);
    assert!(output.contains("no.such has no contract"), "{output}");
    let (code, output) = run(&db, &["contract", "delete", "mail.send", "--json"]);
    assert_eq!(code, 0, "{output}");
    let deleted: Value = serde_json::from_str(&output).unwrap();
    assert_eq!(deleted["deleted"], serde_json::json!(["mail.send"]));
    let gone = "SELECT count(*) = 0 FROM pg_proc WHERE proname = 'mail_send'";
    assert!(one::<bool>(&client, gone).await);
    let (code, output) = run(&db, &["contract", "delete", "--all"]);
    assert_eq!((code, output.trim()), (0, "deleted  x.y"));
    assert_eq!(
        one::<i64>(&client, "SELECT count(*) FROM rouse.contract").await,
        0
    );
}

#[tokio::test]
async fn the_function_of_a_removed_handler_raises_an_error_even_in_a_schema_with_an_odd_name() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let create = r#"CREATE SCHEMA "100% ""j" AUTHORIZATION rouse_owner"#;
    client.batch_execute(create).await.unwrap();
    let folder = folder_of(
        "",
        &[
            ("x.wasm", module(&[("x.y", TEXT)])),
            ("z.wasm", module(&[("z", TEXT)])),
        ],
    );
    let publish_there = || contract(&db, &folder, &["publish", "--schema", "100% \"j"]);
    let (code, output) = publish_there();
    assert_eq!(code, 0, "{output}");
    let call = r#"SELECT "100% ""j".x_y('it')"#;
    assert!(one::<i64>(&client, call).await > 0);
    std::fs::remove_file(folder.join("handlers-wasm/x.wasm")).unwrap();
    let (code, output) = publish_there();
    assert_eq!(code, 0, "{output}");
    let (message, _) = refused(&client, call).await;
    assert_eq!(
        message,
        "100% \"j.x_y: handler x.y was removed: no worker has it"
    );
}

#[tokio::test]
async fn a_folder_with_a_refused_module_removes_nothing() {
    let db = TestDb::new().await;
    let folder = folder_of(
        "",
        &[
            ("mail.wasm", module(&[("mail.send", MAIL)])),
            ("x.wasm", module(&[("x.y", TEXT)])),
        ],
    );
    publish(&db, &folder);
    std::fs::write(folder.join("handlers-wasm/mail.wasm"), "no module").unwrap();
    let (code, output) = contract(&db, &folder, &["publish"]);
    assert_eq!(code, 0);
    assert!(
        output.contains("mail.wasm is refused, so nothing is removed"),
        "{output}"
    );
    assert!(output.contains("nothing changed (1 unchanged)"), "{output}");
}

#[tokio::test]
async fn an_unknown_handler_gets_an_error_a_notice_or_silence() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder_of("", &[("x.wasm", module(&[("x.y", TEXT)]))]);
    publish(&db, &folder);
    let set = async |value: &str| {
        let sql = format!("UPDATE rouse.limits SET unknown_handlers = {value}");
        client.batch_execute(&sql).await.unwrap();
    };
    let calls = [
        "SELECT rouse.enqueue('no.such')",
        "SELECT rouse.enqueue_many('no.such', '{\"{}\"}')",
    ];
    for call in calls {
        set("DEFAULT").await;
        assert!(client.query(call, &[]).await.is_ok(), "a notice");
        set("'silence'").await;
        assert!(client.query(call, &[]).await.is_ok());
        set("'error'").await;
        let (message, _) = refused(&client, call).await;
        assert_eq!(
            message,
            "rouse.enqueue: handler no.such is unknown: it has no contract, and no live worker has it"
        );
        // The same applies to a lane that already exists.
        assert!(
            one::<bool>(
                &client,
                "SELECT count(*) > 0 FROM rouse.lane WHERE handler = 'no.such'"
            )
            .await
        );
    }
    // A handler that a worker has is known.
    let catalog = catalog_of(&[("n.wasm", &module(&[("no.such", "true")]))]).await;
    let worker = TestWorker::start_on(&db, Settings::default(), catalog);
    until_true(
        &client,
        "SELECT count(*) = 1 FROM rouse.handlers WHERE handler = 'no.such'",
    )
    .await;
    assert!(client.query(calls[0], &[]).await.is_ok());
    worker.drain().await;
    // Without any contract, nothing is checked.
    run(&db, &["contract", "delete", "--all"]);
    assert!(
        client
            .query("SELECT rouse.enqueue('else')", &[])
            .await
            .is_ok()
    );
}

#[tokio::test]
async fn lanes_have_the_contract_of_their_handler_while_it_is_published_removed_and_deleted() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let bad = async |queue: &str| {
        let sql = format!("SELECT rouse.enqueue('mail.send', '{{\"to\": 7}}', queue => '{queue}')");
        client.query(&sql, &[]).await.is_err()
    };
    assert!(!bad("before").await, "nothing is published");
    let folder = folder_of("", &[("mail.wasm", module(&[("mail.send", MAIL)]))]);
    publish(&db, &folder);
    assert!(bad("before").await && bad("after").await);
    client
        .query(
            "SELECT rouse.enqueue('mail.send', '{\"to\": \"a@b.c\"}', queue => 'after')",
            &[],
        )
        .await
        .unwrap();
    assert!(bad("after").await);

    // A new version accepts payloads that the old version refused.
    std::fs::write(
        folder.join("handlers-wasm/mail.wasm"),
        module(&[(
            "mail.send",
            r#"{"type": "object", "properties": {"to": {"type": "integer"}}}"#,
        )]),
    )
    .unwrap();
    publish(&db, &folder);
    assert!(!bad("before").await && !bad("after").await);

    // Once removed, the handler is unknown, even if it has a lane.
    client
        .batch_execute("UPDATE rouse.limits SET unknown_handlers = 'error'")
        .await
        .unwrap();
    std::fs::write(
        folder.join("handlers-wasm/mail.wasm"),
        module(&[("x.y", TEXT)]),
    )
    .unwrap();
    publish(&db, &folder);
    assert!(bad("before").await && bad("after").await);
    let (code, output) = run(&db, &["contract", "delete", "--all"]);
    assert_eq!(code, 0, "{output}");
    assert!(!bad("before").await && !bad("after").await);
}

#[tokio::test]
async fn a_lane_that_is_added_during_a_publication_is_checked_after_the_next_maintenance() {
    let db = TestDb::new().await;
    let (client, producer) = (db.client().await, db.client().await);
    const BAD: &str = "SELECT rouse.enqueue('mail.send', '{\"to\": 7}')";
    producer.batch_execute("BEGIN").await.unwrap();
    producer.batch_execute(BAD).await.unwrap();
    let folder = folder_of("", &[("mail.wasm", module(&[("mail.send", MAIL)]))]);
    publish(&db, &folder);
    producer.batch_execute("COMMIT").await.unwrap();
    assert!(client.batch_execute(BAD).await.is_ok(), "the old copy");
    client
        .batch_execute(
            "SELECT rouse.register('w', sha256('key'), 'here', 'linux', '0', '{}', 1, '{}', '{}');
             SELECT rouse.maintain_lanes((SELECT max(incarnation) FROM rouse.worker), sha256('key'))",
        )
        .await
        .unwrap();
    let (message, _) = refused(&client, BAD).await;
    assert!(message.contains("at /to: expected string"), "{message}");
}
