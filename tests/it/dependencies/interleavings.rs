//! Releases that meet other transactions, forced by transactions that stay open.

use rouse::job::Fence;
use rouse::store::{ClaimedJob, Locked};
use serde_json::json;
use tokio_postgres::{Client, IsolationLevel, Transaction};

use super::{enqueue_after, failed, ok, settle_ready, waits_for};
use crate::support::TestDb;
use crate::support::claims::{adopt, claim, claim_one, orders, rand, settlement};
use crate::support::worker::{SESSION_WAITS, cancel, enqueue, show, until_true};

/// Settles a claimed job as succeeded in this transaction, as the settlement of another host does.
async fn settle_in(transaction: &Transaction<'_>, job: &ClaimedJob) {
    let sql = "SELECT count(*) FROM rouse._settle(NULL, ARRAY[jsonb_populate_record(
                   NULL::rouse.settlement, jsonb_build_object('id', $1::bigint, 'fence', $2::bigint, 'state', 'succeeded', 'result', 1))])";
    let row = transaction
        .query_one(sql, &[&job.id.0, &job.fence.0])
        .await
        .unwrap();
    assert_eq!(row.get::<_, i64>(0), 1, "settled, and nothing is left");
}

/// Enqueues a job after another one, in this transaction.
async fn enqueue_in(transaction: &Transaction<'_>, parent: i64) -> i64 {
    let sql = "SELECT rouse.enqueue('x', after => jsonb_build_array($1::bigint))";
    transaction.query_one(sql, &[&parent]).await.unwrap().get(0)
}

/// Makes all pending releases due, as if time had passed.
async fn make_releases_due(client: &Client) {
    let sql = "UPDATE rouse.pending_release SET try_at = clock_timestamp()";
    client.batch_execute(sql).await.unwrap();
}

async fn end(transaction: Transaction<'_>, commits: bool) {
    match commits {
        true => transaction.commit().await.unwrap(),
        false => transaction.rollback().await.unwrap(),
    }
}

#[tokio::test]
async fn two_last_parents_that_settle_at_once_release_their_child() {
    for commits in [true, false] {
        let db = TestDb::new().await;
        let (mut client, store) = (db.client().await, db.worker().await);
        let first = enqueue(&client, "x", json!(1)).await;
        let second = enqueue(&client, "x", json!(2)).await;
        let child = enqueue_after(&client, "x", json!([first, second])).await;
        let jobs = claim(&store, 2).await;
        let other = client.transaction().await.unwrap();
        settle_in(&other, &jobs[0]).await;

        let settled = store
            .settle(&[settlement(&jobs[1], ok())], Locked::Wait)
            .await
            .unwrap();
        assert_eq!(settled.accepted.len(), 1, "it does not wait for the other");
        assert!(settled.has_releases);
        assert!(!store.continue_releases().await.unwrap(), "still locked");
        end(other, commits).await;
        make_releases_due(&client).await;
        assert!(!store.continue_releases().await.unwrap());
        let left = if commits { None } else { Some(vec![first]) };
        assert_eq!(waits_for(&client, child).await, left);
        until_true(
            &client,
            "SELECT NOT EXISTS (SELECT FROM rouse.pending_release)",
        )
        .await;
        if commits {
            assert_eq!(settle_ready(&store, &[ok()]).await.0, [child]);
        }
    }
}

#[tokio::test]
async fn a_parent_settles_after_the_producer_that_names_it_and_releases_its_child() {
    for commits in [true, false] {
        let db = TestDb::new().await;
        let (mut client, store) = (db.client().await, db.worker().await);
        let parent = enqueue(&client, "x", json!(1)).await;
        let bystander = enqueue(&client, "x", json!(2)).await;
        let jobs = claim(&store, 2).await;
        let batch = [settlement(&jobs[0], ok()), settlement(&jobs[1], ok())];
        let producer = client.transaction().await.unwrap();
        let child = enqueue_in(&producer, parent).await;

        let error = store.settle(&batch, Locked::Wait).await.unwrap_err();
        assert!(error.is_locked(), "{error}");
        let settled = store.settle(&batch, Locked::Skip).await.unwrap();
        assert_eq!(
            settled.locked.iter().map(|id| id.0).collect::<Vec<_>>(),
            [parent]
        );
        assert_eq!(
            settled.accepted.iter().map(|id| id.0).collect::<Vec<_>>(),
            [bystander]
        );
        end(producer, commits).await;
        store.settle(&batch[..1], Locked::Wait).await.unwrap();
        match commits {
            true => assert_eq!(settle_ready(&store, &[ok()]).await.0, [child]),
            false => assert!(claim(&store, 1).await.is_empty()),
        }
        until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.dependency)").await;
    }
}

