//! Results that live jobs still need when the history that contains them is dropped.

use rouse::job::{NewJob, Outcome, ReturnedCall, Wait};
use rouse::store::{ClaimedJob, Store};
use serde_json::{Value, json};
use tokio_postgres::Client;

use super::{call, promote, settle, suspend, suspended};
use crate::support::TestDb;
use crate::support::claims::{claim, claim_one, result};
use crate::support::worker::{SESSION_WAITS, cancel, enqueue, forget, show, until_true};

/// Moves ended jobs to a day of 2020.
async fn make_old(client: &Client, day: u8, ids: &[i64]) {
    let next = day + 1;
    let sql = format!(
        "SET ROLE rouse_owner;
         CREATE TABLE rouse.finished_202001{day} PARTITION OF rouse.finished_default FOR VALUES FROM ('2020-01-{day} UTC') TO ('2020-01-{next} UTC');
         BEGIN;
         SELECT rouse.unlock_history('a test');
         UPDATE rouse.finished SET finished_at = '2020-01-{day} 12:00 UTC' WHERE id = ANY (ARRAY{ids:?}::bigint[]);
         COMMIT;
         RESET ROLE"
    );
    client.batch_execute(&sql).await.unwrap();
}

/// Moves ended jobs to a day of 2020, and drops that day.
async fn drop_history(client: &Client, store: &Store, day: u8, ids: &[i64]) {
    make_old(client, day, ids).await;
    assert_eq!(store.maintain_partitions().await.unwrap(), (1, 0));
    let sql = "SELECT count(*) FROM rouse.finished WHERE id = ANY ($1)";
    let left: i64 = client.query_one(sql, &[&ids]).await.unwrap().get(0);
    assert_eq!(left, 0, "they are no longer kept");
}

