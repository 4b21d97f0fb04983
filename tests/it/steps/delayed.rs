//! Steps that cannot be read or recorded at once, because of locks, errors or cut connections.

use std::time::{Duration, Instant};

use rouse::store::{NewStateValue, StateScope};
use rouse::worker::Settings;
use serde_json::{Value, json};

use crate::support::claims::{claim, lock_job};
use crate::support::refusals::{refuse_inserts, warnings_become_rare};
use crate::support::worker::{TestWorker, ended, enqueue, until_true};
use crate::support::{Host, TestDb, command, cut_all_others, folder, until_quicker_than};

/// The host makes few such calls at a time, and others would wait for them.
#[tokio::test]
async fn no_call_of_an_attempt_waits_for_the_lock_of_its_job() {
    let db = TestDb::new().await;
    let (mut other, client, owner) = (db.client().await, db.client().await, db.worker().await);
    let id = enqueue(&client, "x", json!({})).await;
    let job = claim(&owner, 1).await.remove(0);
    let open = other.transaction().await.unwrap();
    lock_job(&open, id).await;
    let (id, fence) = (job.id, job.fence);
    let state = StateScope {
        id,
        fence,
        handler: "x",
    };
    let set = NewStateValue {
        key: "k",
        value: b"1",
        version: 1,
        expected: None,
        keys_max: 9,
        bytes_max: 99,
    };
    let steps = ["call:a".to_owned()];
    for error in [
        owner.record_step(id, fence, "s", "1").await.err(),
        owner.take_signal(id, fence, "s", "go", None).await.err(),
        owner.returned_calls(id, fence, &steps, 99).await.err(),
        owner.write_state(state, set).await.err(),
        owner.erase_state(state, "k").await.err(),
    ] {
        let error = error.expect("the job is locked");
        assert!(error.is_locked(), "{error}");
        // It is the error of NOWAIT, and not that of a timeout.
        let text = error.to_string();
        assert!(text.contains("could not obtain lock on row"), "{text}");
    }
    open.rollback().await.unwrap();
    let outcome = owner.record_step(id, fence, "s", "1").await;
    assert_eq!(outcome.unwrap(), Ok(()));
}

/// As during a cancellation of many jobs that is not committed.
#[tokio::test]
async fn attempts_whose_jobs_are_locked_do_not_delay_the_steps_of_others() {
    const LOCKED: usize = 30;
    let db = TestDb::new().await;
    let (mut first, mut other, client) = (db.client().await, db.client().await, db.client().await);
    // No attempt can record its first step before all jobs are locked.
    let early = first.transaction().await.unwrap();
    early
        .batch_execute("LOCK TABLE rouse.step IN EXCLUSIVE MODE")
        .await
        .unwrap();
    let slots = Settings {
        slots: LOCKED + 1,
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, slots).await;
    for _ in 0..LOCKED {
        enqueue(&client, "test.steps", json!({"between": "nothing"})).await;
    }
    let all_run = format!("SELECT count(*) = {LOCKED} FROM rouse.job WHERE state = 'running'");
    until_true(&client, &all_run).await;
    let open = other.transaction().await.unwrap();
    open.batch_execute("SELECT FROM rouse.job FOR UPDATE")
        .await
        .unwrap();
    early.commit().await.unwrap();
    // The job has five steps. If each of them waited for the tries of all others, the job would take 20 seconds.
    until_quicker_than(Duration::from_secs(10), async || {
        let free = enqueue(&client, "test.steps", json!({"between": "nothing"})).await;
        assert_eq!(ended(&client, free).await.state, "succeeded");
    })
    .await;
    open.rollback().await.unwrap();
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    worker.drain().await;
}

#[tokio::test]
async fn a_step_that_cannot_be_recorded_now_is_recorded_later() {
    let db = TestDb::new().await;
    let (mut client, observer) = (db.client().await, db.client().await);
    let worker = TestWorker::start(&db, Settings::default()).await;
    let open = client.transaction().await.unwrap();
    open.batch_execute("LOCK TABLE rouse.step IN EXCLUSIVE MODE")
        .await
        .unwrap();
    let id = enqueue(&observer, "test.steps", json!({"between": "nothing"})).await;
    // One call waits for the lock, which is released only after the call was given up.
    let waits = "EXISTS (SELECT FROM pg_stat_activity
                 WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%record_step%')";
    until_true(&observer, &format!("SELECT {waits}")).await;
    until_true(&observer, &format!("SELECT NOT {waits}")).await;
    open.commit().await.unwrap();
    let job = ended(&observer, id).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
    worker.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_warnings_about_a_refused_step_become_rare() {
    let db = TestDb::new().await;
    let client = db.client().await;
    refuse_inserts(&client, "rouse.step", "true", "'the books are closed'").await;
    let folder = folder("[handlers.\"*\"]\nlease = \"1m\"\n", &["test_guests.wasm"]);
    let host = Host::spawn(command(&db.url(), &["serve", "--http", "off"], &folder));
    let id = enqueue(&client, "test.steps", json!({"between": "nothing"})).await;
    let is_warning = |line: &str| {
        line.contains("could not read or write a step or the state; trying again")
            && line.contains(&format!("job.id={id}"))
    };
    warnings_become_rare(&client, &host, is_warning).await;
    client
        .batch_execute("DROP TRIGGER refuse ON rouse.step")
        .await
        .unwrap();
    assert_eq!(ended(&client, id).await.state, "succeeded");
}

#[tokio::test]
async fn a_worker_without_connections_records_its_steps_when_it_has_some() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    until_true(&client, "SELECT count(*) = 1 FROM rouse.workers").await;
    let id = enqueue(&client, "test.steps", json!({"between": "fail"})).await;
    for _ in 0..20 {
        cut_all_others(&client).await;
    }
    let job = ended(&client, id).await;
    assert_eq!(job.state, "succeeded", "{:?}", job.error);
    let done: Value = job.result.unwrap();
    assert_eq!(done["looped"], json!(vec![done["first"].clone(); 3]));
    worker.drain().await;
}

