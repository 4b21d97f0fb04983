//! Which running jobs a claim behind a gate counts, and what it reads to count them.

use std::time::SystemTime;

use rouse::job::Fence;
use rouse::store::Store;
use tokio_postgres::Client;

use crate::support::claims::{claim, orders, rand};

use super::{enqueue, gate, number, set_gate};

/// Makes the jobs run as if they had been claimed before there was a gate: no claim has considered their leases for
/// `rouse.lease_floor`.
const OLD_RUNNING: &str = "UPDATE rouse.job AS j
    SET state = 'running', attempt = 1, fence = 1, worker = (SELECT min(incarnation) FROM rouse.worker), claimed_at = now() - interval '1 hour',
        lease_until = now() - interval '50 minutes'";

/// The number of jobs that a worker gets if it does not look for orphans.
async fn claimed(store: &Store) -> usize {
    let orders = orders(store, 60_000).await;
    let now = Some(SystemTime::now());
    let claimed = store.claim(Fence(rand()), &orders, 10, now).await.unwrap();
    claimed.jobs().len()
}

/// The number of index entries of running jobs that a claim reads.
async fn read(client: &Client) -> i64 {
    const READ: &str =
        "SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'job_lease'";
    const CLAIM: &str = "SELECT count(*), pg_stat_force_next_flush() FROM rouse.claim(
        (SELECT max(incarnation) FROM rouse.worker), sha256('key'), 7,
        ARRAY(SELECT ROW(l.id, 0, 60000, 1, NULL)::rouse.claim_order FROM rouse.lane AS l), 1)";
    let before = number(client, READ).await;
    client.query_one(CLAIM, &[]).await.unwrap();
    number(client, READ).await - before
}

#[tokio::test]
async fn jobs_that_ended_long_ago_are_read_once_while_a_transaction_is_open() {
    for max in [10, 1_000] {
        let (db, client) = gate(&format!("'few', 'max_concurrent', max => {max}")).await;
        let old = db.client().await;
        client
            .batch_execute(
                "SELECT rouse.register('w', sha256('key'), 'here', 'linux', '0', '{}', 1, '{}', '{}');
                 SELECT rouse.enqueue('x') FROM generate_series(1, 1000)",
            )
            .await
            .unwrap();
        client.batch_execute(OLD_RUNNING).await.unwrap();
        old.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM rouse.job LIMIT 1")
            .await
            .unwrap();
        client.batch_execute("DELETE FROM rouse.job").await.unwrap();
        enqueue(&client, "x", "").await;
        let first = read(&client).await;
        assert!(first >= 1_000, "{first} read");
        let second = read(&client).await;
        assert!(second <= 10, "{second} read");
    }
}

/// Its worker is dead, and the remaining workers may not adopt it.
#[tokio::test]
async fn an_orphan_that_stays_behind_still_counts_however_old_it_is() {
    let (db, client) = gate("'one', 'max_concurrent', key => '{tenant}', max => 1").await;
    enqueue(&client, "a", ", tenant => 't'").await;
    let (_dead, store) = (db.worker().await, db.worker().await);
    client.batch_execute(OLD_RUNNING).await.unwrap();
    enqueue(&client, "b", ", tenant => 't'").await;
    for _ in 0..2 {
        assert_eq!(claimed(&store).await, 0);
    }
    client
        .batch_execute("DELETE FROM rouse.job WHERE state = 'running'")
        .await
        .unwrap();
    assert_eq!(claimed(&store).await, 1);
}

/// An old orphan in another queue does not count, and claims behind the gate still pass over the jobs that have ended.
#[tokio::test]
async fn an_orphan_that_is_not_behind_the_gate_does_not_matter() {
    let (db, client) = gate("'one', 'max_concurrent', queue => 'mail', max => 1").await;
    enqueue(&client, "a", "").await;
    let (_dead, store) = (db.worker().await, db.worker().await);
    client.batch_execute(OLD_RUNNING).await.unwrap();
    enqueue(&client, "a", ", queue => 'mail'").await;
    assert_eq!(claimed(&store).await, 1);
    let floor =
        "SELECT extract(epoch FROM clock_timestamp() - lease_until)::bigint FROM rouse.lease_floor";
    let floor = number(&client, floor).await;
    assert!((60..120).contains(&floor), "{floor} s ago");
}

/// The clock was set back by an hour since the last claims behind this gate: new leases end before old ones did.
#[tokio::test]
async fn all_running_jobs_count_after_the_clock_was_set_back() {
    let (db, client) = gate("'one', 'max_concurrent', max => 1").await;
    let store = db.worker().await;
    enqueue(&client, "a", "").await;
    client
        .batch_execute("INSERT INTO rouse.lease_floor VALUES ('one', now() + interval '1 hour')")
        .await
        .unwrap();
    assert_eq!(claim(&store, 10).await.len(), 1);
    enqueue(&client, "a", "").await;
    assert_eq!(claimed(&store).await, 0);
    let later = "SELECT count(*) FROM rouse.lease_floor WHERE lease_until > now()";
    assert_eq!(number(&client, later).await, 0, "it was lowered");
    let running = "SELECT running FROM rouse.gate_keys('one')";
    assert_eq!(number(&client, running).await, 1);
}

/// The time of a gate that was not affected does not count for the other one.
#[tokio::test]
async fn all_running_jobs_of_each_gate_of_a_claim_count_after_the_clock_was_set_back() {
    let (db, client) = gate("'mail', 'max_concurrent', queue => 'mail', max => 1").await;
    set_gate(
        &client,
        "'other', 'max_concurrent', queue => 'other', max => 1",
    )
    .await;
    let store = db.worker().await;
    enqueue(&client, "a", ", queue => 'mail'").await;
    client.batch_execute(OLD_RUNNING).await.unwrap();
    client
        .batch_execute(
            "INSERT INTO rouse.lease_floor VALUES ('mail', now() + interval '1 hour'), ('other', now() - interval '10 minutes')",
        )
        .await
        .unwrap();
    enqueue(&client, "a", ", queue => 'mail'").await;
    enqueue(&client, "a", ", queue => 'other'").await;
    assert_eq!(claimed(&store).await, 1);
}

/// A gate that is deleted, and set again later, starts from the beginning.
#[tokio::test]
async fn the_time_from_which_leases_are_read_is_deleted_with_its_gate() {
    let (db, client) = gate("'one', 'max_concurrent', max => 1").await;
    let store = db.worker().await;
    enqueue(&client, "a", "").await;
    assert_eq!(claim(&store, 10).await.len(), 1);
    let floors = "SELECT count(*) FROM rouse.lease_floor";
    assert_eq!(number(&client, floors).await, 1);
    client
        .batch_execute("SELECT rouse.delete_gate('one')")
        .await
        .unwrap();
    assert_eq!(number(&client, floors).await, 0);
}
