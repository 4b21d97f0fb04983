//! Notifications: which workers get them, when, and with which contents. The producer's commit decides.

use std::time::Duration;

use rouse::job::{Fence, Incarnation, LaneId, Outcome};
use rouse::store::{
    ClaimOrder, ECHO_TIMEOUT, Listener, Locked, Notification, Settlement, Store, Wakeup,
};
use serde_json::json;
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::old_versions::{entries_read, keep_versions};
use crate::support::worker::{enqueue, until_true};

/// A listener accepts any incarnation.
const WORKER: Incarnation = Incarnation(1);

/// A worker that sleeps on these queues.
async fn sleeping_worker(db: &TestDb, queues: &[&str]) -> Store {
    let queues: Vec<String> = queues.iter().map(ToString::to_string).collect();
    let worker = db.worker().await;
    worker
        .sleep(&queues, Duration::from_secs(60))
        .await
        .unwrap();
    worker
}

async fn listen(db: &TestDb) -> Listener {
    Listener::start(&db.connector(), WORKER).await.unwrap()
}

/// All notifications so far. They arrive in the order of their commits, so a notification of our own is the last.
async fn received(listener: &mut Listener, client: &Client) -> Vec<Wakeup> {
    client
        .batch_execute("NOTIFY rouse_wake, 'the-end'")
        .await
        .unwrap();
    let mut received = Vec::new();
    loop {
        let Notification::Wakeup(wakeup) = listener.next().await.expect("the connection is up")
        else {
            continue;
        };
        if wakeup.queue == "the-end" {
            return received;
        }
        received.push(wakeup);
    }
}

async fn lane(client: &Client, handler: &str) -> LaneId {
    let row = client
        .query_one("SELECT id FROM rouse.lane WHERE handler = $1", &[&handler])
        .await;
    LaneId(row.unwrap().get(0))
}

/// Asserts that there was one notification, of the only lane of this handler.
async fn assert_wakes(listener: &mut Listener, client: &Client, queue: &str, handler: &str) {
    let lane = lane(client, handler).await;
    let all = received(listener, client).await;
    assert_eq!(all, [ready_wakeup(queue, lane)]);
}

fn ready_wakeup(queue: &str, lane: LaneId) -> Wakeup {
    Wakeup {
        queue: queue.into(),
        lane: Some(lane),
    }
}

/// The number of advisory locks that are held in this database.
const HELD: &str = "SELECT count(*) FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database
     WHERE l.locktype = 'advisory' AND d.datname = current_database()";

/// Holds the locks with which transactions that commit at this moment would suppress the notifications of others, for
/// this notification and the next ten seconds.
async fn hold_wake_locks(client: &Client, note: &str) {
    client
        .query(
            "SELECT pg_advisory_lock(rouse._wake_key(s.salt, $1, clock_timestamp() + n * interval '100 ms'))
             FROM rouse.wake_salt AS s, generate_series(0, 100) AS n",
            &[&note],
        )
        .await
        .unwrap();
}

#[tokio::test]
async fn a_commit_wakes_workers_that_fell_asleep_after_the_enqueue() {
    let db = TestDb::new().await;
    let (mut producer, client) = (db.client().await, db.client().await);
    let mut listener = listen(&db).await;
    let transaction = producer.transaction().await.unwrap();
    transaction
        .query("SELECT rouse.enqueue('x')", &[])
        .await
        .unwrap();
    sleeping_worker(&db, &["*"]).await;
    assert_eq!(received(&mut listener, &client).await, []);
    transaction.commit().await.unwrap();
    assert_wakes(&mut listener, &client, "default", "x").await;
}

#[tokio::test]
async fn a_transaction_with_one_snapshot_wakes_workers_that_fell_asleep_after_it() {
    let db = TestDb::new().await;
    let (producer, client) = (db.client().await, db.client().await);
    let mut listener = listen(&db).await;
    producer
        .batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT rouse.enqueue('x')")
        .await
        .unwrap();
    sleeping_worker(&db, &["*"]).await;
    until_true(
        &producer,
        "SELECT clock_timestamp() > now() + interval '50 ms'",
    )
    .await;
    producer.batch_execute("COMMIT").await.unwrap();
    assert_wakes(&mut listener, &client, "default", "x").await;
}

#[tokio::test]
async fn a_queue_that_is_named_twice_adds_one_sleeper() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let twice = ["mail".to_string(), "mail".to_string()];
    store.sleep(&twice, Duration::from_secs(60)).await.unwrap();
    let sleepers = client.query("SELECT queue FROM rouse.sleeper", &[]).await;
    assert_eq!(sleepers.unwrap().len(), 1);
}

