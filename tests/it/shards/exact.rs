//! Claims and leases of several connections at the same time: each shard has one worker until its claims are committed.

use std::time::Duration;

use rouse::job::Fence;
use tokio::task::JoinHandle;
use tokio_postgres::{Client, Transaction};

use super::{enqueue, lease, sharded, shares};
use crate::support::TestDb;
use crate::support::claims::{claim, orders, rand};
use crate::support::worker::{SESSION_WAITS, until_true};

const CLAIM: &str = "SELECT id FROM rouse.claim((SELECT max(incarnation) FROM rouse.worker WHERE worker_id = 'w'), sha256('key'), 7,
                            ARRAY(SELECT ROW(l.id, 0, 60000, NULL, NULL)::rouse.claim_order FROM rouse.lane AS l), 100)";
const CLAIM_BOUND: &str = "SELECT rouse.claim_bound((SELECT max(incarnation) FROM rouse.worker WHERE worker_id = 'w'), sha256('key'), 7,
                            ARRAY(SELECT l.id FROM rouse.lane AS l), '{s}', 60000, 100)";
const LEASE: &str = "SELECT cardinality(own) FROM rouse.lease_shards((SELECT max(incarnation) FROM rouse.worker WHERE worker_id = 'w'), sha256('key'), '{q}', 1)";

/// Registers a worker whose statements the test sends itself, and leases shards for it.
async fn register(client: &Client) {
    let register =
        "SELECT rouse.register('w', sha256('key'), 'here', 'linux', '0', '{}', 1, '{}', '{}')";
    client.batch_execute(register).await.unwrap();
    client.batch_execute(LEASE).await.unwrap();
}

async fn claimed(transaction: &Transaction<'_>) -> usize {
    transaction.query(CLAIM, &[]).await.unwrap().len()
}

/// Starts a claim in a transaction of its own, which returns the number of claimed jobs.
fn spawn_claim(mut client: Client) -> JoinHandle<usize> {
    tokio::spawn(async move {
        let claiming = client.transaction().await.unwrap();
        let jobs = claimed(&claiming).await;
        claiming.commit().await.unwrap();
        jobs
    })
}

