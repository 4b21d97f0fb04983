//! The database metrics, for monitoring.

use std::time::Instant;

use rouse::store::{COUNT_TIMEOUT, Store};
use serde_json::json;
use tokio_postgres::Transaction;
use tokio_postgres::error::SqlState;

use crate::support::TestDb;
use crate::support::worker::{TIMEOUT, cancel, enqueue, until_true};

#[tokio::test]
async fn depths_are_counted_for_each_queue_and_handler() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    for _ in 0..2 {
        enqueue(&client, "x", json!({})).await;
    }
    client
        .batch_execute(
            "SELECT rouse.enqueue('x', priority => 'low');
             SELECT rouse.enqueue('y', queue => 'mail', run_at => now() + interval '1 hour')",
        )
        .await
        .unwrap();
    let mut depths = store.depths().await.unwrap();
    depths.sort_by(|one, other| one.handler.cmp(&other.handler));
    let [x, y] = depths.as_slice() else {
        panic!("expected two depths, got {depths:?}");
    };
    assert_eq!((x.ready, x.scheduled, x.running), (3, 0, 0));
    assert!(x.oldest_wait_s.is_some_and(|wait| wait > 0.0));
    assert_eq!((y.queue.as_str(), y.ready, y.scheduled), ("mail", 0, 1));
    assert_eq!(y.oldest_wait_s, None);
    client
        .batch_execute("SELECT rouse.purge_queue('default')")
        .await
        .unwrap();
    let depths = store.depths().await.unwrap();
    assert_eq!(
        depths,
        std::slice::from_ref(y),
        "a lane without jobs is left out"
    );
}

#[tokio::test]
async fn a_count_that_takes_too_long_is_cancelled_in_the_database() {
    let db = TestDb::new().await;
    let (mut holder, client, store) = (db.client().await, db.client().await, db.worker().await);
    let open = holder.transaction().await.unwrap();
    open.batch_execute("LOCK TABLE rouse.job IN ACCESS EXCLUSIVE MODE")
        .await
        .unwrap();
    let started = Instant::now();
    let error = store.depths().await.unwrap_err();
    assert_eq!(error.code(), Some(&SqlState::QUERY_CANCELED), "{error}");
    assert!(started.elapsed() >= COUNT_TIMEOUT);
    let none_waits = "SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    until_true(&client, none_waits).await;
    open.rollback().await.unwrap();
    // The time limit applied to that one count only, and the connection is usable.
    store.depths().await.unwrap();
}

/// Asserts that this transaction is reported, and is no longer reported once it has ended. At least three transactions
/// have started since it did.
async fn assert_reported_until_its_end(store: &Store, open: Transaction<'_>) {
    let database_metrics = store.database_metrics().await.unwrap();
    assert!(
        database_metrics
            .oldest_transaction_s
            .is_some_and(|age| age > 0.0)
    );
    assert!(
        database_metrics.xmin_age.is_some_and(|age| age >= 3),
        "{database_metrics:?}"
    );
    open.rollback().await.unwrap();
    // Processes of the server without a database, such as the autovacuum launcher, have transactions that last
    // milliseconds.
    let until_none = async {
        while let Some(age) = store.database_metrics().await.unwrap().oldest_transaction_s {
            assert!(age < 1.0, "{age}");
        }
    };
    tokio::time::timeout(TIMEOUT, until_none)
        .await
        .expect("none is open");
}

#[tokio::test]
async fn an_idle_transaction_that_has_written_is_reported() {
    let db = TestDb::new().await;
    let (mut holder, client, store) = (db.client().await, db.client().await, db.worker().await);
    let job = enqueue(&client, "x", json!({})).await;
    let open = holder.transaction().await.unwrap();
    // Between two statements it has no snapshot, at the default isolation level.
    assert!(cancel(open.client(), job).await);
    for _ in 0..3 {
        enqueue(&client, "x", json!({})).await;
    }
    assert_reported_until_its_end(&store, open).await;
}

#[tokio::test]
async fn a_long_open_transaction_is_reported() {
    let db = TestDb::new().await;
    let (mut holder, client, store) = (db.client().await, db.client().await, db.worker().await);
    assert_eq!(
        store.database_metrics().await.unwrap().oldest_transaction_s,
        None
    );
    let open = holder
        .build_transaction()
        .isolation_level(tokio_postgres::IsolationLevel::RepeatableRead)
        .start()
        .await
        .unwrap();
    open.query("SELECT FROM rouse.job", &[]).await.unwrap();
    for _ in 0..3 {
        enqueue(&client, "x", json!({})).await;
    }
    assert_reported_until_its_end(&store, open).await;
}

#[tokio::test]
async fn the_page_about_job_rows_explains_each_column() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let page = include_str!("../../docs/reference/job-rows.md");
    let (_, section) = page.split_once("## A job as a row").expect("the section");
    let (section, _) = section.split_once("\n## ").expect("its end");
    let columns = client
        .query(
            "SELECT attname::text FROM pg_attribute WHERE attrelid = 'rouse.jobs'::regclass AND attnum > 0",
            &[],
        )
        .await
        .unwrap();
    let unexplained: Vec<String> = columns
        .iter()
        .map(|row| row.get(0))
        .filter(|name| !section.contains(&format!("`{name}`")))
        .collect();
    assert_eq!((unexplained, columns.len() > 20), (vec![], true));
}
