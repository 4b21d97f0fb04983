//! Waiting for the ends of jobs: `rouse.wait`, `GET /jobs/ID?wait=…`, `--wait`.

mod commands;
mod http;
mod page;
mod together;

use rouse::job::{ErrorKind, Fence, Outcome};
use rouse::store::Locked;
use serde_json::json;
use tokio::task::JoinHandle;
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::claims::{adopt, claim, error, orders, rand, result, settlement};
use crate::support::database::refusal;
use crate::support::worker::{cancel, enqueue, enqueue_sql, until_true};

/// Waits in SQL; returns `id state ended` of each row, with the result or the kind of the error.
async fn wait(client: &Client, ids: &[i64], timeout: &str) -> Vec<String> {
    let sql = "SELECT concat_ws(' ', id, state, ended, result, error ->> 'kind') FROM rouse.wait($1, $2::text::interval)";
    let rows = client.query(sql, &[&ids, &timeout]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

/// Starts such a wait on a connection of its own; returns once it is between two looks.
async fn start_to_wait(db: &TestDb, ids: &[i64]) -> JoinHandle<Vec<String>> {
    let (waiter, ids) = (db.client().await, ids.to_vec());
    let waiting = tokio::spawn(async move { wait(&waiter, &ids, "2 minutes").await });
    let sleeps = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep')";
    until_true(&db.client().await, sleeps).await;
    waiting
}

#[tokio::test]
async fn a_wait_ends_with_the_last_job_and_returns_how_each_has_ended() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let ids = [
        enqueue(&client, "x", json!(1)).await,
        enqueue(&client, "x", json!(2)).await,
        enqueue(&client, "x", json!(3)).await,
    ];
    let [first, second, third] = ids;
    // A repeated id does not result in a second row.
    let waiting = start_to_wait(&db, &[third, first, second, first]).await;
    let jobs = claim(&store, 2).await;
    let failed = Outcome::Failed(error(ErrorKind::GuestError));
    let batch = [
        settlement(&jobs[0], result("{\"n\": 1}")),
        settlement(&jobs[1], failed),
    ];
    store.settle(&batch, Locked::Wait).await.unwrap();
    assert!(!waiting.is_finished());
    assert!(cancel(&client, third).await);
    assert_eq!(
        waiting.await.unwrap(),
        [
            format!("{third} cancelled t"),
            format!("{first} succeeded t {{\"n\": 1}}"),
            format!("{second} failed t guest_error"),
        ]
    );
    assert_eq!(wait(&client, &[], "0").await, [""; 0]);
}

#[tokio::test]
async fn a_wait_returns_at_its_timeout_with_the_jobs_that_have_not_ended() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (ended, live) = (
        enqueue(&client, "x", json!(1)).await,
        enqueue(&client, "x", json!(2)).await,
    );
    cancel(&client, ended).await;
    for timeout in ["0", "50 milliseconds"] {
        assert_eq!(
            wait(&client, &[ended, live], timeout).await,
            [format!("{ended} cancelled t"), format!("{live} queued f")]
        );
    }
}

#[tokio::test]
async fn a_wait_sees_the_end_of_a_lost_job_and_of_a_retry() {
    let db = TestDb::new().await;
    let (client, store, survivor) = (db.client().await, db.worker().await, db.worker().await);
    let id = enqueue(&client, "x", json!(1)).await;
    claim(&store, 1).await;
    let waiting = start_to_wait(&db, &[id]).await;
    let expire = "UPDATE rouse.job SET lease_until = clock_timestamp()";
    client.batch_execute(expire).await.unwrap();
    let orders = orders(&survivor, 60_000).await;
    // With a maximum of one crash, the job fails as lost.
    adopt(&survivor, Fence(rand()), &orders, 1, 1, None)
        .await
        .unwrap();
    assert_eq!(waiting.await.unwrap(), [format!("{id} failed t lost")]);

    let retry: i64 = client
        .query_one("SELECT rouse.retry($1)", &[&id])
        .await
        .unwrap()
        .get(0);
    let both = [id, retry];
    let waiting = start_to_wait(&db, &both).await;
    let job = claim(&survivor, 1).await.remove(0);
    let batch = [settlement(&job, result("7"))];
    survivor.settle(&batch, Locked::Wait).await.unwrap();
    assert_eq!(
        waiting.await.unwrap(),
        [
            format!("{id} failed t lost"),
            format!("{retry} succeeded t 7")
        ]
    );
}

