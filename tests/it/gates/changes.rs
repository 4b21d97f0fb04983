//! Changes to gates while claims wait for them. The claim has determined which gates its lanes are behind, and waits
//! for their locks: it uses the gates as they are after the wait.

use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::claims::claim;
use crate::support::worker::{SESSION_WAITS, until_true};

use super::{enqueue, gate, number, set_gate};

/// Starts a change, then claims, and commits the change when the claim waits for it. Returns the number of jobs.
async fn claim_during(db: &TestDb, client: &Client, change: &str) -> usize {
    let mut other = db.client().await;
    let changing = other.transaction().await.unwrap();
    changing.batch_execute(change).await.unwrap();
    let store = db.worker().await;
    let claiming = tokio::spawn(async move { claim(&store, 100).await.len() });
    until_true(client, SESSION_WAITS).await;
    changing.commit().await.unwrap();
    claiming.await.unwrap()
}

#[tokio::test]
async fn a_claim_that_waits_for_a_limit_counts_by_its_new_key() {
    let (db, client) = gate("'one', 'max_concurrent', key => '{tenant}', max => 1").await;
    for tenant in ["x", "y", "z"] {
        enqueue(&client, "a", &format!(", tenant => '{tenant}'")).await;
    }
    assert_eq!(claim(&db.worker().await, 1).await.len(), 1);
    let change = "SELECT rouse.set_gate('one', 'max_concurrent', max => 1)";
    assert_eq!(
        claim_during(&db, &client, change).await,
        0,
        "one of all jobs runs"
    );
}

#[tokio::test]
async fn a_claim_that_waits_for_a_rate_charges_its_new_key() {
    let (db, client) =
        gate("'rate', 'throttle', key => '{tenant}', max => 2, period => '1 day'").await;
    for tenant in ["w", "x", "y", "z"] {
        enqueue(&client, "a", &format!(", tenant => '{tenant}'")).await;
    }
    let change = "SELECT rouse.set_gate('rate', 'throttle', max => 2, period => '1 day')";
    assert_eq!(claim_during(&db, &client, change).await, 2);
    assert_eq!(claim(&db.worker().await, 100).await.len(), 0);
    let keys = "SELECT count(*) FROM rouse.gate_key WHERE key <> ''";
    assert_eq!(number(&client, keys).await, 0);
}

#[tokio::test]
async fn a_claim_that_waits_for_a_limit_that_becomes_a_rate_charges_it() {
    let (db, client) = gate("'two', 'max_concurrent', max => 2").await;
    for _ in 0..5 {
        enqueue(&client, "a", "").await;
    }
    let change = "SELECT rouse.set_gate('two', 'throttle', max => 2, period => '1 day')";
    assert_eq!(claim_during(&db, &client, change).await, 2);
    assert_eq!(claim(&db.worker().await, 100).await.len(), 0);
}

#[tokio::test]
async fn a_claim_that_waits_for_a_rate_that_becomes_a_limit_counts_what_runs() {
    let (db, client) = gate("'two', 'throttle', max => 2, period => '1 day'").await;
    for _ in 0..5 {
        enqueue(&client, "a", "").await;
    }
    assert_eq!(claim(&db.worker().await, 1).await.len(), 1);
    let change = "SELECT rouse.set_gate('two', 'max_concurrent', max => 2)";
    assert_eq!(claim_during(&db, &client, change).await, 1);
}

#[tokio::test]
async fn a_claim_that_waits_for_a_gate_applies_it_to_the_handlers_that_it_gets() {
    let (db, client) = gate("'one', 'max_concurrent', handler => 'a', max => 1").await;
    for handler in ["a", "b"] {
        enqueue(&client, handler, "").await;
    }
    let change = "SELECT rouse.set_gate('one', 'max_concurrent', max => 1)";
    assert_eq!(claim_during(&db, &client, change).await, 1);
}

#[tokio::test]
async fn a_claim_that_waits_for_a_fair_queue_counts_by_its_new_key() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute("SELECT rouse.set_fair_share('mail', policy => 'drr', max_in_flight => 1)")
        .await
        .unwrap();
    for tenant in ["x", "y", "z"] {
        enqueue(
            &client,
            "a",
            &format!(", queue => 'mail', tenant => '{tenant}'"),
        )
        .await;
    }
    assert_eq!(claim(&db.worker().await, 1).await.len(), 1);
    let change = "SELECT rouse.set_fair_share('mail', key => 'handler')";
    assert_eq!(claim_during(&db, &client, change).await, 0);
}

/// A deleted gate permits everything.
#[tokio::test]
async fn a_claim_that_waits_for_a_gate_that_is_deleted_takes_all_jobs() {
    let (db, client) = gate("'one', 'max_concurrent', max => 1").await;
    set_gate(&client, "'two', 'throttle', max => 2, period => '1 day'").await;
    for _ in 0..5 {
        enqueue(&client, "a", "").await;
    }
    let change = "SELECT rouse.delete_gate('one'), rouse.delete_gate('two')";
    assert_eq!(claim_during(&db, &client, change).await, 5);
}
