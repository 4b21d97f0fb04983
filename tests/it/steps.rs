//! Steps: what an attempt records while it runs, and which workers may record and read them.

mod delayed;
mod newer;
mod progress;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use rouse::job::{AbortReason, Fence, JobId, RecordedStep};
use rouse::store::{Locked, LostJob};
use rouse::worker::Settings;
use serde_json::json;
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::claims::{claim, orders, rand, recorded_steps, result, settlement};
use crate::support::worker::{
    TestWorker, cancel, ended, enqueue, events_at_any_speed, expire_lease, until_true,
};

/// Waits until the attempt reports that it waits.
async fn until_waiting(client: &Client, id: i64) {
    until_true(
        client,
        &format!("SELECT coalesce((progress->>'step') = 'waiting', false) FROM rouse.job({id})"),
    )
    .await;
}

async fn recorded(client: &Client, id: i64) -> Vec<String> {
    let rows = client
        .query(
            "SELECT name FROM rouse.step WHERE job = $1 ORDER BY at, name",
            &[&id],
        )
        .await
        .unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

async fn refused(client: &Client) -> i64 {
    client
        .query_one("SELECT sum(refused)::bigint FROM rouse.workers", &[])
        .await
        .unwrap()
        .get(0)
}

#[tokio::test]
async fn a_recorded_step_is_not_repeated() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    for (between, attempt) in [("nothing", 1), ("fail", 2), ("panic", 2)] {
        let id = enqueue(&client, "test.steps", json!({ "between": between })).await;
        let job = ended(&client, id).await;
        let done = json!({"first": 1, "looped": [1, 1, 1], "second": attempt});
        assert_eq!(
            (job.attempt, job.result),
            (attempt, Some(done)),
            "{between}: {:?}",
            job.error
        );
        let steps = ["first", "looped", "looped#2", "looped#3", "second"];
        assert_eq!(recorded(&client, id).await, steps);
    }
    let id = enqueue(&client, "test.steps", json!({"between": "fail"})).await;
    ended(&client, id).await;
    let expected = [
        "requested",
        "started",
        "step",
        "step",
        "step",
        "step",
        "failed",
        "started",
        "step",
        "succeeded",
    ];
    assert_eq!(events_at_any_speed(&client, id).await, expected);
    worker.drain().await;
}

#[tokio::test]
async fn an_attempt_that_takes_a_job_over_continues_from_its_recorded_steps() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    // Waits until the worker listens. When it starts to listen, it queries all its jobs and renews leases that seem to
    // have ended, which must not happen in the middle of this test.
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
    let id = enqueue(&client, "test.steps", json!({"between": "ignore-abort"})).await;
    until_waiting(&client, id).await;
    // As if the worker had been unable to renew the lease.
    expire_lease(&client, id).await;
    let job = ended(&client, id).await;
    let done = json!({"first": 1, "looped": [1, 1, 1], "second": 2});
    assert_eq!((job.attempt, job.result), (2, Some(done)));
    worker.drain().await;
}

#[tokio::test]
async fn an_attempt_that_a_shutdown_stops_keeps_its_number_and_its_steps() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    let id = enqueue(&client, "test.steps", json!({"between": "wait"})).await;
    until_waiting(&client, id).await;
    worker.stop_now().await;
    let counts = "SELECT attempt, uncounted FROM rouse.job WHERE id = $1 AND state = 'queued'";
    let row = client.query_one(counts, &[&id]).await.unwrap();
    assert_eq!((row.get::<_, i32>(0), row.get::<_, i32>(1)), (1, 1));
    let next = TestWorker::start(&db, Settings::default()).await;
    let job = ended(&client, id).await;
    let done = json!({"first": 1, "looped": [1, 1, 1], "second": 2});
    assert_eq!((job.attempt, job.result), (2, Some(done)));
    next.drain().await;
}

#[tokio::test]
async fn an_aborted_attempt_records_no_more_steps() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    let id = enqueue(&client, "test.steps", json!({"between": "wait"})).await;
    until_waiting(&client, id).await;
    cancel(&client, id).await;
    worker.drain().await;
    let steps = ["first", "looped", "looped#2", "looped#3"];
    assert_eq!(recorded(&client, id).await, steps);
}

