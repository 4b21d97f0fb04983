//! Which jobs a claim of batches takes, and when it is worth looking again.

use std::time::Duration;

use rouse::job::Fence;
use rouse::store::{ClaimOrder, ClaimResult, ClosedLane, Store};
use tokio_postgres::Client;

use crate::gates::{enqueue, gate, number, on_eight_workers, set_gate};
use crate::support::claims::{orders, rand};
use crate::support::database::refusal;

const GATE: &str = "'b', 'batch', handler => 'a', max => 10, period => '1 hour'";

/// The numbers of jobs of each tenant in a claim of batches, and the lanes that are closed.
async fn claim(store: &Store, batches: usize) -> (Vec<usize>, Vec<ClosedLane>) {
    let orders: Vec<ClaimOrder> = orders(store, 60_000)
        .await
        .into_iter()
        .map(|order| ClaimOrder {
            max: Some(10 * batches),
            ..order
        })
        .collect();
    let claimed = store.claim_batches(Fence(rand()), &orders, batches, None);
    match claimed.await.unwrap() {
        ClaimResult::Jobs(jobs, closed) => {
            let tenants = jobs.chunk_by(|one, other| one.tenant == other.tenant);
            (tenants.map(<[_]>::len).collect(), closed)
        }
        ClaimResult::Orphans(_) => panic!("leases were not checked"),
    }
}

async fn enqueue_jobs(client: &Client, tenant: &str, jobs: usize) {
    for _ in 0..jobs {
        enqueue(client, "a", &format!(", tenant => '{tenant}'")).await;
    }
}

/// Makes the ready jobs older.
async fn age(client: &Client, by: &str) {
    let sql = format!(
        "UPDATE rouse.job SET available_at = available_at - interval '{by}' WHERE state = 'queued'"
    );
    client.batch_execute(&sql).await.unwrap();
}

#[tokio::test]
async fn a_claim_takes_whole_batches_and_others_only_after_the_period() {
    let (db, client) = gate(GATE).await;
    let store = db.worker().await;
    enqueue_jobs(&client, "x", 25).await;
    enqueue_jobs(&client, "y", 4).await;
    let (sizes, _) = claim(&store, 1).await;
    assert_eq!(sizes, [10], "as many batches as are wanted");
    let (sizes, closed) = claim(&store, 4).await;
    assert_eq!(sizes, [10]);
    assert_eq!(closed.len(), 2, "5 of x and 4 of y have to wait");
    let waits = closed.iter().all(|lane| lane.by[0].wait.is_some());
    assert!(waits, "{closed:?}");
    let (sizes, _) = claim(&store, 4).await;
    assert!(sizes.is_empty(), "{sizes:?}");
    age(&client, "1 hour").await;
    let (mut sizes, closed) = claim(&store, 4).await;
    sizes.sort_unstable();
    assert_eq!(sizes, [4, 5]);
    assert!(closed.is_empty(), "{closed:?}");
}

/// Otherwise, such jobs would wait until the clock has caught up, and then for the period.
#[tokio::test]
async fn jobs_that_lie_far_in_the_future_do_not_wait_for_others() {
    let (db, client) = gate(GATE).await;
    let store = db.worker().await;
    enqueue_jobs(&client, "x", 4).await;
    // Jobs that lie 5 s in the future may have been enqueued after the claim has read the clock.
    age(&client, "-5 seconds").await;
    assert!(claim(&store, 1).await.0.is_empty());
    // The clock has been set back since.
    age(&client, "-1 minute").await;
    let (sizes, closed) = claim(&store, 1).await;
    assert_eq!(sizes, [4]);
    assert!(closed.is_empty(), "{closed:?}");
}

#[tokio::test]
async fn without_a_period_a_claim_takes_what_is_ready() {
    let (db, client) = gate("'b', 'batch', handler => 'a', max => 10").await;
    let store = db.worker().await;
    enqueue_jobs(&client, "x", 23).await;
    enqueue_jobs(&client, "y", 3).await;
    let (sizes, closed) = claim(&store, 2).await;
    assert_eq!((sizes.iter().sum::<usize>(), closed.len()), (20, 0));
    let (mut sizes, _) = claim(&store, 9).await;
    sizes.sort_unstable();
    assert_eq!(sizes, [3, 3]);
}

