//! Sessions of hosts: their settings do not depend on roles and databases, few of them are used, and none before it has
//! responded to the last call.

use rouse::job::{Fence, JobId};
use rouse::worker::Settings;
use serde_json::json;
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::claims::{orders, rand};
use crate::support::database::refusal;
use crate::support::worker::{SESSION_WAITS, TestWorker, ended, enqueue, until_true};

/// Sets these for sessions of the database that are opened after this call.
async fn set_for_database(client: &Client, settings: &[(&str, &str)]) {
    for (name, value) in settings {
        let sql = format!(
            "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET {name} = %L', current_database(), '{value}'); END $$"
        );
        client.batch_execute(&sql).await.unwrap();
    }
}

/// A database with a gate that lets one job run at a time.
async fn limited() -> (TestDb, Client) {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute("SELECT rouse.set_gate('one', 'max_concurrent', max => 1)")
        .await
        .unwrap();
    (db, client)
}

#[tokio::test]
async fn every_connection_has_the_settings_that_rouse_relies_on() {
    let (db, client) = limited().await;
    set_for_database(
        &client,
        &[
            ("default_transaction_isolation", "serializable"),
            ("statement_timeout", "20s"),
            ("idle_session_timeout", "20s"),
        ],
    )
    .await;
    let session = db.connector().client().await.unwrap();
    for (name, value) in [
        ("default_transaction_isolation", "read committed"),
        ("statement_timeout", "0"),
        ("idle_session_timeout", "0"),
    ] {
        let row = session
            .query_one("SELECT current_setting($1)", &[&name])
            .await;
        assert_eq!(row.unwrap().get::<_, String>(0), value, "{name}");
    }
    let worker = TestWorker::start(&db, Settings::default()).await;
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    assert_eq!(ended(&client, id).await.state, "succeeded");
    worker.drain().await;
}

/// The claim that waits for the other claim counts with a snapshot taken after the wait, not at its own start.
#[tokio::test]
async fn a_limit_holds_in_a_database_whose_default_isolation_level_is_repeatable_read() {
    let (db, client) = limited().await;
    let mut holder = db.client().await;
    for _ in 0..2 {
        enqueue(&client, "x", json!({})).await;
    }
    set_for_database(
        &client,
        &[("default_transaction_isolation", "repeatable read")],
    )
    .await;
    let lock = holder.transaction().await.unwrap();
    lock.batch_execute("SELECT rouse._lock('gate', 'one')")
        .await
        .unwrap();
    let mut claims = Vec::new();
    for _ in 0..2 {
        let store = db.worker().await;
        let orders = orders(&store, 60_000).await;
        claims.push(tokio::spawn(async move {
            let claimed = store.claim(Fence(rand()), &orders, 1, None).await;
            claimed.unwrap().jobs().len()
        }));
    }
    let both_wait = "SELECT count(*) = 2 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    until_true(&client, both_wait).await;
    lock.rollback().await.unwrap();
    let mut claimed = 0;
    for claim in claims {
        claimed += claim.await.unwrap();
    }
    assert_eq!(claimed, 1);
}

#[tokio::test]
async fn transactions_that_keep_their_snapshot_neither_claim_through_a_limit_nor_enlarge_a_state() {
    let (_db, client) = limited().await;
    let id = enqueue(&client, "x", json!({})).await;
    client
        .batch_execute(
            "SELECT rouse.register('w', sha256('key'), 'here', 'linux', '0', '{}', 1, '{}', '{}')",
        )
        .await
        .unwrap();
    let me = "(SELECT max(incarnation) FROM rouse.worker), sha256('key')";
    let claim = format!(
        "SELECT FROM rouse.claim({me}, 7, ARRAY(SELECT ROW(l.id, 0, 60000, NULL, NULL)::rouse.claim_order FROM rouse.lane AS l), 1)"
    );
    let set = format!("SELECT rouse.write_state({me}, {id}, 7, 'x', 'k', '1', 1, NULL, 10, 100)");
    for (sql, what) in [
        (&claim, "a claim through gates"),
        (&set, "a write that makes a state larger"),
    ] {
        let begin = format!("BEGIN ISOLATION LEVEL REPEATABLE READ; {sql}");
        let text = refusal(&client, &begin).await;
        let wanted = format!(
            "rouse: {what} needs a transaction with isolation level READ COMMITTED, not REPEATABLE READ"
        );
        assert!(text.starts_with(&wanted), "{text}");
        client.batch_execute("ROLLBACK").await.unwrap();
        client.batch_execute(sql).await.unwrap();
    }
}

/// A session that has made its plans is used again, although others are idle.
#[tokio::test]
async fn a_pool_hands_out_the_connection_that_was_returned_last() {
    const SESSION: &str = "SELECT pg_backend_pid()";
    let db = TestDb::new().await;
    let pool = db.connector().pool(3);
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(pool.get().await.expect("a connection"));
    }
    let mut last: i32 = 0;
    for client in clients {
        last = client.query_one(SESSION, &[]).await.unwrap().get(0);
    }
    for _ in 0..3 {
        let client = pool.get().await.expect("a connection");
        let next: i32 = client.query_one(SESSION, &[]).await.unwrap().get(0);
        assert_eq!(next, last);
    }
}

/// An abort, or a user who leaves a page, drops calls. The next call would get the same connection.
#[tokio::test]
async fn a_call_that_is_dropped_before_its_response_does_not_delay_the_next_one() {
    let db = TestDb::new().await;
    let (mut owner, client, store) = (db.client().await, db.client().await, db.store());
    let lock = owner.transaction().await.unwrap();
    lock.batch_execute("LOCK rouse.job").await.unwrap();
    let reading = tokio::spawn({
        let store = store.clone();
        async move { store.job(JobId(1)).await }
    });
    until_true(&client, SESSION_WAITS).await;
    reading.abort();
    assert!(reading.await.is_err_and(|error| error.is_cancelled()));
    // The lock is still held.
    store.now().await.unwrap();
    lock.rollback().await.unwrap();
}
