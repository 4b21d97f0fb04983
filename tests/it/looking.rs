//! How a worker looks for jobs, and how rarely it does so when there are none.

use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use rouse::job::{Fence, LaneId};
use rouse::store::{ClaimOrder, Peek, PeekParams, Store};
use rouse::worker::Settings;
use serde_json::json;
use tokio_postgres::{Client, IsolationLevel, Transaction};

use crate::support::TestDb;
use crate::support::proxy::Proxy;
use crate::support::worker::{TestWorker, catalog, enqueue, until_true};

/// A worker that has read the catalog and peeks at all lanes in it.
struct Looker {
    store: Store,
    lanes: Vec<ClaimOrder>,
    catalog_sum: i64,
}

impl Looker {
    async fn new(db: &TestDb) -> Self {
        let store = db.worker().await;
        let catalog = store.catalog_after(0, None).await.unwrap().lanes;
        let lanes = catalog.iter().map(|lane| ClaimOrder {
            lane: lane.id,
            after: 0,
            lease_ms: 60_000,
            max: None,
            overdue: None,
        });
        Self {
            lanes: lanes.collect(),
            catalog_sum: catalog.iter().map(|lane| lane.seq).sum(),
            store,
        }
    }

    async fn peek_within(&self, within: Option<Duration>) -> Peek {
        let looking = PeekParams {
            lanes: &self.lanes,
            catalog_after: 0,
            catalog_sum: self.catalog_sum,
            orphaned_since: since(within),
            due_since: since(within),
            writers: None,
        };
        Peek {
            turn: 0,
            writers: None,
            looked_at: SystemTime::UNIX_EPOCH,
            ..self.store.peek(&looking).await.unwrap()
        }
    }

    async fn peek(&self) -> Peek {
        self.peek_within(None).await
    }
}

/// The time this long ago. The server runs on this machine, so they share a clock.
fn since(within: Option<Duration>) -> Option<SystemTime> {
    within.map(|within| SystemTime::now() - within)
}

fn nothing() -> Peek {
    Peek {
        ready: Vec::new(),
        catalog_changed: false,
        orphans: false,
        due: false,
        next_due: None,
        looked_at: SystemTime::UNIX_EPOCH,
        turn: 0,
        paused: HashSet::new(),
        writers: None,
        releases: false,
        deadlines: false,
    }
}

async fn sql(client: &Client, statement: &str) {
    client.batch_execute(statement).await.unwrap();
}

#[tokio::test]
async fn a_peek_reports_that_there_is_no_work_and_none_will_be_due() {
    let db = TestDb::new().await;
    assert_eq!(Looker::new(&db).await.peek().await, nothing());
}

#[tokio::test]
async fn a_peek_returns_lanes_with_jobs_after_their_cursors_in_the_requested_order() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for handler in ["noop", "test.a", "test.b"] {
        enqueue(&client, handler, json!({})).await;
    }
    let mut looker = Looker::new(&db).await;
    let names = |looker: &Looker| {
        looker
            .lanes
            .iter()
            .map(|order| order.lane)
            .collect::<Vec<LaneId>>()
    };
    looker.lanes.reverse();
    assert_eq!(looker.peek().await.ready, names(&looker));
    let turn: i64 = client
        .query_one("SELECT max(turn) FROM rouse.job", &[])
        .await
        .unwrap()
        .get(0);
    // The lane of the newest job has nothing after its cursor.
    looker.lanes[0].after = turn;
    assert_eq!(looker.peek().await.ready, names(&looker)[1..]);
    looker.lanes.clear();
    assert_eq!(
        looker.peek().await,
        nothing(),
        "lanes with jobs of other handlers"
    );
}