async fn kept(client: &Client) -> Vec<i64> {
    let sql = "SELECT chain FROM rouse.kept_end ORDER BY chain";
    let rows = client.query(sql, &[]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

const SUM: &str = "SELECT rouse.enqueue('sum', after => jsonb_build_object('a', $1::bigint))";
/// Two steps of rouse.drop_partitions.
const KEEP_ENDS: &str = "SELECT rouse._keep_ends(ARRAY['finished_20200111'])";
const DROP: &str = "DROP TABLE rouse.finished_20200111";

async fn as_owner(client: &Client, sql: &str) {
    let sql = format!("SET ROLE rouse_owner; {sql}; RESET ROLE");
    client.batch_execute(&sql).await.unwrap();
}

/// A job that ended in 2020 with the result 7.
async fn old_parent(client: &Client, store: &Store) -> i64 {
    let parent = enqueue(client, "x", json!(1)).await;
    let job = claim_one(store).await;
    settle(store, &job, result("7"), Vec::new()).await;
    make_old(client, 11, &[parent]).await;
    parent
}

/// Keeps the end of an old job, which no live job needs.
async fn keep_without_need(client: &Client, parent: i64) {
    let earlier = client.query_one(SUM, &[&parent]).await.unwrap().get(0);
    assert!(cancel(client, earlier).await);
    assert_eq!(kept(client).await, [parent]);
}

/// Asserts that the next job gets the result of its parent, which is no longer in the history.
async fn assert_reads_parent(store: &Store) {
    let sum = claim_one(store).await;
    let ends = store.parent_ends(sum.id, sum.fence, None, &[]).await;
    let ends = ends.unwrap().unwrap().ends;
    assert_eq!(ends[0].state.as_deref(), Some("succeeded"));
    assert_eq!(ends[0].output.as_ref().unwrap().0, "7");
}

/// The end of the call, as the caller receives it.
async fn returned(store: &Store, caller: &ClaimedJob, step: &str) -> Value {
    let steps = [step.to_owned()];
    let ends = store.returned_calls(caller.id, caller.fence, &steps, 1 << 20);
    match &ends.await.unwrap().unwrap()[step] {
        ReturnedCall::Done(json) => serde_json::from_slice(json).unwrap(),
        ReturnedCall::Pending(job) => panic!("{job:?}"),
    }
}

#[tokio::test]
async fn the_ends_of_calls_outlive_their_partition_until_the_caller_ends() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let calls = vec![call("call:a", json!(1)), call("call:b", json!(2))];
    let waits = suspended("call:a", Wait::Calls { jobs: Vec::new() });
    suspend(&client, &store, waits, calls).await;
    // The first call continues its chain, and both of its jobs are dropped on different days.
    let mut called = claim(&store, 9).await;
    called.sort_by_key(|job| job.id);
    let next = NewJob {
        kind: rouse::job::NewJobKind::Next,
        ..call("", json!(3))
    };
    settle(&store, &called[0], result("null"), vec![next]).await;
    let last = claim_one(&store).await;
    settle(&store, &last, result(r#"{"r": 1}"#), Vec::new()).await;
    // A job for which no other job waits.
    let other = enqueue(&client, "x", json!(1)).await;
    let job = claim_one(&store).await;
    settle(&store, &job, result("7"), Vec::new()).await;

    drop_history(&client, &store, 11, &[called[0].id.0, other]).await;
    assert!(kept(&client).await.is_empty(), "the last job is kept");
    drop_history(&client, &store, 12, &[last.id.0]).await;
    assert_eq!(kept(&client).await, [called[0].id.0]);

    settle(&store, &called[1], result("2"), Vec::new()).await;
    let caller = claim_one(&store).await;
    let first = returned(&store, &caller, "call:a").await;
    assert_eq!(first, json!({"output": {"r": 1}}));
    let second = returned(&store, &caller, "call:b").await;
    assert_eq!(second, json!({"output": 2}));
    settle(&store, &caller, result("null"), Vec::new()).await;
    drop_history(&client, &store, 13, &[called[1].id.0]).await;
    assert!(kept(&client).await.is_empty(), "no live job needs them");
}

#[tokio::test]
async fn the_ends_of_parents_outlive_their_partition_until_the_job_ends() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let mut parents = Vec::new();
    for n in 0..3 {
        parents.push(enqueue(&client, "x", json!(n)).await);
    }
    let run = |id: i64| json!({"job": id, "on_failure": "run"});
    let after = json!({"a": parents[0], "b": run(parents[1]), "c": parents[2]});
    let sql = "SELECT rouse.enqueue('sum', after => $1)";
    client.query_one(sql, &[&after]).await.unwrap();
    let mut jobs = claim(&store, 9).await;
    jobs.sort_by_key(|job| job.id);
    settle(&store, &jobs[0], result("10"), Vec::new()).await;
    let failed = crate::support::claims::error(rouse::job::ErrorKind::GuestError);
    settle(&store, &jobs[1], Outcome::Failed(failed), Vec::new()).await;
    drop_history(&client, &store, 11, &parents[..2]).await;
    assert_eq!(kept(&client).await, parents[..2]);

    settle(&store, &jobs[2], result("30"), Vec::new()).await;
    let sum = claim_one(&store).await;
    let ends = store.parent_ends(sum.id, sum.fence, None, &[]).await;
    let ends = ends.unwrap().unwrap().ends;
    let states: Vec<_> = ends.iter().map(|end| end.state.as_deref()).collect();
    assert_eq!(
        states,
        [Some("succeeded"), Some("failed"), Some("succeeded")]
    );
    let outputs: Vec<_> = ends
        .iter()
        .map(|end| &end.output.as_ref().unwrap().0)
        .collect();
    assert_eq!((outputs[0].as_str(), outputs[2].as_str()), ("10", "30"));
    assert!(outputs[1].contains("guest_error"), "{}", outputs[1]);
    settle(&store, &sum, result("null"), Vec::new()).await;
    drop_history(&client, &store, 12, &parents[2..]).await;
    assert!(kept(&client).await.is_empty(), "no live job needs them");
}

#[tokio::test]
async fn an_old_parent_that_a_job_names_while_its_partition_is_dropped_is_kept() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let parent = old_parent(&client, &store).await;
    // The steps of rouse.drop_partitions, and an enqueue between them.
    as_owner(&client, KEEP_ENDS).await;
    assert!(kept(&client).await.is_empty(), "nobody needs it yet");
    client.query_one(SUM, &[&parent]).await.unwrap();
    as_owner(&client, DROP).await;
    assert_reads_parent(&store).await;
}

/// An earlier job has kept the end of the parent, and no longer needs it. Maintenance does not see the later one yet.
#[tokio::test]
async fn an_end_that_an_enqueue_relies_on_is_not_deleted_before_the_enqueue_commits() {
    let db = TestDb::new().await;
    let (mut other, client, store) = (db.client().await, db.client().await, db.worker().await);
    let parent = old_parent(&client, &store).await;
    keep_without_need(&client, parent).await;
    let enqueuing = other.transaction().await.unwrap();
    enqueuing.query_one(SUM, &[&parent]).await.unwrap();
    as_owner(&client, KEEP_ENDS).await;
    assert_eq!(kept(&client).await, [parent]);
    enqueuing.commit().await.unwrap();
    as_owner(&client, DROP).await;
    assert_reads_parent(&store).await;
}

/// As before, but maintenance has locked the end when the enqueue looks for it.
#[tokio::test]
async fn an_enqueue_waits_for_maintenance_that_deletes_an_end_and_keeps_it_again() {
    let db = TestDb::new().await;
    let (mut other, client, store) = (db.client().await, db.client().await, db.worker().await);
    let parent = old_parent(&client, &store).await;
    keep_without_need(&client, parent).await;
    let maintaining = other.transaction().await.unwrap();
    // Like the first step of rouse._keep_ends.
    let lock = "SET LOCAL ROLE rouse_owner; SELECT FROM rouse.kept_end FOR UPDATE";
    maintaining.batch_execute(lock).await.unwrap();
    let enqueuing = db.client().await;
    let enqueued = tokio::spawn(async move { enqueuing.query_one(SUM, &[&parent]).await });
    until_true(&client, SESSION_WAITS).await;
    maintaining.batch_execute(KEEP_ENDS).await.unwrap();
    maintaining.commit().await.unwrap();
    enqueued.await.unwrap().unwrap();
    assert_eq!(kept(&client).await, [parent]);
    as_owner(&client, DROP).await;
    assert_reads_parent(&store).await;
}

/// An enqueue that is not committed yet has kept an older end of the chain.
#[tokio::test]
async fn a_partition_stays_until_the_enqueue_that_relies_on_one_of_its_jobs_has_committed() {
    let db = TestDb::new().await;
    let (mut other, client, store) = (db.client().await, db.client().await, db.worker().await);
    let parent = old_parent(&client, &store).await;
    client.query_one(SUM, &[&parent]).await.unwrap();
    let older = "UPDATE rouse.kept_end SET job = job - 1, result = '6'";
    as_owner(&client, older).await;
    let enqueuing = other.transaction().await.unwrap();
    let lock = "SET LOCAL ROLE rouse_owner; SELECT FROM rouse.kept_end FOR NO KEY UPDATE";
    enqueuing.batch_execute(lock).await.unwrap();
    assert_eq!(store.maintain_partitions().await.unwrap(), (0, 1));
    enqueuing.commit().await.unwrap();
    assert_eq!(store.maintain_partitions().await.unwrap(), (1, 0));
    assert_reads_parent(&store).await;
}

#[tokio::test]
async fn the_end_of_a_call_outlives_its_partition_although_an_attempt_has_failed_since() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let waits = suspended("call:a", Wait::Calls { jobs: Vec::new() });
    let id = suspend(&client, &store, waits, vec![call("call:a", json!(1))]).await;
    let called = claim_one(&store).await;
    settle(&store, &called, result("7"), Vec::new()).await;
    // The next attempt fails before it requests the call.
    let caller = claim_one(&store).await;
    let retry = Outcome::Retry {
        again: std::time::Duration::from_secs(3_600).into(),
        error: crate::support::claims::error(rouse::job::ErrorKind::GuestError),
    };
    settle(&store, &caller, retry, Vec::new()).await;
    drop_history(&client, &store, 11, &[called.id.0]).await;
    assert_eq!(kept(&client).await, [called.id.0]);
    crate::support::claims::make_due(&client, id).await;
    promote(&store).await;
    let caller = claim_one(&store).await;
    let end = returned(&store, &caller, "call:a").await;
    assert_eq!(end, json!({"output": 7}));
}

