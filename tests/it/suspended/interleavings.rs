//! Waits that meet other transactions, forced by transactions that stay open.

use rouse::job::{Fence, Outcome, Wait};
use rouse::store::{Locked, Settlement};
use serde_json::json;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, IsolationLevel, Transaction};

use super::{call, in_an_hour, none, settle, signal, sleep, suspend, suspended, take};
use crate::support::TestDb;
use crate::support::claims::{
    adopt, claim, claim_one, make_due, orders, rand, recorded_steps, renewal, result, settlement,
    settlement_with,
};
use crate::support::worker::{SESSION_WAITS, cancel, enqueue, until_true};

const SIGNAL: &str = "SELECT rouse.signal($1, 'go', '1')";
#[tokio::test]
async fn a_signal_that_is_not_committed_when_the_wait_starts_ends_it() {
    for commits in [true, false] {
        let db = TestDb::new().await;
        let (mut client, store) = (db.client().await, db.worker().await);
        let id = enqueue(&client, "x", json!(1)).await;
        let job = claim_one(&store).await;
        let sender = client.transaction().await.unwrap();
        sender.query_one(SIGNAL, &[&id]).await.unwrap();
        assert_eq!(take(&store, &job, None).await, None, "not committed");
        let wait = [settlement(&job, signal(None))];
        let settled = store.settle(&wait, Locked::Skip).await.unwrap();
        assert!(settled.locked.contains(&job.id), "it comes back later");
        match commits {
            true => sender.commit().await.unwrap(),
            false => sender.rollback().await.unwrap(),
        }
        let settled = store.settle(&wait, Locked::Skip).await.unwrap();
        assert!(settled.accepted.contains(&job.id));
        assert_eq!(none(&store).await, !commits);
    }
}

#[tokio::test]
async fn a_signal_waits_for_a_suspension_that_is_about_to_commit_and_ends_it() {
    let db = TestDb::new().await;
    let (mut client, store, sender) = (db.client().await, db.worker().await, db.client().await);
    let observer = db.client().await;
    let id = enqueue(&client, "x", json!(1)).await;
    let job = claim_one(&store).await;
    let suspension = client.transaction().await.unwrap();
    let sql = "SELECT count(*) FROM rouse._settle(NULL, ARRAY[jsonb_populate_record(NULL::rouse.settlement, jsonb_build_object(
                   'id', $1::bigint, 'fence', $2::bigint, 'state', 'queued', 'result', '{\"kind\": \"signal\", \"step\": \"signal:go\", \"name\": \"go\"}'::jsonb))])";
    suspension
        .query_one(sql, &[&id, &job.fence.0])
        .await
        .unwrap();
    let sending = tokio::spawn(async move { sender.query_one(SIGNAL, &[&id]).await.unwrap() });
    until_true(&observer, SESSION_WAITS).await;
    suspension.commit().await.unwrap();
    assert!(sending.await.unwrap().get::<_, bool>(0));
    assert_eq!(claim_one(&store).await.id.0, id);
}

/// Starts a transaction with a single snapshot, and takes the snapshot.
async fn with_snapshot(client: &mut Client, level: IsolationLevel) -> Transaction<'_> {
    let transaction = client.build_transaction().isolation_level(level);
    let transaction = transaction.start().await.unwrap();
    let read = "SELECT FROM rouse.job";
    transaction.execute(read, &[]).await.unwrap();
    transaction
}

/// Such a sender sees a running job, and would leave it asleep.
#[tokio::test]
async fn a_sender_whose_snapshot_is_older_than_the_wait_is_refused_and_the_signal_is_not_lost() {
    for level in [IsolationLevel::RepeatableRead, IsolationLevel::Serializable] {
        let db = TestDb::new().await;
        let (mut client, store) = (db.client().await, db.worker().await);
        let id = enqueue(&client, "x", json!(1)).await;
        let job = claim_one(&store).await;
        let sender = with_snapshot(&mut client, level).await;
        settle(&store, &job, signal(None), Vec::new()).await;
        let error = sender.query_one(SIGNAL, &[&id]).await.unwrap_err();
        assert_eq!(error.code(), Some(&SqlState::T_R_SERIALIZATION_FAILURE));
        sender.rollback().await.unwrap();
        let again = with_snapshot(&mut client, level).await;
        again.query_one(SIGNAL, &[&id]).await.unwrap();
        again.commit().await.unwrap();
        assert_eq!(claim_one(&store).await.id.0, id);
    }
}

