//! Outcomes that Postgres refuses to write: they do not block others.

use std::time::{Duration, Instant};

use rouse::worker::Settings;
use serde_json::json;
use tokio_postgres::Client;

use crate::support::database::drop_all_partitions;
use crate::support::held_up::hold_up_ends;
use crate::support::refusals::{refuse_inserts, warnings_become_rare};
use crate::support::worker::{TestWorker, ended, enqueue, lease, show, until, until_true};
use crate::support::{Host, TestDb, command, folder};

use super::settings;

#[tokio::test]
async fn an_outcome_that_cannot_be_written_does_not_block_others_and_ends_with_its_lease() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let refused = enqueue(&client, "test.echo", json!({})).await;
    let refuse = format!("ALTER TABLE rouse.finished ADD CONSTRAINT no CHECK (id <> {refused})");
    client.batch_execute(&refuse).await.unwrap();
    let short = Settings {
        overrides: crate::support::worker::lease("test.echo", 2),
        ..settings()
    };
    let worker = TestWorker::start(&db, short).await;
    until(&client, refused, |job| job.state == "running").await;
    for n in 0..5 {
        let id = enqueue(&client, "noop", json!({ "n": n })).await;
        assert_eq!(ended(&client, id).await.state, "succeeded");
    }
    // The lease is not renewed forever: another attempt starts.
    until(&client, refused, |job| job.attempt > 1).await;
    worker.drain().await;
}

/// From now on, the ends of jobs that match this condition raise this error.
pub(super) async fn refuse_ends(client: &Client, condition: &str, error: &str) {
    refuse_inserts(client, "rouse.finished", condition, error).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_warnings_about_a_refused_outcome_become_rare() {
    let db = TestDb::new().await;
    let client = db.client().await;
    refuse_ends(&client, "true", "'the books are closed'").await;
    let folder = folder("[handlers.\"*\"]\nlease = \"1m\"\n", &["noop.wasm"]);
    let host = Host::spawn(command(&db.url(), &["serve", "--http", "off"], &folder));
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    let is_warning = |line: &str| {
        line.contains("cannot settle; trying until the lease expires")
            && line.contains(&format!("job.id={id} "))
    };
    warnings_become_rare(&client, &host, is_warning).await;
    accept_ends(&client).await;
    assert_eq!(ended(&client, id).await.state, "succeeded");
}

/// From now on the disk has no room for the ends of jobs that match this condition.
pub(super) async fn fill_disk(client: &Client, condition: &str) {
    let error = "'No space left on device' USING ERRCODE = 'disk_full'";
    refuse_ends(client, condition, error).await;
}

/// Ends what [`refuse_ends`] started. DROP TRIGGER alone locks the partitions before their parent, and readers of the
/// history lock the parent first, so the two would deadlock.
pub(super) async fn accept_ends(client: &Client) {
    client
        .batch_execute(
            "BEGIN; LOCK TABLE rouse.finished IN ACCESS EXCLUSIVE MODE; DROP TRIGGER refuse ON rouse.finished; COMMIT",
        )
        .await
        .unwrap();
}

#[tokio::test]
async fn an_outcome_that_does_not_fit_on_the_disk_does_not_block_others_and_ends_with_its_lease() {
    let db = TestDb::new().await;
    let client = db.client().await;
    fill_disk(&client, "NEW.payload ->> 'n' IN ('40', '70')").await;
    client
        .batch_execute("SELECT rouse.enqueue_many('noop', ARRAY(SELECT jsonb_build_object('n', n) FROM generate_series(1, 100) AS n))")
        .await
        .unwrap();
    let short = Settings {
        overrides: crate::support::worker::lease("noop", 2),
        ..settings()
    };
    let worker = TestWorker::start(&db, short).await;
    until_true(&client, "SELECT count(*) = 98 FROM rouse.finished").await;
    // The leases of these jobs are not renewed forever: other attempts start.
    until_true(&client, "SELECT bool_and(attempt > 1) FROM rouse.job").await;
    accept_ends(&client).await;
    until_true(
        &client,
        "SELECT count(*) FILTER (WHERE state = 'succeeded') = 100 FROM rouse.finished",
    )
    .await;
    worker.drain().await;
}

#[tokio::test]
async fn on_a_full_disk_settlements_back_off_and_no_outcome_is_lost() {
    let db = TestDb::new().await;
    let client = db.client().await;
    fill_disk(&client, "true").await;
    let worker = TestWorker::start(&db, settings()).await;
    client
        .batch_execute("SELECT rouse.enqueue_many('noop', ARRAY(SELECT jsonb_build_object('n', n) FROM generate_series(1, 64) AS n))")
        .await
        .unwrap();
    // After 16 tries, the worker waits for 2 s after each round of two statements: one outcome alone, and then all.
    until_true(&client, "SELECT last_value >= 16 FROM public.tries").await;
    let row = client
        .query_one(
            "SELECT last_value, clock_timestamp()::text FROM public.tries",
            &[],
        )
        .await
        .unwrap();
    let (before, at): (i64, String) = (row.get(0), row.get(1));
    let later = format!("SELECT clock_timestamp() > '{at}'::timestamptz + interval '6 s'");
    until_true(&client, &later).await;
    let since = format!(
        "SELECT last_value, extract(epoch FROM clock_timestamp() - '{at}'::timestamptz)::float8 FROM public.tries"
    );
    let row = client.query_one(&since, &[]).await.unwrap();
    let (tries, elapsed): (i64, f64) = (row.get::<_, i64>(0) - before, row.get(1));
    assert!(
        tries as f64 <= 2.0 * elapsed,
        "{tries} tries in {elapsed} s"
    );
    accept_ends(&client).await;
    until_true(&client, "SELECT count(*) FILTER (WHERE state = 'succeeded' AND attempt = 1) = 64 FROM rouse.finished").await;
    worker.drain().await;
}

#[tokio::test]
async fn a_stop_retries_outcomes_that_cannot_be_written_until_their_leases_end() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let other = hold_up_ends(&db, &client, "NEW.payload ->> 'n' = '1'").await;
    fill_disk(&client, "NEW.payload ->> 'n' = '2'").await;
    let short = Settings {
        overrides: lease("noop", 2),
        ..settings()
    };
    let worker = TestWorker::start(&db, short).await;
    let held_up = enqueue(&client, "noop", json!({"n": 1})).await;
    until_true(&client, "SELECT last_value >= 3 FROM public.held_up").await;
    let no_room = enqueue(&client, "noop", json!({"n": 2})).await;
    until_true(&client, "SELECT last_value >= 2 FROM public.tries").await;
    // Without an end, their leases would be renewed forever.
    worker.drain().await;
    for id in [held_up, no_room] {
        assert_ne!(show(&client, id).await.state, "succeeded");
    }
    other.batch_execute("ROLLBACK").await.unwrap();
    accept_ends(&client).await;
    let next = TestWorker::start(&db, settings()).await;
    for id in [held_up, no_room] {
        assert_eq!(ended(&client, id).await.state, "succeeded");
    }
    next.drain().await;
}

