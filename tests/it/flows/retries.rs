//! A flow is retried in batches, each in a transaction of its own.

use rouse::store::Locked;
use serde_json::{Value, json};
use tokio_postgres::Client;
use tokio_postgres::types::ToSql;

use super::{act, enqueue_flow, job_of, settle_ready, states};
use crate::support::TestDb;
use crate::support::claims::{claim, lock_job, result, settlement};
use crate::support::database::refusal;
use crate::support::worker::{SESSION_WAITS, TIMEOUT, enqueue, forget, until_true};

/// Jobs that wait for each other, one after another.
fn chain(length: usize) -> Value {
    let jobs = (0..length).map(|n| {
        let mut job = json!({"name": n.to_string(), "handler": "x"});
        if n > 0 {
            job["after"] = json!([(n - 1).to_string()]);
        }
        job
    });
    jobs.collect()
}

/// Retries at most this many jobs.
async fn retry(client: &Client, flow: i64, max: i32) -> i32 {
    let sql = "SELECT rouse.retry_flow($1, $2)";
    let args: [&(dyn ToSql + Sync); 2] = [&flow, &max];
    let retried = tokio::time::timeout(TIMEOUT, client.query_one(sql, &args));
    retried.await.expect("no deadlock").unwrap().get(0)
}

#[tokio::test]
async fn a_retry_that_was_interrupted_between_two_batches_is_completed_by_the_next_call() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let flow = enqueue_flow(&client, chain(5)).await;
    assert_eq!(act(&client, "cancel_flow", flow).await, 5);
    assert_eq!(retry(&client, flow, 2).await, 2);
    assert_eq!(
        states(&client, flow).await,
        [
            "0 queued",
            "1 queued",
            "2 cancelled",
            "3 cancelled",
            "4 cancelled"
        ]
    );
    // The operator's session has ended, and the jobs continue in the meantime: the first job has ended, and the second
    // is running.
    drop(client);
    settle_ready(&store, &[]).await;
    let running = claim(&store, 1).await.remove(0);
    let client = db.client().await;
    assert_eq!(retry(&client, flow, 2).await, 2);
    let batch = [settlement(&running, result("1"))];
    store.settle(&batch, Locked::Wait).await.unwrap();
    assert_eq!(retry(&client, flow, 2).await, 1);
    assert_eq!(retry(&client, flow, 2).await, 0);
    for _ in 0..3 {
        settle_ready(&store, &[]).await;
    }
    assert_eq!(
        states(&client, flow).await,
        [
            "0 succeeded",
            "1 succeeded",
            "2 succeeded",
            "3 succeeded",
            "4 succeeded"
        ]
    );
    let records = "SELECT array_agg(detail ->> 'jobs' ORDER BY at) FROM rouse.record WHERE event = 'flow_retried'";
    let row = client.query_one(records, &[]).await.unwrap();
    assert_eq!(row.get::<_, Vec<String>>(0), ["2", "2", "1"]);
    assert_eq!(
        refusal(&client, &format!("SELECT rouse.retry_flow({flow}, 0)")).await,
        "rouse.retry_flow: max must be at least 1, not 0 / "
    );
}

#[tokio::test]
async fn a_job_that_fails_again_between_two_batches_is_not_retried_again() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let flow = enqueue_flow(
        &client,
        json!([
            {"name": "a", "handler": "x"},
            {"name": "b", "handler": "x", "after": ["a"]},
            {"name": "c", "handler": "x"},
        ]),
    )
    .await;
    act(&client, "cancel_flow", flow).await;
    let now = "SELECT clock_timestamp()::text";
    let before: String = client.query_one(now, &[]).await.unwrap().get(0);
    let retry = async || {
        let sql = "SELECT rouse.retry_flow($1, 1, $2::text::timestamptz)";
        let row = client.query_one(sql, &[&flow, &before]).await;
        row.unwrap().get::<_, i32>(0)
    };
    assert_eq!(retry().await, 1);
    let a = job_of(&client, flow, "a").await;
    settle_ready(&store, &[a]).await;
    // b, which waits for the failed job, is left out, and c is not.
    assert_eq!(retry().await, 1);
    assert_eq!(retry().await, 0);
    assert_eq!(
        states(&client, flow).await,
        ["a failed", "c queued", "b cancelled"]
    );
    assert_eq!(act(&client, "retry_flow", flow).await, 2);
}