/// A transaction that is open all day keeps them.
#[tokio::test]
async fn requests_for_notifications_that_ended_long_ago_are_not_read() {
    const REGISTER: &str = "SELECT incarnation FROM rouse.register('w', sha256('key'), 'here', 'linux', '0', '{}', 1, '{}', '{}')";
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker: i64 = client.query_one(REGISTER, &[]).await.unwrap().get(0);
    client
        .batch_execute("SELECT rouse.enqueue('x')")
        .await
        .unwrap();
    let _old = keep_versions(&db).await;
    client
        .batch_execute(&format!(
            "INSERT INTO rouse.sleeper (worker, queue, until)
             SELECT {worker}, '*', now() - n * interval '1 second' FROM generate_series(1, 1000) AS n;
             DELETE FROM rouse.sleeper"
        ))
        .await
        .unwrap();
    let sleep = format!("SELECT rouse.sleep({worker}, sha256('key'), '{{*}}', 60000)");
    let awake = format!("SELECT rouse.awake({worker}, sha256('key'))");
    // A producer decides about a notification when it commits.
    let enqueue = "SELECT rouse.enqueue('x'); SET CONSTRAINTS ALL IMMEDIATE";
    for statements in [enqueue.to_owned(), format!("{sleep}; {enqueue}"), awake] {
        let read = entries_read(&client, &["rouse.sleeper"], &statements).await;
        assert!(read < 20, "{statements}: {read}");
    }
}

#[tokio::test]
async fn the_requests_of_other_workers_for_other_queues_are_not_read() {
    const REGISTER: &str = "SELECT incarnation FROM rouse.register('w', sha256('key'), 'here', 'linux', '0', '{}', 1, '{}', '{}')";
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker: i64 = client.query_one(REGISTER, &[]).await.unwrap().get(0);
    client
        .batch_execute(
            "SELECT rouse.enqueue('x');
             INSERT INTO rouse.sleeper (worker, queue, until)
             SELECT -w, 'queue-' || q, now() + interval '1 minute' FROM generate_series(1, 100) AS w, generate_series(1, 20) AS q",
        )
        .await
        .unwrap();
    let sleep = format!("SELECT rouse.sleep({worker}, sha256('key'), '{{mail}}', 60000)");
    let awake = format!("SELECT rouse.awake({worker}, sha256('key'))");
    let enqueue = "SELECT rouse.enqueue('x'); SET CONSTRAINTS ALL IMMEDIATE";
    for statements in [enqueue.to_owned(), sleep, awake] {
        let read = entries_read(&client, &["rouse.sleeper"], &statements).await;
        assert!(read < 30, "{statements}: {read}");
    }
}

#[tokio::test]
async fn a_worker_that_renews_its_request_has_one() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let minute = Duration::from_secs(60);
    for queues in [["mail", "sms"], ["mail", "billing"]] {
        let queues = queues.map(String::from);
        store.sleep(&queues, minute).await.unwrap();
    }
    let sleepers = "SELECT string_agg(queue, ' ' ORDER BY queue) FROM rouse.sleeper";
    let sleepers: Option<String> = client.query_one(sleepers, &[]).await.unwrap().get(0);
    assert_eq!(sleepers.as_deref(), Some("billing mail"));
    store.awake().await.unwrap();
    let left = client.query("SELECT FROM rouse.sleeper", &[]).await;
    assert_eq!(left.unwrap().len(), 0);
}

/// Nobody else deletes the request of a worker that has died.
#[tokio::test]
async fn maintenance_deletes_requests_that_ended_an_hour_ago() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    client
        .batch_execute(
            "INSERT INTO rouse.sleeper (worker, queue, until)
             SELECT -n, '*', now() - n * interval '40 minutes' FROM generate_series(1, 3) AS n",
        )
        .await
        .unwrap();
    store.maintain_partitions().await.unwrap();
    let left = client.query("SELECT FROM rouse.sleeper", &[]).await;
    assert_eq!(left.unwrap().len(), 1);
}

