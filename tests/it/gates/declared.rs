//! Gates that modules declare.

use std::collections::HashMap;

use rouse::job::declared_gate::{DeclaredGate, GateLimit};
use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::sandbox_guest::guest_of_wasip1;
use crate::support::worker::{SESSION_WAITS, TIMEOUT, until_true};
use crate::support::{Host, TestDb, command, folder_of, rouse_without_database, show_handler};

/// A module with these handlers and their gates.
fn module(handlers: &[(&str, Value)]) -> Vec<u8> {
    let handlers = handlers
        .iter()
        .map(|(name, gates)| json!({"name": name, "gates": gates, "concurrency": 4}));
    let manifest = json!({"handlers": handlers.collect::<Vec<_>>()});
    guest_of_wasip1(
        "",
        &manifest.to_string(),
        "(call $return_ok (i32.const 0) (i32.const 0))",
    )
}

/// A host on a folder with this module.
fn host(db: &TestDb, module: &[u8]) -> Host {
    let folder = folder_of("", &[("mail.wasm", module)]);
    let host = Host::spawn(command(&db.url(), &["serve", "--http", "off"], &folder));
    host.line(TIMEOUT, |line| line.contains("modules loaded"));
    host
}

/// The gates in the database by name, without the settings that are not set; each with the transaction that wrote it.
async fn gates(client: &Client) -> HashMap<String, (Value, String)> {
    let sql =
        "SELECT name, jsonb_strip_nulls(to_jsonb(g) - 'name'), xmin::text FROM rouse.gate AS g";
    let rows = client.query(sql, &[]).await.unwrap();
    let gates = rows
        .iter()
        .map(|row| (row.get(0), (row.get(1), row.get(2))));
    gates.collect()
}

async fn until_gate(client: &Client, name: &str) {
    until_true(
        client,
        &format!("SELECT EXISTS (SELECT FROM rouse.gate WHERE name = '{name}')"),
    )
    .await;
}

async fn changes(client: &Client) -> i64 {
    let sql = "SELECT count(*) FROM rouse.record WHERE event IN ('gate_set', 'gate_deleted')";
    client.query_one(sql, &[]).await.unwrap().get(0)
}

fn every_kind() -> Value {
    json!([
        {"kind": "max_concurrent", "max": 5, "key": ["tenant"]},
        {"kind": "throttle", "max": 100, "period_ms": 60_000, "burst": 10, "key": ["$.api"]},
        {"kind": "throttle", "max": 1000, "period_ms": 3_600_000},
        {"kind": "singleton", "key": ["$.doc", "source"], "during": "queued", "on_conflict": "keep"},
        {"kind": "debounce", "period_ms": 5000, "max_wait_ms": 60_000, "edge": "trailing"},
    ])
}

#[tokio::test]
async fn a_host_sets_the_gates_of_its_modules_and_a_version_without_them_deletes_them() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let first = host(&db, &module(&[("mail.send", every_kind())]));
    until_gate(&client, "mail.send/throttle.2").await;
    first.stop();
    let of_first = gates(&client).await;
    let row = |name: &str| &of_first[name].0;
    for (name, expected) in [
        (
            "mail.send/max_concurrent",
            json!({"kind": "max_concurrent", "max": 5, "key": ["tenant"]}),
        ),
        (
            "mail.send/throttle",
            json!({"kind": "throttle", "max": 100, "period_ms": 60_000, "burst": 10, "key": ["$.api"]}),
        ),
        (
            "mail.send/throttle.2",
            json!({"kind": "throttle", "max": 1000, "period_ms": 3_600_000, "key": []}),
        ),
        (
            "mail.send/singleton",
            json!({"kind": "singleton", "during": "queued", "on_conflict": "keep", "key": ["$.doc", "source"]}),
        ),
        (
            "mail.send/debounce",
            json!({"kind": "debounce", "period_ms": 5000, "max_wait_ms": 60_000, "edge": "trailing", "key": []}),
        ),
    ] {
        let mut expected = expected;
        expected["handler"] = "mail.send".into();
        expected["declared_by"] = "mail.send".into();
        assert_eq!(*row(name), expected, "{name}");
    }
    assert_eq!(of_first.len(), 5);
    assert_eq!(changes(&client).await, 5);

    // A second start writes nothing about gates that have not changed. The host sends the gates in the order of the
    // handlers.
    let one = json!([{"kind": "max_concurrent", "max": 1}]);
    let second = host(
        &db,
        &module(&[("mail.send", every_kind()), ("mail.wait", one.clone())]),
    );
    until_gate(&client, "mail.wait/max_concurrent").await;
    assert_eq!(changes(&client).await, 6);
    let mut of_second = gates(&client).await;
    of_second.remove("mail.wait/max_concurrent");
    assert_eq!(of_second, of_first);

    // The host that loads its version last decides, even while another host has gates. Handlers that this host does not
    // have keep their gates.
    let third = host(&db, &module(&[("mail.send", json!([]))]));
    until_true(&client, "SELECT count(*) = 1 FROM rouse.gate").await;
    assert!(
        gates(&client)
            .await
            .contains_key("mail.wait/max_concurrent")
    );
    second.stop();
    third.stop();
    assert_eq!(changes(&client).await, 11);
}