/// Failed jobs may be kept for longer than others.
#[tokio::test]
async fn a_job_whose_retry_has_succeeded_and_is_no_longer_kept_is_not_retried_again() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let flow = enqueue_flow(&client, chain(1)).await;
    let failed = job_of(&client, flow, "0").await;
    settle_ready(&store, &[failed]).await;
    assert_eq!(retry(&client, flow, 9).await, 1);
    let again = job_of(&client, flow, "0").await;
    settle_ready(&store, &[]).await;
    assert_eq!(states(&client, flow).await, ["0 succeeded"]);
    forget(&client, again).await;
    assert_eq!(retry(&client, flow, 9).await, 0);
    assert!(claim(&store, 9).await.is_empty());
}

#[tokio::test]
async fn jobs_whose_retries_are_no_longer_kept_are_left_out_without_a_call_for_each() {
    const CALLS: &str = "SELECT coalesce(sum(calls), 0)::bigint FROM pg_stat_xact_user_functions WHERE schemaname = 'rouse' AND funcname = '_ended_job'";
    let db = TestDb::new().await;
    let mut client = db.client().await;
    let jobs: Value = (0..50)
        .map(|n| json!({"name": n.to_string(), "handler": "x"}))
        .collect();
    let flow = enqueue_flow(&client, jobs).await;
    assert_eq!(act(&client, "cancel_flow", flow).await, 50);
    client
        .execute(
            "INSERT INTO rouse.record (at, job, event, who) SELECT now(), job, 'retried', 'w' FROM rouse.flow($1) WHERE name <> '49'",
            &[&flow],
        )
        .await
        .unwrap();
    let transaction = client.transaction().await.unwrap();
    transaction
        .batch_execute("SET LOCAL track_functions = 'all'")
        .await
        .unwrap();
    let retried = transaction
        .query_one("SELECT rouse.retry_flow($1)", &[&flow])
        .await
        .unwrap();
    assert_eq!(retried.get::<_, i32>(0), 1);
    let calls: i64 = transaction.query_one(CALLS, &[]).await.unwrap().get(0);
    assert_eq!(calls, 1);
    transaction.commit().await.unwrap();
}

/// Each call reads all jobs of the flow: if it retried only a few, a large flow would take minutes.
#[tokio::test]
async fn a_call_retries_one_job_for_every_two_hundred_of_the_flow_however_long_it_takes() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let jobs: Value = (0..1000)
        .map(|n| json!({"name": n.to_string(), "handler": "x"}))
        .collect();
    let flow = enqueue_flow(&client, jobs).await;
    assert_eq!(act(&client, "cancel_flow", flow).await, 1000);
    make_retries_take_long(&client).await;
    assert_eq!(retry(&client, flow, 1000).await, 5);
    assert_eq!(retry(&client, flow, 3).await, 3);
}

/// From now on, each retry takes longer than a call may take after its first one.
async fn make_retries_take_long(client: &Client) {
    client
        .batch_execute(
            "CREATE FUNCTION public.take_long() RETURNS trigger LANGUAGE plpgsql AS
                 $$ BEGIN PERFORM pg_sleep(0.035); RETURN NEW; END $$;
             CREATE TRIGGER take_long BEFORE INSERT ON rouse.job
                 FOR EACH ROW EXECUTE FUNCTION public.take_long()",
        )
        .await
        .unwrap();
}

/// Each call looks again at the jobs that were left out before: if it retried only one after thousands of these, a
/// large flow would take minutes.
#[tokio::test]
async fn a_call_retries_one_job_for_every_ten_that_it_leaves_out_however_long_it_takes() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let outside = enqueue(&client, "x", json!(1)).await;
    let job = |n: usize| match n {
        0..100 => json!({"name": n.to_string(), "handler": "x", "after": [outside]}),
        _ => json!({"name": n.to_string(), "handler": "x"}),
    };
    let flow = enqueue_flow(&client, (0..120).map(job).collect()).await;
    assert_eq!(act(&client, "cancel_flow", flow).await, 120);
    client
        .execute("SELECT rouse.fail($1, 'no')", &[&outside])
        .await
        .unwrap();
    make_retries_take_long(&client).await;
    for retried in [10, 10, 0] {
        assert_eq!(retry(&client, flow, 1000).await, retried);
    }
}

