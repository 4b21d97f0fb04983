//! Subcommands for named jobs, while other transactions change these jobs.

use crate::support::worker::{enqueue_sql, show};
use crate::support::{TestDb, run_rouse};

/// The beginning of the message about a job that another transaction has locked.
fn locked(id: i64) -> String {
    format!(
        "job {id}: canceling statement due to lock timeout. It waited for a transaction that has changed the job"
    )
}

#[tokio::test]
async fn a_job_that_another_transaction_has_locked_is_reported_and_does_not_stop_the_others() {
    let db = TestDb::new().await;
    let (mut client, watcher) = (db.client().await, db.client().await);
    for (verb, options, done) in [
        ("reschedule", &["--in", "1h"][..], "queued"),
        ("cancel", &[], "cancelled"),
        ("delete", &[], "cancelled"),
    ] {
        let mut ids = Vec::new();
        for _ in 0..3 {
            ids.push(enqueue_sql(&client, "'x'").await);
        }
        let named: Vec<String> = ids.iter().map(i64::to_string).collect();
        let named: Vec<&str> = named.iter().map(String::as_str).collect();
        let transaction = client.transaction().await.unwrap();
        let lock = "SELECT FROM rouse.job WHERE id = $1 FOR UPDATE";
        transaction.query_one(lock, &[&ids[1]]).await.unwrap();
        let changed = run_rouse(&db, &[&["job", verb][..], &named[..], options].concat()).await;
        changed.exits(6).prints(&locked(ids[1]));
        for id in [ids[0], ids[2]] {
            changed.prints(&format!("job {id} is {done}"));
        }
        changed.prints("2 of 3 jobs done, 1 refused");
        // The server has given up too: nothing changes the job once it is free.
        transaction.rollback().await.unwrap();
        assert_eq!(show(&watcher, ids[1]).await.state, "queued", "{verb}");
    }
}

#[tokio::test]
async fn an_ended_job_that_another_transaction_has_locked_does_not_stop_the_retries_of_others() {
    let db = TestDb::new().await;
    let (mut client, watcher) = (db.client().await, db.client().await);
    let mut ids = Vec::new();
    for _ in 0..3 {
        let id = enqueue_sql(&client, "'x'").await;
        let fail = "SELECT rouse.fail($1, 'why')";
        client.query(fail, &[&id]).await.unwrap();
        ids.push(id);
    }
    let named: Vec<String> = ids.iter().map(i64::to_string).collect();
    let named: Vec<&str> = named.iter().map(String::as_str).collect();
    let transaction = client.transaction().await.unwrap();
    let lock = "SELECT FROM rouse.finished WHERE id = $1 FOR UPDATE";
    transaction.query_one(lock, &[&ids[1]]).await.unwrap();
    let retried = run_rouse(&db, &[&["job", "retry"][..], &named[..]].concat()).await;
    retried.exits(6).prints(&locked(ids[1]));
    retried.prints("2 of 3 jobs done, 1 refused");
    transaction.rollback().await.unwrap();
    let retries = "SELECT array_agg(retried_from ORDER BY id) FROM rouse.job";
    let row = watcher.query_one(retries, &[]).await.unwrap();
    assert_eq!(row.get::<_, Vec<i64>>(0), [ids[0], ids[2]]);
}

#[tokio::test]
async fn an_edit_of_a_locked_job_is_refused() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    let id = enqueue_sql(&client, "'x'").await;
    let transaction = client.transaction().await.unwrap();
    let lock = "SELECT FROM rouse.job WHERE id = $1 FOR UPDATE";
    transaction.query_one(lock, &[&id]).await.unwrap();
    let named = id.to_string();
    for (option, value) in [("--priority", "high"), ("--payload", "1")] {
        let args = ["job", "edit", named.as_str(), option, value];
        let edited = run_rouse(&db, &args).await;
        edited.exits(6).prints(&locked(id));
    }
    transaction.rollback().await.unwrap();
}

#[tokio::test]
async fn an_edit_that_is_tried_again_changes_the_priority_once() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue_sql(&client, "'x'").await;
    // The first new job meets another transaction. A sequence keeps its value when a transaction is rolled back.
    client
        .batch_execute(
            "CREATE SEQUENCE public.tries;
             CREATE FUNCTION public.meet() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
             BEGIN
                 IF nextval('public.tries') < 2 THEN
                     RAISE EXCEPTION 'in use' USING ERRCODE = 'serialization_failure';
                 END IF;
                 RETURN NEW;
             END
             $$;
             CREATE TRIGGER meet BEFORE INSERT ON rouse.job FOR EACH ROW EXECUTE FUNCTION public.meet()",
        )
        .await
        .unwrap();
    let named = id.to_string();
    let args = [
        "job",
        "edit",
        named.as_str(),
        "--priority",
        "high",
        "--payload",
        "1",
    ];
    let edited = run_rouse(&db, &args).await;
    let line = format!("rouse: job {id} has the priority high");
    let printed = edited.exits(0).stderr.lines();
    assert_eq!(
        printed.filter(|it| *it == line).count(),
        1,
        "{}",
        edited.text()
    );
    let tries = "SELECT last_value FROM public.tries";
    let row = client.query_one(tries, &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 2);
}
