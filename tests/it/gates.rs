//! Gates: limits on how many jobs run, how often they start, which start together, and which are enqueued.

mod batches;
mod changes;
mod claims;
mod declared;
mod enqueues;
mod merged;
mod model;
mod operators;
mod sabotage;
mod waiting;

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