#[tokio::test]
async fn a_search_of_the_newest_jobs_names_the_lanes_of_those_that_a_claim_could_take() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let store = db.worker().await;
    enqueue(&client, "noop", json!({})).await;
    let (_, first) = store.newest_lanes(None, 10).await.unwrap();
    let search = async |after: i64, max: i32| store.newest_lanes(Some(after), max).await.unwrap();
    let queues = async || {
        let (lanes, last) = search(first, 10).await;
        let lanes: Vec<i64> = lanes.iter().map(|lane| lane.0).collect();
        let names = "SELECT coalesce(array_agg(DISTINCT queue ORDER BY queue), '{}') FROM rouse.lane WHERE id = ANY ($1)";
        let row = client.query_one(names, &[&lanes]).await.unwrap();
        (row.get::<_, Vec<String>>(0), last)
    };
    let enqueue = async |args: &str| {
        let enqueue = format!("SELECT rouse.enqueue('noop', {args})");
        client.query(&enqueue, &[]).await.unwrap();
    };
    assert_eq!(queues().await, (vec![], first));
    client
        .batch_execute("SELECT rouse.pause_queue('paused')")
        .await
        .unwrap();
    assert_eq!(queues().await, (vec![], first), "beside a paused queue");
    enqueue("queue => 'a'").await;
    enqueue("queue => 'paused'").await;
    enqueue("queue => 'later', run_at => now() + interval '1 hour'").await;
    enqueue("queue => 'b'").await;
    let (found, last) = queues().await;
    assert_eq!(found, ["a", "b"]);
    assert_eq!(search(last, 10).await, (vec![], last));
    // Only the last ids are read.
    assert_eq!(search(first, 1).await.0.len(), 1);
}

#[tokio::test]
async fn a_peek_reports_unread_lanes_in_the_catalog() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let looker = Looker::new(&db).await;
    enqueue(&client, "noop", json!({})).await;
    let expected = Peek {
        catalog_changed: true,
        ..nothing()
    };
    assert_eq!(looker.peek().await, expected);
    assert!(!Looker::new(&db).await.peek().await.catalog_changed);
}

#[tokio::test]
async fn a_peek_reports_when_the_next_job_is_due_and_whether_one_already_is() {
    let db = TestDb::new().await;
    let client = db.client().await;
    sql(
        &client,
        "SELECT rouse.enqueue('noop', run_at => now() + interval '1 hour')",
    )
    .await;
    let looker = Looker::new(&db).await;
    let peek = looker.peek().await;
    assert!(!peek.due);
    let next_due = peek.next_due.unwrap();
    assert!(next_due > Duration::from_secs(3500) && next_due <= Duration::from_secs(3600));

    sql(
        &client,
        "UPDATE rouse.job SET available_at = now() - interval '1 minute'",
    )
    .await;
    let peek = looker.peek().await;
    assert!(peek.due);
    assert_eq!(peek.next_due, Some(Duration::ZERO));
    // The peek leaves out jobs that were due more than half a minute ago.
    let within = Some(Duration::from_secs(30));
    assert_eq!(looker.peek_within(within).await, nothing());
    assert_eq!(
        looker
            .store
            .promote(since(within), false)
            .await
            .unwrap()
            .promoted,
        0
    );
    let within = Some(Duration::from_secs(90));
    assert!(looker.peek_within(within).await.due);
    assert_eq!(
        looker
            .store
            .promote(since(within), false)
            .await
            .unwrap()
            .promoted,
        1
    );
    assert!(!looker.peek().await.due, "the job has its turn");
}

#[tokio::test]
async fn a_peek_reports_an_expired_lease() {
    let db = TestDb::new().await;
    let client = db.client().await;
    enqueue(&client, "noop", json!({})).await;
    let looker = Looker::new(&db).await;
    let (store, lanes) = (&looker.store, &looker.lanes);
    store.claim(Fence(1), lanes, 1, None).await.unwrap();
    assert_eq!(looker.peek().await, nothing(), "its lease is still valid");
    sql(
        &client,
        "UPDATE rouse.job SET lease_until = now() - interval '1 minute'",
    )
    .await;
    assert!(looker.peek().await.orphans);
    // The peek leaves out leases that ended more than half a minute ago.
    let within = Some(Duration::from_secs(30));
    assert!(!looker.peek_within(within).await.orphans);
    let adopted = crate::support::claims::adopt(store, Fence(2), lanes, 1, 3, since(within)).await;
    assert!(adopted.unwrap().claimed.is_empty());
    let within = Some(Duration::from_secs(90));
    assert!(looker.peek_within(within).await.orphans);
    let adopted = crate::support::claims::adopt(store, Fence(2), lanes, 1, 3, since(within)).await;
    assert_eq!(adopted.unwrap().claimed.len(), 1);
    assert_eq!(looker.peek().await, nothing());
}