#[tokio::test]
async fn a_sender_with_a_snapshot_does_not_keep_a_running_job_from_renewing_its_lease() {
    let db = TestDb::new().await;
    let (mut client, store) = (db.client().await, db.worker().await);
    let id = enqueue(&client, "x", json!(1)).await;
    let job = claim_one(&store).await;
    let sender = with_snapshot(&mut client, IsolationLevel::RepeatableRead).await;
    sender.query_one(SIGNAL, &[&id]).await.unwrap();
    let renewed = store.renew(&[renewal(&job, 60_000)]).await.unwrap();
    assert_eq!(renewed, [(job.id, None)]);
    let wait = [settlement(&job, signal(None))];
    let settled = store.settle(&wait, Locked::Skip).await.unwrap();
    assert!(settled.locked.contains(&job.id), "it comes back later");
    sender.commit().await.unwrap();
    settle(&store, &job, signal(None), Vec::new()).await;
    assert_eq!(claim_one(&store).await.id.0, id);
}

#[tokio::test]
async fn two_signals_at_once_wake_the_job_once_even_if_the_first_is_rolled_back() {
    for commits in [true, false] {
        let db = TestDb::new().await;
        let (mut client, store, second) = (db.client().await, db.worker().await, db.client().await);
        let observer = db.client().await;
        let id = suspend(&client, &store, signal(None), Vec::new()).await;
        let first = client.transaction().await.unwrap();
        first.query_one(SIGNAL, &[&id]).await.unwrap();
        let sending = tokio::spawn(async move { second.query_one(SIGNAL, &[&id]).await.unwrap() });
        until_true(&observer, SESSION_WAITS).await;
        assert!(none(&store).await, "locked");
        match commits {
            true => first.commit().await.unwrap(),
            false => first.rollback().await.unwrap(),
        }
        sending.await.unwrap();
        let job = claim_one(&store).await;
        assert_eq!(job.id.0, id);
        assert!(take(&store, &job, None).await.is_some());
        let sql = "SELECT count(*) FROM rouse.signal WHERE job = $1";
        let left: i64 = observer.query_one(sql, &[&id]).await.unwrap().get(0);
        assert_eq!(left, i64::from(commits), "the other is kept");
    }
}

#[tokio::test]
async fn a_signal_that_meets_the_timeout_is_taken_or_kept_but_never_lost() {
    let db = TestDb::new().await;
    let (mut client, store) = (db.client().await, db.worker().await);
    let id = suspend(&client, &store, signal(Some(in_an_hour())), Vec::new()).await;
    make_due(&client, id).await;
    let sender = client.transaction().await.unwrap();
    sender.query_one(SIGNAL, &[&id]).await.unwrap();
    // The sender has locked the row: the timeout skips it, and the signal wakes the job.
    store.promote(None, false).await.unwrap();
    assert!(none(&store).await);
    sender.commit().await.unwrap();
    let job = claim_one(&store).await;
    let over = Some(std::time::SystemTime::UNIX_EPOCH);
    assert_eq!(take(&store, &job, over).await, Some(json!({"payload": 1})));
    assert!(none(&store).await, "once");
}

