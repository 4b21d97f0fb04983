//! Shards: workers lease parts of the lanes of a queue, and claim only from those parts.

mod exact;
mod operators;
mod workers;

use std::collections::BTreeSet;

use rouse::job::{LaneId, shard_of};
use rouse::store::{BoundSearch, Store};
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::claims::claim;

/// Leases last for a minute instead of five seconds, so that none ends because the machine is slow: tests end them.
const LONG_LEASES: &str = "
    DO $$ DECLARE
        source text := pg_get_functiondef('rouse.lease_shards'::regproc);
    BEGIN
        ASSERT source LIKE '%lease_ms := 5000;%';
        EXECUTE replace(source, 'lease_ms := 5000;', 'lease_ms := 60000;');
    END $$";

/// A database in which queue `q` has this many shards and a lane for each tenant; and a client.
async fn sharded(shards: i32) -> (TestDb, Client) {
    let db = TestDb::new().await;
    let client = db.client().await;
    let set = format!(
        "SELECT rouse.set_fair_share('q', policy => 'drr'); SELECT rouse.set_shards('q', {shards})"
    );
    client.batch_execute(&set).await.unwrap();
    client.batch_execute(LONG_LEASES).await.unwrap();
    (db, client)
}

/// Enqueues a job for each of this many tenants.
async fn enqueue(client: &Client, handler: &str, tenants: i32) {
    client
        .execute(
            "SELECT rouse.enqueue($1, '{\"ms\": 1}', queue => 'q', tenant => 't' || n) FROM generate_series(1, $2::int) AS n",
            &[&handler, &tenants],
        )
        .await
        .unwrap();
}

/// Leases as a worker does; returns its shards.
async fn lease(store: &Store) -> BTreeSet<u32> {
    let leased = store.lease_shards(&["q".to_owned()], 1).await.unwrap();
    leased.into_iter().flat_map(|of| of.own).collect()
}

/// Makes the workers call in turn until nothing changes; returns the number of shards of each.
async fn shares(stores: &[Store]) -> Vec<usize> {
    let mut before = Vec::new();
    for _ in 0..4 {
        let mut own = Vec::new();
        for store in stores {
            own.push(lease(store).await);
        }
        if own == before {
            let all: BTreeSet<u32> = own.iter().flatten().copied().collect();
            let shares: Vec<usize> = own.iter().map(BTreeSet::len).collect();
            assert_eq!(
                all.len(),
                shares.iter().sum::<usize>(),
                "one owner for each"
            );
            return shares;
        }
        before = own;
    }
    panic!("no end after four rounds: {before:?}");
}

/// Ends the lease of a worker, as if it had not called for a long time.
async fn end_lease(client: &Client, worker_id: &str) {
    let ended = client
        .execute(
            "UPDATE rouse.shard_lease AS s SET until = now() - interval '1 ms' FROM rouse.worker AS w
             WHERE w.incarnation = s.worker AND w.worker_id = $1",
            &[&worker_id],
        )
        .await
        .unwrap();
    assert_eq!(ended, 1);
}

#[tokio::test]
async fn shares_are_even_and_follow_workers_that_come_leave_and_die() {
    let (db, client) = sharded(16).await;
    let mut stores = vec![db.worker().await];
    assert_eq!(shares(&stores).await, [16]);
    stores.push(db.worker().await);
    assert_eq!(shares(&stores).await, [8, 8]);
    stores.push(db.worker().await);
    assert_eq!(shares(&stores).await, [6, 5, 5]);
    stores.push(db.worker().await);
    stores.push(db.worker().await);
    assert_eq!(shares(&stores).await, [4, 3, 3, 3, 3]);
    // A worker leaves: its shards are free at once.
    stores.remove(1).unregister().await.unwrap();
    assert_eq!(shares(&stores).await, [4, 4, 4, 4]);
    // A worker is killed: its shards are free when its lease has expired.
    stores.remove(3);
    assert_eq!(shares(&stores).await, [4, 4, 4]);
    end_lease(&client, "w-5").await;
    assert_eq!(shares(&stores).await, [6, 5, 5]);
    // A worker freezes, and comes back.
    end_lease(&client, "w-1").await;
    assert_eq!(shares(&stores[1..]).await, [8, 8]);
    assert_eq!(shares(&stores).await, [6, 5, 5]);
    // A worker is declared dead.
    client
        .batch_execute("UPDATE rouse.worker SET seen_at = now() - interval '2 minutes' WHERE worker_id = 'w-1'")
        .await
        .unwrap();
    let stats = rouse::store::Stats::default();
    stores[1].heartbeat(None, &stats, false).await.unwrap();
    assert_eq!(shares(&stores[1..]).await, [8, 8]);
}