#[tokio::test]
async fn a_peek_does_not_wait_for_locks() {
    let db = TestDb::new().await;
    let (mut other, client) = (db.client().await, db.client().await);
    enqueue(&client, "noop", json!({})).await;
    let looker = Looker::new(&db).await;
    let transaction = other.transaction().await.unwrap();
    transaction
        .batch_execute(
            "SELECT FROM rouse.job FOR UPDATE; LOCK TABLE rouse.job IN SHARE ROW EXCLUSIVE MODE",
        )
        .await
        .unwrap();
    assert_eq!(looker.peek().await.ready.len(), 1);
    transaction.rollback().await.unwrap();
}

/// While a transaction is open all day, the index keeps the entries of all releases that were continued.
#[tokio::test]
async fn a_peek_finds_releases_that_have_been_pending_for_a_second_since_the_last_peek() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let looker = Looker::new(&db).await;
    let minute = Some(Duration::from_secs(60));
    let pending = async |since: &str| {
        let pending = format!(
            "DELETE FROM rouse.pending_release;
             INSERT INTO rouse.pending_release (chain, succeeded, noted_at, try_at) VALUES (1, true, now(), now() - interval '{since}')"
        );
        sql(&client, &pending).await;
        let last_minute = looker.peek_within(minute).await.releases;
        (last_minute, looker.peek().await.releases)
    };
    assert_eq!(pending("-1 hour").await, (false, false));
    assert_eq!(pending("10 seconds").await, (true, true));
    assert_eq!(pending("2 minutes").await, (false, true), "a restart");
}

/// The looks of a worker, each of which finds a due job: with the time since which it searches for them.
const ALWAYS_DUE: &str = "
    CREATE TABLE public.look (due_since timestamptz);
    ALTER FUNCTION rouse.peek RENAME TO real_peek;
    CREATE FUNCTION rouse.peek(
        p_lanes bigint[], p_cursors bigint[], p_catalog_after bigint, p_catalog_sum bigint,
        p_orphaned_since timestamptz, p_due_since timestamptz, p_writers bigint[],
        OUT ready bigint[], OUT catalog_changed boolean, OUT orphans boolean, OUT due boolean, OUT next_due_ms bigint, OUT looked_at timestamptz,
        OUT turn bigint, OUT writers bigint[], OUT releases boolean, OUT deadlines boolean, OUT paused text[])
    LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO public.look VALUES (p_due_since);
        SELECT p.ready, p.catalog_changed, p.orphans, true, p.next_due_ms, p.looked_at, p.turn, p.writers, p.releases, p.deadlines, p.paused
        INTO ready, catalog_changed, orphans, due, next_due_ms, looked_at, turn, writers, releases, deadlines, paused
        FROM rouse.real_peek(p_lanes, p_cursors, p_catalog_after, p_catalog_sum, p_orphaned_since, p_due_since, p_writers) AS p;
    END $$";

/// A transaction that is open all day keeps the entries of all jobs that were promoted.
#[tokio::test]
async fn a_worker_that_finds_due_jobs_in_each_look_does_not_search_from_the_beginning_each_time() {
    let db = TestDb::new().await;
    let client = db.client().await;
    sql(&client, ALWAYS_DUE).await;
    sql(
        &client,
        "SELECT rouse.enqueue('noop', '{\"n\": 1}', run_at => clock_timestamp() + n * interval '200 ms') FROM generate_series(1, 5) AS n",
    )
    .await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    until_true(
        &client,
        "SELECT EXISTS (SELECT FROM look WHERE due_since IS NOT NULL)",
    )
    .await;
    worker.drain().await;
}

