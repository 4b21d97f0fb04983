//! A due time while the job of the previous due time is live.

use std::time::Duration;

use rouse::job::{ErrorKind, JobId, Outcome};
use rouse::store::{ClaimedJob, Locked, Store};
use serde_json::json;
use tokio_postgres::Client;

use super::{decided, due, fire_due, make_due, one, outcomes, shown, write};
use crate::support::TestDb;
use crate::support::claims::{claim, error, result, settlement};
use crate::support::worker::{cancel, show};

/// Settles jobs as succeeded.
async fn settle(store: &Store, jobs: &[ClaimedJob]) {
    let batch: Vec<_> = jobs
        .iter()
        .map(|job| settlement(job, result("1")))
        .collect();
    store.settle(&batch, Locked::Wait).await.unwrap();
}

/// Fires a schedule, and makes it due again. The first job is running by then if `starts`, and queued otherwise.
async fn second_firing(overlap: &str, starts: bool) -> (TestDb, Client, Store) {
    let (db, client, store) = due(overlap).await;
    fire_due(&store).await;
    assert_eq!(outcomes(&client, "a").await, ["enqueued"]);
    if starts {
        assert_eq!(claim(&store, 1).await.len(), 1);
    }
    due_again(&client).await;
    (db, client, store)
}

/// Makes the schedule due again, by moving the due time that was fired into the past.
async fn due_again(client: &Client) {
    client
        .batch_execute("UPDATE rouse.schedule_run SET due_at = due_at - interval '1 day'")
        .await
        .unwrap();
    make_due(client).await;
}

#[tokio::test]
async fn overlap_skip_leaves_a_due_time_out_while_the_previous_job_is_live() {
    for starts in [false, true] {
        let (_db, client, store) = second_firing("skip", starts).await;
        fire_due(&store).await;
        assert_eq!(outcomes(&client, "a").await, ["enqueued", "skipped"]);
        let run = shown(&client, "a").await["last_runs"][0].take();
        assert_eq!(
            (&run["outcome"], &run["job"]),
            (&json!("skipped"), &json!(null))
        );
    }
}

/// The previous job fails, and waits for its retry.
async fn fail(store: &Store) -> JobId {
    let job = claim(store, 1).await.remove(0);
    let outcome = Outcome::Retry {
        again: Duration::from_secs(3600).into(),
        error: error(ErrorKind::GuestError),
    };
    let retry = settlement(&job, outcome);
    store.settle(&[retry], Locked::Wait).await.unwrap();
    assert!(claim(store, 1).await.is_empty(), "it waits");
    job.id
}

#[tokio::test]
async fn overlap_skip_makes_the_retry_of_the_previous_job_due() {
    let (_db, client, store) = second_firing("skip", false).await;
    let previous = fail(&store).await;
    fire_due(&store).await;
    assert_eq!(outcomes(&client, "a").await, ["enqueued", "skipped"]);
    let again = claim(&store, 10).await;
    assert_eq!(again.len(), 1);
    assert_eq!(again[0].id, previous);
    let sql = "SELECT detail ->> 'schedule' FROM rouse.record WHERE event = 'rescheduled'";
    assert_eq!(one::<String>(&client, sql).await, "a");
}

#[tokio::test]
async fn other_overlaps_leave_the_retry_of_the_previous_job_alone() {
    let (_db, client, store) = second_firing("queue", false).await;
    fail(&store).await;
    fire_due(&store).await;
    assert_eq!(outcomes(&client, "a").await, ["enqueued", "queued"]);
    assert!(claim(&store, 10).await.is_empty());
}

#[tokio::test]
async fn a_locked_retry_does_not_hold_up_the_schedule() {
    let (_db, mut client, store) = second_firing("skip", false).await;
    fail(&store).await;
    let lock = client.transaction().await.unwrap();
    lock.execute("SELECT FROM rouse.job FOR UPDATE", &[])
        .await
        .unwrap();
    fire_due(&store).await;
    lock.rollback().await.unwrap();
    assert_eq!(outcomes(&client, "a").await, ["enqueued", "skipped"]);
    assert!(claim(&store, 10).await.is_empty(), "it waits as before");
}

#[tokio::test]
async fn overlap_skip_enqueues_again_once_the_previous_job_has_ended() {
    let (_db, client, store) = second_firing("skip", false).await;
    settle(&store, &claim(&store, 1).await).await;
    fire_due(&store).await;
    assert_eq!(outcomes(&client, "a").await, ["enqueued", "enqueued"]);
}

