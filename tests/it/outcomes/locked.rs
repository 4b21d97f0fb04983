//! Outcomes that locks hold up: they do not block others.

use std::time::Duration;

use rouse::worker::{Settings, UnsettledLimits};
use serde_json::json;

use crate::support::held_ends::HeldEnds;
use crate::support::held_up::hold_up_ends;
use crate::support::worker::{
    TIMEOUT, TestWorker, ended, enqueue, enqueue_sql, lease, show, until, until_true,
};
use crate::support::{Host, TestDb, command, folder, until_quicker_than};

use super::settings;

/// For example, attempts that enqueue jobs with the unique key of a job whose producer has not committed yet.
#[tokio::test]
async fn outcomes_that_an_open_transaction_holds_up_do_not_block_others() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let other = hold_up_ends(&db, &client, "(NEW.payload ->> 'n')::integer >= 1000").await;
    let worker = TestWorker::start(&db, settings()).await;
    client
        .batch_execute("SELECT rouse.enqueue_many('noop', ARRAY(SELECT jsonb_build_object('n', n) FROM generate_series(900, 1199) AS n))")
        .await
        .unwrap();
    // The outcomes that were settled together with those that are held up are written.
    until_true(&client, "SELECT count(*) = 100 FROM rouse.finished").await;
    until_true(&client, "SELECT last_value >= 200 FROM public.held_up").await;
    let mut others = 0;
    for _ in 0..5 {
        // Trying each of the 200 outcomes would take 20 s.
        until_quicker_than(Duration::from_secs(10), async || {
            let id = enqueue(&client, "noop", json!({ "n": others })).await;
            others += 1;
            assert_eq!(ended(&client, id).await.state, "succeeded");
        })
        .await;
    }
    let finished = |jobs: i32| {
        format!(
            "SELECT count(*) FILTER (WHERE state = 'succeeded' AND attempt = 1) = {jobs} FROM rouse.finished"
        )
    };
    until_true(&client, &finished(100 + others)).await;
    other.batch_execute("COMMIT").await.unwrap();
    until_true(&client, &finished(300 + others)).await;
    worker.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_waits_for_outcomes_that_locks_block_until_the_end_of_the_drain_timeout() {
    let db = TestDb::new().await;
    let (client, producer) = (db.client().await, db.client().await);
    let other = hold_up_ends(&db, &client, "NEW.payload ->> 'n' = '2'").await;
    // The drain lasts much longer than the attempt at the second job, which is still running at the signal.
    let folder = folder(
        "drain_timeout = \"16s\"\n[handlers.\"*\"]\nlease = \"10m\"\n",
        &["noop.wasm", "test_guests.wasm"],
    );
    let mut command = command(&db.url(), &["serve", "--http", "off"], &folder);
    command.env("ROUSE_LOG", "info,rouse::job=debug");
    let host = Host::spawn(command);
    let held_up = enqueue(&client, "noop", json!({"n": 2})).await;
    until_true(&client, "SELECT last_value >= 2 FROM public.held_up").await;
    let pause = "SELECT rouse.pause_queue('named')";
    client.batch_execute(pause).await.unwrap();
    let named = enqueue_sql(&client, "'test.sleep', '{\"ms\": 4000}', queue => 'named'").await;
    let name = format!("BEGIN; SELECT rouse.enqueue('test.echo', after => '[{named}]')");
    producer.batch_execute(&name).await.unwrap();
    let resume = "SELECT rouse.resume_queue('named')";
    client.batch_execute(resume).await.unwrap();
    // A claim that has not started would be released.
    host.line(TIMEOUT, |line| {
        line.contains("started") && line.contains(&format!("job.id={named} "))
    });
    host.signal(libc::SIGTERM);
    // The host exits long before the leases end.
    let (status, output) = host.exit(TIMEOUT);
    assert!(status.success(), "{output}");
    for id in [named, held_up] {
        let is_given_up = |line: &str| {
            line.contains("another transaction has blocked it until the end of drain_timeout")
                && line.contains(&format!("job.id={id} "))
        };
        assert!(output.lines().any(is_given_up), "{output}");
    }
    producer.batch_execute("ROLLBACK").await.unwrap();
    other.batch_execute("ROLLBACK").await.unwrap();
    let next = TestWorker::start(&db, settings()).await;
    for id in [named, held_up] {
        let job = ended(&client, id).await;
        assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 2));
    }
    next.drain().await;
}

#[tokio::test]
async fn an_uncommitted_cancellation_does_not_block_other_settlements() {
    let db = TestDb::new().await;
    let (mut other, client) = (db.client().await, db.client().await);
    let held = HeldEnds::of("test.sleep");
    let worker = TestWorker::start_with_middlewares(&db, settings(), held.alone()).await;
    let locked = enqueue(&client, "test.sleep", json!({"ms": 1})).await;
    until(&client, locked, |job| job.state == "running").await;
    let transaction = other.transaction().await.unwrap();
    transaction
        .query("SELECT rouse.cancel($1)", &[&locked])
        .await
        .unwrap();
    held.release();
    for n in 0..5 {
        let id = enqueue(&client, "noop", json!({ "n": n })).await;
        assert_eq!(ended(&client, id).await.state, "succeeded");
    }
    assert_eq!(
        show(&client, locked).await.state,
        "running",
        "as other sessions see it"
    );
    transaction.rollback().await.unwrap();
    assert_eq!(ended(&client, locked).await.state, "succeeded");
    worker.drain().await;
}

