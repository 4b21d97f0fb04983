//! Deadlines that pass while other transactions are in progress.

use std::time::Duration;

use rouse::store::{Peek, PeekParams, Store};
use tokio_postgres::Client;

use super::{enforce, enforced, one, pass};
use crate::support::TestDb;
use crate::support::worker::{enqueue_sql, events, show};

const HOUR: &str = "'x', job_timeout => '1 hour'";

async fn peek(store: &Store) -> Peek {
    let looking = PeekParams {
        lanes: &[],
        catalog_after: 0,
        catalog_sum: 0,
        orphaned_since: None,
        due_since: None,
        writers: None,
    };
    store.peek(&looking).await.unwrap()
}

/// Makes the next try of each deadline due, as if time had passed.
async fn try_again(client: &Client) {
    let sql = "UPDATE rouse.deadline SET try_at = clock_timestamp()";
    client.batch_execute(sql).await.unwrap();
}

#[tokio::test]
async fn a_locked_job_does_not_hold_up_others_and_ends_once_it_is_free() {
    for lock in [
        "SELECT FROM rouse.job WHERE id = $1 FOR UPDATE",
        // As long as a producer that names the job, or sends it a signal, has not committed.
        "SELECT rouse.enqueue('y', after => jsonb_build_array($1::bigint))",
    ] {
        let db = TestDb::new().await;
        let (mut client, observer, store) =
            (db.client().await, db.client().await, db.worker().await);
        let locked = enqueue_sql(&client, HOUR).await;
        let free = enqueue_sql(&client, HOUR).await;
        pass(&client, locked).await;
        pass(&client, free).await;
        let deadline = format!("SELECT deadline_at::text FROM rouse.deadline WHERE job = {locked}");
        let at: String = one(&observer, &deadline).await;
        let transaction = client.transaction().await.unwrap();
        transaction.query_one(lock, &[&locked]).await.unwrap();

        assert_eq!(enforced(&store).await, [free], "it does not wait: {lock}");
        assert_eq!(show(&observer, locked).await.state, "queued");
        assert_eq!(
            one::<String>(&observer, &deadline).await,
            at,
            "it is shown as before"
        );
        // The deadline is tried again after a second, and then at growing intervals: no host looks for it in a tight
        // loop.
        for (passed, again) in [
            (
                "clock_timestamp()",
                "try_at - deadline_at >= interval '1 second'",
            ),
            (
                "clock_timestamp() - interval '100 seconds'",
                "try_at - deadline_at >= interval '110 seconds'",
            ),
            (
                "clock_timestamp() - interval '1 day'",
                "try_at BETWEEN clock_timestamp() AND clock_timestamp() + interval '1 minute'",
            ),
        ] {
            let sql =
                format!("UPDATE rouse.deadline SET deadline_at = {passed}, try_at = {passed}");
            observer.batch_execute(&sql).await.unwrap();
            let (handled, ended) = enforce(&store).await;
            assert_eq!((handled, ended.len()), (1, 0), "still locked");
            let sql = format!("SELECT {again} FROM rouse.deadline");
            assert!(one::<bool>(&observer, &sql).await, "{again}");
        }
        assert!(!peek(&store).await.deadlines);

        transaction.rollback().await.unwrap();
        try_again(&observer).await;
        assert_eq!(enforced(&store).await, [locked], "{lock}");
        assert_eq!(events(&observer, locked).await, ["requested", "failed"]);
    }
}