#[tokio::test]
async fn a_producer_that_names_a_parent_which_is_being_settled_sees_how_it_ends() {
    for commits in [true, false] {
        let db = TestDb::new().await;
        let (mut client, watcher, store) =
            (db.client().await, db.client().await, db.worker().await);
        let parent = enqueue(&client, "x", json!(1)).await;
        let job = claim(&store, 1).await.remove(0);
        let settling = client.transaction().await.unwrap();
        settle_in(&settling, &job).await;
        let producer = db.client().await;
        let child =
            tokio::spawn(async move { enqueue_after(&producer, "x", json!([parent])).await });
        until_true(&watcher, SESSION_WAITS).await;
        end(settling, commits).await;
        let child = child.await.unwrap();
        let left = if commits { None } else { Some(vec![parent]) };
        assert_eq!(waits_for(&watcher, child).await, left);
        if !commits {
            store
                .settle(&[settlement(&job, ok())], Locked::Wait)
                .await
                .unwrap();
        }
        assert_eq!(settle_ready(&store, &[ok()]).await.0, [child]);
    }
}

async fn retry(client: &Client, id: i64) -> i64 {
    let sql = "SELECT rouse.retry($1)";
    client.query_one(sql, &[&id]).await.unwrap().get(0)
}

#[tokio::test]
async fn a_retry_waits_for_a_producer_whose_job_waits_for_it() {
    let db = TestDb::new().await;
    let (mut client, watcher, store) = (db.client().await, db.client().await, db.worker().await);
    let parent = enqueue(&client, "x", json!(1)).await;
    settle_ready(&store, &[failed()]).await;
    let producer = client.transaction().await.unwrap();
    let sql = "SELECT rouse.enqueue('x', after => jsonb_build_object('p', jsonb_build_object('job', $1::bigint, 'on_failure', 'wait')))";
    let child: i64 = producer.query_one(sql, &[&parent]).await.unwrap().get(0);
    let operator = db.client().await;
    let retried = tokio::spawn(async move { retry(&operator, parent).await });
    until_true(&watcher, SESSION_WAITS).await;
    producer.commit().await.unwrap();
    let retried = retried.await.unwrap();
    assert_eq!(settle_ready(&store, &[ok()]).await.0, [retried]);
    assert_eq!(settle_ready(&store, &[ok()]).await.0, [child]);
}

#[tokio::test]
async fn a_producer_whose_job_waits_for_a_retry_sees_the_one_that_is_being_made() {
    for commits in [true, false] {
        let db = TestDb::new().await;
        let (mut client, watcher, store) =
            (db.client().await, db.client().await, db.worker().await);
        let parent = enqueue(&client, "x", json!(1)).await;
        settle_ready(&store, &[failed()]).await;
        let operator = client.transaction().await.unwrap();
        let retried: i64 = operator
            .query_one("SELECT rouse.retry($1)", &[&parent])
            .await
            .unwrap()
            .get(0);
        let producer = db.client().await;
        let after = json!({"p": {"job": parent, "on_failure": "wait"}});
        let child = tokio::spawn(async move { enqueue_after(&producer, "x", after).await });
        until_true(&watcher, SESSION_WAITS).await;
        end(operator, commits).await;
        let child = child.await.unwrap();
        assert_eq!(waits_for(&watcher, child).await, Some(vec![parent]));
        let retried = if commits {
            retried
        } else {
            retry(&watcher, parent).await
        };
        assert_eq!(settle_ready(&store, &[ok()]).await.0, [retried]);
        assert_eq!(settle_ready(&store, &[ok()]).await.0, [child]);
    }
}

