//! How operators set direct dispatch, and what they can see of it.

use serde_json::{Value, json};

use super::worker;
use crate::support::database::refusal;
use crate::support::{TestDb, run_rouse, set_mail};

#[tokio::test]
async fn settings_of_direct_dispatch_are_checked_and_recorded() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for (arguments, reason) in [
        (
            "'broadcast'",
            "dispatch must be shared, round-robin, hash or random, not 'broadcast'",
        ),
        (
            "'hash', '{}'",
            "key must be one to three of tenant, source and paths of the payload such as $.customer.id, not {}",
        ),
        ("'hash', '{handler}'", "key must be one to three"),
        ("'hash', '{tenant,tenant}'", "key must be one to three"),
        (
            "'hash', '{tenant,source,$.a,$.b}'",
            "key must be one to three",
        ),
        ("'hash', '{NULL}'", "key must be one to three"),
        ("'hash', '{{tenant},{source}}'", "key must be one to three"),
        ("'hash', '{$}'", "key must be one to three"),
        (
            "'random', '{tenant}'",
            "only hash has a key; dispatch of queue q is random",
        ),
        (
            "NULL, '{tenant}'",
            "only hash has a key; dispatch of queue q is shared",
        ),
    ] {
        let why = refusal(
            &client,
            &format!("SELECT rouse.set_dispatch('q', {arguments})"),
        )
        .await;
        assert!(
            why.contains(&format!("rouse.set_dispatch: {reason}")),
            "{arguments}: {why}"
        );
    }
    let why = refusal(&client, "SELECT rouse.set_dispatch('no queue', 'hash')").await;
    assert!(why.contains("'no queue' is not a queue name"), "{why}");
    client
        .batch_execute(
            "SELECT rouse.set_dispatch('q', 'hash', '{source,$.a.b}'); SELECT rouse.set_dispatch('q', 'hash'); SELECT rouse.set_dispatch('q');
             SELECT rouse.set_dispatch('q', 'random')",
        )
        .await
        .unwrap();
    let records = "SELECT jsonb_agg(detail ORDER BY at) FROM rouse.record WHERE event = 'dispatch_set' AND queue = 'q'";
    let records: Value = client.query_one(records, &[]).await.unwrap().get(0);
    let expected =
        json!([{"dispatch": "hash", "key": ["source", "$.a.b"]}, {"dispatch": "random"}]);
    assert_eq!(
        records, expected,
        "calls that change nothing leave no record"
    );
    let settings = "SELECT dispatch, dispatch_key FROM rouse.queues WHERE name = 'q'";
    let row = client.query_one(settings, &[]).await.unwrap();
    assert_eq!(
        (row.get::<_, &str>(0), row.get::<_, Option<Vec<String>>>(1)),
        ("random", None)
    );
}

#[tokio::test]
async fn the_command_line_sets_direct_dispatch() {
    let db = TestDb::new().await;
    let client = db.client().await;
    worker(&db, "a").await;
    client
        .batch_execute("SELECT rouse.enqueue('greet', queue => 'mail')")
        .await
        .unwrap();
    let set = async |options: &[&str]| set_mail(&db, options).await;
    set(&["--dispatch", "round-robin"])
        .await
        .exits(0)
        .prints("jobs of queue mail go to the workers in turn (round-robin)\n");
    set(&[
        "--dispatch",
        "hash",
        "--dispatch-key",
        "tenant",
        "--dispatch-key",
        "$.region",
    ])
    .await
    .exits(0)
    .prints("jobs of queue mail go to the same worker for the same tenant and $.region (hash)\n");
    let all = set(&["--dispatch-key", "tenant,source", "--json"])
        .await
        .json();
    assert_eq!(
        all,
        json!({"queue": "mail", "dispatch": "hash", "dispatch_key": ["tenant", "source"]})
    );
    run_rouse(&db, &["queue", "ls"])
        .await
        .exits(0)
        .prints("mail: jobs go to the same worker for the same tenant and source (hash)\n");
    let listed = run_rouse(&db, &["queue", "ls", "--json"]).await.json();
    let queues = listed["queues"].as_array().unwrap();
    let mail = queues.iter().find(|queue| queue["name"] == "mail").unwrap();
    assert_eq!(
        (&mail["dispatch"], &mail["dispatch_key"]),
        (&json!("hash"), &json!(["tenant", "source"]))
    );
    let other = queues
        .iter()
        .find(|queue| queue["name"] == "default")
        .unwrap();
    assert_eq!(
        (&other["dispatch"], &other["dispatch_key"]),
        (&json!("shared"), &json!(null))
    );
    set(&["--dispatch", "shared"])
        .await
        .exits(0)
        .prints("jobs of queue mail go to any worker (shared)\n");
    set(&["--dispatch-key", "tenant"])
        .await
        .exits(1)
        .prints("only hash has a key; dispatch of queue mail is shared");
    run_rouse(
        &db,
        &[
            "queue",
            "set",
            "other",
            "--dispatch",
            "hash",
            "--dispatch-key",
            "source",
        ],
    )
    .await
    .exits(0);
    set(&["other", "--dispatch-key", "tenant"])
        .await
        .exits(1)
        .prints("jobs of queue other go to the same worker for the same tenant (hash)\n")
        .prints("1 of 2 queues done, 1 refused");
    set(&["--dispatch", "fastest"])
        .await
        .exits(2)
        .prints("invalid value 'fastest'");
    set(&["--dispatch", "hash", "--keep-days", "3"])
        .await
        .exits(2)
        .prints("cannot be used with");
    set(&["--dispatch", "hash", "--policy", "drr"])
        .await
        .exits(2)
        .prints("cannot be used with");
}
