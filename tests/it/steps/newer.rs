//! Steps that a host has read before: a later attempt reads only newer ones.

use std::time::{Duration, SystemTime};

use rouse::job::{Outcome, Suspension, Wait};
use rouse::store::{ClaimedJob, Locked, RecordedSteps, Store};
use rouse::worker::Settings;
use serde_json::json;
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::claims::{claim_one, make_due, recorded_steps, settlement};
use crate::support::worker::{TestWorker, ended, enqueue, until_true};

/// After this call, `public.response` has a row for each response to a request for steps.
async fn count_responses(client: &Client) {
    let count = "
        ALTER FUNCTION rouse.recorded_steps RENAME TO really_recorded_steps;
        CREATE TABLE public.response (number bigint GENERATED ALWAYS AS IDENTITY, steps bigint);
        CREATE FUNCTION rouse.recorded_steps(p_worker bigint, p_key bytea, p_ids bigint[], p_fences bigint[], p_known_until timestamptz[])
        RETURNS TABLE (place bigint, refusal text, known bigint, added bigint, names text[], bytes integer[], results text[], waits text[], until_ms bigint[], at timestamptz[])
        LANGUAGE sql AS '
            WITH response AS MATERIALIZED (SELECT * FROM rouse.really_recorded_steps(p_worker, p_key, p_ids, p_fences, p_known_until)),
            counted AS (INSERT INTO public.response (steps) SELECT coalesce(cardinality(a.names), 0) FROM response AS a)
            SELECT a.* FROM response AS a'";
    client.batch_execute(count).await.unwrap();
}

/// The numbers of steps in the responses since the last call.
async fn responses(client: &Client) -> Vec<i64> {
    let take = "
        WITH taken AS (DELETE FROM public.response RETURNING number, steps)
        SELECT coalesce(array_agg(steps ORDER BY number), '{}') FROM taken";
    client.query_one(take, &[]).await.unwrap().get(0)
}

async fn record(store: &Store, job: &ClaimedJob, step: &str) {
    let recorded = store.record_step(job.id, job.fence, step, "1").await;
    assert_eq!(recorded.unwrap(), Ok(()));
}

/// Reads the steps that are newer than the known ones, and returns both together.
async fn read(store: &Store, job: &ClaimedJob, known: RecordedSteps) -> RecordedSteps {
    let asked = [(job.id, job.fence)];
    let mut read = store.recorded_steps(&asked, vec![known]).await.unwrap();
    read.remove(0).unwrap()
}

async fn assert_all(store: &Store, job: &ClaimedJob, read: &RecordedSteps) {
    let all = recorded_steps(store, job.id, job.fence).await.unwrap();
    assert_eq!(*read.steps, all);
}

/// Suspends an attempt, and wakes its job.
async fn sleep(client: &Client, store: &Store, job: &ClaimedJob) {
    let suspended = Outcome::Suspended(Suspension {
        step: format!("nap {}", job.attempt),
        wait: Wait::Sleep {
            until: SystemTime::now() + Duration::from_secs(3600),
        },
        is_recorded: false,
    });
    let settlements = [settlement(job, suspended)];
    let settled = store.settle(&settlements, Locked::Wait).await.unwrap();
    assert!(settled.accepted.contains(&job.id));
    make_due(client, job.id.0).await;
    store.promote(None, false).await.unwrap();
}

#[tokio::test]
async fn a_resumption_reads_only_steps_that_are_newer_than_those_the_host_knows() {
    let db = TestDb::new().await;
    let (client, owner, other) = (db.client().await, db.worker().await, db.worker().await);
    count_responses(&client).await;
    enqueue(&client, "x", json!({})).await;
    let job = claim_one(&owner).await;
    for step in ["a", "b", "c"] {
        record(&owner, &job, step).await;
    }
    let known = read(&owner, &job, RecordedSteps::default()).await;
    let known = read(&owner, &job, known).await;
    assert_eq!(responses(&client).await, [3, 0]);
    sleep(&client, &owner, &job).await;

    // An attempt on another host, which does not know anything about the job.
    let job = claim_one(&other).await;
    record(&other, &job, "d").await;
    sleep(&client, &other, &job).await;

    let job = claim_one(&owner).await;
    let known = read(&owner, &job, known).await;
    assert_eq!(responses(&client).await, [3], "a wait, d, and a wait");
    assert_eq!(known.steps.len(), 6);
    assert_all(&owner, &job, &known).await;
}

#[tokio::test]
async fn steps_that_were_removed_changed_or_dated_back_make_the_host_read_all_of_them() {
    let db = TestDb::new().await;
    let (client, owner) = (db.client().await, db.worker().await);
    count_responses(&client).await;
    enqueue(&client, "x", json!({})).await;
    let job = claim_one(&owner).await;
    for step in ["a", "b", "c"] {
        record(&owner, &job, step).await;
    }
    let mut known = read(&owner, &job, RecordedSteps::default()).await;
    record(&owner, &job, "d").await;
    responses(&client).await;
    for (change, expected) in [
        ("DELETE FROM rouse.step WHERE name = 'a'", [1, 3]),
        ("UPDATE rouse.step SET result = '7' WHERE name = 'b'", [0, 3]),
        (
            "INSERT INTO rouse.step (job, name, result, attempt, worker, at, kept_at)
             SELECT job, 'e', '1', attempt, worker, at - interval '1 hour', kept_at FROM rouse.step WHERE name = 'b'",
            [0, 4],
        ),
        ("DELETE FROM rouse.step", [0, 0]),
    ] {
        let unlocked = format!("BEGIN; SELECT rouse.unlock_history('a test'); {change}; COMMIT");
        client.batch_execute(&unlocked).await.unwrap();
        known = read(&owner, &job, known).await;
        assert_eq!(responses(&client).await, expected, "{change}");
        assert_all(&owner, &job, &known).await;
        responses(&client).await;
    }
}

/// Runs a job with this many sleeps, and ends each sleep as soon as the job is suspended.
async fn nap(client: &Client, naps: u32) {
    let payload = json!({"n": naps, "ms": 3_600_000});
    let id = enqueue(client, "flow.naps", payload).await;
    for _ in 0..naps {
        let suspended = format!("SELECT wait IS NOT NULL FROM rouse.jobs WHERE id = {id}");
        until_true(client, &suspended).await;
        let wake = "SELECT rouse.reschedule($1)";
        client.query_one(wake, &[&id]).await.unwrap();
    }
    let job = ended(client, id).await;
    // Each attempt has done one step.
    let done = json!(vec![1; naps as usize]);
    assert_eq!(job.result, Some(done), "{:?}", job.error);
}

#[tokio::test]
async fn a_host_keeps_the_steps_of_a_suspended_job_if_they_are_many() {
    let db = TestDb::new().await;
    let client = db.client().await;
    count_responses(&client).await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    nap(&client, 20).await;
    // A step, a wait and its new end for each sleep: two steps in three rows. 32 steps are kept.
    let expected: Vec<i64> = (1..=20).map(|n| if n <= 16 { 3 * n } else { 3 }).collect();
    assert_eq!(responses(&client).await, expected);
    worker.drain().await;
}