#[tokio::test]
async fn a_wait_that_has_ended_stays_ended_if_the_clock_was_set_back() {
    let db = TestDb::new().await;
    let (client, owner) = (db.client().await, db.worker().await);
    enqueue(&client, "x", json!({})).await;
    let job = claim(&owner, 1).await.remove(0);
    let outcome = owner.record_step(job.id, job.fence, "s", "1").await;
    assert_eq!(outcome.unwrap(), Ok(()));
    let start_an_hour_later = "
        INSERT INTO rouse.step (job, name, wait, attempt, worker, at, kept_at)
        SELECT job, name, '{\"kind\": \"signal\"}', attempt, worker, at + interval '1 hour', kept_at FROM rouse.step";
    client.execute(start_an_hour_later, &[]).await.unwrap();
    let steps = recorded_steps(&owner, job.id, job.fence).await.unwrap();
    assert!(
        matches!(steps["s"], RecordedStep::Done { bytes: 1, .. }),
        "{steps:?}"
    );
}

#[tokio::test]
async fn only_the_worker_that_has_the_job_records_and_reads_its_steps() {
    let db = TestDb::new().await;
    let (client, owner, other) = (db.client().await, db.worker().await, db.worker().await);
    enqueue(&client, "x", json!({})).await;
    let job = claim(&owner, 1).await.remove(0);
    let (id, fence) = (job.id, job.fence);
    let refusal = |reason| Err(LostJob(reason));

    let other_fence = Fence(fence.0 ^ 1);
    let taken = AbortReason::TakenByAnotherWorker;
    for (store, fence) in [(&other, fence), (&owner, other_fence)] {
        let outcome = store.record_step(id, fence, "s", "1").await.unwrap();
        assert_eq!(outcome, refusal(taken));
        let outcome = recorded_steps(store, id, fence).await;
        assert_eq!(outcome, Err(LostJob(taken)));
        let outcome = store.recorded_step(id, fence, "s").await.unwrap();
        assert_eq!(outcome, Err(LostJob(taken)));
    }
    assert_eq!(
        refused(&client).await,
        3,
        "taken by the other worker each time"
    );
    assert!(recorded(&client, id.0).await.is_empty());

    for output in ["[1]", "[2]"] {
        let outcome = owner.record_step(id, fence, "s", output).await.unwrap();
        assert_eq!(outcome, Ok(()));
    }
    let steps = recorded_steps(&owner, id, fence).await.unwrap();
    let small = RecordedStep::Done {
        bytes: 3,
        result: Some(b"[1]".to_vec()),
    };
    assert_eq!(steps, [("s".to_owned(), small)].into());
    let (at_most, larger) = ("1".repeat(1024), "1".repeat(1025));
    for (name, output) in [("at most", &at_most), ("larger", &larger)] {
        let outcome = owner.record_step(id, fence, name, output).await.unwrap();
        assert_eq!(outcome, Ok(()));
    }
    let steps = recorded_steps(&owner, id, fence).await.unwrap();
    for (name, bytes, is_in_the_list) in [("at most", 1024, true), ("larger", 1025, false)] {
        let result = is_in_the_list.then(|| at_most.clone().into_bytes());
        assert_eq!(steps[name], RecordedStep::Done { bytes, result }, "{name}");
    }
    let first = owner.recorded_step(id, fence, "s").await.unwrap();
    assert_eq!(first, Ok(Some(b"[1]".to_vec())), "the first result stays");
    let none = owner.recorded_step(id, fence, "t").await.unwrap();
    assert_eq!(none, Ok(None));

    let settled = settlement(&job, result("1"));
    owner.settle(&[settled], Locked::Wait).await.unwrap();
    let outcome = owner.record_step(id, fence, "late", "1").await.unwrap();
    assert_eq!(outcome, refusal(AbortReason::AlreadyCompleted));
    let outcome = owner.record_step(JobId(-1), fence, "s", "1").await.unwrap();
    assert_eq!(outcome, refusal(AbortReason::NotFound));

    let cancelled = enqueue(&client, "x", json!({})).await;
    let job = claim(&owner, 1).await.remove(0);
    cancel(&client, cancelled).await;
    let outcome = owner
        .record_step(job.id, job.fence, "s", "1")
        .await
        .unwrap();
    assert_eq!(outcome, refusal(AbortReason::Cancelled));
}

#[tokio::test]
async fn an_unrecorded_step_is_never_reported_as_recorded() {
    let db = TestDb::new().await;
    let (client, owner) = (db.client().await, db.worker().await);
    enqueue(&client, "x", json!({})).await;
    let job = claim(&owner, 1).await.remove(0);
    // As if the job came back to the worker between the lookup of its row and the lookup of the reason.
    client
        .batch_execute(
            "CREATE OR REPLACE FUNCTION rouse._refusal(p_worker bigint, p_id bigint, p_fence bigint) RETURNS text
             LANGUAGE sql AS 'SELECT NULL::text'",
        )
        .await
        .unwrap();
    let other_fence = Fence(job.fence.0 ^ 1);
    let outcome = owner
        .record_step(job.id, other_fence, "s", "1")
        .await
        .unwrap();
    assert_eq!(outcome, Err(LostJob(AbortReason::Error)));
    assert!(recorded(&client, job.id.0).await.is_empty());
}