/// They may be locked for as long as the transaction of a producer is open.
#[tokio::test]
async fn a_batch_whose_jobs_are_locked_leaves_its_place_to_the_next_one() {
    let (db, client) = gate(GATE).await;
    let store = db.worker().await;
    // The lane of this tenant is the first one.
    enqueue_jobs(&client, "x", 10).await;
    enqueue_jobs(&client, "y", 10).await;
    let mut producer = db.client().await;
    let holds = producer.transaction().await.unwrap();
    holds
        .batch_execute("SELECT FROM rouse.job WHERE tenant = 'x' FOR UPDATE")
        .await
        .unwrap();
    assert_eq!(claim(&store, 1).await.0, [10]);
    assert!(claim(&store, 1).await.0.is_empty(), "those of x are locked");
    holds.rollback().await.unwrap();
    assert_eq!(claim(&store, 1).await.0, [10]);
}

/// Otherwise, the others would start at once, in a smaller batch.
#[tokio::test]
async fn locked_jobs_do_not_make_a_batch_full() {
    let (db, client) = gate(GATE).await;
    let store = db.worker().await;
    enqueue_jobs(&client, "x", 25).await;
    let mut producer = db.client().await;
    let holds = producer.transaction().await.unwrap();
    holds
        .batch_execute("SELECT FROM rouse.job ORDER BY turn LIMIT 12 FOR UPDATE")
        .await
        .unwrap();
    let (sizes, closed) = claim(&store, 3).await;
    assert_eq!(sizes, [10], "of the 13 that are not locked");
    assert!(closed[0].by[0].wait.is_some(), "{closed:?}");
    let (sizes, closed) = claim(&store, 1).await;
    assert!(sizes.is_empty(), "3 wait: {sizes:?}");
    assert!(closed[0].by[0].wait.is_some(), "{closed:?}");
    client
        .batch_execute(
            "UPDATE rouse.job SET available_at = available_at - interval '1 hour'
             WHERE id IN (SELECT id FROM rouse.job WHERE state = 'queued' FOR UPDATE SKIP LOCKED)",
        )
        .await
        .unwrap();
    assert_eq!(claim(&store, 1).await.0, [3], "after the period");
    holds.rollback().await.unwrap();
    assert_eq!(claim(&store, 1).await.0, [10]);
    assert!(claim(&store, 1).await.0.is_empty(), "2 wait");
}

/// The time after which it is worth looking again is estimated from how fast jobs have arrived.
#[tokio::test]
async fn a_batch_is_looked_for_again_when_it_may_be_full() {
    let (db, client) = gate(GATE).await;
    let store = db.worker().await;
    enqueue_jobs(&client, "x", 5).await;
    let (_, closed) = claim(&store, 1).await;
    let wait = closed[0].by[0].wait.unwrap();
    assert!(
        wait >= Duration::from_millis(10) && wait < Duration::from_secs(30),
        "5 more, as fast as the first 5: {wait:?}"
    );
    age(&client, "2 s").await;
    let (_, closed) = claim(&store, 1).await;
    let wait = closed[0].by[0].wait.unwrap();
    assert!(
        (Duration::from_secs(2)..Duration::from_secs(5)).contains(&wait),
        "{wait:?}"
    );
    age(&client, "40 minutes").await;
    let (_, closed) = claim(&store, 1).await;
    let wait = closed[0].by[0].wait;
    assert_eq!(wait, Some(Duration::from_secs(5)), "at the latest");
    age(&client, "19 minutes 55 seconds").await;
    let (_, closed) = claim(&store, 1).await;
    let wait = closed[0].by[0].wait.unwrap();
    assert!(
        wait < Duration::from_secs(4),
        "the period is over then: {wait:?}"
    );
}

/// Two workers never divide a batch between them.
#[tokio::test]
async fn workers_that_claim_at_once_get_whole_batches() {
    let (db, client) = gate(GATE).await;
    enqueue_jobs(&client, "x", 45).await;
    let sizes = on_eight_workers(&db, |store| async move { claim(&store, 1).await.0 }).await;
    assert_eq!(sizes.concat(), [10; 4]);
    assert_eq!(
        number(
            &client,
            "SELECT count(*) FROM rouse.job WHERE state = 'queued'"
        )
        .await,
        5
    );
}

/// Lanes that share the key of another gate get whole batches, too.
#[tokio::test]
async fn a_limit_of_several_lanes_does_not_divide_batches() {
    let (db, client) = gate(GATE).await;
    set_gate(
        &client,
        "'many', 'max_concurrent', handler => 'a', max => 35",
    )
    .await;
    let store = db.worker().await;
    enqueue_jobs(&client, "x", 20).await;
    enqueue_jobs(&client, "y", 20).await;
    assert_eq!(claim(&store, 1).await.0, [10]);
    let (sizes, _) = claim(&store, 4).await;
    assert_eq!(sizes.iter().sum::<usize>(), 25, "{sizes:?}");
}

