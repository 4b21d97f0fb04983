//! Cancellations reach running attempts by notification, not only by the next renewal.

use rouse::worker::Settings;
use serde_json::json;

use crate::support::TestDb;
use crate::support::proxy::{ECHO, Proxy, Side};
use crate::support::worker::{
    TestWorker, cancel, catalog, enqueue, lease, show, until, until_true,
};

/// The lease is renewed after 4 minutes, and the attempts wait for nothing but the abort.
fn settings() -> Settings {
    Settings {
        overrides: lease("test.wait-abort", 600),
        ..Settings::default()
    }
}

#[tokio::test]
async fn a_cancellation_reaches_a_running_attempt_at_once() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, settings()).await;
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
    let id = enqueue(&client, "test.wait-abort", json!({})).await;
    until(&client, id, |job| job.state == "running").await;
    cancel(&client, id).await;
    // Once the attempt has ended.
    worker.drain().await;
    assert_eq!(show(&client, id).await.state, "cancelled");
}

#[tokio::test]
async fn a_cancellation_missed_by_the_listener_reaches_a_running_attempt_after_the_next_listen() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let proxy = Proxy::start(&db).await;
    let (listen_connector, catalog) = (proxy.connector(), catalog().await);
    let worker = TestWorker::start_listening_through(listen_connector, &db, settings(), catalog);
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
    let id = enqueue(&client, "test.wait-abort", json!({})).await;
    until(&client, id, |job| job.state == "running").await;
    let listens_again = proxy.hold("LISTEN rouse_wake", Side::Statement);
    let cut = client
        .query(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
             WHERE datname = current_database() AND query LIKE 'LISTEN%'",
            &[],
        )
        .await
        .unwrap();
    assert_eq!(cut.len(), 1);
    listens_again.caught().await;
    assert!(cancel(&client, id).await, "cancelled by this call");
    listens_again.release();
    // Once the attempt has ended.
    worker.drain().await;
    assert_eq!(show(&client, id).await.state, "cancelled");
}

/// The worker does not trust its notifications yet: it is still checking whether they arrive.
#[tokio::test]
async fn a_cancellation_before_the_listener_has_received_its_echo_reaches_a_running_attempt() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let proxy = Proxy::start(&db).await;
    let echo = proxy.hold(ECHO, Side::Statement);
    let id = enqueue(&client, "test.wait-abort", json!({})).await;
    let (store, catalog) = (proxy.store(), catalog().await);
    let worker = TestWorker::start_through(store, db.connector(), settings(), catalog);
    echo.caught().await;
    until(&client, id, |job| job.state == "running").await;
    assert!(cancel(&client, id).await, "cancelled by this call");
    echo.release();
    // Once the attempt has ended.
    worker.drain().await;
    assert_eq!(show(&client, id).await.state, "cancelled");
}
