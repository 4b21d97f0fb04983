//! Jobs and lanes whose producers commit late, after a worker's cursors have passed them.

use std::time::{Duration, Instant};

use rouse::worker::{Intervals, Settings};
use serde_json::json;
use tokio_postgres::{Client, Transaction};

use super::{NEVER, settings, with_fast_sweeps, without_polls};
use crate::support::TestDb;
use crate::support::worker::{TestWorker, ended, enqueue, enqueue_sql, until_true};

/// Commits these jobs, and waits for their success. The unconditional restart, which would also find them, happens at
/// least 30 s after the start of the worker.
async fn commit_and_find(transaction: Transaction<'_>, client: &Client, late: &[i64]) {
    transaction.commit().await.unwrap();
    let committed = Instant::now();
    for id in late {
        assert_eq!(ended(client, *id).await.state, "succeeded");
    }
    assert!(committed.elapsed() < Duration::from_secs(15));
}

/// Runs jobs with these arguments, one after another, until fast sweeps have forgotten the cursors before them.
async fn run_during_several_sweeps(client: &Client, job: &str) {
    let started = Instant::now();
    while started.elapsed() < Duration::from_millis(700) {
        ended(client, enqueue_sql(client, job).await).await;
    }
}

#[tokio::test]
async fn a_late_committed_job_is_found() {
    let db = TestDb::new().await;
    let (mut late, client) = (db.client().await, db.client().await);
    let worker = TestWorker::start(&db, settings()).await;
    let transaction = late.transaction().await.unwrap();
    let row = transaction
        .query_one("SELECT rouse.enqueue('noop', '{\"n\": 1}')", &[])
        .await
        .unwrap();
    let early_turn: i64 = row.get(0);
    // Later turns of the same lane are claimed and finished: the cursor has passed the uncommitted one.
    for n in 0..3 {
        let id = enqueue(&client, "noop", json!({ "n": n })).await;
        assert!(id > early_turn);
        ended(&client, id).await;
    }
    // The short sweep finds the job.
    commit_and_find(transaction, &client, &[early_turn]).await;
    worker.drain().await;
}

#[tokio::test]
async fn late_committed_jobs_are_found_without_a_notification() {
    let db = TestDb::new().await;
    let (mut late, client) = (db.client().await, db.client().await);
    let transaction = late.transaction().await.unwrap();
    let late = "SELECT rouse.enqueue('noop', '{\"n\": 1}'), rouse.enqueue('noop', '{\"n\": 1}', queue => 'other')";
    let row = transaction.query_one(late, &[]).await.unwrap();
    let late: [i64; 2] = [row.get(0), row.get(1)];
    // One lane is in the catalog, but this worker has never seen a job in it. The cursor passes the job of the other
    // lane.
    let lane =
        "SELECT rouse._lane('noop', 'default', NULL, NULL, 'normal', NULL, NULL, '{}', '{}')";
    client.batch_execute(lane).await.unwrap();
    let worker = TestWorker::start(
        &db,
        Settings {
            notify: false,
            ..with_fast_sweeps()
        },
    )
    .await;
    // From the second sweep on, the worker does not look behind the cursor of the previous sweep.
    run_during_several_sweeps(&client, "'noop', queue => 'other'").await;
    // A sweep notices the end of the transaction and causes a restart.
    commit_and_find(transaction, &client, &late).await;
    worker.drain().await;
}

/// Sweeps as usual, but with almost no looks behind the cursors in between, and without unconditional restarts.
fn without_restarts() -> Settings {
    Settings {
        notify: false,
        slots: 1,
        intervals: Intervals {
            look_back: Duration::from_millis(5),
            restart: Duration::from_secs(600),
            restart_max: Duration::from_secs(600),
            ..Intervals::default()
        },
        ..settings()
    }
}

/// The worker has no earlier cursor in the lane to which it could go back.
#[tokio::test]
async fn a_late_committed_job_of_a_new_lane_is_found_without_a_notification() {
    let db = TestDb::new().await;
    let (mut late, client) = (db.client().await, db.client().await);
    let worker = TestWorker::start(&db, without_restarts()).await;
    ended(&client, enqueue(&client, "noop", json!({ "n": 0 })).await).await;
    let transaction = late.transaction().await.unwrap();
    let enqueue = "SELECT rouse.enqueue('noop', queue => 'new')";
    let early: i64 = transaction.query_one(enqueue, &[]).await.unwrap().get(0);
    // The worker learns about the lane from the job of another transaction.
    let id = enqueue_sql(&client, "'noop', queue => 'new'").await;
    assert!(id > early);
    ended(&client, id).await;
    // At most one sweep sees the transaction, so it does not count as late. The recent cursors are also past its turn.
    for _ in 0..10 {
        ended(
            &client,
            enqueue_sql(&client, "'noop', queue => 'new'").await,
        )
        .await;
    }
    commit_and_find(transaction, &client, &[early]).await;
    worker.drain().await;
}

/// A row lock hides a job that has had its turn for a long time.
#[tokio::test]
async fn a_job_that_was_locked_while_a_new_worker_read_its_lane_is_found_without_a_notification() {
    let db = TestDb::new().await;
    let (mut late, client) = (db.client().await, db.client().await);
    let mut ids = Vec::new();
    for _ in 0..12 {
        ids.push(enqueue(&client, "test.sleep", json!({ "ms": 150 })).await);
    }
    // The job is locked from before the first sweep until before the third.
    let transaction = late.transaction().await.unwrap();
    let lock = "SELECT FROM rouse.job WHERE id = $1 FOR UPDATE";
    transaction.query(lock, &[&ids[5]]).await.unwrap();
    let worker = TestWorker::start(&db, without_restarts()).await;
    ended(&client, ids[8]).await;
    commit_and_find(transaction, &client, &[ids[5]]).await;
    worker.drain().await;
}