/// The transaction acts like that of an operator who sets a gate and leaves the transaction open.
#[tokio::test]
async fn gates_whose_declaration_was_held_up_are_declared_soon_afterwards() {
    let db = TestDb::new().await;
    let (operator, client) = (db.client().await, db.client().await);
    let lock = "BEGIN; LOCK TABLE rouse.lane IN SHARE UPDATE EXCLUSIVE MODE";
    operator.batch_execute(lock).await.unwrap();
    let host = host(&db, &module(&[("mail.send", every_kind())]));
    host.line(TIMEOUT, |line| {
        line.contains("cannot set the gates that modules declare; trying again")
    });
    operator.batch_execute("COMMIT").await.unwrap();
    until_gate(&client, "mail.send/throttle.2").await;
    host.stop();
}

/// Otherwise, a declaration and a claim could each hold a lock that the other waits for.
#[tokio::test]
async fn a_declaration_locks_its_gates_in_the_order_in_which_claims_do() {
    let db = TestDb::new().await;
    let (claim, client) = (db.client().await, db.client().await);
    // The order in which the gates of this handler are locked differs from the order of their names, in which they are
    // changed.
    let handler = "SELECT 'h' || n FROM generate_series(1, 1000) AS n
         WHERE hashtextextended('h' || n || '/max_concurrent', 0) & 1023 > hashtextextended('h' || n || '/throttle', 0) & 1023
         LIMIT 1";
    let handler: String = client.query_one(handler, &[]).await.unwrap().get(0);
    let store = db.worker().await;
    let gates = |key: &str| {
        let throttle = GateLimit::Throttle {
            max: 1,
            period_ms: 1000,
            burst: None,
        };
        [GateLimit::MaxConcurrent { max: 1 }, throttle].map(|limit| DeclaredGate {
            limit,
            key: vec![key.to_owned()],
        })
    };
    assert!(
        store
            .declare_gates(&handler, &gates("tenant"))
            .await
            .unwrap()
    );
    let lock = |kind: &str| format!("SELECT rouse._lock('gate', '{handler}/{kind}')");
    claim
        .batch_execute(&format!("BEGIN; {}", lock("throttle")))
        .await
        .unwrap();
    let declaring = {
        let handler = handler.clone();
        tokio::spawn(async move { store.declare_gates(&handler, &gates("source")).await })
    };
    until_true(&client, SESSION_WAITS).await;
    claim
        .batch_execute(&format!("{}; COMMIT", lock("max_concurrent")))
        .await
        .unwrap();
    assert!(declaring.await.unwrap().unwrap());
}

#[tokio::test]
async fn a_changed_module_replaces_its_gates_while_the_host_runs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let gate = |max: u32| json!([{"kind": "max_concurrent", "max": max}]);
    let folder = folder_of("", &[("mail.wasm", module(&[("mail.send", gate(3))]))]);
    let host = Host::spawn(command(&db.url(), &["serve", "--http", "off"], &folder));
    until_gate(&client, "mail.send/max_concurrent").await;
    let modules = folder.join("handlers-wasm");
    std::fs::write(modules.join(".new"), module(&[("mail.send", gate(4))])).unwrap();
    std::fs::rename(modules.join(".new"), modules.join("mail.wasm")).unwrap();
    until_true(&client, "SELECT max = 4 FROM rouse.gate").await;
    host.stop();
}

#[tokio::test]
async fn a_gate_that_an_operator_has_set_is_left_alone() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "SELECT rouse.set_gate('mail.send/throttle', 'throttle', handler => 'mail.send', max => 7, period => '1 day')",
        )
        .await
        .unwrap();
    let set = gates(&client).await;
    let with_gates = host(&db, &module(&[("mail.send", every_kind())]));
    until_gate(&client, "mail.send/throttle.2").await;
    let all = gates(&client).await;
    assert_eq!(all["mail.send/throttle"], set["mail.send/throttle"]);
    assert_eq!(all.len(), 5);
    with_gates.stop();
    let without = host(&db, &module(&[("mail.send", json!([]))]));
    until_true(&client, "SELECT count(*) = 1 FROM rouse.gate").await;
    assert_eq!(gates(&client).await, set);
    without.stop();
}

