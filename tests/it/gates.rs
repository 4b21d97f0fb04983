//! Gates: limits on how many jobs run, how often they start, which start together, and which are enqueued.

mod batches;
mod changes;
mod claims;
mod declared;
mod enqueues;
mod few_claims;
mod merged;
mod model;
mod operators;
mod running;
mod sabotage;
mod throttles;
mod waiting;

use std::sync::Arc;

use rouse::store::Store;
use tokio::sync::Barrier;
use tokio_postgres::Client;

use crate::support::TestDb;

/// A database with this gate, and a client.
async fn gate(set: &str) -> (TestDb, Client) {
    let db = TestDb::new().await;
    let client = db.client().await;
    set_gate(&client, set).await;
    (db, client)
}

/// Calls `rouse.set_gate` with these arguments.
async fn set_gate(client: &Client, arguments: &str) {
    client
        .batch_execute(&format!("SELECT rouse.set_gate({arguments})"))
        .await
        .unwrap();
}

/// Enqueues a job with these additional arguments, and returns its id.
async fn enqueue(client: &Client, handler: &str, arguments: &str) -> i64 {
    let sql = format!("SELECT rouse.enqueue('{handler}'{arguments})");
    client.query_one(&sql, &[]).await.unwrap().get(0)
}

/// A number that a query returns.
async fn number(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// Makes this call on eight workers at the same time, and returns the results.
async fn on_eight_workers<C>(db: &TestDb, call: impl Fn(Store) -> C) -> Vec<C::Output>
where
    C: Future<Output: Send + 'static> + Send + 'static,
{
    let start = Arc::new(Barrier::new(8));
    let mut calls = Vec::new();
    for _ in 0..8 {
        let (call, start) = (call(db.worker().await), start.clone());
        calls.push(tokio::spawn(async move {
            start.wait().await;
            call.await
        }));
    }
    let mut results = Vec::new();
    for call in calls {
        results.push(call.await.unwrap());
    }
    results
}
