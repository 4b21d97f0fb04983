//! How operators set shards, and what they can see of them.

use serde_json::json;

use super::{lease, sharded};
use crate::support::database::refusal;
use crate::support::{TestDb, run_rouse, set_mail};

#[tokio::test]
async fn settings_out_of_range_are_refused_and_a_change_leaves_a_record() {
    let (_db, client) = sharded(16).await;
    for (shards, shown) in [("1", "1"), ("1025", "1025"), ("-1", "-1"), ("NULL", "null")] {
        let why = refusal(&client, &format!("SELECT rouse.set_shards('q', {shards})")).await;
        let expected =
            format!("rouse.set_shards: shards must be 2 to 1024, or 0 for none, not {shown}");
        assert!(why.contains(&expected), "{why}");
    }
    let why = refusal(&client, "SELECT rouse.set_shards('no queue', 2)").await;
    assert!(why.contains("'no queue' is not a queue name"), "{why}");
    let set = "SELECT rouse.set_shards('q', 16); SELECT rouse.set_shards('q', 1024); SELECT rouse.set_shards('q', 0)";
    client.batch_execute(set).await.unwrap();
    let records = "SELECT array_agg((r.detail ->> 'shards')::int ORDER BY r.at), bool_and(r.who = session_user)
                   FROM rouse.record AS r WHERE r.event = 'shards_set' AND r.queue = 'q'";
    let row = client.query_one(records, &[]).await.unwrap();
    let (shards, by_login): (Vec<i32>, bool) = (row.get(0), row.get(1));
    assert_eq!(shards, [16, 1024, 0], "the second call has changed nothing");
    assert!(by_login);
}

#[tokio::test]
async fn the_command_line_sets_and_lists_shards() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute("SELECT rouse.enqueue('greet', queue => 'mail')")
        .await
        .unwrap();
    let set = async |options: &[&str]| set_mail(&db, options).await;
    set(&["--shards", "16"])
        .await
        .exits(0)
        .prints("queue mail has 16 shards\n");
    let listed = async || {
        let all = run_rouse(&db, &["queue", "ls", "--json"]).await.json();
        let queues = all["queues"].as_array().unwrap().clone();
        let mail = queues.into_iter().find(|queue| queue["name"] == "mail");
        mail.unwrap()["shards"].clone()
    };
    assert_eq!(listed().await, 16);
    let off = set(&["--shards", "0", "--json"]).await.json();
    assert_eq!(off, json!({"queue": "mail", "shards": 0}));
    assert_eq!(listed().await, 0);
    set(&["--shards", "0"])
        .await
        .exits(0)
        .prints("queue mail has no shards: all workers serve all lanes\n");
    set(&["--shards", "1"])
        .await
        .exits(1)
        .prints("shards must be 2 to 1024, or 0 for none, not 1");
    for other in [["--keep-days", "3"], ["--policy", "drr"]] {
        set(&["--shards", "4", other[0], other[1]])
            .await
            .exits(2)
            .prints("cannot be used with");
    }
}

#[tokio::test]
async fn operators_set_shards_workers_lease_them_and_observers_read_both() {
    let (db, client) = sharded(4).await;
    assert_eq!(lease(&db.worker().await).await.len(), 4);
    let may = async |role: &str, call: &str| {
        let tried = format!("BEGIN; SET LOCAL ROLE {role}; {call}");
        let result = client.batch_execute(&tried).await;
        client.batch_execute("ROLLBACK").await.unwrap();
        match result {
            Ok(()) => true,
            Err(error) => match error.code().unwrap().code() {
                "42501" => false,
                // No worker has this key.
                "RW004" => true,
                _ => panic!("{role}: {call}: {error:?}"),
            },
        }
    };
    let roles = ["enqueuer", "producer", "operator", "worker", "observer"];
    let set = "SELECT rouse.set_shards('q', 2)";
    let lease = "SELECT * FROM rouse.lease_shards(1, NULL, '{q}', 1)";
    let read = "SELECT * FROM rouse.shard; SELECT * FROM rouse.shard_lease";
    for role in roles {
        let name = format!("rouse_{role}");
        assert_eq!(may(&name, set).await, role == "operator", "{role}");
        assert_eq!(may(&name, lease).await, role == "worker", "{role}");
        let reads = ["operator", "observer"].contains(&role);
        assert_eq!(may(&name, read).await, reads, "{role}");
        assert!(!may(&name, "UPDATE rouse.shard_lease SET until = now()").await);
        assert!(!may(&name, "SELECT rouse._in_own_shards(1, '{1}')").await);
    }
}