#[tokio::test]
async fn an_outcome_can_be_settled_if_todays_partition_is_missing() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, settings()).await;
    let first = enqueue(&client, "noop", json!({"n": 1})).await;
    ended(&client, first).await;
    drop_all_partitions(&client, "finished_default").await;
    let second = enqueue(&client, "noop", json!({"n": 2})).await;
    assert_eq!(ended(&client, second).await.state, "succeeded");
    worker.drain().await;
}

/// No call creates the partition.
#[tokio::test]
async fn an_outcome_whose_partition_stays_missing_does_not_block_others_and_is_tried_after_pauses()
{
    let db = TestDb::new().await;
    let client = db.client().await;
    let missing = "'no partition found' USING ERRCODE = 'check_violation', SCHEMA = 'rouse', TABLE = 'finished'";
    refuse_ends(&client, "NEW.payload ->> 'n' = '7'", missing).await;
    client
        .batch_execute("SELECT rouse.enqueue_many('noop', ARRAY(SELECT jsonb_build_object('n', n) FROM generate_series(1, 20) AS n))")
        .await
        .unwrap();
    let worker = TestWorker::start(&db, settings()).await;
    until_true(&client, "SELECT count(*) = 19 FROM rouse.finished").await;
    let started_at = Instant::now();
    let tries = "SELECT last_value FROM public.tries";
    let before: i64 = client.query_one(tries, &[]).await.unwrap().get(0);
    let more = format!("SELECT last_value >= {} FROM public.tries", before + 10);
    until_true(&client, &more).await;
    // Each time, the worker makes two tries, one of them after the creation of partitions, and waits for 0.2 s.
    let took = started_at.elapsed();
    assert!(took > Duration::from_millis(500), "{took:?}");
    accept_ends(&client).await;
    until_true(
        &client,
        "SELECT count(*) FILTER (WHERE state = 'succeeded') = 20 FROM rouse.finished",
    )
    .await;
    worker.drain().await;
}