/// The number of shards that this call returns.
async fn call(client: &Client, sql: &str) -> i32 {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// The time until which `w` has leased, in microseconds.
async fn until(client: &Client) -> i64 {
    let until = "SELECT (extract(epoch FROM s.until) * 1000000)::bigint FROM rouse.shard_lease AS s
                 JOIN rouse.worker AS w ON w.incarnation = s.worker WHERE w.worker_id = 'w'";
    client.query_one(until, &[]).await.unwrap().get(0)
}

async fn waits_for_lock(db: &TestDb) {
    until_true(&db.client().await, SESSION_WAITS).await;
}

#[tokio::test]
async fn a_shard_is_not_taken_over_before_the_last_claim_of_its_worker_is_committed() {
    let (db, client) = sharded(8).await;
    enqueue(&client, "noop", 20).await;
    let mut slow = db.client().await;
    register(&slow).await;
    let claiming = slow.transaction().await.unwrap();
    assert_eq!(claimed(&claiming).await, 20);
    super::end_lease(&client, "w").await;
    enqueue(&client, "noop", 20).await;
    let other = db.worker().await;
    assert!(lease(&other).await.is_empty(), "the claim is under way");
    assert!(claim(&other, 100).await.is_empty());
    claiming.commit().await.unwrap();
    assert_eq!(lease(&other).await.len(), 8);
    let stale = slow.transaction().await.unwrap();
    assert_eq!(claimed(&stale).await, 0);
    stale.commit().await.unwrap();
    assert_eq!(claim(&other, 100).await.len(), 20);
}

#[tokio::test]
async fn a_worker_gives_up_shards_only_after_its_own_claims_are_committed() {
    let (db, client) = sharded(8).await;
    enqueue(&client, "noop", 20).await;
    let mut slow = db.client().await;
    register(&slow).await;
    let other = db.worker().await;
    assert!(lease(&other).await.is_empty());
    let claiming = slow.transaction().await.unwrap();
    assert_eq!(claimed(&claiming).await, 20);
    // The worker would give up half of its shards. Its lease is renewed nevertheless.
    let before = until(&client).await;
    assert_eq!(call(&client, LEASE).await, 8);
    assert!(until(&client).await > before);
    assert!(lease(&other).await.is_empty());
    claiming.commit().await.unwrap();
    assert_eq!(call(&client, LEASE).await, 4);
    assert_eq!(lease(&other).await.len(), 4);
}

#[tokio::test]
async fn a_worker_that_divides_a_queue_for_a_long_time_does_not_keep_others_from_renewing() {
    let (db, client) = sharded(8).await;
    enqueue(&client, "noop", 20).await;
    let mut dividing = db.client().await;
    register(&dividing).await;
    let other = db.worker().await;
    assert!(lease(&other).await.is_empty());
    assert_eq!(call(&client, LEASE).await, 4);
    assert_eq!(lease(&other).await.len(), 4);
    let open = dividing.transaction().await.unwrap();
    open.batch_execute(LEASE).await.unwrap();
    assert_eq!(lease(&other).await.len(), 4, "it keeps its shards");
    assert!(!claim(&other, 100).await.is_empty());
    let newcomer = db.worker().await;
    assert!(lease(&newcomer).await.is_empty(), "nobody else divides");
    open.commit().await.unwrap();
    let stores = [other, newcomer];
    for store in &stores {
        lease(store).await;
    }
    assert_eq!(call(&client, LEASE).await, 3);
    lease(&stores[0]).await;
    assert_eq!(lease(&stores[1]).await.len(), 2);
}

#[tokio::test]
async fn a_claim_that_waits_for_a_gate_holds_no_lease() {
    let (db, client) = sharded(8).await;
    client
        .batch_execute("SELECT rouse.set_gate('many', 'max_concurrent', queue => 'q', max => 1000)")
        .await
        .unwrap();
    enqueue(&client, "noop", 40).await;
    let claiming = db.client().await;
    register(&claiming).await;
    let other = db.worker().await;
    assert!(lease(&other).await.is_empty());
    let mut holding = db.client().await;
    let gate = holding.transaction().await.unwrap();
    gate.batch_execute("SELECT rouse._lock('gate', 'many')")
        .await
        .unwrap();
    let waiting = spawn_claim(claiming);
    waits_for_lock(&db).await;
    assert_eq!(call(&client, LEASE).await, 4);
    assert_eq!(lease(&other).await.len(), 4);
    gate.commit().await.unwrap();
    let jobs = waiting.await.unwrap();
    assert!(jobs < 40, "only those of the shards that it still has");
    assert_eq!(jobs + claim(&other, 100).await.len(), 40);
}

/// Each check reads all lanes of the claim from the catalog. There is no gate, one of another queue, or one of this
/// queue.
#[tokio::test]
async fn a_claim_checks_the_shards_once_whether_or_not_there_are_gates() {
    const CALLS: &str = "SELECT coalesce(sum(calls), 0)::bigint FROM pg_stat_xact_user_functions
                         WHERE schemaname = 'rouse' AND funcname = '_in_own_shards'";
    let (_db, client) = sharded(8).await;
    register(&client).await;
    enqueue(&client, "noop", 5).await;
    for gate in [
        "SELECT 1",
        "SELECT rouse.set_gate('many', 'max_concurrent', queue => 'other', max => 1000)",
        "SELECT rouse.set_gate('many', 'max_concurrent', queue => 'q', max => 1000)",
    ] {
        client.batch_execute(gate).await.unwrap();
        for claim in [CLAIM, CLAIM_BOUND] {
            client
                .batch_execute("BEGIN; SET LOCAL track_functions = 'all'")
                .await
                .unwrap();
            let before: i64 = client.query_one(CALLS, &[]).await.unwrap().get(0);
            client.batch_execute(claim).await.unwrap();
            let after: i64 = client.query_one(CALLS, &[]).await.unwrap().get(0);
            client.batch_execute("ROLLBACK").await.unwrap();
            assert_eq!(after - before, 1, "{gate}: {claim}");
        }
    }
}

/// The transaction that changes them would otherwise wait for the claim, and the claim for the transaction.
#[tokio::test]
async fn a_claim_through_a_gate_that_waits_for_a_change_to_the_shards_has_locked_no_jobs() {
    let (db, client) = sharded(8).await;
    client
        .batch_execute("SELECT rouse.set_gate('few', 'max_concurrent', queue => 'q', max => 2)")
        .await
        .unwrap();
    enqueue(&client, "noop", 3).await;
    let claiming = db.client().await;
    register(&claiming).await;
    let mut operator = db.client().await;
    let changing = operator.transaction().await.unwrap();
    changing
        .batch_execute("SELECT rouse.set_shards('q', 4)")
        .await
        .unwrap();
    let waiting = spawn_claim(claiming);
    waits_for_lock(&db).await;
    changing
        .batch_execute("SELECT rouse.cancel(id) FROM rouse.job")
        .await
        .unwrap();
    changing.commit().await.unwrap();
    assert_eq!(waiting.await.unwrap(), 0, "nothing is leased any more");
}

/// While a transaction is open, each second leaves an old version of a lease.
#[tokio::test]
async fn leases_and_claims_read_no_old_versions_of_leases() {
    let (db, client) = sharded(8).await;
    register(&client).await;
    enqueue(&client, "noop", 5).await;
    let old = db.client().await;
    old.batch_execute(
        "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM rouse.shard_lease",
    )
    .await
    .unwrap();
    for age in (0..200).rev() {
        let renewed = format!("UPDATE rouse.shard_lease SET until = now() - interval '{age} s'");
        client.batch_execute(&renewed).await.unwrap();
    }
    client
        .batch_execute("UPDATE rouse.shard_lease SET until = now() + interval '1 minute'")
        .await
        .unwrap();
    let entries =
        "SELECT sum(pg_stat_get_xact_tuples_returned(i.indexrelid))::bigint FROM pg_index AS i
                   WHERE i.indrelid = 'rouse.shard_lease'::regclass";
    for call in [LEASE, CLAIM] {
        client.batch_execute("BEGIN").await.unwrap();
        let before: i64 = client.query_one(entries, &[]).await.unwrap().get(0);
        client.batch_execute(call).await.unwrap();
        let after: i64 = client.query_one(entries, &[]).await.unwrap().get(0);
        client.batch_execute("ROLLBACK").await.unwrap();
        let read = after - before;
        assert!((1..20).contains(&read), "{call}: {read} entries");
    }
    old.batch_execute("COMMIT").await.unwrap();
}

#[tokio::test]
async fn a_claim_waits_while_shards_change_their_worker_and_then_has_the_new_ones() {
    let (db, client) = sharded(8).await;
    let mut changing = db.client().await;
    register(&changing).await;
    let other = db.worker().await;
    assert_eq!(lease(&other).await.len(), 0);
    enqueue(&client, "noop", 40).await;
    let giving_up = changing.transaction().await.unwrap();
    let own: i32 = giving_up.query_one(LEASE, &[]).await.unwrap().get(0);
    assert_eq!(own, 4);
    let claiming = spawn_claim(db.client().await);
    waits_for_lock(&db).await;
    giving_up.commit().await.unwrap();
    let jobs = claiming.await.unwrap();
    assert_eq!(lease(&other).await.len(), 4);
    assert_eq!(jobs + claim(&other, 100).await.len(), 40);
    assert!(jobs < 40);
}

#[tokio::test]
async fn a_new_number_of_shards_waits_for_claims_under_the_old_one() {
    let (db, client) = sharded(8).await;
    enqueue(&client, "noop", 20).await;
    let mut slow = db.client().await;
    register(&slow).await;
    let claiming = slow.transaction().await.unwrap();
    assert_eq!(claimed(&claiming).await, 20);
    let setting = db.client().await;
    let setting = tokio::spawn(async move {
        let set = "SELECT rouse.set_shards('q', 5)";
        setting.batch_execute(set).await.unwrap();
    });
    waits_for_lock(&db).await;
    claiming.commit().await.unwrap();
    setting.await.unwrap();
    enqueue(&client, "noop", 20).await;
    let claiming = slow.transaction().await.unwrap();
    assert_eq!(claimed(&claiming).await, 0, "nothing is leased any more");
    claiming.commit().await.unwrap();
    client.batch_execute(LEASE).await.unwrap();
    let claiming = slow.transaction().await.unwrap();
    assert_eq!(claimed(&claiming).await, 20);
    claiming.commit().await.unwrap();
}

#[tokio::test]
async fn workers_that_lease_and_claim_at_the_same_time_never_share_a_shard() {
    let (db, client) = sharded(8).await;
    super::workers::note_strays(&client).await;
    let mut workers = Vec::new();
    for _ in 0..4 {
        let store = db.worker().await;
        workers.push(tokio::spawn(async move {
            let mut claimed = 0;
            for round in 0..60 {
                lease(&store).await;
                claimed += claim(&store, 2).await.len();
                if round % 10 == 9 {
                    // Gives up all shards.
                    store.lease_shards(&[], 1).await.unwrap();
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            (store, claimed)
        }));
    }
    for _ in 0..10 {
        enqueue(&client, "noop", 30).await;
        super::end_some_lease(&client).await;
    }
    let mut stores = Vec::new();
    let mut claimed_jobs = 0;
    for worker in workers {
        let (store, claimed) = worker.await.unwrap();
        stores.push(store);
        claimed_jobs += claimed;
    }
    assert_eq!(shares(&stores).await, [2, 2, 2, 2]);
    for store in &stores {
        claimed_jobs += claim(store, 1000).await.len();
    }
    assert_eq!(claimed_jobs, 300);
    super::workers::assert_no_strays(&client).await;
}

/// The transaction of an operator may stay open.
#[tokio::test]
async fn a_claim_waits_some_seconds_for_a_change_of_the_shards_and_names_it() {
    let (db, client) = sharded(8).await;
    enqueue(&client, "noop", 20).await;
    let store = db.worker().await;
    assert_eq!(lease(&store).await.len(), 8);
    let operator = db.client().await;
    operator
        .batch_execute("BEGIN; SELECT rouse.set_shards('q', 4)")
        .await
        .unwrap();
    let orders = orders(&store, 60_000).await;
    let claimed = store.claim(Fence(rand()), &orders, 1, None).await;
    let error = claimed.expect_err("the shards are being changed");
    assert_eq!(
        error.waits_for(),
        Some("a transaction that has changed the shards of a queue and is still open"),
        "{error}"
    );
    operator.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(lease(&store).await.len(), 8);
    assert_eq!(claim(&store, 20).await.len(), 20);
}