#[tokio::test]
async fn the_end_of_a_job_waits_for_a_signal_that_is_being_sent() {
    let db = TestDb::new().await;
    let (mut client, store) = (db.client().await, db.worker().await);
    let id = enqueue(&client, "x", json!(1)).await;
    let job = claim_one(&store).await;
    let sender = client.transaction().await.unwrap();
    sender.query_one(SIGNAL, &[&id]).await.unwrap();
    // The lease of the job is renewed in the meantime.
    let renewed = store.renew(&[renewal(&job, 60_000)]).await.unwrap();
    assert_eq!(renewed, [(job.id, None)]);
    let end = [settlement(&job, result("1"))];
    let settled = store.settle(&end, Locked::Skip).await.unwrap();
    assert!(settled.locked.contains(&job.id));
    sender.commit().await.unwrap();
    let settled = store.settle(&end, Locked::Skip).await.unwrap();
    assert!(settled.accepted.contains(&job.id));
}

#[tokio::test]
async fn a_suspended_attempt_that_was_lost_or_cancelled_is_refused() {
    let db = TestDb::new().await;
    let (client, store, other) = (db.client().await, db.worker().await, db.worker().await);
    let id = enqueue(&client, "x", json!(1)).await;
    let job = claim_one(&store).await;
    let sql = "UPDATE rouse.job SET lease_until = now() - interval '1 second'";
    client.batch_execute(sql).await.unwrap();
    let orders = orders(&other, 60_000).await;
    let adopted = adopt(&other, Fence(rand()), &orders, 1, 3, None).await;
    assert_eq!(adopted.unwrap().claimed.len(), 1);
    let calls = suspended("c", Wait::Calls { jobs: Vec::new() });
    let late = settlement_with(&job, calls, vec![call("c", json!(1))]);
    let settled = store.settle(&[late], Locked::Wait).await.unwrap();
    assert!(settled.accepted.is_empty());
    assert!(none(&store).await, "no job was called");
    cancel(&client, id).await;
    let asleep = settlement(&job, sleep(in_an_hour()));
    let settled = store.settle(&[asleep], Locked::Wait).await.unwrap();
    assert!(settled.accepted.is_empty());
}

#[tokio::test]
async fn a_lost_attempt_after_a_wait_is_adopted_with_the_wait_recorded() {
    let db = TestDb::new().await;
    let (client, store, other) = (db.client().await, db.worker().await, db.worker().await);
    let id = suspend(&client, &store, sleep(in_an_hour()), Vec::new()).await;
    make_due(&client, id).await;
    store.promote(None, false).await.unwrap();
    claim_one(&store).await;
    let sql = "UPDATE rouse.job SET lease_until = now() - interval '1 second'";
    client.batch_execute(sql).await.unwrap();
    let orders = orders(&other, 60_000).await;
    let adopted = adopt(&other, Fence(rand()), &orders, 1, 3, None)
        .await
        .unwrap();
    let job = &adopted.claimed[0];
    assert_eq!((job.attempt.0, job.uncounted), (3, 2));
    let steps = recorded_steps(&other, job.id, job.fence).await;
    assert!(steps.unwrap().contains_key("nap"));
}

#[tokio::test]
async fn a_batch_settles_all_kinds_of_ends_at_once() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    for n in 1..=5 {
        enqueue(&client, "x", json!(n)).await;
    }
    let mut jobs = claim(&store, 9).await;
    jobs.sort_by_key(|job| job.id.0);
    let calls = || suspended("c", Wait::Calls { jobs: Vec::new() });
    let mut batch: Vec<Settlement> = [
        result("1"),
        sleep(in_an_hour()),
        signal(None),
        calls(),
        Outcome::Released,
    ]
    .into_iter()
    .zip(&jobs)
    .map(|(outcome, job)| settlement(job, outcome))
    .collect();
    batch[3].jobs = vec![call("c", json!("called"))];
    let settled = store.settle(&batch, Locked::Wait).await.unwrap();
    assert_eq!(settled.accepted.len(), 5);
    let mut ready: Vec<String> = claim(&store, 9)
        .await
        .into_iter()
        .map(|job| job.payload.0)
        .collect();
    ready.sort_unstable();
    assert_eq!(ready, ["\"called\"", "5"]);
    let refused = settle(&store, &jobs[1], result("1"), Vec::new()).await;
    assert!(refused.accepted.is_empty(), "its fence is no longer valid");
}