#[tokio::test]
async fn a_job_is_neither_taken_over_nor_settled_while_a_step_is_being_recorded() {
    let db = TestDb::new().await;
    let (mut recording, client) = (db.client().await, db.client().await);
    let (owner, other) = (db.worker().await, db.worker().await);
    enqueue(&client, "x", json!({})).await;
    let job = claim(&owner, 1).await.remove(0);
    client
        .batch_execute("UPDATE rouse.job SET lease_until = now() - interval '1 s'")
        .await
        .unwrap();

    // The lock that rouse.record_step takes, in a transaction that has not committed.
    let open = recording.transaction().await.unwrap();
    open.query(
        "SELECT FROM rouse.job WHERE id = $1 FOR NO KEY UPDATE",
        &[&job.id.0],
    )
    .await
    .unwrap();
    let orders = orders(&other, 60_000).await;
    let adopt = async || {
        crate::support::claims::adopt(&other, Fence(rand()), &orders, 1, 3, None)
            .await
            .unwrap()
    };
    assert!(adopt().await.claimed.is_empty());
    let settled = owner
        .settle(&[settlement(&job, result("1"))], Locked::Skip)
        .await
        .unwrap();
    assert!(settled.locked.contains(&job.id));
    open.commit().await.unwrap();
    assert_eq!(adopt().await.claimed.len(), 1);
}

#[tokio::test]
async fn one_call_returns_the_steps_of_several_jobs() {
    let db = TestDb::new().await;
    let (client, owner) = (db.client().await, db.worker().await);
    for n in 0..3 {
        enqueue(&client, "x", json!({ "n": n })).await;
    }
    let jobs = claim(&owner, 3).await;
    for (job, output) in [(&jobs[0], "\"a\""), (&jobs[2], "\"c\"")] {
        let outcome = owner.record_step(job.id, job.fence, "s", output).await;
        assert_eq!(outcome.unwrap(), Ok(()));
    }
    let other_fence = Fence(jobs[0].fence.0 ^ 1);
    let asked = [
        (jobs[2].id, jobs[2].fence),
        (jobs[0].id, other_fence),
        (jobs[1].id, jobs[1].fence),
        (jobs[0].id, jobs[0].fence),
    ];
    let done = |text: &str| {
        let (bytes, result) = (text.len(), Some(text.as_bytes().to_vec()));
        HashMap::from([("s".to_owned(), RecordedStep::Done { bytes, result })])
    };
    let read = owner.recorded_steps(&asked, Vec::new()).await.unwrap();
    let steps = read.into_iter();
    let steps = steps.map(|read| read.map(|read| Arc::unwrap_or_clone(read.steps)));
    assert_eq!(
        steps.collect::<Vec<_>>(),
        [
            Ok(done("\"c\"")),
            Err(LostJob(AbortReason::TakenByAnotherWorker)),
            Ok(HashMap::new()),
            Ok(done("\"a\""))
        ]
    );
}

#[tokio::test]
async fn invalid_steps_are_refused_with_the_reason() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    let cases = [
        ("", 1, 1, "1 to 200 printable characters"),
        (&"x".repeat(201), 1, 1, "1 to 200 printable characters"),
        ("a\nb", 1, 1, "1 to 200 printable characters"),
        ("a#2", 1, 1, "must not contain #"),
        (
            "large",
            300_000,
            1,
            "300002 bytes long; at most 262144 are allowed",
        ),
        ("many", 1, 1001, "at most 1000 steps"),
        ("much", 262_000, 40, "the maximum of 8388608 bytes"),
    ];
    for (name, bytes, count, why) in cases {
        let payload = json!({"name": name, "bytes": bytes, "count": count});
        let id = enqueue(&client, "test.bad-steps", payload).await;
        let outcome = ended(&client, id).await.result.unwrap();
        assert_eq!(outcome["kind"], "step_refused", "{name:.20}: {outcome}");
        assert!(
            outcome["message"].as_str().unwrap().contains(why),
            "{outcome}"
        );
    }
    // A NUL, which jsonb cannot hold, is allowed.
    let payload = json!({"name": "ok", "bytes": 1, "count": 3});
    let id = enqueue(&client, "test.bad-steps", payload).await;
    assert_eq!(ended(&client, id).await.result, Some(json!("all recorded")));
    worker.drain().await;
}

