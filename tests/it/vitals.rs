//! What the database says of itself, for those who watch it.

use serde_json::json;

use crate::support::TestDb;
use crate::support::worker::enqueue;

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
        panic!("two: {depths:?}");
    };
    assert_eq!((x.ready, x.scheduled, x.running), (3, 0, 0));
    assert!(x.oldest_wait_s.is_some_and(|wait| wait > 0.0));
    assert_eq!((y.queue.as_str(), y.ready, y.scheduled), ("mail", 0, 1));
    assert_eq!(y.oldest_wait_s, None);
}

#[tokio::test]
async fn a_transaction_that_is_held_open_is_seen() {
    let db = TestDb::new().await;
    let (mut holder, client, store) = (db.client().await, db.client().await, db.worker().await);
    assert_eq!(store.vitals().await.unwrap().oldest_transaction_s, None);
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
    let vitals = store.vitals().await.unwrap();
    assert!(vitals.oldest_transaction_s.is_some_and(|age| age > 0.0));
    assert!(vitals.xmin_age.is_some_and(|age| age >= 3), "{vitals:?}");
    open.rollback().await.unwrap();
    assert_eq!(store.vitals().await.unwrap().oldest_transaction_s, None);
}