#[tokio::test]
async fn only_workers_that_sleep_on_the_queue_or_on_all_queues_are_woken() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut listener = listen(&db).await;
    enqueue(&client, "x", json!({})).await;
    assert_eq!(
        received(&mut listener, &client).await,
        [],
        "no worker sleeps"
    );
    let sleeper = sleeping_worker(&db, &["mail"]).await;
    enqueue(&client, "x", json!({})).await;
    assert_eq!(
        received(&mut listener, &client).await,
        [],
        "not on this queue"
    );
    client
        .query("SELECT rouse.enqueue('y', queue => 'mail')", &[])
        .await
        .unwrap();
    assert_wakes(&mut listener, &client, "mail", "y").await;
    sleeper.awake().await.unwrap();
    client
        .query("SELECT rouse.enqueue('y', queue => 'mail')", &[])
        .await
        .unwrap();
    assert_eq!(
        received(&mut listener, &client).await,
        [],
        "the worker is awake again"
    );
}

#[tokio::test]
async fn a_notification_names_the_lane_of_a_ready_job_and_only_the_queue_of_a_scheduled_one() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut listener = listen(&db).await;
    sleeping_worker(&db, &["*"]).await;
    client
        .query(
            "SELECT rouse.enqueue('x', run_at => now() + interval '1 hour', queue => 'later')",
            &[],
        )
        .await
        .unwrap();
    let scheduled = Wakeup {
        queue: "later".into(),
        lane: None,
    };
    assert_eq!(received(&mut listener, &client).await, [scheduled]);
    client
        .query("SELECT rouse.enqueue('y', unique_key => 'k')", &[])
        .await
        .unwrap();
    assert_wakes(&mut listener, &client, "default", "y").await;
    client
        .query("SELECT rouse.enqueue('y', unique_key => 'k')", &[])
        .await
        .unwrap();
    assert_eq!(
        received(&mut listener, &client).await,
        [],
        "nothing was enqueued"
    );
}

#[tokio::test]
async fn a_transaction_notifies_once_per_lane_for_any_number_of_jobs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut listener = listen(&db).await;
    sleeping_worker(&db, &["*"]).await;
    client
        .batch_execute(
            "BEGIN;
             SELECT rouse.enqueue_many('x', ARRAY['1', '2', '3']::jsonb[]);
             SELECT rouse.enqueue('x');
             SELECT rouse.enqueue('y');
             COMMIT",
        )
        .await
        .unwrap();
    let (x, y) = (lane(&client, "x").await, lane(&client, "y").await);
    assert_eq!(
        received(&mut listener, &client).await,
        [ready_wakeup("default", x), ready_wakeup("default", y)]
    );
}

#[tokio::test]
async fn a_rolled_back_enqueue_does_not_notify() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut listener = listen(&db).await;
    enqueue(&client, "x", json!({})).await;
    enqueue(&client, "y", json!({})).await;
    sleeping_worker(&db, &["*"]).await;
    client
        .batch_execute("BEGIN; SELECT rouse.enqueue('x'); ROLLBACK")
        .await
        .unwrap();
    assert_eq!(received(&mut listener, &client).await, []);
    client
        .batch_execute(
            "BEGIN;
             SAVEPOINT one; SELECT rouse.enqueue('x'); ROLLBACK TO SAVEPOINT one;
             SELECT rouse.enqueue('y');
             COMMIT",
        )
        .await
        .unwrap();
    assert_wakes(&mut listener, &client, "default", "y").await;
}

#[tokio::test]
async fn of_two_concurrent_commits_only_the_first_notifies() {
    let db = TestDb::new().await;
    let (committing, client) = (db.client().await, db.client().await);
    let mut listener = listen(&db).await;
    enqueue(&client, "x", json!({})).await;
    sleeping_worker(&db, &["*"]).await;
    let lane = lane(&client, "x").await;
    hold_wake_locks(&committing, &format!("default {lane}")).await;
    // On a machine that is too slow to commit within 100 ms, the job notifies anyway.
    let mut muted = false;
    for _ in 0..20 {
        enqueue(&client, "x", json!({})).await;
        muted = muted || received(&mut listener, &client).await.is_empty();
    }
    assert!(muted);
    client
        .query("SELECT rouse.enqueue('x', queue => 'other')", &[])
        .await
        .unwrap();
    assert_eq!(
        received(&mut listener, &client).await.len(),
        1,
        "a commit of another lane mutes no notification"
    );
    drop(committing);
    until_true(&client, &format!("SELECT ({HELD}) = 0")).await;
    enqueue(&client, "x", json!({})).await;
    assert_eq!(
        received(&mut listener, &client).await,
        [ready_wakeup("default", lane)]
    );
}