/// The next attempt of each job is its second one, and the first one has recorded a step.
const SECOND_ATTEMPTS: &str = "
    UPDATE rouse.job SET attempt = 1, uncounted = 1;
    INSERT INTO rouse.step (job, name, result, attempt, worker, at, kept_at)
    SELECT id, 'first', '7', 1, 0, now(), now() FROM rouse.job";

#[tokio::test]
async fn attempts_that_share_a_call_wait_before_they_repeat_it() {
    const JOBS: usize = 30;
    let db = TestDb::new().await;
    let client = db.client().await;
    for _ in 0..JOBS {
        enqueue(&client, "test.steps", json!({"between": "nothing"})).await;
    }
    client.batch_execute(SECOND_ATTEMPTS).await.unwrap();
    // A sequence keeps its value whatever becomes of the statement.
    client
        .batch_execute(
            "CREATE SEQUENCE public.calls;
             ALTER FUNCTION rouse.recorded_steps RENAME TO _recorded_steps;
             CREATE FUNCTION rouse.recorded_steps(bigint, bytea, bigint[], bigint[], timestamptz[])
             RETURNS TABLE (place bigint, refusal text, known bigint, added bigint, names text[], bytes integer[], results text[],
                            waits text[], until_ms bigint[], at timestamptz[])
             LANGUAGE plpgsql AS $$ BEGIN
                 PERFORM nextval('public.calls');
                 RAISE EXCEPTION 'not now';
             END $$",
        )
        .await
        .unwrap();
    let slots = Settings {
        slots: JOBS,
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, slots).await;
    let all_run = format!("SELECT count(*) = {JOBS} FROM rouse.job WHERE state = 'running'");
    until_true(&client, &all_run).await;
    let started_at = Instant::now();
    let calls = "SELECT last_value FROM public.calls";
    let before: i64 = client.query_one(calls, &[]).await.unwrap().get(0);
    let more = format!("SELECT last_value >= {} FROM public.calls", before + 100);
    until_true(&client, &more).await;
    // Every 0.2 s, there are a few calls; without a wait, there would be hundreds.
    let took = started_at.elapsed();
    assert!(took > Duration::from_millis(500), "{took:?}");
    client
        .batch_execute(
            "DROP FUNCTION rouse.recorded_steps; ALTER FUNCTION rouse._recorded_steps RENAME TO recorded_steps",
        )
        .await
        .unwrap();
    until_true(
        &client,
        &format!("SELECT count(*) FILTER (WHERE state = 'succeeded') = {JOBS} FROM rouse.finished"),
    )
    .await;
    worker.drain().await;
}

#[tokio::test]
async fn attempts_whose_shared_call_is_cut_repeat_it() {
    const JOBS: i64 = 12;
    let db = TestDb::new().await;
    let (mut client, observer) = (db.client().await, db.client().await);
    let mut ids = Vec::new();
    for _ in 0..JOBS {
        ids.push(enqueue(&client, "test.steps", json!({"between": "nothing"})).await);
    }
    client.batch_execute(SECOND_ATTEMPTS).await.unwrap();
    let open = client.transaction().await.unwrap();
    let lock = "LOCK TABLE rouse.step IN ACCESS EXCLUSIVE MODE";
    open.batch_execute(lock).await.unwrap();
    let slots = Settings {
        slots: JOBS as usize,
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, slots).await;
    let waiting = "FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%recorded_steps%'";
    let all_run = format!("SELECT count(*) = {JOBS} FROM rouse.job WHERE state = 'running'");
    until_true(&observer, &all_run).await;
    let two_calls = format!("SELECT count(*) = 2 {waiting}");
    until_true(&observer, &two_calls).await;
    let cut = format!("SELECT pg_terminate_backend(pid) {waiting}");
    observer.batch_execute(&cut).await.unwrap();
    until_true(&observer, &two_calls).await;
    open.commit().await.unwrap();
    for id in ids {
        let job = ended(&observer, id).await;
        let done = json!({"first": 7, "looped": [2, 2, 2], "second": 2});
        assert_eq!((job.attempt, job.result), (2, Some(done)));
    }
    worker.drain().await;
}