#[tokio::test]
async fn a_cancellation_that_meets_a_release_wins_if_it_commits() {
    for commits in [true, false] {
        let db = TestDb::new().await;
        let (mut client, store) = (db.client().await, db.worker().await);
        let parent = enqueue(&client, "x", json!(1)).await;
        let child = enqueue_after(&client, "x", json!([parent])).await;
        let operator = client.transaction().await.unwrap();
        operator
            .execute("SELECT rouse.cancel($1)", &[&child])
            .await
            .unwrap();
        let (_, has_releases) = settle_ready(&store, &[ok()]).await;
        assert!(has_releases);
        end(operator, commits).await;
        assert!(!store.continue_releases().await.unwrap());
        match commits {
            true => assert_eq!(show(&client, child).await.state, "cancelled"),
            false => assert_eq!(settle_ready(&store, &[ok()]).await.0, [child]),
        }
        until_true(
            &client,
            "SELECT NOT EXISTS (SELECT FROM rouse.pending_release) AND NOT EXISTS (SELECT FROM rouse.dependency)",
        )
        .await;
    }
}

#[tokio::test]
async fn a_child_locked_for_a_long_time_does_not_hold_up_the_release_of_others() {
    let db = TestDb::new().await;
    let (mut client, store) = (db.client().await, db.worker().await);
    let parent = enqueue(&client, "x", json!(1)).await;
    let locked = enqueue_after(&client, "x", json!([parent])).await;
    let free = enqueue_after(&client, "x", json!([parent])).await;
    let other = client.transaction().await.unwrap();
    other
        .execute("SELECT FROM rouse.job WHERE id = $1 FOR UPDATE", &[&locked])
        .await
        .unwrap();
    settle_ready(&store, &[ok()]).await;
    assert_eq!(settle_ready(&store, &[ok()]).await.0, [free]);
    // A host tries again after a second, and not in a tight loop.
    assert!(!store.continue_releases().await.unwrap());
    other.rollback().await.unwrap();
    make_releases_due(&client).await;
    assert!(!store.continue_releases().await.unwrap());
    assert_eq!(settle_ready(&store, &[ok()]).await.0, [locked]);
}

#[tokio::test]
async fn a_chain_that_ends_in_a_transaction_with_an_old_snapshot_still_releases() {
    for action in ["complete($1)", "cancel($1)"] {
        let db = TestDb::new().await;
        let (mut operator, client, store) =
            (db.client().await, db.client().await, db.worker().await);
        let parent = enqueue(&client, "x", json!(1)).await;
        let transaction = operator
            .build_transaction()
            .isolation_level(IsolationLevel::RepeatableRead)
            .start()
            .await
            .unwrap();
        transaction
            .execute("SELECT FROM rouse.job", &[])
            .await
            .unwrap();
        let after = json!({"p": {"job": parent, "on_failure": "run"}});
        let child = enqueue_after(&client, "x", after).await;
        let sql = format!("SELECT rouse.{action}");
        transaction.execute(&sql, &[&parent]).await.unwrap();
        transaction.commit().await.unwrap();
        store.continue_releases().await.unwrap();
        assert_eq!(settle_ready(&store, &[ok()]).await.0, [child], "{action}");
        let noted = "SELECT NOT EXISTS (SELECT FROM rouse.pending_release)";
        until_true(&client, noted).await;
    }
}

/// It does not see the jobs that wait, and would cancel them.
#[tokio::test]
async fn a_transaction_with_an_old_snapshot_deletes_neither_a_chain_nor_a_flow() {
    let db = TestDb::new().await;
    let (mut operator, client) = (db.client().await, db.client().await);
    let flow = r#"SELECT rouse.enqueue_flow('[{"name": "a", "handler": "x"}]')"#;
    let flow: i64 = client.query_one(flow, &[]).await.unwrap().get(0);
    let parent = "SELECT job FROM rouse.flow($1)";
    let parent: i64 = client.query_one(parent, &[&flow]).await.unwrap().get(0);
    for (function, id) in [("delete_chain", parent), ("delete_flow", flow)] {
        let transaction = operator
            .build_transaction()
            .isolation_level(IsolationLevel::RepeatableRead)
            .start()
            .await
            .unwrap();
        transaction
            .execute("SELECT FROM rouse.job", &[])
            .await
            .unwrap();
        let child = enqueue_after(&client, "x", json!([parent])).await;
        let delete = format!("SELECT rouse.{function}($1)");
        let error = transaction.query_one(&delete, &[&id]).await.unwrap_err();
        assert_eq!(
            error.as_db_error().unwrap().message(),
            format!(
                "rouse.{function}: a transaction with isolation level REPEATABLE READ may not see all jobs that wait"
            )
        );
        transaction.rollback().await.unwrap();
        assert_eq!(show(&client, child).await.state, "queued");
    }
}

