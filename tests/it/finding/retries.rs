//! Bulk retries of the jobs that match a filter.

use rouse::store::{LockWait, RetryAll};
use serde_json::json;

use super::{RETRY, failed, kept, start_behind_lock};
use crate::commands::run;
use crate::support::TestDb;
use crate::support::worker::{SESSION_WAITS, TIMEOUT, enqueue_sql, until_true};

#[tokio::test]
async fn matching_jobs_are_retried_once_in_batches_with_a_record_for_each() {
    let db = TestDb::new().await;
    let (client, other) = (db.client().await, db.client().await);
    let mut ids = Vec::new();
    for n in 1..=5 {
        ids.push(failed(&client, &format!("'x', '{n}', tenant => 't'"), "why").await);
    }
    let keyed = failed(&client, "'x', tenant => 't', unique_key => 'k'", "why").await;
    enqueue_sql(&client, "'x', tenant => 't', unique_key => 'k'").await;
    failed(&client, "'x', tenant => 'u'", "why").await;
    let filter = json!({"state": "failed", "tenant": "t"});

    let row = client
        .query_one(RETRY, &[&filter, &None::<i64>, &2, &1000])
        .await
        .unwrap();
    let (retried, made): (Vec<i64>, Vec<i64>) = (row.get(0), row.get(1));
    assert_eq!(retried, [ids[4]], "newest first");
    assert_eq!(row.get::<_, Vec<i64>>(2), [keyed]);
    assert_eq!(row.get::<_, Option<i64>>(3), Some(ids[4]));
    let row = client
        .query_one(
            "SELECT (a.payload, a.tenant, a.retried_from) = (b.payload, b.tenant, b.id)
             FROM rouse.job($1) AS a, rouse.job($2) AS b",
            &[&made[0], &retried[0]],
        )
        .await
        .unwrap();
    assert!(row.get::<_, bool>(0), "the retry repeats the same job");

    // Two concurrent retries from the start: each job is retried once.
    let args: [&(dyn tokio_postgres::types::ToSql + Sync); 4] =
        [&filter, &None::<i64>, &100, &1000];
    let (first, second) = tokio::join!(
        client.query_one(RETRY, &args),
        other.query_one(RETRY, &args)
    );
    let (first, second): (Vec<i64>, Vec<i64>) = (first.unwrap().get(0), second.unwrap().get(0));
    assert_eq!(first.len() + second.len(), 4, "{first:?}, {second:?}");
    let row = client
        .query_one(
            "SELECT count(*), count(DISTINCT retried_from),
                    (SELECT count(*) FROM rouse.record WHERE event = 'retried' AND who = session_user AND job = ANY ($1))
             FROM rouse.job WHERE retried_from IS NOT NULL",
            &[&ids],
        )
        .await
        .unwrap();
    assert_eq!((row.get(0), row.get(1), row.get(2)), (5_i64, 5_i64, 5_i64));

    // A job still counts as retried after its retry has ended; a retry that fails again is another job.
    let fail = "SELECT rouse.fail($1, 'again')";
    client.query(fail, &[&made[0]]).await.unwrap();
    let row = client.query_one(RETRY, &args).await.unwrap();
    assert_eq!(row.get::<_, Vec<i64>>(0), [made[0]]);
    let row = client.query_one(RETRY, &args).await.unwrap();
    assert_eq!(row.get::<_, Vec<i64>>(0), Vec::<i64>::new());
    assert_eq!(row.get::<_, Option<i64>>(3), None);
}

#[tokio::test]
async fn an_interrupted_bulk_retry_finishes_its_batch_and_the_same_command_resumes() {
    let db = TestDb::new().await;
    let (mut client, watcher) = (db.client().await, db.client().await);
    kept(&client, 0, "timed_out", 1_000_001..=1_000_600).await;
    // Another batch has not committed yet.
    let transaction = client.transaction().await.unwrap();
    transaction
        .query("SELECT rouse._lock('retry_jobs', '')", &[])
        .await
        .unwrap();
    let args = ["job", "retry", "--state", "timed_out", "--yes"];
    let host = start_behind_lock(&db, &watcher, &args).await;
    host.signal(libc::SIGINT);
    host.until_signal_is_taken(TIMEOUT).await;
    transaction.rollback().await.unwrap();
    let (status, output) = host.exit(TIMEOUT);
    assert_eq!(status.code(), Some(130), "{output}");
    assert!(
        output.contains("the same command with --until 2"),
        "{output}"
    );
    let retried =
        "SELECT count(DISTINCT retried_from) FROM rouse.job WHERE retried_from IS NOT NULL";
    let row = watcher.query_one(retried, &[]).await.unwrap();
    assert_eq!(
        row.get::<_, i64>(0),
        i64::from(RetryAll::BATCH),
        "one complete batch"
    );
    let (code, output) = run(&db, &args);
    assert_eq!(code, 0, "{output}");
    assert!(output.contains("retried 540 of the 600 jobs"), "{output}");
    let row = watcher.query_one(retried, &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 600);
}