/// Otherwise, the shards of a worker that dies at that time would wait until it is declared dead.
#[tokio::test]
async fn a_lease_from_before_the_clock_was_set_back_ends_like_others() {
    let (db, client) = sharded(8).await;
    let stores = [db.worker().await, db.worker().await, db.worker().await];
    assert_eq!(shares(&stores).await, [3, 3, 2]);
    let set_back = "UPDATE rouse.shard_lease SET until = until + interval '1 hour'";
    client.batch_execute(set_back).await.unwrap();
    assert_eq!(lease(&stores[0]).await.len(), 3);
    let late = "SELECT count(*) FROM rouse.shard_lease WHERE until > clock_timestamp() + interval '1 minute'";
    let late: i64 = client.query_one(late, &[]).await.unwrap().get(0);
    assert_eq!(late, 0);
    // The others are alive, and keep their shards.
    assert_eq!(shares(&stores).await, [3, 3, 2]);
    // A call that is being made renews its own lease.
    client.batch_execute(set_back).await.unwrap();
    let renewing = db.client().await;
    renewing
        .batch_execute(
            "BEGIN; SELECT FROM rouse.shard_lease AS s JOIN rouse.worker AS w ON w.incarnation = s.worker
             WHERE w.worker_id = 'w-2' FOR NO KEY UPDATE OF s",
        )
        .await
        .unwrap();
    assert_eq!(lease(&stores[0]).await.len(), 3, "it does not wait");
    renewing.batch_execute("ROLLBACK").await.unwrap();
}

#[tokio::test]
async fn a_worker_without_a_shard_waits_for_one() {
    let (db, _client) = sharded(2).await;
    let stores = [db.worker().await, db.worker().await, db.worker().await];
    assert_eq!(shares(&stores).await, [1, 1, 0]);
    stores[0].unregister().await.unwrap();
    assert_eq!(shares(&stores[1..]).await, [1, 1]);
}

#[tokio::test]
async fn a_worker_gives_up_the_shards_of_queues_that_it_no_longer_serves() {
    let (db, client) = sharded(4).await;
    client
        .batch_execute("SELECT rouse.set_shards('r', 2)")
        .await
        .unwrap();
    let (one, other) = (db.worker().await, db.worker().await);
    let both = ["q".to_owned(), "r".to_owned(), "default".to_owned()];
    let leased = one.lease_shards(&both, 1).await.unwrap();
    let counts: Vec<(&str, usize)> = leased
        .iter()
        .map(|of| (of.queue.as_str(), of.own.len()))
        .collect();
    assert_eq!(counts, [("q", 4), ("r", 2)], "the default queue has none");
    assert!(lease(&other).await.is_empty());
    assert!(one.lease_shards(&both[1..], 1).await.unwrap().len() == 1);
    assert_eq!(lease(&other).await.len(), 4);
    assert!(one.lease_shards(&[], 1).await.unwrap().is_empty());
    let left: i64 = client
        .query_one("SELECT count(*) FROM rouse.shard WHERE queue = 'r'", &[])
        .await
        .unwrap()
        .get(0);
    assert_eq!(left, 0);
}

/// Otherwise, a lane could wait for a worker that cannot serve it.
#[tokio::test]
async fn workers_that_can_run_other_jobs_divide_all_shards_again() {
    let (db, client) = sharded(16).await;
    enqueue(&client, "noop", 20).await;
    let (one, other) = (db.worker().await, db.worker().await);
    let queues = ["q".to_owned()];
    assert_eq!(lease(&one).await.len(), 16);
    assert_eq!(
        other.lease_shards(&queues, 2).await.unwrap()[0].own.len(),
        16
    );
    assert_eq!(claim(&one, 10).await.len(), 10);
    assert_eq!(claim(&other, 100).await.len(), 10);
    // The other worker loads the handlers that it lacked.
    let stores = [one, other];
    assert_eq!(shares(&stores).await, [8, 8]);
}