#[tokio::test]
async fn a_recorded_result_that_a_new_version_cannot_read_is_an_error() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    let id = enqueue(&client, "test.changed-step", json!({})).await;
    let job = ended(&client, id).await;
    let error = job.error.unwrap();
    assert_eq!(error["guest_kind"], "step_changed");
    let message = error["message"].as_str().unwrap();
    assert!(
        message.contains("the recorded result of the step it"),
        "{message}"
    );
    worker.drain().await;
}

#[tokio::test]
async fn steps_of_a_live_job_outlive_their_partition() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = enqueue(&client, "x", json!({})).await;
    client
        .batch_execute(&format!(
            "SET ROLE rouse_owner;
             CREATE TABLE rouse.step_20200101 PARTITION OF rouse.step FOR VALUES FROM ('2020-01-01') TO ('2020-01-02');
             INSERT INTO rouse.step (job, name, result, attempt, worker, at, kept_at) VALUES ({id}, 'kept', '1', 1, 1, '2020-01-01', '2020-01-01'),
                                           (-1, 'gone', '1', 1, 1, '2020-01-01', '2020-01-01')"
        ))
        .await
        .unwrap();
    assert_eq!(store.maintain_partitions().await.unwrap(), (1, 0));
    assert_eq!(recorded(&client, id).await, ["kept"]);
    assert!(recorded(&client, -1).await.is_empty());
    let at: String = client
        .query_one("SELECT at::date::text FROM rouse.step", &[])
        .await
        .unwrap()
        .get(0);
    assert_eq!(at, "2020-01-01", "the time of recording is not changed");
}

#[tokio::test]
async fn steps_are_not_copied_from_a_partition_that_is_in_use() {
    let db = TestDb::new().await;
    let (mut reader, client, store) = (db.client().await, db.client().await, db.worker().await);
    let id = enqueue(&client, "x", json!({})).await;
    for day in [1, 2] {
        let sql = format!(
            "SET ROLE rouse_owner;
             CREATE TABLE rouse.step_2020010{day} PARTITION OF rouse.step FOR VALUES FROM ('2020-01-0{day}') TO ('2020-01-0{}');
             INSERT INTO rouse.step (job, name, result, attempt, worker, at, kept_at) VALUES ({id}, 'kept {day}', '1', 1, 1, '2020-01-0{day}', '2020-01-0{day}')",
            day + 1
        );
        client.batch_execute(&sql).await.unwrap();
    }
    client.batch_execute("RESET ROLE").await.unwrap();
    let written = async || -> i64 {
        client
            .query_one(
                "SELECT pg_relation_size('rouse.step_' || to_char(now() AT TIME ZONE 'UTC', 'YYYYMMDD'))",
                &[],
            )
            .await
            .unwrap()
            .get(0)
    };
    let open = reader.transaction().await.unwrap();
    open.query("SELECT FROM rouse.step_20200102", &[])
        .await
        .unwrap();
    assert_eq!(store.maintain_partitions().await.unwrap(), (1, 1));
    let both = ["kept 1", "kept 2"];
    assert_eq!(recorded(&client, id).await, both);
    let size = written().await;
    open.rollback().await.unwrap();

    let all = reader.transaction().await.unwrap();
    all.query("SELECT FROM rouse.step", &[]).await.unwrap();
    for _ in 0..200 {
        assert_eq!(store.maintain_partitions().await.unwrap(), (0, 1));
    }
    assert_eq!(written().await, size, "nothing was copied needlessly");
    all.rollback().await.unwrap();
    assert_eq!(store.maintain_partitions().await.unwrap(), (1, 0));
    assert_eq!(recorded(&client, id).await, both);
}

#[tokio::test]
async fn an_error_can_set_the_time_of_the_next_attempt() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    let soon = std::time::SystemTime::now() + Duration::from_millis(1500);
    let ms = soon
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_millis();
    let id = enqueue(&client, "test.retry-at", json!({"unix_ms": ms as u64})).await;
    let job = ended(&client, id).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 2));
    let row = client
        .query_one(
            "SELECT (extract(epoch FROM available_at) * 1000)::bigint, claimed_at >= available_at FROM rouse.job($1)",
            &[&id],
        )
        .await
        .unwrap();
    assert_eq!(row.get::<_, i64>(0), ms as i64);
    assert!(row.get::<_, bool>(1), "not before");
    // The next attempt is at most a year away.
    let id = enqueue(
        &client,
        "test.retry-at",
        json!({"unix_ms": u64::MAX / 2_000_000}),
    )
    .await;
    until_true(
        &client,
        &format!("SELECT attempt = 1 AND state = 'queued' AND available_at < now() + interval '366 days' FROM rouse.job({id})"),
    )
    .await;
    worker.drain().await;
}