#[tokio::test]
async fn overlap_queue_keeps_one_job_behind_the_running_one() {
    let (_db, client, store) = second_firing("queue", true).await;
    fire_due(&store).await;
    assert_eq!(outcomes(&client, "a").await, ["enqueued", "queued"]);
    assert!(claim(&store, 10).await.is_empty(), "it waits");
    due_again(&client).await;
    fire_due(&store).await;
    assert_eq!(
        outcomes(&client, "a").await,
        ["enqueued", "queued", "skipped"]
    );
    // The failure of the first job also releases it.
    let first: i64 = one(&client, "SELECT min(job) FROM rouse.schedule_run").await;
    client
        .execute("SELECT rouse.fail($1, 'no')", &[&first])
        .await
        .unwrap();
    let released = claim(&store, 10).await;
    assert_eq!(released.len(), 1);
    settle(&store, &released).await;
    due_again(&client).await;
    fire_due(&store).await;
    assert_eq!(
        outcomes(&client, "a").await,
        ["enqueued", "queued", "skipped", "enqueued"]
    );
}

#[tokio::test]
async fn overlap_queue_waits_for_the_running_job_although_the_one_behind_it_was_cancelled() {
    let (_db, client, store) = second_firing("queue", true).await;
    fire_due(&store).await;
    let queued: i64 = one(&client, "SELECT max(job) FROM rouse.schedule_run").await;
    assert!(cancel(&client, queued).await);
    due_again(&client).await;
    fire_due(&store).await;
    assert_eq!(
        outcomes(&client, "a").await,
        ["enqueued", "queued", "queued"]
    );
    assert!(claim(&store, 10).await.is_empty(), "the first one runs");
    let first: i64 = one(&client, "SELECT min(job) FROM rouse.schedule_run").await;
    let end = "SELECT rouse.complete($1)";
    client.execute(end, &[&first]).await.unwrap();
    settle(&store, &claim(&store, 10).await).await;
    due_again(&client).await;
    fire_due(&store).await;
    assert_eq!(
        outcomes(&client, "a").await,
        ["enqueued", "queued", "queued", "enqueued"]
    );
}

#[tokio::test]
async fn a_job_that_has_run_is_the_previous_one_although_the_one_before_it_is_retried() {
    let (_db, client, store) = second_firing("queue", true).await;
    fire_due(&store).await;
    let first: i64 = one(&client, "SELECT min(job) FROM rouse.schedule_run").await;
    let fail = "SELECT rouse.fail($1, 'no')";
    client.execute(fail, &[&first]).await.unwrap();
    settle(&store, &claim(&store, 10).await).await;
    let retry = "SELECT rouse.retry($1)";
    client.execute(retry, &[&first]).await.unwrap();
    due_again(&client).await;
    fire_due(&store).await;
    assert_eq!(
        outcomes(&client, "a").await,
        ["enqueued", "queued", "enqueued"]
    );
}

#[tokio::test]
async fn overlap_queue_does_not_queue_behind_a_job_that_has_not_started() {
    let (_db, client, store) = second_firing("queue", false).await;
    fire_due(&store).await;
    assert_eq!(outcomes(&client, "a").await, ["enqueued", "skipped"]);
}

#[tokio::test]
async fn overlap_allow_enqueues_both() {
    let (_db, client, store) = second_firing("allow", true).await;
    fire_due(&store).await;
    assert_eq!(outcomes(&client, "a").await, ["enqueued", "enqueued"]);
    assert_eq!(claim(&store, 10).await.len(), 1);
}

#[tokio::test]
async fn overlap_cancel_cancels_the_previous_job() {
    for starts in [false, true] {
        let (_db, client, store) = second_firing("cancel", starts).await;
        fire_due(&store).await;
        assert_eq!(outcomes(&client, "a").await, ["enqueued", "replaced"]);
        let first: i64 = one(&client, "SELECT min(job) FROM rouse.schedule_run").await;
        assert_eq!(show(&client, first).await.state, "cancelled");
        assert_eq!(claim(&store, 10).await.len(), 1, "only the new one");
    }
}