#[tokio::test]
async fn a_flow_has_not_failed_because_a_failed_job_is_kept_longer_than_its_retry() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let keep = "SELECT rouse.set_retention('default', keep_days => 1, keep_failed_days => 30)";
    client.batch_execute(keep).await.unwrap();
    let jobs = json!([{"name": "a", "handler": "x"}, {"name": "b", "handler": "x"}]);
    let flow = enqueue_flow(&client, jobs).await;
    let failed = job_of(&client, flow, "a").await;
    settle_ready(&store, &[failed]).await;
    assert_eq!(retry(&client, flow, 9).await, 1);
    let again = job_of(&client, flow, "a").await;
    settle_ready(&store, &[]).await;
    let counted = async || counted(&client, flow).await;
    assert_eq!(counted().await, ("succeeded".into(), 2, 0, true));
    forget(&client, again).await;
    assert_eq!(counted().await, ("succeeded".into(), 1, 0, true));
    assert_eq!(states(&client, flow).await, ["b succeeded"]);
    let b = job_of(&client, flow, "b").await;
    forget(&client, b).await;
    assert_eq!(counted().await, ("succeeded".into(), 0, 0, true));
}

/// The state of a flow, the numbers of its jobs and of those that have failed, and whether it has ended.
async fn counted(client: &Client, flow: i64) -> (String, i64, i64, bool) {
    let sql = "SELECT state, jobs, failed, finished_at IS NOT NULL FROM rouse.flows WHERE id = $1";
    let row = client.query_one(sql, &[&flow]).await.unwrap();
    (row.get(0), row.get(1), row.get(2), row.get(3))
}

#[tokio::test]
async fn a_job_has_not_succeeded_because_it_is_kept_longer_than_its_failed_retry() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let keep = "SELECT rouse.set_retention('default', keep_failed_days => 1)";
    client.batch_execute(keep).await.unwrap();
    let jobs = json!([{"name": "a", "handler": "x"}, {"name": "b", "handler": "x"}]);
    let flow = enqueue_flow(&client, jobs).await;
    settle_ready(&store, &[]).await;
    let a = job_of(&client, flow, "a").await;
    client
        .query_one("SELECT rouse.retry($1)", &[&a])
        .await
        .unwrap();
    let again = job_of(&client, flow, "a").await;
    settle_ready(&store, &[again]).await;
    assert_eq!(counted(&client, flow).await, ("failed".into(), 2, 1, true));
    forget(&client, again).await;
    assert_eq!(
        counted(&client, flow).await,
        ("succeeded".into(), 1, 0, true)
    );
    assert_eq!(states(&client, flow).await, ["b succeeded"]);
}

#[tokio::test]
async fn a_job_that_a_failure_has_cancelled_never_runs_without_the_failed_one() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let flow = enqueue_flow(&client, chain(2)).await;
    let first = job_of(&client, flow, "0").await;
    let second = job_of(&client, flow, "1").await;
    settle_ready(&store, &[first]).await;
    assert_eq!(states(&client, flow).await, ["0 failed", "1 cancelled"]);
    // The queue of the second job may keep its jobs for longer.
    forget(&client, first).await;
    assert_eq!(retry(&client, flow, 9).await, 0);
    assert_eq!(
        refusal(&client, &format!("SELECT rouse.retry({second})")).await,
        format!(
            "rouse: job {second} cannot be retried: it waits for job {first}, which has failed / \
             That job is no longer kept. Enqueue a new job with the payload of this one."
        )
    );
    assert!(claim(&store, 9).await.is_empty());
}

#[tokio::test]
async fn a_batch_ends_before_a_job_whose_parent_is_locked_and_waits_only_if_it_is_the_first() {
    let db = TestDb::new().await;
    let (mut other, client) = (db.client().await, db.client().await);
    let outside = enqueue(&client, "x", json!(1)).await;
    let flow = enqueue_flow(
        &client,
        json!([
            {"name": "a", "handler": "x"},
            {"name": "b", "handler": "x", "after": [outside]},
            {"name": "c", "handler": "x"},
        ]),
    )
    .await;
    act(&client, "cancel_flow", flow).await;
    // Locks the job, as its settlement would.
    let settling = other.transaction().await.unwrap();
    lock_job(&settling, outside).await;
    assert_eq!(retry(&client, flow, 1000).await, 1);
    assert_eq!(
        states(&client, flow).await,
        ["a queued", "b cancelled", "c cancelled"]
    );
    let operator = db.client().await;
    let retried = tokio::spawn(async move { retry(&operator, flow, 1000).await });
    until_true(&client, SESSION_WAITS).await;
    settling.rollback().await.unwrap();
    assert_eq!(retried.await.unwrap(), 2);
}