/// Locks all jobs until the transaction ends.
const NAME_ALL_JOBS: &str =
    "BEGIN; SELECT rouse.enqueue('test.echo', after => (SELECT jsonb_agg(id) FROM rouse.job))";

/// For example, a producer that names the jobs in `after`, and leaves its transaction open. It does not prevent the
/// worker from renewing their leases.
#[tokio::test]
async fn outcomes_of_many_jobs_that_a_producer_has_locked_do_not_block_others() {
    let db = TestDb::new().await;
    let (client, producer) = (db.client().await, db.client().await);
    client
        .batch_execute("SELECT rouse.enqueue_many('noop', ARRAY(SELECT jsonb_build_object('n', n) FROM generate_series(1, 20) AS n))")
        .await
        .unwrap();
    producer.batch_execute(NAME_ALL_JOBS).await.unwrap();
    let few = Settings {
        overrides: lease("noop", 2),
        // Fewer than the locked jobs.
        unsettled_limits: UnsettledLimits {
            count: 16,
            ..UnsettledLimits::default()
        },
        ..settings()
    };
    let worker = TestWorker::start(&db, few).await;
    until_true(
        &client,
        "SELECT count(*) = 20 FROM rouse.job WHERE state = 'running'",
    )
    .await;
    for n in 0..5 {
        let id = enqueue(&client, "test.echo", json!({ "n": n })).await;
        assert_eq!(ended(&client, id).await.state, "succeeded");
    }
    // The others are still locked.
    until_true(&client, "SELECT count(*) = 5 FROM rouse.finished").await;
    producer.batch_execute("ROLLBACK").await.unwrap();
    until_true(
        &client,
        "SELECT count(*) FILTER (WHERE state = 'succeeded') = 25 FROM rouse.finished",
    )
    .await;
    worker.drain().await;
}

#[tokio::test]
async fn outcomes_that_stay_locked_take_no_space_of_others_however_long_their_leases_are() {
    let db = TestDb::new().await;
    let (client, producer) = (db.client().await, db.client().await);
    client
        .batch_execute("SELECT rouse.enqueue_many('noop', ARRAY(SELECT jsonb_build_object('n', n) FROM generate_series(1, 60) AS n))")
        .await
        .unwrap();
    producer.batch_execute(NAME_ALL_JOBS).await.unwrap();
    let few = Settings {
        slots: 4,
        overrides: lease("noop", 600),
        // The locked jobs fill this space, the way to it, and all slots.
        unsettled_limits: UnsettledLimits {
            count: 16,
            blocked: Duration::from_secs(1),
            ..UnsettledLimits::default()
        },
        ..settings()
    };
    let worker = TestWorker::start(&db, few).await;
    for n in 0..5 {
        let id = enqueue(&client, "test.echo", json!({ "n": n })).await;
        assert_eq!(ended(&client, id).await.state, "succeeded");
    }
    until_true(
        &client,
        "SELECT count(*) = 60 FROM rouse.job WHERE state = 'running'",
    )
    .await;
    producer.batch_execute("ROLLBACK").await.unwrap();
    worker.drain().await;
    let next = TestWorker::start(&db, settings()).await;
    until_true(
        &client,
        "SELECT count(*) FILTER (WHERE state = 'succeeded') = 65 FROM rouse.finished",
    )
    .await;
    next.drain().await;
}

/// Each of the large results takes more than a third of the space.
#[tokio::test]
async fn large_outcomes_that_stay_locked_take_no_space_of_others() {
    let db = TestDb::new().await;
    let (client, producer) = (db.client().await, db.client().await);
    let little = enqueue(&client, "noop", json!({"n": 1})).await;
    let mut named = Vec::new();
    for _ in 0..8 {
        named.push(enqueue(&client, "test.big-result", json!({"bytes": 400_000})).await);
    }
    producer.batch_execute(NAME_ALL_JOBS).await.unwrap();
    let small = Settings {
        slots: 4,
        unsettled_limits: UnsettledLimits {
            bytes: 1 << 20,
            blocked: Duration::from_secs(1),
            ..UnsettledLimits::default()
        },
        ..settings()
    };
    let worker = TestWorker::start(&db, small).await;
    let other = enqueue(&client, "test.echo", json!("small")).await;
    assert_eq!(ended(&client, other).await.state, "succeeded");
    producer.batch_execute("ROLLBACK").await.unwrap();
    // The outcome of this job took little space, so it was not given up.
    let job = ended(&client, little).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
    worker.drain().await;
    let next = TestWorker::start(&db, settings()).await;
    for id in named {
        assert_eq!(ended(&client, id).await.state, "succeeded");
    }
    next.drain().await;
}