#[tokio::test]
async fn more_locked_jobs_than_one_call_takes_do_not_hold_up_others() {
    let db = TestDb::new().await;
    let (mut client, observer, store) = (db.client().await, db.client().await, db.worker().await);
    let sql = "SELECT count(*) FROM rouse.enqueue_many('x', array_fill('{}'::jsonb, ARRAY[1200]), job_timeout => '1 hour')";
    assert_eq!(one::<i64>(&observer, sql).await, 1200);
    let locks = client.transaction().await.unwrap();
    locks
        .execute("SELECT FROM rouse.job FOR UPDATE", &[])
        .await
        .unwrap();
    let free = enqueue_sql(&observer, HOUR).await;
    // All deadlines are at the same time, with the one of the unlocked job last.
    let sql = "UPDATE rouse.deadline SET deadline_at = now(), try_at = now() - CASE WHEN job = $1 THEN interval '0' ELSE interval '1 s' END";
    observer.execute(sql, &[&free]).await.unwrap();
    assert_eq!(enforced(&store).await, [free]);
    locks.rollback().await.unwrap();
    try_again(&observer).await;
    assert_eq!(enforced(&store).await.len(), 1200);
}

#[tokio::test]
async fn a_call_that_stays_open_holds_up_only_the_deadlines_that_it_has_handled() {
    let db = TestDb::new().await;
    let (mut client, observer, store) = (db.client().await, db.client().await, db.worker().await);
    let sql = "SELECT count(*) FROM rouse.enqueue_many('x', array_fill('{}'::jsonb, ARRAY[50]), job_timeout => '1 hour')";
    assert_eq!(one::<i64>(&observer, sql).await, 50);
    let sql = "UPDATE rouse.deadline SET deadline_at = now(), try_at = now() - interval '1 s'";
    observer.batch_execute(sql).await.unwrap();
    let register = "SELECT incarnation FROM rouse.register('w', sha256('key'), 'here', 'linux', '0', '{}', 1, '{}', '{}')";
    let worker: i64 = one(&client, register).await;
    // The call ends its first job slowly, so that this takes more than 100 ms.
    observer
        .batch_execute(
            "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.15); RETURN OLD; END $$;
             CREATE TRIGGER slow BEFORE DELETE ON rouse.job FOR EACH ROW WHEN (OLD.lane IS NOT NULL) EXECUTE FUNCTION slow();",
        )
        .await
        .unwrap();
    let open = client.transaction().await.unwrap();
    let sql = "SELECT handled FROM rouse.enforce_deadlines($1, sha256('key'), 10000)";
    let handled: i32 = open.query_one(sql, &[&worker]).await.unwrap().get(0);
    assert_eq!(handled, 1);
    let (others, _) = enforce(&store).await;
    assert!(others >= 1, "the rest is free");
    open.rollback().await.unwrap();
}

#[tokio::test]
async fn hosts_that_enforce_at_once_end_each_job_once() {
    let db = TestDb::new().await;
    let (client, one_store, other) = (db.client().await, db.worker().await, db.worker().await);
    let sql = "SELECT count(*) FROM rouse.enqueue_many('x', array_fill('{}'::jsonb, ARRAY[400]), job_timeout => '1 hour')";
    one::<i64>(&client, sql).await;
    let sql = "UPDATE rouse.deadline SET deadline_at = now(), try_at = now()";
    client.batch_execute(sql).await.unwrap();
    let (first, second) = tokio::join!(enforced(&one_store), enforced(&other));
    let mut ended = [first, second].concat();
    ended.sort_unstable();
    ended.dedup();
    assert_eq!(ended.len(), 400, "all were ended");
    let sql = "SELECT count(*) FROM rouse.record WHERE event = 'failed'";
    assert_eq!(one::<i64>(&client, sql).await, 400, "each of them once");
    let left = "SELECT (SELECT count(*) FROM rouse.deadline) + (SELECT count(*) FROM rouse.job)";
    assert_eq!(one::<i64>(&client, left).await, 0);
}