#[tokio::test]
async fn jobs_of_newer_batches_are_retried_after_the_failed_job_that_they_wait_for() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let parent = enqueue_sql(&client, "'x'").await;
    // More than a batch.
    client
        .execute(
            "SELECT rouse.enqueue('x', after => jsonb_build_array($1::bigint)) FROM generate_series(1, 600)",
            &[&parent],
        )
        .await
        .unwrap();
    let fail = "SELECT rouse.fail($1, 'why')";
    client.query(fail, &[&parent]).await.unwrap();
    // This job is refused permanently.
    failed(&client, "'x', unique_key => 'k'", "why").await;
    enqueue_sql(&client, "'x', unique_key => 'k'").await;
    let args = ["job", "retry", "--state", "failed,cancelled", "--confirm"];
    let (code, output) = run(&db, &args);
    assert_eq!(code, 6, "{output}");
    assert!(
        output.contains("retried 601 of the 602 jobs") && output.contains("1 was refused"),
        "{output}"
    );
    let retries = "SELECT count(*), count(DISTINCT retried_from), count(blockers) FROM rouse.job WHERE retried_from IS NOT NULL";
    let row = client.query_one(retries, &[]).await.unwrap();
    assert_eq!(
        (row.get(0), row.get(1), row.get(2)),
        (601_i64, 601_i64, 600_i64)
    );
}

#[tokio::test]
async fn a_concurrent_batch_skips_jobs_that_another_has_retried_even_if_the_retries_have_ended() {
    let db = TestDb::new().await;
    let (client, mut first, second) = (db.client().await, db.client().await, db.client().await);
    let id = failed(&client, "'x'", "no").await;
    let filter = json!({"state": "failed", "handler": "x"});
    let transaction = first.transaction().await.unwrap();
    let row = transaction
        .query_one(RETRY, &[&filter, &None::<i64>, &10, &1000])
        .await
        .unwrap();
    assert_eq!(row.get::<_, Vec<i64>>(0), [id]);
    let made: Vec<i64> = row.get(1);
    transaction
        .query("SELECT rouse.cancel($1)", &[&made[0]])
        .await
        .unwrap();
    let again = tokio::spawn(async move {
        let row = second
            .query_one(RETRY, &[&filter, &None::<i64>, &10, &1000])
            .await
            .unwrap();
        row.get::<_, Vec<i64>>(0)
    });
    until_true(&client, SESSION_WAITS).await;
    transaction.commit().await.unwrap();
    assert_eq!(again.await.unwrap(), Vec::<i64>::new());
}

#[tokio::test]
async fn locked_jobs_are_left_out_of_a_bulk_retry_and_listed() {
    let db = TestDb::new().await;
    let (mut client, watcher) = (db.client().await, db.client().await);
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(failed(&client, "'x'", "why").await);
    }
    let succeeded = enqueue_sql(&client, "'x'").await;
    let complete = "SELECT rouse.complete($1)";
    client.query(complete, &[&succeeded]).await.unwrap();
    // One is locked by its row, the other by the unique index of retries.
    let transaction = client.transaction().await.unwrap();
    for id in [ids[1], succeeded] {
        let retry = "SELECT rouse.retry($1)";
        transaction.query(retry, &[&id]).await.unwrap();
    }
    let sql = "SELECT retried, locked FROM rouse.retry_jobs($1, max => 1)";
    let row = watcher
        .query_one(sql, &[&json!({"state": "succeeded"})])
        .await
        .unwrap();
    assert_eq!(row.get::<_, Vec<i64>>(0), Vec::<i64>::new());
    assert_eq!(row.get::<_, Vec<i64>>(1), [succeeded]);

    let args = ["job", "retry", "--state", "failed,succeeded", "--confirm"];
    let (code, output) = run(&db, &[&args[..], &["--json"]].concat());
    assert_eq!(code, 6, "{output}");
    assert!(
        output.contains("\"retried\":2")
            && output.contains(&format!("\"locked\":[{},{succeeded}]", ids[1]))
            && output.contains("\"refused\":[]")
            && output.contains("2 were not retried, because another transaction has locked them"),
        "{output}"
    );
    // One of the two becomes free without having been retried; the other is retried.
    transaction.rollback().await.unwrap();
    let retry = "SELECT rouse.retry($1)";
    watcher.query(retry, &[&succeeded]).await.unwrap();
    let (code, output) = run(&db, &args);
    assert_eq!(code, 0, "{output}");
    assert!(output.contains("retried 1 of the 4 jobs"), "{output}");
}