#[tokio::test]
async fn claims_take_only_jobs_of_leased_shards() {
    let (db, client) = sharded(8).await;
    enqueue(&client, "noop", 60).await;
    client
        .batch_execute("SELECT rouse.enqueue('noop', queue => 'plain')")
        .await
        .unwrap();
    let stores = [db.worker().await, db.worker().await];
    assert_eq!(claim(&stores[0], 100).await.len(), 1, "of the other queue");
    assert_eq!(shares(&stores).await, [4, 4]);
    let mut claimed = 0;
    for store in &stores {
        let own = lease(store).await;
        let jobs = claim(store, 100).await;
        assert!(jobs.iter().all(|job| own.contains(&shard_of(job.lane, 8))));
        claimed += jobs.len();
    }
    assert_eq!(claimed, 60);
}

#[tokio::test]
async fn the_claim_of_a_worker_whose_lease_has_expired_takes_nothing() {
    let (db, client) = sharded(8).await;
    enqueue(&client, "noop", 20).await;
    let (stale, other) = (db.worker().await, db.worker().await);
    assert_eq!(lease(&stale).await.len(), 8);
    end_lease(&client, "w-1").await;
    assert!(
        claim(&stale, 100).await.is_empty(),
        "nobody has taken over yet"
    );
    assert_eq!(lease(&other).await.len(), 8);
    assert!(claim(&stale, 100).await.is_empty());
    assert_eq!(claim(&other, 100).await.len(), 20);
}

#[tokio::test]
async fn a_claim_by_source_takes_only_jobs_of_leased_shards() {
    let (db, client) = sharded(8).await;
    client
        .batch_execute("SELECT rouse.enqueue('noop', queue => 'q', tenant => 't' || n, source => 's') FROM generate_series(1, 30) AS n")
        .await
        .unwrap();
    let stores = [db.worker().await, db.worker().await];
    let lanes = stores[0].catalog_after(i64::MIN, None).await.unwrap().lanes;
    let lanes: Vec<LaneId> = lanes.iter().map(|lane| lane.id).collect();
    let claim = async |store: &Store| {
        let (fence, lease) = (rouse::job::Fence(1), std::time::Duration::from_secs(60));
        let search = BoundSearch {
            lanes: &lanes,
            sources: &["s".to_owned()],
            ..BoundSearch::default()
        };
        store.claim_bound(fence, search, lease, 100).await.unwrap()
    };
    let none = claim(&stores[0]).await;
    assert!(none.jobs.is_empty() && !none.is_empty.contains(&true));
    assert_eq!(shares(&stores).await, [4, 4]);
    let first = claim(&stores[0]).await.jobs;
    let own = lease(&stores[0]).await;
    assert!(!first.is_empty() && first.iter().all(|job| own.contains(&shard_of(job.lane, 8))));
    assert_eq!(first.len() + claim(&stores[1]).await.jobs.len(), 30);
}

#[tokio::test]
async fn a_lane_has_the_same_shard_in_sql_and_in_rust() {
    let (_db, client) = sharded(16).await;
    enqueue(&client, "noop", 50).await;
    let ids = "SELECT n.id, s.shards, rouse._shard_of(n.id, s.shards)
               FROM (SELECT l.id FROM rouse.lane AS l
                     UNION ALL VALUES (-9223372036854775808), (-1), (0), (1), (9223372036854775807)) AS n,
                    unnest('{2,3,16,1000,1024}'::int[]) AS s(shards)";
    let rows = client.query(ids, &[]).await.unwrap();
    assert!(rows.len() > 250);
    for row in rows {
        let (lane, shards, shard): (i64, i32, i32) = (row.get(0), row.get(1), row.get(2));
        let expected = shard_of(LaneId(lane), shards.unsigned_abs());
        assert_eq!(shard.unsigned_abs(), expected, "{lane} of {shards}");
    }
}

/// Ends the lease of some worker, as if it were frozen.
async fn end_some_lease(client: &Client) {
    client
        .batch_execute(
            "UPDATE rouse.shard_lease SET until = now() - interval '1 ms'
             WHERE (worker, queue) IN (SELECT s.worker, s.queue FROM rouse.shard_lease AS s ORDER BY random() LIMIT 1)",
        )
        .await
        .unwrap();
}
