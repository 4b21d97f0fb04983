//! How operators set and delete gates, and what they can see of them.

mod keys;

use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::support::database::refusal;
use crate::support::{CommandOutput, TestDb, command, rouse_in, scratch};

async fn gate(db: &TestDb, args: &[&str]) -> CommandOutput {
    rouse_in(db, &[&["gate"], args].concat(), &scratch("gates")).await
}

async fn run(client: &Client, sql: &str) {
    client.batch_execute(sql).await.unwrap();
}

/// Enqueues this many jobs of a tenant.
async fn enqueue(client: &Client, handler: &str, tenant: &str, jobs: i32) {
    client
        .execute(
            "SELECT rouse.enqueue($1, tenant => $2) FROM generate_series(1, $3)",
            &[&handler, &tenant, &jobs],
        )
        .await
        .unwrap();
}

#[tokio::test]
async fn the_command_line_sets_lists_and_deletes_gates() {
    let db = TestDb::new().await;
    gate(&db, &[]).await.exits(0).prints("rouse: no gates\n");
    gate(
        &db,
        &[
            "set",
            "tenants",
            "--kind",
            "max_concurrent",
            "--key",
            "tenant",
            "--max",
            "5",
        ],
    )
    .await
    .exits(0)
    .prints(
        "gate tenants is set: at most 5 running jobs of each tenant (all handlers, all queues)\n",
    );
    gate(
        &db,
        &[
            "set", "api", "--kind", "throttle", "--queue", "api", "--key", "$.account", "--key", "source", "--max", "10", "--period", "1s",
            "--burst", "50",
        ],
    )
    .await
    .exits(0)
    .prints("gate api is set: 10 jobs of each $.account and source start in 1s on average, at most 50 at once (all handlers, queue api)\n")
    .prints("rouse: nothing was enqueued recently into queue api");
    gate(
        &db,
        &["set", "report", "--kind", "singleton", "--handler", "report.make", "--during", "running", "--on-conflict", "refuse"],
    )
    .await
    .exits(0)
    .prints("gate report is set: one queued or running job of each tenant; later ones are refused (handler report.make, all queues)\n")
    .prints("rouse: nothing was enqueued recently for handler report.make");
    let index = gate(
        &db,
        &[
            "set",
            "index",
            "--kind",
            "debounce",
            "--handler",
            "index.build",
            "--edge",
            "leading",
            "--period",
            "5s",
            "--max-wait",
            "1m",
            "--json",
        ],
    )
    .await;
    let expected = json!({
        "name": "index", "kind": "debounce", "handler": "index.build", "queue": null, "key": [], "max": null, "period_ms": 5000, "burst": null,
        "during": null, "on_conflict": null, "edge": "leading", "max_wait_ms": 60000, "declared_by": null});
    assert_eq!(index.exits(0).json(), expected);

    // Options that are left out have their defaults, even if the gate already exists.
    gate(
        &db,
        &[
            "set", "api", "--kind", "throttle", "--max", "1", "--period", "1d",
        ],
    )
    .await
    .exits(0)
    .prints("gate api is set: at most 1 job starts in any 1day (all handlers, all queues)\n");
    let all = gate(&db, &["ls", "--json"]).await.json();
    assert_eq!(all["gates"][1], expected);
    let names: Vec<&Value> = all["gates"]
        .as_array()
        .unwrap()
        .iter()
        .map(|gate| &gate["name"])
        .collect();
    assert_eq!(names, ["api", "index", "report", "tenants"]);
    gate(&db, &["ls"])
        .await
        .exits(0)
        .prints("at most 1 job starts in any 1day")
        .prints("the first job of a burst of jobs of each tenant; the burst ends once none has been enqueued for 5s, or 1m after the first")
        .prints("at most 5 running jobs of each tenant");

    gate(&db, &["delete", "api", "nothing", "report"])
        .await
        .exits(3)
        .prints("gate api is deleted\n")
        .prints("rouse: no gate nothing (`rouse gate ls`)\n")
        .prints("rouse: 2 of 3 gates done, 1 refused\n");
    let deleted = gate(&db, &["delete", "index", "--json"]).await;
    assert_eq!(
        deleted.exits(0).json(),
        json!({"gate": "index", "deleted": true})
    );
    gate(&db, &["delete", "index"])
        .await
        .exits(3)
        .prints("rouse: no gate index");
    gate(&db, &["show", "index"])
        .await
        .exits(3)
        .prints("rouse: no gate index");
    let left = gate(&db, &["--json"]).await.json();
    assert_eq!(left["gates"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn an_invalid_setting_is_explained_and_changes_nothing() {
    let db = TestDb::new().await;
    gate(&db, &["set", "x", "--kind", "throttle", "--max", "3"])
        .await
        .exits(1)
        .prints("rouse.set_gate: period must be 1 millisecond to 30 days, not null");
    gate(
        &db,
        &["set", "x", "--kind", "max_concurrent", "--max", "3", "--key", "tenant", "--key", "source", "--key", "queue"],
    )
    .await
    .exits(1)
    .prints("key must be at most two of tenant, source, handler, queue and paths of the payload such as $.customer.id, not {tenant,source,queue}");
    gate(&db, &["set", "x", "--kind", "semaphore"])
        .await
        .exits(2)
        .prints("[possible values: max_concurrent, throttle, batch, singleton, debounce]");
    gate(&db, &["set", "x", "--kind", "throttle", "--period", "soon"])
        .await
        .exits(2)
        .prints("it is not a duration such as 90s or 2h");
    gate(&db, &["set", "x", "--max", "3"])
        .await
        .exits(2)
        .prints("--kind");
    gate(&db, &["ls"]).await.exits(0).prints("no gates");
}

#[tokio::test]
async fn the_database_refuses_each_invalid_setting_with_its_reason() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let long = "x".repeat(161);
    for (arguments, reason) in [
        (
            "NULL, 'throttle', max => 1, period => '1 s'",
            "name and kind must not be null",
        ),
        ("'g', NULL", "name and kind must not be null"),
        (
            "'G', 'throttle'",
            "name must consist of lower-case letters, digits and _ . / -, not 'G'",
        ),
        (
            &format!("'{long}', 'throttle'"),
            "name must consist of lower-case letters, digits and _ . / -, not 'xxx",
        ),
        (
            "'g', 'semaphore'",
            "kind must be max_concurrent, throttle, batch, singleton or debounce, not 'semaphore'",
        ),
        (
            "'g', 'max_concurrent', max => 1, queue => 'a b'",
            "'a b' is not a queue name",
        ),
        (
            "'g', 'max_concurrent', max => 1, handler => 'A'",
            "'A' is not a handler name",
        ),
        (
            &format!("'g', 'max_concurrent', max => 1, handler => '{long}'"),
            "xxx' is not a handler name",
        ),
        (
            "'g', 'max_concurrent', max => 1, key => '{tenant,source,queue}'",
            "key must be at most two of tenant, source, handler, queue and paths",
        ),
        (
            "'g', 'max_concurrent', max => 1, key => '{tenant,NULL}'",
            "not {tenant,NULL}",
        ),
        (
            "'g', 'max_concurrent', max => 1, key => '{tenant,tenant}'",
            "not {tenant,tenant}",
        ),
        (
            "'g', 'max_concurrent', max => 1, key => '{priority}'",
            "not {priority}",
        ),
        ("'g', 'max_concurrent', max => 1, key => '{$}'", "not {$}"),
        (
            "'g', 'max_concurrent', max => 1, key => '{$.a.b.c.d.e.f.g.h.i}'",
            "not {$.a.b.c.d.e.f.g.h.i}",
        ),
        ("'g', 'singleton'", "singleton needs a handler"),
        (
            "'g', 'debounce', period => '1 s'",
            "debounce needs a handler",
        ),
        (
            "'g', 'max_concurrent'",
            "max must be 1 to 1000000, not null",
        ),
        (
            "'g', 'max_concurrent', max => 0",
            "max must be 1 to 1000000, not 0",
        ),
        (
            "'g', 'throttle', max => 1000001, period => '1 s'",
            "max must be 1 to 1000000, not 1000001",
        ),
        (
            "'g', 'throttle', max => 1001, period => '1 s'",
            "without a burst, max must be 1 to 1000, not 1001",
        ),
        (
            "'g', 'throttle', max => 1, period => '1 s', burst => 0",
            "burst must be 1 to 1000000, not 0",
        ),
        (
            "'g', 'throttle', max => 1",
            "period must be 1 millisecond to 30 days, not null",
        ),
        (
            "'g', 'throttle', max => 1, period => '31 days'",
            "period must be 1 millisecond to 30 days, not 744:00:00",
        ),
        (
            "'g', 'debounce', handler => 'h', period => '-1 s'",
            "period must be 1 millisecond to 30 days, not -00:00:01",
        ),
        (
            "'g', 'singleton', handler => 'h', during => 'period'",
            "period must be 1 millisecond to 30 days, not null",
        ),
        (
            "'g', 'singleton', handler => 'h', during => 'ever'",
            "during must be queued, running or period, not 'ever'",
        ),
        (
            "'g', 'singleton', handler => 'h', on_conflict => 'drop'",
            "on_conflict must be keep, replace or refuse, not 'drop'",
        ),
        (
            "'g', 'singleton', handler => 'h', during => 'running', on_conflict => 'replace'",
            "a job is replaced only while it is queued: leave out during",
        ),
        (
            "'g', 'debounce', handler => 'h', period => '1 s', edge => 'both'",
            "edge must be trailing or leading, not 'both'",
        ),
        (
            "'g', 'debounce', handler => 'h', period => '2 s', max_wait => '1 s'",
            "max_wait must be at least the period, and at most 30 days, not 00:00:01",
        ),
        (
            "'g', 'debounce', handler => 'h', period => '2 s', max_wait => '31 days'",
            "max_wait must be at least the period, and at most 30 days, not 744:00:00",
        ),
        (
            "'g', 'singleton', handler => 'h', max => 1",
            "singleton has no max",
        ),
        (
            "'g', 'debounce', handler => 'h', period => '1 s', max => 1",
            "debounce has no max",
        ),
        (
            "'g', 'max_concurrent', max => 1, period => '1 s'",
            "max_concurrent has no period",
        ),
        (
            "'g', 'singleton', handler => 'h', period => '1 s'",
            "a singleton has a period only if during is period",
        ),
        (
            "'g', 'max_concurrent', max => 1, burst => 1",
            "max_concurrent has no burst",
        ),
        (
            "'g', 'throttle', max => 1, period => '1 s', during => 'queued'",
            "throttle has no during",
        ),
        (
            "'g', 'max_concurrent', max => 1, during => 'period'",
            "max_concurrent has no during",
        ),
        (
            "'g', 'debounce', handler => 'h', period => '1 s', on_conflict => 'keep'",
            "debounce has no on_conflict",
        ),
        (
            "'g', 'singleton', handler => 'h', edge => 'leading'",
            "singleton has no edge",
        ),
        (
            "'g', 'throttle', max => 1, period => '2 s', max_wait => '1 s'",
            "throttle has no max_wait",
        ),
    ] {
        let why = refusal(&client, &format!("SELECT rouse.set_gate({arguments})")).await;
        assert!(
            why.starts_with("rouse.set_gate: ") && why.contains(reason),
            "{arguments}: {why}"
        );
    }
    run(&client, "UPDATE rouse.limits SET gates_max = 1; SELECT rouse.set_gate('one', 'max_concurrent', max => 1)").await;
    let why = refusal(
        &client,
        "SELECT rouse.set_gate('two', 'max_concurrent', max => 1)",
    )
    .await;
    assert!(
        why.contains("there are already 1 gates, the maximum")
            && why.contains("raise gates_max in rouse.limits"),
        "{why}"
    );
    // A gate that exists can be replaced. An array of another shape has the same values.
    run(
        &client,
        "SELECT rouse.set_gate('one', 'max_concurrent', max => 2, key => '[0:1]={tenant,source}')",
    )
    .await;
    let key = "SELECT (key)[1] || ' ' || (key)[2] FROM rouse.gates";
    let key: String = client.query_one(key, &[]).await.unwrap().get(0);
    assert_eq!(key, "tenant source");
}

#[tokio::test]
async fn each_change_of_a_gate_leaves_a_record() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let set = "SELECT rouse.set_gate('mail', 'throttle', handler => 'mail.send', queue => 'mail', key => '{tenant}', max => 3, period => '1 min')";
    run(&client, &format!("{set}; {set}")).await;
    run(
        &client,
        "SELECT rouse.set_gate('mail', 'max_concurrent', max => 2)",
    )
    .await;
    run(
        &client,
        "SELECT rouse.delete_gate('mail'); SELECT rouse.delete_gate('mail')",
    )
    .await;
    let records = "SELECT jsonb_build_array(event, queue, who = session_user, detail) FROM rouse.record ORDER BY at";
    let records = client.query(records, &[]).await.unwrap();
    let records: Vec<Value> = records.iter().map(|row| row.get(0)).collect();
    assert_eq!(
        records,
        [
            json!(["gate_set", "mail", true, {"name": "mail", "kind": "throttle", "handler": "mail.send", "queue": "mail", "key": ["tenant"],
                                              "max": 3, "period_ms": 60000}]),
            json!(["gate_set", null, true, {"name": "mail", "kind": "max_concurrent", "key": [], "max": 2}]),
            json!(["gate_deleted", null, true, {"name": "mail"}]),
        ],
        "a call that changes nothing leaves none"
    );
    let audit = rouse_in(&db, &["audit"], &scratch("gates")).await;
    audit.exits(0).prints("gate_set").prints("gate_deleted");
}

#[tokio::test]
async fn an_observer_sees_gates_and_an_operator_changes_them() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // Roles belong to the whole server, which other tests share.
    run(
        &client,
        "DO $$ BEGIN CREATE ROLE gates_observer LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$;
         DO $$ BEGIN CREATE ROLE gates_operator LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$;
         DO $$ BEGIN CREATE ROLE gates_producer LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$;
         GRANT rouse_observer TO gates_observer; GRANT rouse_operator TO gates_operator; GRANT rouse_producer TO gates_producer",
    )
    .await;
    let user = db.address().user;
    let folder = scratch("gates");
    let by = async |role: &str, args: &[&str]| {
        let url = db
            .url()
            .replace(&format!("//{user}@"), &format!("//{role}@"));
        let mut command = command(&url, &[&["gate"], args].concat(), &folder);
        tokio::task::spawn_blocking(move || CommandOutput::run(&mut command))
            .await
            .unwrap()
    };
    let set = [
        "set",
        "tenants",
        "--kind",
        "max_concurrent",
        "--key",
        "tenant",
        "--max",
        "2",
    ];
    by("gates_operator", &set)
        .await
        .exits(0)
        .prints("gate tenants is set");
    enqueue(&client, "mail.send", "acme", 1).await;
    for role in ["gates_observer", "gates_operator"] {
        by(role, &["ls"])
            .await
            .exits(0)
            .prints("at most 2 running jobs of each tenant");
        by(role, &["show", "tenants"]).await.exits(0).prints("acme");
    }
    for role in ["gates_observer", "gates_producer"] {
        by(role, &set)
            .await
            .exits(1)
            .prints("permission denied for function set_gate");
        by(role, &["delete", "tenants"])
            .await
            .exits(1)
            .prints("permission denied for function delete_gate");
    }
    by("gates_producer", &["ls"])
        .await
        .exits(1)
        .prints("permission denied for view gates");
    by("gates_producer", &["show", "tenants"])
        .await
        .exits(1)
        .prints("permission denied for view gates");
    run(&client, "SET ROLE gates_observer; SELECT * FROM rouse.gate; SELECT * FROM rouse.gate_key; SELECT * FROM rouse.gate_keys()").await;
    for change in [
        "DELETE FROM rouse.gate",
        "DELETE FROM rouse.gate_key",
        "UPDATE rouse.gate SET max = 7",
    ] {
        assert!(
            refusal(&client, change).await.contains("permission denied"),
            "{change}"
        );
    }
    by("gates_operator", &["delete", "tenants"])
        .await
        .exits(0)
        .prints("gate tenants is deleted");
}