#[tokio::test]
async fn an_adoption_does_not_wait_for_a_producer_that_has_named_the_job() {
    let db = TestDb::new().await;
    let (mut client, store, next) = (db.client().await, db.worker().await, db.worker().await);
    let parent = enqueue(&client, "x", json!(1)).await;
    claim(&store, 1).await;
    let expire = "UPDATE rouse.job SET lease_until = clock_timestamp() WHERE id = $1";
    client.execute(expire, &[&parent]).await.unwrap();
    let producer = client.transaction().await.unwrap();
    let child = enqueue_in(&producer, parent).await;
    let orders = orders(&next, 60_000).await;
    let adopt = async || {
        adopt(&next, Fence(rand()), &orders, 10, 1, None)
            .await
            .unwrap()
    };
    adopt().await;
    producer.commit().await.unwrap();
    assert_eq!(show(&client, parent).await.state, "running");
    adopt().await;
    let client = db.client().await;
    assert_eq!(show(&client, parent).await.state, "failed");
    assert_eq!(show(&client, child).await.state, "cancelled");
}

#[tokio::test]
async fn retrying_any_job_of_a_live_chain_returns_its_live_job() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let first = enqueue(&client, "x", json!(1)).await;
    settle_ready(&store, &[failed()]).await;
    let second = retry(&client, first).await;
    settle_ready(&store, &[failed()]).await;
    let third = retry(&client, first).await;
    for id in [first, second] {
        assert_eq!(retry(&client, id).await, third);
    }
    let sql = "SELECT array_agg(job) FROM rouse.chain($1)";
    let row = client.query_one(sql, &[&second]).await.unwrap();
    assert_eq!(row.get::<_, Vec<i64>>(0), [first, second, third]);
}

#[tokio::test]
async fn deleting_a_chain_does_not_wait_for_a_job_that_waits_for_it() {
    let db = TestDb::new().await;
    let (mut other, client) = (db.client().await, db.client().await);
    let parent = enqueue(&client, "x", json!(1)).await;
    let after = json!({"p": {"job": parent, "on_failure": "run"}});
    let child = enqueue_after(&client, "x", after).await;
    let transaction = other.transaction().await.unwrap();
    let lock = "SELECT FROM rouse.job WHERE id = $1 FOR UPDATE";
    transaction.execute(lock, &[&child]).await.unwrap();
    let delete = "SELECT rouse.delete_chain($1, cascade => true)";
    let error = client.query_one(delete, &[&parent]).await.unwrap_err();
    assert_eq!(
        error.as_db_error().unwrap().message(),
        format!(
            "rouse: chain {parent} cannot be deleted: another transaction has locked a job that waits for it"
        )
    );
    transaction.rollback().await.unwrap();
    client.query_one(delete, &[&parent]).await.unwrap();
    assert_eq!(show(&client, child).await.state, "cancelled");
}

#[tokio::test]
async fn deleting_a_chain_waits_for_its_retry_and_deletes_the_retry_too() {
    let db = TestDb::new().await;
    let (mut other, client, deleting) = (db.client().await, db.client().await, db.client().await);
    let parent = enqueue(&client, "x", json!(1)).await;
    let after = json!({"p": {"job": parent, "on_failure": "wait"}});
    let child = enqueue_after(&client, "x", after).await;
    assert!(cancel(&client, parent).await);
    let retrying = other.transaction().await.unwrap();
    let retry = "SELECT rouse.retry($1)";
    let again: i64 = retrying.query_one(retry, &[&parent]).await.unwrap().get(0);
    let deleted = tokio::spawn(async move {
        let delete = "SELECT rouse.delete_chain($1, cascade => true)";
        let row = deleting.query_one(delete, &[&parent]).await.unwrap();
        row.get::<_, bool>(0)
    });
    until_true(&client, SESSION_WAITS).await;
    retrying.commit().await.unwrap();
    assert!(deleted.await.unwrap());
    assert_eq!(show(&client, again).await.state, "cancelled");
    assert_eq!(show(&client, child).await.state, "cancelled");
}