/// Otherwise, nothing would run: the gate merges the new job with the cancelled one.
#[tokio::test]
async fn overlap_cancel_cancels_nothing_if_a_gate_keeps_the_new_job_out() {
    let (_db, client, store) = due("cancel").await;
    let gate = "SELECT rouse.set_gate('one', 'singleton', handler => 'x', during => 'period', period => '1 hour')";
    client.batch_execute(gate).await.unwrap();
    fire_due(&store).await;
    let first: i64 = one(&client, "SELECT job FROM rouse.schedule_run").await;
    assert_eq!(claim(&store, 1).await.len(), 1);
    let mut expected = vec!["enqueued"];
    for _ in 0..2 {
        due_again(&client).await;
        fire_due(&store).await;
        expected.push("skipped");
        assert_eq!(outcomes(&client, "a").await, expected);
        assert_eq!(show(&client, first).await.state, "running");
    }
    // A gate that the end of the job opens lets the new one through.
    let gate = "SELECT rouse.set_gate('one', 'singleton', handler => 'x', during => 'running')";
    client.batch_execute(gate).await.unwrap();
    due_again(&client).await;
    fire_due(&store).await;
    expected.push("replaced");
    assert_eq!(outcomes(&client, "a").await, expected);
    assert_eq!(show(&client, first).await.state, "cancelled");
}

#[tokio::test]
async fn overlap_cancel_cancels_nothing_for_a_due_time_that_a_backfill_has_handled() {
    let (_db, client, store) = second_firing("cancel", true).await;
    let first: i64 = one(&client, "SELECT job FROM rouse.schedule_run").await;
    let decided = decided(&store).await;
    let due_at = decided[0].1.firings[0].due_at;
    // A host continues a backfill in the meantime.
    let backfilled = format!(
        "INSERT INTO rouse.schedule_run (schedule, due_at, at, outcome, job) VALUES ('a', '{due_at}', now(), 'backfilled', rouse.enqueue('x'))"
    );
    client.batch_execute(&backfilled).await.unwrap();
    write(&store, &decided).await;
    assert_eq!(show(&client, first).await.state, "running");
    assert_eq!(outcomes(&client, "a").await, ["enqueued", "backfilled"]);
}

#[tokio::test]
async fn overlap_cancel_cancels_nothing_for_a_due_time_that_a_backfill_handles_at_the_same_time() {
    let (_db, client, store) = second_firing("cancel", true).await;
    let first: i64 = one(&client, "SELECT job FROM rouse.schedule_run").await;
    // The backfill commits just before the row about the due time is written.
    client
        .batch_execute(
            "CREATE FUNCTION public.backfill() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
             BEGIN
                 INSERT INTO rouse.schedule_run (schedule, due_at, at, outcome, job)
                 VALUES (NEW.schedule, NEW.due_at, now(), 'backfilled', rouse.enqueue('x'));
                 RETURN NEW;
             END
             $$;
             CREATE TRIGGER backfill BEFORE INSERT ON rouse.schedule_run FOR EACH ROW WHEN (NEW.outcome = 'replaced')
                 EXECUTE FUNCTION public.backfill()",
        )
        .await
        .unwrap();
    fire_due(&store).await;
    assert_eq!(show(&client, first).await.state, "running");
    assert_eq!(outcomes(&client, "a").await, ["enqueued", "backfilled"]);
}

#[tokio::test]
async fn a_job_that_a_login_has_started_does_not_hide_the_live_previous_job() {
    let (_db, client, store) = second_firing("skip", true).await;
    let first: i64 = one(&client, "SELECT job FROM rouse.schedule_run").await;
    let run = "SELECT rouse.run_schedule('a')";
    let manual: i64 = one(&client, run).await;
    settle(&store, &claim(&store, 10).await).await;
    assert_eq!(show(&client, manual).await.state, "succeeded");
    fire_due(&store).await;
    assert_eq!(
        outcomes(&client, "a").await,
        ["enqueued", "manual", "skipped"]
    );
    // If no job is live, the one that the login has started is the previous one.
    let end = "SELECT rouse.complete($1)";
    client.execute(end, &[&first]).await.unwrap();
    one::<i64>(&client, run).await;
    due_again(&client).await;
    fire_due(&store).await;
    assert_eq!(
        outcomes(&client, "a").await,
        ["enqueued", "manual", "skipped", "manual", "skipped"]
    );
}

#[tokio::test]
async fn a_retry_of_the_previous_job_counts_as_the_previous_job() {
    let (_db, client, store) = second_firing("skip", false).await;
    let first: i64 = one(&client, "SELECT job FROM rouse.schedule_run").await;
    client
        .execute("SELECT rouse.fail($1, 'no')", &[&first])
        .await
        .unwrap();
    client
        .execute("SELECT rouse.retry($1)", &[&first])
        .await
        .unwrap();
    fire_due(&store).await;
    assert_eq!(outcomes(&client, "a").await, ["enqueued", "skipped"]);
}