#[tokio::test]
async fn a_host_that_dies_while_it_enforces_leaves_the_deadline_to_others() {
    for commits in [true, false] {
        let db = TestDb::new().await;
        let (mut client, observer, store) =
            (db.client().await, db.client().await, db.worker().await);
        let id = enqueue_sql(&client, HOUR).await;
        pass(&client, id).await;
        let register = "SELECT incarnation FROM rouse.register('w', sha256('key'), 'here', 'linux', '0', '{}', 1, '{}', '{}')";
        let worker: i64 = one(&client, register).await;
        let host = client.transaction().await.unwrap();
        let sql = "SELECT handled FROM rouse.enforce_deadlines($1, sha256('key'), 10)";
        let handled: i32 = host.query_one(sql, &[&worker]).await.unwrap().get(0);
        assert_eq!(handled, 1);

        assert_eq!(enforce(&store).await, (0, Vec::new()), "the other has it");
        assert!(peek(&store).await.deadlines, "it is not over yet");
        match commits {
            true => host.commit().await.unwrap(),
            false => host.rollback().await.unwrap(),
        }
        let expected = if commits { vec![] } else { vec![id] };
        assert_eq!(enforced(&store).await, expected);
        assert_eq!(events(&observer, id).await, ["requested", "failed"]);
        assert!(!peek(&store).await.deadlines);
    }
}

#[tokio::test]
async fn an_uncommitted_end_of_a_job_takes_precedence_over_its_deadline() {
    for commits in [true, false] {
        let db = TestDb::new().await;
        let (mut client, observer, store) =
            (db.client().await, db.client().await, db.worker().await);
        let id = enqueue_sql(&client, HOUR).await;
        pass(&client, id).await;
        let operator = client.transaction().await.unwrap();
        let sql = "SELECT rouse.complete($1)";
        operator.query_one(sql, &[&id]).await.unwrap();
        assert_eq!(enforced(&store).await, [0; 0]);
        match commits {
            true => operator.commit().await.unwrap(),
            false => operator.rollback().await.unwrap(),
        }
        try_again(&observer).await;
        let (handled, ended) = enforce(&store).await;
        assert_eq!((handled, ended.len()), (1, usize::from(!commits)));
        let state = if commits { "succeeded" } else { "failed" };
        assert_eq!(show(&observer, id).await.state, state);
    }
}

#[tokio::test]
async fn a_peek_reports_whether_a_deadline_has_passed_and_waits_for_none() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = enqueue_sql(&client, HOUR).await;
    let sql = "'x', run_at => now() + interval '2 hours'";
    enqueue_sql(&client, sql).await;
    let peeked = peek(&store).await;
    assert!(!peeked.deadlines);
    let next = peeked.next_due.expect("the scheduled job");
    assert!(
        next > Duration::from_secs(7_000),
        "it waits for no deadline: {next:?}"
    );
    let next = store
        .enforce_deadlines(None)
        .await
        .unwrap()
        .next_in
        .unwrap();
    assert!(next > Duration::from_secs(3_500), "{next:?}");
    pass(&client, id).await;
    let peeked = peek(&store).await;
    assert!(peeked.deadlines);
    assert_eq!(enforced(&store).await, [id]);
    assert_eq!(store.enforce_deadlines(None).await.unwrap().next_in, None);
}

#[tokio::test]
async fn a_look_that_follows_a_long_pause_finds_all_deadlines_that_passed_in_between() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = enqueue_sql(&client, HOUR).await;
    let last = store.enforce_deadlines(None).await.unwrap();
    assert_eq!(last.handled, 0);
    // An hour passes, with a suspension of the host: all times of the database are an hour ago.
    let hour = Duration::from_secs(3_600);
    let sql = "UPDATE rouse.deadline SET deadline_at = $1, try_at = $1";
    let passed_at = last.looked_at - hour / 2;
    client.execute(sql, &[&passed_at]).await.unwrap();
    let since = Some(last.looked_at - hour);
    let found = store.enforce_deadlines(since).await.unwrap();
    let ended: Vec<i64> = found.ended.iter().map(|missed| missed.id.0).collect();
    assert_eq!((found.handled, ended), (1, vec![id]));
    assert!(found.looked_at >= last.looked_at);
}