#[tokio::test]
async fn a_limited_worker_declares_only_gates_of_handlers_that_it_may_serve() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let store = db.worker().await;
    let gate = [DeclaredGate {
        limit: GateLimit::MaxConcurrent { max: 1 },
        key: Vec::new(),
    }];
    assert!(store.declare_gates("other", &gate).await.unwrap());
    client
        .batch_execute(
            "UPDATE rouse.worker SET limited = true;
             INSERT INTO rouse.worker_login (login, worker_ids, queues, handlers)
             VALUES (session_user::regrole, '{*}', '{*}', '{mail.*}')",
        )
        .await
        .unwrap();
    assert!(store.declare_gates("mail.send", &gate).await.unwrap());
    assert!(!store.declare_gates("mail.send", &gate).await.unwrap());
    for gates in [&gate[..], &[]] {
        let why = store.declare_gates("other", gates).await.unwrap_err();
        assert!(
            why.to_string()
                .contains("may not set gates of handler 'other'"),
            "{why}"
        );
    }
    let declared = store.handlers_with_declared_gates().await.unwrap();
    assert_eq!(declared, ["mail.send", "other"].map(str::to_owned).into());
    // The login may serve all handlers, but not all queues: a gate applies to all queues.
    client
        .batch_execute("UPDATE rouse.worker_login SET handlers = '{*}', queues = '{mail}'")
        .await
        .unwrap();
    let why = store.declare_gates("mail.send", &[]).await.unwrap_err();
    assert!(why.to_string().contains("may not set gates"), "{why}");
}

#[tokio::test]
async fn names_of_gates_are_shown_as_the_database_gives_them() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // The maximum length of the name of a handler.
    let handler = format!("mail.{}", "x".repeat(123));
    let max = |max: u32| json!({"kind": "max_concurrent", "max": max});
    let gates_of = json!([max(1), {"kind": "singleton"}, max(2), max(3)]);
    let module = module(&[(&handler, gates_of)]);
    let folder = folder_of("", &[("mail.wasm", &module)]);
    let json = show_handler(&handler, &folder, &["--json"]).json();
    let shown = json["manifest"]["gates"].as_array().unwrap();
    let host = host(&db, &module);
    until_gate(&client, &format!("{handler}/singleton")).await;
    let gates = gates(&client).await;
    assert_eq!(gates.len(), 4);
    for gate in shown {
        let row = &gates[gate["name"].as_str().unwrap()].0;
        for key in ["kind", "max", "key", "during", "on_conflict"] {
            assert_eq!(row[key], gate[key], "{gate}");
        }
    }
    host.stop();
}

#[test]
fn gates_and_concurrency_are_shown() {
    let module = module(&[("mail.send", every_kind())]);
    let folder = folder_of("", &[("mail.wasm", &module)]);
    let text = show_handler("mail.send", &folder, &[]);
    text.exits(0)
        .prints(" mail.send/max_concurrent  at most 5 running jobs of each tenant\n");
    let line = |part: &str| {
        let line = text.stdout.lines().find(|line| line.contains(part));
        line.unwrap_or_else(|| panic!("{part}: {}", text.stdout))
    };
    assert!(line("mail.send/throttle.2").contains("at most 1000 jobs start in any 1h"));
    let concurrency = line("concurrency");
    assert!(
        concurrency.contains('4') && concurrency.contains("module"),
        "{concurrency}"
    );
    let json = show_handler("mail.send", &folder, &["--json"]).json();
    let manifest = &json["manifest"];
    assert_eq!(manifest["gates"][2]["name"], "mail.send/throttle.2");
    assert_eq!(
        (&manifest["concurrency"], &manifest["from"]["concurrency"]),
        (&json!(4), &json!("module"))
    );

    let table = "[handlers.\"mail.*\"]";
    let folder = folder_of(
        &format!("{table}\nconcurrency = 2\n"),
        &[("mail.wasm", &module)],
    );
    let json = show_handler("mail.send", &folder, &["--json"]).json();
    let manifest = &json["manifest"];
    assert_eq!(
        (&manifest["concurrency"], &manifest["from"]["concurrency"]),
        (&json!(2), &json!(table))
    );
}

#[test]
fn a_module_with_an_invalid_gate_is_refused() {
    let invalid = module(&[("mail.send", json!([{"kind": "throttle", "max": 5}]))]);
    let folder = folder_of("", &[("mail.wasm", &invalid)]);
    rouse_without_database(&["handlers"], &folder)
        .exits(1)
        .prints("is invalid for the handler `mail.send`: gates[0]: period_ms is missing");
}