/// A lock that is held only briefly is not noticed by sweeps. The looks after the promotion of the other job search
/// for jobs that became due later.
#[tokio::test]
async fn a_due_job_that_was_locked_while_another_one_was_promoted_is_found_without_a_sweep() {
    let db = TestDb::new().await;
    let (mut locker, client) = (db.client().await, db.client().await);
    let scheduled = "'noop', run_at => now() + interval '1 hour'";
    let locked = enqueue_sql(&client, scheduled).await;
    let other = enqueue_sql(&client, scheduled).await;
    client
        .batch_execute("UPDATE rouse.job SET available_at = now() - interval '10 s'")
        .await
        .unwrap();
    let transaction = locker.transaction().await.unwrap();
    let lock = "SELECT FROM rouse.job WHERE id = $1 FOR UPDATE";
    transaction.query(lock, &[&locked]).await.unwrap();
    let never = Duration::from_secs(600);
    let settings = Settings {
        notify: false,
        intervals: Intervals {
            sweep: never,
            restart: never,
            restart_max: never,
            ..Intervals::default()
        },
        ..settings()
    };
    let worker = TestWorker::start(&db, settings).await;
    ended(&client, other).await;
    transaction.rollback().await.unwrap();
    assert_eq!(ended(&client, locked).await.state, "succeeded");
    worker.drain().await;
}

#[tokio::test]
async fn a_late_commit_of_more_jobs_than_fit_between_two_sweeps_is_processed_completely() {
    let db = TestDb::new().await;
    let (mut late, client) = (db.client().await, db.client().await);
    let transaction = late.transaction().await.unwrap();
    let late = "SELECT max(id) FROM rouse.enqueue_many('test.sleep', ARRAY(
                    SELECT jsonb_build_object('ms', 100) FROM generate_series(1, 40))) AS id";
    let last: i64 = transaction.query_one(late, &[]).await.unwrap().get(0);
    let worker = TestWorker::start(
        &db,
        Settings {
            notify: false,
            slots: 2,
            ..with_fast_sweeps()
        },
    )
    .await;
    // The cursor passes the uncommitted jobs, and the sweeps forget its position before them.
    run_during_several_sweeps(&client, "'test.sleep', '{\"ms\": 1}'").await;
    // The jobs take 2 s.
    commit_and_find(transaction, &client, &[last]).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_lane_committed_long_after_it_was_numbered_is_found() {
    let db = TestDb::new().await;
    let (mut late, client) = (db.client().await, db.client().await);
    let settings = Settings {
        intervals: Intervals {
            restart: Duration::from_secs(1),
            ..Intervals::default()
        },
        ..settings()
    };
    let worker = TestWorker::start(&db, settings).await;
    let transaction = late.transaction().await.unwrap();
    let row = transaction
        .query_one("SELECT rouse.enqueue('noop', queue => 'late')", &[])
        .await
        .unwrap();
    // More lanes than the window in which the catalog is read again, and a job that proves that they were read.
    client
        .query(
            "SELECT rouse.enqueue('no.such.handler', queue => 'q' || n) FROM generate_series(1, 400) AS n",
            &[],
        )
        .await
        .unwrap();
    let row_after = client
        .query_one("SELECT rouse.enqueue('noop', queue => 'after')", &[])
        .await
        .unwrap();
    ended(&client, row_after.get(0)).await;
    transaction.commit().await.unwrap();
    // The long sweep reads the whole catalog.
    let job = ended(&client, row.get(0)).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
    worker.drain().await;
}

#[tokio::test]
async fn a_scheduled_job_committed_after_its_time_is_found_by_its_notification() {
    let db = TestDb::new().await;
    let (mut late, client) = (db.client().await, db.client().await);
    let worker = TestWorker::start(&db, without_polls(settings())).await;
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
    let transaction = late.transaction().await.unwrap();
    let row = transaction
        .query_one(
            "SELECT rouse.enqueue('noop', '{\"n\": 1}', run_at => clock_timestamp() + interval '10 ms')",
            &[],
        )
        .await
        .unwrap();
    // The pause is longer than a look for due jobs reaches back. The job after the pause triggers a look, so that no
    // sweep is near.
    tokio::time::sleep(Duration::from_millis(3000)).await;
    let id = enqueue(&client, "noop", json!({ "n": 2 })).await;
    ended(&client, id).await;
    transaction.commit().await.unwrap();
    assert_eq!(ended(&client, row.get(0)).await.state, "succeeded");
    worker.drain().await;
}

#[tokio::test]
async fn a_job_committed_behind_the_cursors_is_found_by_its_notification() {
    let db = TestDb::new().await;
    let (mut late, client) = (db.client().await, db.client().await);
    let worker = TestWorker::start(&db, without_polls(with_fast_sweeps())).await;
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
    let transaction = late.transaction().await.unwrap();
    let row = transaction
        .query_one("SELECT rouse.enqueue('noop', '{\"n\": 1}')", &[])
        .await
        .unwrap();
    // Enough looks, each more than two sweep intervals after the previous one, for the short sweep to forget.
    for n in 0..4 {
        let id = enqueue(&client, "noop", json!({ "n": n })).await;
        ended(&client, id).await;
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    transaction.commit().await.unwrap();
    let committed = Instant::now();
    assert_eq!(ended(&client, row.get(0)).await.state, "succeeded");
    // The worker would poll later.
    assert!(committed.elapsed() < NEVER / 2, "found by a sweep");
    worker.drain().await;
}