#[tokio::test]
async fn an_idle_worker_sends_few_statements() {
    let db = TestDb::new().await;
    let (client, proxy) = (db.client().await, Proxy::start(&db).await);
    let settings = Settings::default();
    let worker =
        TestWorker::start_through(proxy.store(), proxy.connector(), settings, catalog().await);
    // The worker looks every 5 ms until it listens, which may take a while on a loaded machine.
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
    let mut statements = 0;
    for _ in 0..3 {
        let before = proxy.sent();
        tokio::time::sleep(Duration::from_secs(3)).await;
        statements = proxy.sent() - before;
        // On a slow machine, some statements of the start come late.
        if statements < 20 {
            break;
        }
    }
    worker.drain().await;
    // The worker looks after 5, 10, 20 … ms, ten times in three seconds. 8 to 12 statements were measured, with and
    // without load.
    assert!(
        (1..20).contains(&statements),
        "{statements} statements in three seconds"
    );
}

#[tokio::test]
async fn a_peek_returns_the_newest_writing_transaction_of_its_own_database() {
    let (db, other) = (TestDb::new().await, TestDb::new().await);
    let looker = Looker::new(&db).await;
    let writers = async || {
        let looking = PeekParams {
            lanes: &[],
            catalog_after: 0,
            catalog_sum: 0,
            orphaned_since: None,
            due_since: None,
            writers: Some(&[]),
        };
        looker.store.peek(&looking).await.unwrap().writers.unwrap()
    };
    let (mut here, mut there) = (db.client().await, other.client().await);
    let watch = db.client().await;
    let there = there.transaction().await.unwrap();
    const WRITE: &str = "SELECT rouse.enqueue('x'), pg_current_xact_id()::xid::text::bigint";
    const ENDED: &str = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint";
    there.query_one(WRITE, &[]).await.unwrap();
    // A snapshot does not list running transactions that are newer than all ended ones. Other tests end
    // transactions all the time, so this repeats until no transaction newer than this one had ended before
    // the peek.
    for _ in 0..100 {
        let here = here.transaction().await.unwrap();
        let id: i64 = here.query_one(WRITE, &[]).await.unwrap().get(1);
        assert_eq!(writers().await, [id]);
        let ended: i64 = watch.query_one(ENDED, &[]).await.unwrap().get(0);
        here.commit().await.unwrap();
        assert!(writers().await.is_empty());
        if ended <= id {
            break;
        }
    }
    there.rollback().await.unwrap();
}

#[tokio::test]
async fn a_transaction_that_ends_during_a_peek_is_still_writing_if_the_last_peek_has_seen_it() {
    const PEEK: &str = "SELECT writers FROM rouse.peek('{}', '{}', 0, 0, NULL, NULL, $1::bigint[])";
    let db = TestDb::new().await;
    let (mut looker, mut producer) = (db.client().await, db.client().await);
    let enqueue = producer.transaction().await.unwrap();
    let id: i64 = enqueue
        .query_one(
            "SELECT rouse.enqueue('x'), pg_current_xact_id()::xid::text::bigint",
            &[],
        )
        .await
        .unwrap()
        .get(1);
    // The peek has its snapshot, and has not read the sessions.
    let peek = looker
        .build_transaction()
        .isolation_level(IsolationLevel::RepeatableRead)
        .start()
        .await
        .unwrap();
    peek.batch_execute("SELECT 1").await.unwrap();
    enqueue.commit().await.unwrap();
    let writers = async |client: &Transaction<'_>, last: &[i64]| -> Vec<i64> {
        client.query_one(PEEK, &[&last]).await.unwrap().get(0)
    };
    assert_eq!(writers(&peek, &[id]).await, [id]);
    assert!(writers(&peek, &[]).await.is_empty());
    peek.commit().await.unwrap();
    // The next peek sees its jobs.
    let peek = looker.transaction().await.unwrap();
    assert!(writers(&peek, &[id]).await.is_empty());
}
