//! Workers of queues with direct dispatch.

use std::time::Duration;

use rouse::job::{ErrorKind, Outcome};
use rouse::store::Locked;
use rouse::worker::{Intervals, Settings};
use tokio_postgres::Client;

use super::{declare_dead, direct, inbox, worker};
use crate::support::TestDb;
use crate::support::claims::{claim, error, result, settlement};
use crate::support::worker::{TestWorker, ended, enqueue_sql, until_true};

/// Starts a worker with this id that looks for inboxes to recover every 200 ms, and waits until it is registered with
/// its handlers.
async fn start(db: &TestDb, client: &Client, worker_id: &str) -> TestWorker {
    let settings = Settings {
        worker_id: worker_id.to_owned(),
        slots: 2,
        intervals: Intervals {
            recovery: Duration::from_millis(200),
            ..Intervals::default()
        },
        ..Settings::default()
    };
    let worker = TestWorker::start(db, settings).await;
    let has_handler = format!(
        "SELECT EXISTS (SELECT FROM rouse.handlers WHERE handler = 'test.sleep' AND worker_id = '{worker_id}')"
    );
    until_true(client, &has_handler).await;
    worker
}

/// Enqueues short jobs.
async fn enqueue_many(client: &Client, jobs: i32) {
    client
        .execute(
            "SELECT rouse.enqueue_many('test.sleep', array_fill('{\"ms\": 1}'::jsonb, ARRAY[$1::int]), queue => 'q')",
            &[&jobs],
        )
        .await
        .unwrap();
}

#[tokio::test]
async fn each_worker_runs_the_jobs_of_its_inbox_and_shares_the_others() {
    let (db, client) = direct("'round-robin'").await;
    let workers = [
        start(&db, &client, "a").await,
        start(&db, &client, "b").await,
    ];
    // A worker that is alive and does nothing keeps its inbox.
    let idle = worker(&db, "idle").await;
    enqueue_many(&client, 300).await;
    client
        .batch_execute("SELECT rouse.enqueue('test.sleep', '{\"ms\": 1}', queue => 'q', run_at => clock_timestamp() + interval '2 s') FROM generate_series(1, 50)")
        .await
        .unwrap();
    until_true(&client, "SELECT count(*) = 250 FROM rouse.finished").await;
    let elsewhere = "SELECT count(*) FILTER (WHERE l.worker <> f.worker), count(*) FILTER (WHERE l.worker IS NULL), count(DISTINCT f.worker)
                     FROM rouse.finished AS f JOIN rouse.lane AS l ON l.id = f.lane";
    let row = client.query_one(elsewhere, &[]).await.unwrap();
    let (elsewhere, shared, workers_of): (i64, i64, i64) = (row.get(0), row.get(1), row.get(2));
    assert_eq!(
        (elsewhere, workers_of),
        (0, 2),
        "no worker runs jobs of another inbox"
    );
    assert_eq!(shared, 50, "the jobs for later");
    let left: i64 = client
        .query_one("SELECT count(*) FROM rouse.job", &[])
        .await
        .unwrap()
        .get(0);
    assert_eq!(left, 100);
    // Once it is dead, the others run them.
    declare_dead(&client, &idle).await;
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    for worker in workers {
        worker.drain().await;
    }
}

#[tokio::test]
async fn a_worker_that_sleeps_is_woken_for_its_inbox() {
    let (db, client) = direct("'random'").await;
    let never = Duration::from_secs(60);
    let settings = Settings {
        poll_min: never,
        poll_max: never,
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, settings).await;
    until_true(
        &client,
        "SELECT EXISTS (SELECT FROM rouse.sleeper) AND EXISTS (SELECT FROM rouse.handlers WHERE handler = 'test.sleep')",
    )
    .await;
    for _ in 0..3 {
        let started = std::time::Instant::now();
        let id = enqueue_sql(&client, "'test.sleep', '{\"ms\": 1}', queue => 'q'").await;
        ended(&client, id).await;
        assert!(
            started.elapsed() < Duration::from_secs(30),
            "{:?}",
            started.elapsed()
        );
        until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
    }
    let of_inbox = "SELECT count(*) FROM rouse.finished AS f JOIN rouse.lane AS l ON l.id = f.lane AND l.worker = f.worker";
    let of_inbox: i64 = client.query_one(of_inbox, &[]).await.unwrap().get(0);
    assert_eq!(of_inbox, 3);
    worker.drain().await;
}