#[tokio::test]
async fn a_call_whose_unique_key_leads_to_a_retry_returns_the_end_of_its_chain() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let first = "SELECT rouse.enqueue('callee', unique_key => 'k')";
    let first: i64 = client.query_one(first, &[]).await.unwrap().get(0);
    let job = claim_one(&store).await;
    let failed = crate::support::claims::error(rouse::job::ErrorKind::GuestError);
    settle(&store, &job, Outcome::Failed(failed), Vec::new()).await;
    let sql = "SELECT rouse.retry($1)";
    client.query_one(sql, &[&first]).await.unwrap();
    let keyed = NewJob {
        options: Some(rouse::job::JsonText(json!({"unique_key": "k"}).to_string())),
        ..call("call:c", json!(1))
    };
    // The retry is claimed before the caller is enqueued, so that the next claim takes the caller.
    let retry = claim_one(&store).await;
    let waits = suspended("call:c", Wait::Calls { jobs: Vec::new() });
    suspend(&client, &store, waits, vec![keyed]).await;
    let next = NewJob {
        kind: rouse::job::NewJobKind::Next,
        ..call("", json!(3))
    };
    settle(&store, &retry, result("\"intermediate\""), vec![next]).await;
    let last = claim_one(&store).await;
    settle(&store, &last, result("\"final\""), Vec::new()).await;
    drop_history(&client, &store, 11, &[last.id.0]).await;
    assert_eq!(kept(&client).await, [first]);
    let caller = claim_one(&store).await;
    // Older jobs of the chain are still in the history.
    let end = returned(&store, &caller, "call:c").await;
    assert_eq!(end, json!({"output": "final"}));
}