/// Lanes from which nothing may be claimed do not take batches from other lanes.
#[tokio::test]
async fn paused_queues_take_no_batches_from_others() {
    let (db, client) = gate(GATE).await;
    let store = db.worker().await;
    for queue in ["a", "b", "c"] {
        for _ in 0..20 {
            let arguments = format!(", tenant => 't', queue => '{queue}'");
            enqueue(&client, "a", &arguments).await;
        }
    }
    // The order of the queues does not matter.
    client
        .batch_execute("SELECT rouse.pause_queue('a'), rouse.pause_queue('c')")
        .await
        .unwrap();
    assert_eq!(claim(&store, 1).await.0, [10]);
    assert_eq!(claim(&store, 1).await.0, [10]);
}

/// Jobs that cannot share an attempt take one attempt each.
#[tokio::test]
async fn no_more_attempts_are_claimed_than_wanted() {
    let (db, client) = gate(GATE).await;
    let store = db.worker().await;
    for _ in 0..20 {
        enqueue(&client, "a", ", tenant => 't', timeout => '5 s'").await;
    }
    assert_eq!(claim(&store, 3).await.0, [3]);
    client
        .batch_execute("UPDATE rouse.job SET timeout_ms = NULL, tenant = 't' || id")
        .await
        .unwrap();
    let (sizes, _) = claim(&store, 3).await;
    assert_eq!(sizes, [1; 3], "as in a lane of further keys");
}

/// The period is that of the oldest job, whatever turn it has.
#[tokio::test]
async fn a_young_job_does_not_make_older_ones_wait() {
    let (db, client) = gate(GATE).await;
    let store = db.worker().await;
    enqueue_jobs(&client, "x", 3).await;
    client
        .batch_execute(
            "UPDATE rouse.job SET available_at = available_at - interval '1 hour'
             WHERE turn = (SELECT max(turn) FROM rouse.job)",
        )
        .await
        .unwrap();
    assert_eq!(claim(&store, 1).await.0, [3]);
}

/// A lane is closed by the strictest of its gates.
#[tokio::test]
async fn a_batch_gives_way_to_other_gates() {
    let (db, client) = gate(GATE).await;
    set_gate(
        &client,
        "'few', 'max_concurrent', handler => 'a', key => '{tenant}', max => 13",
    )
    .await;
    let store = db.worker().await;
    enqueue_jobs(&client, "x", 30).await;
    let (sizes, closed) = claim(&store, 2).await;
    assert_eq!(sizes, [13], "a batch of ten, and one of three");
    assert_eq!(closed.len(), 1);
    assert_eq!(
        closed[0].by[0].wait, None,
        "until one of the jobs has ended"
    );
    set_gate(
        &client,
        "'few', 'throttle', handler => 'a', key => '{tenant}', max => 4, period => '1 minute'",
    )
    .await;
    let (sizes, closed) = claim(&store, 2).await;
    assert_eq!(sizes, [4]);
    let wait = closed[0].by[0].wait.unwrap().as_secs();
    assert!((50..=60).contains(&wait), "{closed:?}");
}

#[tokio::test]
async fn a_batch_needs_a_handler_a_size_and_one_tenant() {
    let (db, client) = gate(GATE).await;
    for (arguments, why) in [
        ("'c', 'batch', max => 5", "batch needs a handler"),
        (
            "'c', 'batch', handler => 'a'",
            "max must be 1 to 1000, not null",
        ),
        (
            "'c', 'batch', handler => 'a', max => 1001",
            "max must be 1 to 1000, not 1001",
        ),
        (
            "'c', 'batch', handler => 'a', max => 5, period => '0 s'",
            "period must be 1 millisecond to 30 days",
        ),
        (
            "'c', 'batch', handler => 'a', max => 5, key => '{source,queue}'",
            "the key of a batch has tenant and at most one more, not {tenant,source,queue}",
        ),
        (
            "'c', 'batch', handler => 'a', max => 5, burst => 5",
            "batch has no burst",
        ),
    ] {
        let refused = refusal(&client, &format!("SELECT rouse.set_gate({arguments})")).await;
        assert!(refused.contains(why), "{arguments}: {refused}");
    }
    drop(db);
}