#[tokio::test]
async fn a_job_enqueued_a_while_ago_notifies_despite_concurrent_commits() {
    let db = TestDb::new().await;
    let (committing, client) = (db.client().await, db.client().await);
    let mut listener = listen(&db).await;
    enqueue(&client, "x", json!({})).await;
    sleeping_worker(&db, &["*"]).await;
    let lane = lane(&client, "x").await;
    hold_wake_locks(&committing, &format!("default {lane}")).await;
    client
        .batch_execute("BEGIN; SELECT rouse.enqueue('x')")
        .await
        .unwrap();
    until_true(
        &client,
        "SELECT clock_timestamp() > max(requested_at) + interval '100 ms' FROM rouse.job",
    )
    .await;
    client.batch_execute("COMMIT").await.unwrap();
    assert_eq!(
        received(&mut listener, &client).await,
        [ready_wakeup("default", lane)]
    );
}

#[tokio::test]
async fn a_transaction_that_notifies_before_its_commit_suppresses_other_notifications_for_100_ms() {
    let db = TestDb::new().await;
    let (early, client) = (db.client().await, db.client().await);
    let mut listener = listen(&db).await;
    enqueue(&client, "x", json!({})).await;
    sleeping_worker(&db, &["*"]).await;
    // On a machine that is too slow to get there within 100 ms, the transaction does not take the lock.
    let mut held: i64 = 0;
    for _ in 0..200 {
        early
            .batch_execute(
                "ROLLBACK; BEGIN; SET CONSTRAINTS ALL IMMEDIATE; SELECT rouse.enqueue('x')",
            )
            .await
            .unwrap();
        held = client.query_one(HELD, &[]).await.unwrap().get(0);
        if held == 1 {
            break;
        }
    }
    assert_eq!(held, 1, "the transaction holds the lock until its end");
    let tenth = "SELECT floor(extract(epoch FROM clock_timestamp()) * 10)::bigint";
    let tenth: i64 = client.query_one(tenth, &[]).await.unwrap().get(0);
    let next =
        format!("SELECT floor(extract(epoch FROM clock_timestamp()) * 10)::bigint > {tenth}");
    until_true(&client, &next).await;
    enqueue(&client, "x", json!({})).await;
    assert_wakes(&mut listener, &client, "default", "x").await;
    early.batch_execute("COMMIT").await.unwrap();
    // Its own notification.
    assert_wakes(&mut listener, &client, "default", "x").await;
}

#[tokio::test]
async fn a_producer_can_commit_as_a_role_without_privileges() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut listener = listen(&db).await;
    // Roles belong to the whole server, which other tests share.
    client
        .batch_execute("DO $$ BEGIN CREATE ROLE wakeups_nobody; EXCEPTION WHEN duplicate_object THEN NULL; END $$")
        .await
        .unwrap();
    sleeping_worker(&db, &["*"]).await;
    client
        .batch_execute(
            "BEGIN;
             SET LOCAL ROLE rouse_producer; SELECT rouse.enqueue('x');
             SET LOCAL ROLE wakeups_nobody;
             COMMIT",
        )
        .await
        .unwrap();
    assert_wakes(&mut listener, &client, "default", "x").await;
}

#[tokio::test]
async fn a_released_claim_wakes_sleeping_workers() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let mut listener = listen(&db).await;
    enqueue(&client, "x", json!({})).await;
    let lane = lane(&client, "x").await;
    let order = ClaimOrder {
        lane,
        after: i64::MIN,
        lease_ms: 60_000,
        max: None,
        overdue: None,
    };
    let jobs = store
        .claim(Fence(7), &[order], 1, None)
        .await
        .unwrap()
        .jobs();
    sleeping_worker(&db, &["*"]).await;
    let released = Settlement {
        id: jobs[0].id,
        fence: jobs[0].fence,
        started_after: None,
        guest_run: None,
        handler: None,
        outcome: Outcome::Released,
        jobs: Vec::new(),
        trace: None,
    };
    store.settle(&[released], Locked::Wait).await.unwrap();
    assert_eq!(
        received(&mut listener, &client).await,
        [ready_wakeup("default", lane)]
    );
}

#[tokio::test]
async fn a_worker_receives_its_echo_only_if_its_notifications_arrive() {
    let (db, other) = (TestDb::new().await, TestDb::new().await);
    let mut here = listen(&db).await;
    let mut elsewhere = listen(&other).await;
    let mut other_worker = Listener::start(&db.connector(), Incarnation(2))
        .await
        .unwrap();
    db.store().echo(WORKER).await.unwrap();
    assert!(here.receives_echo(ECHO_TIMEOUT).await);
    let soon = Duration::from_millis(100);
    assert!(!elsewhere.receives_echo(soon).await);
    assert!(!other_worker.receives_echo(soon).await);
}