/// A job that has failed, and its retry.
async fn retried(client: &Client, store: &Store) -> (i64, i64) {
    let id = enqueue(client, "x", json!(1)).await;
    let job = claim_one(store).await;
    let failed = crate::support::claims::error(rouse::job::ErrorKind::GuestError);
    settle(store, &job, Outcome::Failed(failed), Vec::new()).await;
    let sql = "SELECT rouse.retry($1)";
    (id, client.query_one(sql, &[&id]).await.unwrap().get(0))
}

/// Failed jobs may be kept for longer than others.
#[tokio::test]
async fn a_failed_job_is_not_kept_as_the_end_of_a_chain_whose_last_job_is_no_longer_kept() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let (parent, retry) = retried(&client, &store).await;
    settle(&store, &claim_one(&store).await, result("7"), Vec::new()).await;
    let sum: i64 = client.query_one(SUM, &[&parent]).await.unwrap().get(0);
    assert!(cancel(&client, sum).await);
    // No live job needs its end.
    forget(&client, retry).await;
    client
        .query_one("SELECT rouse.retry($1)", &[&sum])
        .await
        .unwrap();
    drop_history(&client, &store, 11, &[parent]).await;
    assert!(kept(&client).await.is_empty(), "the end is not known");
    let sum = claim_one(&store).await;
    let ends = store.parent_ends(sum.id, sum.fence, None, &[]).await;
    let ends = ends.unwrap().unwrap().ends;
    assert_eq!((ends.len(), ends[0].state.as_deref()), (1, None));
}

/// The end of the first job was kept while its retry was live. Maintenance does not see the enqueue yet.
#[tokio::test]
async fn an_enqueue_replaces_an_end_that_was_kept_before_a_retry() {
    let db = TestDb::new().await;
    let (mut other, client, store) = (db.client().await, db.client().await, db.worker().await);
    let (parent, retry) = retried(&client, &store).await;
    let earlier = client.query_one(SUM, &[&parent]).await.unwrap().get(0);
    drop_history(&client, &store, 11, &[parent]).await;
    assert_eq!(kept(&client).await, [parent]);
    settle(&store, &claim_one(&store).await, result("7"), Vec::new()).await;
    assert!(cancel(&client, earlier).await);
    make_old(&client, 12, &[retry]).await;
    let enqueuing = other.transaction().await.unwrap();
    enqueuing.query_one(SUM, &[&parent]).await.unwrap();
    as_owner(
        &client,
        "SELECT rouse._keep_ends(ARRAY['finished_20200112'])",
    )
    .await;
    enqueuing.commit().await.unwrap();
    as_owner(&client, "DROP TABLE rouse.finished_20200112").await;
    assert_reads_parent(&store).await;
}

/// The chain's jobs were in queues with different retentions.
#[tokio::test]
async fn a_job_that_waits_for_a_retry_does_not_run_because_an_older_job_of_the_chain_is_kept() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let first = enqueue(&client, "x", json!(1)).await;
    let job = claim_one(&store).await;
    let sql = "SELECT rouse.enqueue('sum', after => jsonb_build_object('a', jsonb_build_object('job', $1::bigint, 'on_failure', 'wait')))";
    let waiting: i64 = client.query_one(sql, &[&first]).await.unwrap().get(0);
    let next = NewJob {
        kind: rouse::job::NewJobKind::Next,
        ..call("", json!(2))
    };
    settle(&store, &job, result("1"), vec![next]).await;
    let last = claim_one(&store).await;
    let failed = crate::support::claims::error(rouse::job::ErrorKind::GuestError);
    settle(&store, &last, Outcome::Failed(failed), Vec::new()).await;
    drop_history(&client, &store, 11, &[last.id.0]).await;
    assert_eq!(kept(&client).await, [first]);
    assert_eq!(store.maintain_dependencies().await.unwrap(), (0, 1));
    assert!(!store.continue_releases().await.unwrap());
    assert!(claim(&store, 9).await.is_empty());
    assert_eq!(show(&client, waiting).await.state, "cancelled");
}