#[tokio::test]
async fn a_transaction_cannot_wait_for_what_can_only_happen_after_its_commit() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let old = enqueue(&client, "x", json!(1)).await;
    let wait_for = |id: i64| format!("SELECT * FROM rouse.wait('{{{id}}}', '0')");
    let own = |id: i64| {
        format!(
            "rouse.wait: job {id} cannot run until this transaction, which has enqueued or changed it, commits / Commit first, then wait."
        )
    };
    let begin = async |sql: &str| {
        client.batch_execute("ROLLBACK; BEGIN").await.unwrap();
        client.batch_execute(sql).await.unwrap();
    };
    // Enqueued by the transaction itself, by an open savepoint and by a released one.
    for (before, after) in [
        ("", ""),
        ("SAVEPOINT s", ""),
        ("SAVEPOINT s", "RELEASE s"),
        ("SELECT rouse.enqueue('x'); SAVEPOINT s", "SAVEPOINT t"),
    ] {
        begin(before).await;
        let id = enqueue_sql(&client, "'x'").await;
        client.batch_execute(after).await.unwrap();
        assert_eq!(refusal(&client, &wait_for(id)).await, own(id), "{before}");
    }
    begin(&format!(
        "SELECT rouse.reschedule({old}, now() + interval '1 hour')"
    ))
    .await;
    assert_eq!(refusal(&client, &wait_for(old)).await, own(old));
    begin(&format!("SELECT rouse.enqueue('x', after => '[{old}]')")).await;
    assert_eq!(
        refusal(&client, &wait_for(old)).await,
        format!(
            "rouse.wait: job {old} cannot end until this transaction, which has enqueued a job that waits for it, commits / Commit first, then wait."
        )
    );
    // A transaction that has written something else, or has undone it, may wait.
    begin("SELECT rouse.enqueue('x'); SAVEPOINT s").await;
    client
        .batch_execute(&format!(
            "SELECT rouse.enqueue('x', after => '[{old}]'); ROLLBACK TO s"
        ))
        .await
        .unwrap();
    assert_eq!(
        wait(&client, &[old], "0").await,
        [format!("{old} queued f")]
    );
    // An end in the same transaction also counts as an end.
    begin(&format!("SELECT rouse.cancel({old})")).await;
    assert_eq!(
        wait(&client, &[old], "1 minute").await,
        [format!("{old} cancelled t")]
    );
}

#[tokio::test]
async fn only_a_transaction_that_sees_the_commits_of_others_can_wait() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue(&client, "x", json!(1)).await;
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        let begin = format!("ROLLBACK; BEGIN ISOLATION LEVEL {level}");
        client.batch_execute(&begin).await.unwrap();
        assert_eq!(
            refusal(&client, &format!("SELECT rouse.wait('{{{id}}}')")).await,
            format!(
                "rouse.wait: a transaction with isolation level {level} never sees a job end / Wait in a transaction with isolation level READ COMMITTED."
            )
        );
    }
    let begin = "ROLLBACK; BEGIN ISOLATION LEVEL READ UNCOMMITTED";
    client.batch_execute(begin).await.unwrap();
    assert_eq!(wait(&client, &[id], "0").await, [format!("{id} queued f")]);
}

#[tokio::test]
async fn invalid_arguments_of_a_wait_are_refused() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for (arguments, message) in [
        ("NULL", "ids must be a list of job ids, without nulls"),
        ("'{1,NULL}'", "ids must be a list of job ids, without nulls"),
        ("'{17,9}'", "job 9 does not exist, or is no longer kept"),
        (
            "array_fill(1, ARRAY[10001])::bigint[]",
            "ids has 10001 entries; at most 10000 are allowed",
        ),
        (
            "'{}', '-1 second'",
            "timeout must be between 0 and 5 minutes, not -00:00:01",
        ),
        (
            "'{}', '301 seconds'",
            "timeout must be between 0 and 5 minutes, not 00:05:01",
        ),
    ] {
        let refused = refusal(&client, &format!("SELECT rouse.wait({arguments})")).await;
        assert!(
            refused.starts_with(&format!("rouse.wait: {message} / ")),
            "{refused}"
        );
    }
    let refused = refusal(&client, "SELECT rouse.outcomes(NULL)").await;
    assert!(
        refused.starts_with("rouse.outcomes: ids must be"),
        "{refused}"
    );
}

#[tokio::test]
async fn a_wait_can_be_cancelled_and_ends_with_the_statement_timeout() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue(&client, "x", json!(1)).await;
    let set = "SET statement_timeout = '50ms'";
    client.batch_execute(set).await.unwrap();
    let refused = refusal(&client, &format!("SELECT rouse.wait('{{{id}}}')")).await;
    assert!(refused.contains("statement timeout"), "{refused}");

    let waiting = start_to_wait(&db, &[id]).await;
    // The session does not sleep all the time.
    let end = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity
               WHERE datname = current_database() AND state = 'active' AND query LIKE '%rouse.wait(%' AND pid <> pg_backend_pid()";
    db.client().await.batch_execute(end).await.unwrap();
    let failed = waiting.await.unwrap_err().into_panic();
    let why = failed.downcast_ref::<String>().unwrap();
    assert!(
        why.contains("canceling statement due to user request"),
        "{why}"
    );
}

#[tokio::test]
async fn a_wait_reads_only_the_jobs_that_it_names() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    client.batch_execute("ANALYZE rouse.job").await.unwrap();
    let many = "SELECT array_agg(e.id) FROM rouse.enqueue_many('x', array_fill('{}'::jsonb, ARRAY[3000])) AS e(id)";
    let ids: Vec<i64> = client.query_one(many, &[]).await.unwrap().get(0);
    let transaction = client.transaction().await.unwrap();
    let rows = transaction
        .query("SELECT id FROM rouse.wait($1, '20 ms')", &[&&ids[..10]])
        .await
        .unwrap();
    assert_eq!(rows.len(), 10);
    let read = "SELECT coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables WHERE relid = 'rouse.job'::regclass";
    let read: i64 = transaction.query_one(read, &[]).await.unwrap().get(0);
    assert!(read < 200, "{read} rows");
}
