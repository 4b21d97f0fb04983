//! Admin actions on the state of handlers.

use serde_json::json;

use super::{entry, kept};
use crate::support::{TestDb, rouse_in};

#[tokio::test]
async fn operators_list_read_set_and_delete_state() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let here = crate::support::scratch("state-commands");
    let rouse = async |args: &[&str]| {
        let args: Vec<&str> = [&["state"], args].concat();
        rouse_in(&db, &args, &here).await
    };
    // State of a handler that no longer exists, under a key that no guest could have made.
    client
        .batch_execute(
            "INSERT INTO rouse.handler_state (handler, tenant, key, value, version, set_at)
             VALUES ('gone.by', 'acme', E'\\x1b[2J', '\\xff00', 7, now())",
        )
        .await
        .unwrap();
    rouse(&["set", "gone.by", "n", "{\"a\": 1}"])
        .await
        .exits(0)
        .prints("set key n of handler gone.by");
    rouse(&["set", "gone.by", "n", "{"])
        .await
        .exits(1)
        .prints("the value is not JSON");
    rouse(&["set", "gone.by", "raw", "{", "--raw", "--json"])
        .await
        .exits(0)
        .prints("\"set\":true");
    rouse(&["set", "no/name", "n", "1"])
        .await
        .exits(1)
        .prints("'no/name' is not a handler name");
    rouse(&["set", "gone.by", "", "1"])
        .await
        .exits(1)
        .prints("1 to 200 characters");

    let listed = rouse(&["ls", "--json"]).await.json();
    let spaces = json!([
        {"handler": "gone.by", "tenant": null, "keys": 2, "bytes": 13},
        {"handler": "gone.by", "tenant": "acme", "keys": 1, "bytes": 6},
    ]);
    assert_eq!(listed["states"], spaces);
    rouse(&["ls", "gone.by", "--tenant", "acme"])
        .await
        .exits(0)
        .prints("\\u{1b}[2J");
    let entries = rouse(&["ls", "gone.by", "--json"]).await.json();
    assert_eq!(entries["entries"][0]["key"], "n");
    assert_eq!(
        rouse(&["get", "gone.by", "n"]).await.exits(0).stdout,
        "{\"a\": 1}"
    );
    let read = rouse(&["get", "gone.by", "n", "--json"]).await.json();
    assert_eq!(
        (&read["value"]["a"], &read["bytes"]),
        (&json!(1), &json!(9))
    );
    let read = rouse(&["get", "gone.by", "\x1b[2J", "--tenant", "acme", "--json"])
        .await
        .json();
    assert_eq!(read["base64"], "/wA=");
    rouse(&["get", "gone.by", "nothing"])
        .await
        .exits(3)
        .prints("no such state");

    rouse(&["delete", "gone.by", "n"])
        .await
        .exits(2)
        .prints("--confirm");
    rouse(&["delete", "gone.by"])
        .await
        .exits(2)
        .prints("all keys");
    rouse(&["delete", "gone.by", "n", "--confirm"])
        .await
        .exits(0)
        .prints("1 key\n");
    rouse(&["delete", "gone.by", "n", "--confirm"])
        .await
        .exits(3);
    let deleted = rouse(&["delete", "gone.by", "--tenant", "acme", "--yes", "--json"])
        .await
        .json();
    assert_eq!(deleted["deleted"], 1);
    assert_eq!(kept(&client).await, [entry("gone.by", "", "raw", "{")]);

    let records = client
        .query("SELECT event, who, detail ->> 'handler' FROM rouse.record WHERE event LIKE 'state_%' ORDER BY at", &[])
        .await
        .unwrap();
    let records: Vec<(&str, &str, &str)> = records
        .iter()
        .map(|row| (row.get(0), row.get(1), row.get(2)))
        .collect();
    let (put, removed) = (
        ("state_set", "rouse", "gone.by"),
        ("state_deleted", "rouse", "gone.by"),
    );
    assert_eq!(records, [put, put, removed, removed]);
}

#[tokio::test]
async fn set_state_refuses_keys_that_no_handler_could_read_and_an_empty_tenant() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute("SELECT rouse.set_state('x', NULL, 'kept', '1')")
        .await
        .unwrap();
    for (call, expected) in [
        (
            "rouse.delete_state('x', '', NULL)",
            "tenant must not be empty",
        ),
        ("rouse.set_state('x', '', 'k', '1')", "1 to 200 characters"),
        (
            "rouse.set_state('x', NULL, E'a\\x1b', '1')",
            "control characters",
        ),
        ("rouse.set_state('x', NULL, 'k', NULL)", "must not be null"),
    ] {
        let error = client
            .batch_execute(&format!("SELECT {call}"))
            .await
            .expect_err(call);
        let message = error
            .as_db_error()
            .expect("an error from Postgres")
            .message();
        assert!(message.contains(expected), "{call}: {message}");
    }
    let kept = client
        .query_one("SELECT count(*) FROM rouse.handler_state", &[])
        .await
        .unwrap();
    assert_eq!(kept.get::<_, i64>(0), 1);
}