#[tokio::test]
async fn a_bulk_retry_waits_for_locked_jobs_at_the_end() {
    let db = TestDb::new().await;
    let (mut client, watcher) = (db.client().await, db.client().await);
    let older = failed(&client, "'x'", "why").await;
    let locked = failed(&client, "'x'", "why").await;
    let transaction = client.transaction().await.unwrap();
    let retry = "SELECT rouse.retry($1)";
    transaction.query(retry, &[&locked]).await.unwrap();
    let args = ["job", "retry", "--state", "failed", "--confirm", "--json"];
    let host = start_behind_lock(&db, &watcher, &args).await;
    transaction.rollback().await.unwrap();
    let (status, output) = host.exit(TIMEOUT);
    assert_eq!(status.code(), Some(0), "{output}");
    assert!(
        output.contains("\"retried\":2") && output.contains("\"locked\":[]"),
        "{output}"
    );
    let retried = "SELECT count(*) FROM rouse.job WHERE retried_from = ANY ($1)";
    let row = watcher.query_one(retried, &[&vec![older, locked]]).await;
    assert_eq!(row.unwrap().get::<_, i64>(0), 2);
}

#[tokio::test]
async fn a_locked_job_is_tried_again_without_the_refused_jobs_next_to_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let keyed = "'x', unique_key => 'k'";
    let refused = failed(&client, keyed, "why").await;
    let locked = failed(&client, "'x'", "why").await;
    let also_refused = failed(&client, keyed, "why").await;
    enqueue_sql(&client, keyed).await;
    let (store, filter) = (db.store(), json!({"state": "failed"}));
    let all = store.retry_jobs(&filter, Some(locked), 10).await.unwrap();
    assert_eq!(all.refused, [refused], "a call without a lower bound");
    let one = async || {
        store
            .retry_job_if_matching(&filter, locked, LockWait::default())
            .await
            .unwrap()
    };
    let first = one().await;
    assert_eq!((first.retried, first.refused), (vec![locked], vec![]));
    assert_eq!(first.examined_count, 1);
    let second = one().await;
    assert_eq!((second.retried, second.refused), (vec![], vec![]), "once");
    assert_eq!(second.examined_count, 1);
    let newer = store
        .retry_job_if_matching(&filter, also_refused, LockWait::default())
        .await
        .unwrap();
    assert_eq!((newer.retried, newer.refused), (vec![], vec![also_refused]));
}

#[tokio::test]
async fn a_bulk_retry_leaves_out_a_job_that_deadlocks_and_counts_it_as_locked() {
    let db = TestDb::new().await;
    let (mut bulk, other, watcher) = (db.client().await, db.client().await, db.client().await);
    let first = failed(&bulk, "'x'", "why").await;
    let second = failed(&bulk, "'x'", "why").await;
    let third = failed(&bulk, "'x'", "why").await;
    // Postgres ends the transaction that checks for a deadlock: the bulk retry, which starts to wait last.
    let soon = "SET deadlock_timeout = '10ms'";
    bulk.batch_execute(soon).await.unwrap();
    let never = "SET deadlock_timeout = '10min'";
    other.batch_execute(never).await.unwrap();

    let retry = "SELECT rouse.retry($1)";
    let transaction = bulk.transaction().await.unwrap();
    transaction.query(retry, &[&first]).await.unwrap();
    other.batch_execute("BEGIN").await.unwrap();
    other.query(retry, &[&second]).await.unwrap();
    let waiting = tokio::spawn(async move {
        let retried = other.query(retry, &[&first]).await;
        other.batch_execute("ROLLBACK").await.unwrap();
        retried.map(|rows| rows.len())
    });
    until_true(&watcher, SESSION_WAITS).await;
    let sql = "SELECT retried, refused, locked FROM rouse.retry_jobs($1, lock_wait => '1 minute')";
    let row = transaction
        .query_one(sql, &[&json!({"state": "failed"})])
        .await
        .expect("the deadlock is not an error of the call");
    assert_eq!(row.get::<_, Vec<i64>>(0), [third]);
    assert_eq!(row.get::<_, Vec<i64>>(1), Vec::<i64>::new());
    assert_eq!(row.get::<_, Vec<i64>>(2), [second]);
    transaction.commit().await.unwrap();
    assert_eq!(waiting.await.unwrap().unwrap(), 1);

    // The other transaction was rolled back.
    let again = watcher.query_one(sql, &[&json!({"state": "failed"})]).await;
    assert_eq!(again.unwrap().get::<_, Vec<i64>>(0), [second]);
}
