//! The sabotage with which the chaos test shows that it notices gates that are open.

use crate::support::claims::claim;

use super::{enqueue, gate, number, set_gate};

#[tokio::test]
async fn the_sabotage_for_the_chaos_test_opens_every_gate() {
    let (db, client) = gate("'few', 'max_concurrent', handler => 'a', max => 1").await;
    for set in [
        "'rate', 'throttle', handler => 'b', max => 1, period => '1 hour'",
        "'waiting', 'singleton', handler => 'c', during => 'queued'",
        "'live', 'singleton', handler => 'd', during => 'running'",
        "'calm', 'debounce', handler => 'e', period => '1 hour'",
    ] {
        set_gate(&client, set).await;
    }
    let sabotage = include_str!("../../chaos/sabotage/open_gates.sql");
    client.batch_execute(sabotage).await.unwrap();
    let store = db.worker().await;
    for handler in ["a", "a", "b", "b"] {
        enqueue(&client, handler, "").await;
    }
    for nth in ["first", "second"] {
        let claimed = claim(&store, 10).await;
        assert_eq!(claimed.len(), 2, "{nth} claim: one of each handler");
    }
    let waiting = enqueue(&client, "c", "").await;
    assert_ne!(enqueue(&client, "c", "").await, waiting);
    let live = enqueue(&client, "d", "").await;
    assert_eq!(enqueue(&client, "d", "").await, live, "it waits");
    // The two of handler c, and this one.
    assert_eq!(claim(&store, 10).await.len(), 3);
    assert_ne!(enqueue(&client, "d", "").await, live, "it runs");
    let calm = enqueue(&client, "e", "").await;
    let due = format!(
        "SELECT (extract(epoch FROM available_at) * 1000000)::bigint FROM rouse.job WHERE id = {calm}"
    );
    let first_us = number(&client, &due).await;
    assert_eq!(enqueue(&client, "e", "").await, calm);
    assert_eq!(number(&client, &due).await, first_us, "not extended");
}