#[tokio::test]
async fn a_job_of_an_inbox_that_lost_its_worker_is_adopted() {
    let (db, client) = direct("'random'").await;
    let frozen = worker(&db, "frozen").await;
    let id = enqueue_sql(&client, "'test.sleep', '{\"ms\": 1}', queue => 'q'").await;
    let job = claim(&frozen, 1).await.remove(0);
    let other = start(&db, &client, "b").await;
    client
        .batch_execute("UPDATE rouse.job SET lease_until = now() - interval '1 s'")
        .await
        .unwrap();
    assert_eq!(
        ended(&client, id).await.state,
        "succeeded",
        "although the inbox is not its own"
    );
    let refused = frozen
        .settle(&[&settlement(&job, result("1"))], Locked::Wait)
        .await;
    assert!(refused.unwrap().accepted.is_empty());
    other.drain().await;
}

#[tokio::test]
async fn a_worker_that_registers_again_leaves_its_old_inbox_without_losing_a_job() {
    let (db, client) = direct("'random'").await;
    let worker = start(&db, &client, "a").await;
    let id = enqueue_sql(&client, "'test.sleep', '{\"ms\": 1}', queue => 'q'").await;
    ended(&client, id).await;
    // Another worker declares it dead. Its job is already in its inbox.
    client
        .batch_execute("SELECT rouse.pause_queue('q')")
        .await
        .unwrap();
    let id = enqueue_sql(&client, "'test.sleep', '{\"ms\": 1}', queue => 'q'").await;
    assert_eq!(inbox(&client, id).await, "a");
    client
        .batch_execute("UPDATE rouse.worker SET dead_at = now(); SELECT pg_notify('rouse_worker_' || incarnation, '') FROM rouse.worker")
        .await
        .unwrap();
    until_true(
        &client,
        "SELECT count(*) = 2 FROM rouse.workers WHERE worker_id = 'a'",
    )
    .await;
    client
        .batch_execute("SELECT rouse.resume_queue('q')")
        .await
        .unwrap();
    assert_eq!(ended(&client, id).await.state, "succeeded");
    let lane = "SELECT l.worker IS NULL FROM rouse.finished AS f JOIN rouse.lane AS l ON l.id = f.lane WHERE f.id = $1";
    let is_shared: bool = client.query_one(lane, &[&id]).await.unwrap().get(0);
    assert!(is_shared, "it was recovered, not inherited");
    // The new incarnation serves its own inbox.
    until_true(
        &client,
        "SELECT EXISTS (SELECT FROM rouse.handlers WHERE handler = 'test.sleep' AND worker_id = 'a')",
    )
    .await;
    let id = enqueue_sql(&client, "'test.sleep', '{\"ms\": 1}', queue => 'q'").await;
    ended(&client, id).await;
    let row = client
        .query_one("SELECT count(DISTINCT l.worker) FROM rouse.finished AS f JOIN rouse.lane AS l ON l.id = f.lane", &[])
        .await
        .unwrap();
    assert_eq!(row.get::<_, i64>(0), 2, "one inbox for each incarnation");
    worker.drain().await;
}

#[tokio::test]
async fn the_retry_of_a_job_runs_on_any_worker() {
    let (db, client) = direct("'random'").await;
    let first = worker(&db, "first").await;
    let id = enqueue_sql(&client, "'test.sleep', '{\"ms\": 1}', queue => 'q'").await;
    let job = claim(&first, 1).await.remove(0);
    let retry = Outcome::Retry {
        again: Duration::from_millis(1).into(),
        error: error(ErrorKind::GuestError),
    };
    first
        .settle(&[&settlement(&job, retry)], Locked::Wait)
        .await
        .unwrap();
    let other = start(&db, &client, "other").await;
    let shown = ended(&client, id).await;
    assert_eq!((shown.state.as_str(), shown.attempt), ("succeeded", 2));
    other.drain().await;
}

/// An inbox does not belong to a shard: its worker claims from it, no matter which shards are leased by which worker.
#[tokio::test]
async fn a_queue_may_have_direct_dispatch_and_shards() {
    let (db, client) = direct("'round-robin'").await;
    client
        .batch_execute("SELECT rouse.set_shards('q', 16)")
        .await
        .unwrap();
    let workers = [
        start(&db, &client, "a").await,
        start(&db, &client, "b").await,
    ];
    for _ in 0..24 {
        enqueue_many(&client, 1).await;
    }
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    let inboxes = "SELECT count(DISTINCT l.worker) = 2 FROM rouse.finished AS f JOIN rouse.lane AS l ON l.id = f.lane WHERE l.worker = f.worker";
    until_true(&client, inboxes).await;
    for worker in workers {
        worker.drain().await;
    }
}