/// The enqueue waits for the transaction that makes the retry, and in which the retry already succeeds.
#[tokio::test]
async fn a_job_does_not_wait_for_a_retry_that_succeeds_while_it_is_enqueued() {
    let db = TestDb::new().await;
    let (mut other, client, enqueuing) = (db.client().await, db.client().await, db.client().await);
    let parent = enqueue(&client, "x", json!(1)).await;
    assert!(cancel(&client, parent).await);
    let retrying = other.transaction().await.unwrap();
    let again = "SELECT rouse.complete(rouse.retry($1), '7')";
    retrying.query_one(again, &[&parent]).await.unwrap();
    let enqueued = tokio::spawn(async move {
        let after = json!({"p": {"job": parent, "on_failure": "wait"}});
        enqueue_after(&enqueuing, "x", after).await
    });
    until_true(&client, SESSION_WAITS).await;
    retrying.commit().await.unwrap();
    let child = enqueued.await.unwrap();
    let ready = "SELECT turn IS NOT NULL AND blockers IS NULL FROM rouse.job WHERE id = $1";
    let ready: bool = client.query_one(ready, &[&child]).await.unwrap().get(0);
    assert!(ready, "its parent has succeeded");
}

/// A chain for which 1,500 jobs were waiting, of which the first call of a deletion has cancelled 1,000.
async fn half_deleted(client: &Client) -> i64 {
    let parent = enqueue(client, "x", json!(1)).await;
    let many = "SELECT rouse.enqueue('x', after => jsonb_build_array($1::bigint)) FROM generate_series(1, 1500)";
    client.execute(many, &[&parent]).await.unwrap();
    assert!(!delete_cascading(client, parent).await.unwrap());
    assert_eq!(live_jobs(client).await, 501);
    parent
}

async fn delete_cascading(client: &Client, id: i64) -> Result<bool, tokio_postgres::Error> {
    let delete = "SELECT rouse.delete_chain($1, cascade => true)";
    Ok(client.query_one(delete, &[&id]).await?.get(0))
}

async fn live_jobs(client: &Client) -> i64 {
    let live = "SELECT count(*) FROM rouse.job";
    client.query_one(live, &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn between_two_calls_that_delete_a_chain_it_is_live_and_the_next_deletes_what_was_added() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let parent = half_deleted(&client).await;
    let chain = "SELECT job, state::text, rouse.chain_result(job) IS NULL FROM rouse.chain($1)";
    let row = client.query_one(chain, &[&parent]).await.unwrap();
    let shown: (i64, String, bool) = (row.get(0), row.get(1), row.get(2));
    assert_eq!(shown, (parent, "queued".into(), true));
    let late = enqueue_after(&client, "x", json!([parent])).await;
    let cancelled = "SELECT min(id) FROM rouse.finished WHERE state = 'cancelled'";
    let cancelled: i64 = client.query_one(cancelled, &[]).await.unwrap().get(0);
    let again = retry(&client, cancelled).await;
    for id in [late, again] {
        assert_eq!(waits_for(&client, id).await, Some(vec![parent]));
    }
    assert!(delete_cascading(&client, parent).await.unwrap());
    assert_eq!(live_jobs(&client).await, 0);
    for id in [late, again, parent] {
        assert_eq!(show(&client, id).await.state, "cancelled");
    }
    // The chain has ended like any chain that was cancelled.
    let sql = "SELECT rouse.retry($1)";
    let error = client.query_one(sql, &[&cancelled]).await.unwrap_err();
    assert_eq!(
        error.as_db_error().unwrap().message(),
        format!(
            "rouse: job {cancelled} cannot be retried: it waits for job {parent}, which has failed"
        )
    );
    let next = enqueue_after(&client, "x", json!([parent])).await;
    assert_eq!(show(&client, next).await.state, "cancelled");
    let after = json!({"p": {"job": parent, "on_failure": "run"}});
    let next = enqueue_after(&client, "x", after).await;
    assert_eq!(waits_for(&client, next).await, None);
}

#[tokio::test]
async fn a_chain_that_starts_between_two_calls_that_delete_it_continues_with_the_jobs_that_still_wait()
 {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let parent = half_deleted(&client).await;
    let running = claim_one(&store).await;
    assert_eq!(running.id.0, parent);
    let refused = async || {
        let error = delete_cascading(&client, parent).await.unwrap_err();
        error.as_db_error().unwrap().message().to_owned()
    };
    assert_eq!(
        refused().await,
        format!("rouse: job {parent} cannot be deleted: it is running")
    );
    assert_eq!(
        live_jobs(&client).await,
        501,
        "the refused call changed nothing"
    );
    let batch = [settlement(&running, ok())];
    store.settle(&batch, Locked::Wait).await.unwrap();
    assert_eq!(claim(&store, 10_000).await.len(), 500);
    assert_eq!(
        refused().await,
        format!("rouse: job {parent} cannot be deleted: it has already ended as succeeded")
    );
}
