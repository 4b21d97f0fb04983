//! Deadlines: a job that has not ended within its job timeout fails, whatever its state.

mod arguments;
mod hosts;
mod interleavings;

use std::time::{Duration, SystemTime};

use rouse::job::{
    AbortReason, Attempt, ErrorKind, JobId, JsonText, NewJob, NewJobKind, Outcome, ReturnedCall,
    Suspension, Wait,
};
use rouse::store::{ClaimedJob, Locked, MissedDeadline, Refusal, Store};
use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::claims::{
    claim, claim_one, error, make_due, renewal, result, settlement, settlement_with,
};
use crate::support::worker::{enqueue_sql, events, show};

/// The error message for a job timeout of three days.
const MESSAGE: &str =
    "the job had not ended within 3 days, the job timeout that it was enqueued with";

/// Moves the deadline of a job into the past, as if time had passed.
async fn pass(client: &Client, id: i64) {
    let sql = "UPDATE rouse.deadline SET deadline_at = clock_timestamp(), try_at = clock_timestamp() WHERE job = $1";
    assert_eq!(client.execute(sql, &[&id]).await.unwrap(), 1);
}

/// Enforces all deadlines, as a host does; returns the number of deadlines that were handled, and the jobs that were
/// ended.
async fn enforce(store: &Store) -> (i32, Vec<MissedDeadline>) {
    let (mut handled, mut ended) = (0, Vec::new());
    loop {
        let enforced = store.enforce_deadlines(None).await.unwrap();
        handled += enforced.handled;
        ended.extend(enforced.ended);
        if enforced.handled == 0 {
            return (handled, ended);
        }
    }
}

/// Enforces all deadlines; returns the ids of the jobs that it has ended.
async fn enforced(store: &Store) -> Vec<i64> {
    let (_, ended) = enforce(store).await;
    ended.iter().map(|missed| missed.id.0).collect()
}

async fn one<T: for<'a> tokio_postgres::types::FromSql<'a>>(client: &Client, sql: &str) -> T {
    let row = client.query_one(sql, &[]).await;
    row.unwrap_or_else(|error| panic!("{sql}: {error:?}"))
        .get(0)
}

/// The time from this moment to the deadline of a job, as text; empty if it has none.
async fn deadline_after(client: &Client, id: i64, moment: &str) -> String {
    let sql = format!(
        "SELECT coalesce((deadline_at - {moment})::text, '') FROM rouse.jobs WHERE id = {id}"
    );
    one(client, &sql).await
}

async fn settle(store: &Store, job: &ClaimedJob, outcome: Outcome) -> usize {
    let settled = store
        .settle(&[settlement(job, outcome)], Locked::Wait)
        .await;
    settled.unwrap().accepted.len()
}

fn waits(wait: Wait) -> Outcome {
    Outcome::Suspended(Suspension {
        step: "step".into(),
        wait,
        is_recorded: false,
    })
}

#[tokio::test]
async fn a_job_fails_when_its_deadline_has_passed_whatever_it_waits_for() {
    const THREE_DAYS: &str = "job_timeout => '3 days', max_attempts => 20";
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let enqueued =
        async |more: &str| enqueue_sql(&client, &format!("'x', {THREE_DAYS}{more}")).await;
    let after_an_attempt = async |outcome: Outcome| {
        let id = enqueued("").await;
        let job = claim_one(&store).await;
        assert_eq!(settle(&store, &job, outcome).await, 1);
        id
    };
    let sleep = Wait::Sleep {
        until: SystemTime::now() + Duration::from_secs(86_400),
    };
    let signal = Wait::Signal {
        name: "go".into(),
        until: None,
    };
    let retry = Outcome::Retry {
        again: Duration::from_secs(3600).into(),
        error: error(ErrorKind::GuestError),
    };
    let blocker = enqueue_sql(&client, "'x', run_at => now() + interval '9 days'").await;
    let jobs = [
        ("asleep", after_an_attempt(waits(sleep)).await, 1),
        (
            "waiting for a signal",
            after_an_attempt(waits(signal)).await,
            1,
        ),
        ("waiting for its retry", after_an_attempt(retry).await, 1),
        (
            "scheduled",
            enqueued(", run_at => now() + interval '9 days'").await,
            0,
        ),
        (
            "waiting for another",
            enqueued(&format!(", after => '[{blocker}]'")).await,
            0,
        ),
        ("ready", enqueued("").await, 0),
    ];
    assert_eq!(enforce(&store).await, (0, Vec::new()), "none has passed");
    for (what, id, attempt) in jobs {
        pass(&client, id).await;
        let error = json!({"kind": "job_timeout", "message": MESSAGE});
        let missed = MissedDeadline {
            id: JobId(id),
            handler: "x".into(),
            attempt: Attempt(attempt),
            error: error.clone(),
        };
        assert_eq!(enforce(&store).await, (1, vec![missed]), "{what}");
        let job = show(&client, id).await;
        assert_eq!(
            (job.state.as_str(), job.attempt),
            ("failed", attempt),
            "{what}"
        );
        assert_eq!(job.error, Some(error), "{what}");
        assert_eq!(
            deadline_after(&client, id, "now()").await,
            "",
            "{what}: it has ended"
        );
    }
    let left =
        "SELECT (SELECT count(*) FROM rouse.deadline) + (SELECT count(*) FROM rouse.dependency)";
    assert_eq!(one::<i64>(&client, left).await, 0);
    assert_eq!(
        show(&client, blocker).await.state,
        "queued",
        "it has no deadline"
    );
}

#[tokio::test]
async fn the_history_shows_the_deadline_and_no_login() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = enqueue_sql(&client, "'x', job_timeout => '3 days'").await;
    pass(&client, id).await;
    let at: SystemTime = one(&client, "SELECT deadline_at FROM rouse.deadline").await;
    assert_eq!(enforced(&store).await, [id]);
    assert_eq!(events(&client, id).await, ["requested", "failed"]);
    let sql = "SELECT detail - 'deadline_at', (detail ->> 'deadline_at')::timestamptz FROM rouse.history($1) WHERE event = 'failed'";
    let row = client.query_one(sql, &[&id]).await.unwrap();
    assert_eq!(
        (row.get::<_, Value>(0), row.get::<_, SystemTime>(1)),
        (json!({"kind": "job_timeout", "message": MESSAGE}), at)
    );
    let sql = "SELECT who, worker FROM rouse.record WHERE job = $1 AND event = 'failed'";
    let row = client.query_one(sql, &[&id]).await.unwrap();
    let by = (
        row.get::<_, Option<String>>(0),
        row.get::<_, Option<i64>>(1),
    );
    assert_eq!(by, (None, Some(store.incarnation().unwrap().0)));
    let unlogged: i64 = one(&client, "SELECT count(*) FROM rouse.audit_outbox").await;
    assert_eq!(unlogged, 0, "it is not an admin action");
}

#[tokio::test]
async fn a_deadline_is_counted_from_run_at_or_from_the_enqueue_if_that_is_later() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for (run_at, moment) in [
        ("NULL", "requested_at"),
        ("now() + interval '5 days'", "available_at"),
        ("now() - interval '5 days'", "requested_at"),
    ] {
        let id = enqueue_sql(
            &client,
            &format!("'x', run_at => {run_at}, job_timeout => '1 day 2 hours'"),
        )
        .await;
        let after = deadline_after(&client, id, moment).await;
        assert_eq!(after, "1 day 02:00:00", "{run_at}");
    }
}

#[tokio::test]
async fn neither_a_reschedule_nor_a_promotion_nor_a_retry_moves_a_deadline() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let run_at = "run_at => now() + interval '1 hour'";
    let id = enqueue_sql(&client, &format!("'x', {run_at}, job_timeout => '3 days'")).await;
    let at: SystemTime = one(&client, "SELECT deadline_at FROM rouse.jobs").await;
    let reschedule = format!("SELECT rouse.reschedule({id}, now() + interval '9 days')");
    client.batch_execute(&reschedule).await.unwrap();
    make_due(&client, id).await;
    store.promote(None, false).await.unwrap();
    let job = claim_one(&store).await;
    let retry = Outcome::Retry {
        again: Duration::from_secs(10 * 86_400).into(),
        error: error(ErrorKind::GuestError),
    };
    assert_eq!(settle(&store, &job, retry).await, 1);
    assert_eq!(
        one::<SystemTime>(&client, "SELECT deadline_at FROM rouse.jobs").await,
        at
    );
}

#[tokio::test]
async fn a_running_attempt_loses_its_job_and_its_outcome_is_refused() {
    let db = TestDb::new().await;
    let (client, store, other) = (db.client().await, db.worker().await, db.worker().await);
    let id = enqueue_sql(&client, "'x', job_timeout => '3 days', max_attempts => 20").await;
    let job = claim_one(&store).await;
    pass(&client, id).await;
    assert_eq!(enforced(&other).await, [id], "any worker may end it");
    assert_eq!(
        events(&client, id).await,
        ["requested", "claimed", "failed"]
    );
    let renewed = store.renew(&[renewal(&job, 60_000)]).await.unwrap();
    assert!(
        matches!(
            renewed[..],
            [(_, Some(Refusal::Lost(AbortReason::AlreadyCompleted)))]
        ),
        "{renewed:?}"
    );
    assert_eq!(settle(&store, &job, result("1")).await, 0);
    assert_eq!(show(&client, id).await.state, "failed");
}

#[tokio::test]
async fn jobs_that_wait_for_a_job_with_a_missed_deadline_see_a_failure() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let parent = "'x', job_timeout => '3 days', run_at => now() + interval '1 day'";
    let parent = enqueue_sql(&client, parent).await;
    let mut children = Vec::new();
    for on_failure in ["cancel", "run", "wait"] {
        let after = format!(
            "after => '{{\"p\": {{\"job\": {parent}, \"on_failure\": \"{on_failure}\"}}}}'"
        );
        children.push(enqueue_sql(&client, &format!("'y', {after}")).await);
    }
    pass(&client, parent).await;
    assert_eq!(enforced(&store).await, [parent]);
    assert_eq!(show(&client, children[0]).await.state, "cancelled");
    assert_eq!(claim_one(&store).await.id.0, children[1]);
    let waits: Option<Vec<i64>> = one(
        &client,
        &format!(
            "SELECT waits_for FROM rouse.jobs WHERE id = {}",
            children[2]
        ),
    )
    .await;
    assert_eq!(waits, Some(vec![parent]));
}

#[tokio::test]
async fn a_caller_gets_the_missed_deadline_of_the_called_job_as_its_failure() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let caller = enqueue_sql(&client, "'x'").await;
    let job = claim_one(&store).await;
    let call = NewJob {
        kind: NewJobKind::Call {
            step: "call:a".into(),
        },
        handler: "callee".into(),
        payload: JsonText("1".into()),
        options: Some(JsonText(json!({"job_timeout": "3 days"}).to_string())),
    };
    let outcome = waits(Wait::Calls { jobs: Vec::new() });
    let settled = store
        .settle(&[settlement_with(&job, outcome, vec![call])], Locked::Wait)
        .await;
    assert_eq!(settled.unwrap().accepted.len(), 1);
    let callee: i64 = one(&client, "SELECT job FROM rouse.deadline").await;
    pass(&client, callee).await;
    assert_eq!(enforced(&store).await, [callee]);
    let job = claim_one(&store).await;
    assert_eq!(job.id.0, caller, "it resumes");
    let ends = store
        .returned_calls(job.id, job.fence, &["call:a".into()], 1 << 20)
        .await;
    let ends = ends.unwrap().unwrap();
    let ReturnedCall::Done(end) = &ends["call:a"] else {
        panic!("{ends:?}");
    };
    let end: Value = serde_json::from_slice(end).unwrap();
    assert_eq!(
        end["failed"],
        json!({"kind": "job_timeout", "message": MESSAGE})
    );
}

#[tokio::test]
async fn the_deadline_of_a_job_that_has_ended_in_time_is_deleted_when_it_has_passed() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = enqueue_sql(&client, "'x', job_timeout => '3 days'").await;
    let cancelled = enqueue_sql(&client, "'y', job_timeout => '3 days'").await;
    client
        .batch_execute(&format!("SELECT rouse.cancel({cancelled})"))
        .await
        .unwrap();
    let job = claim_one(&store).await;
    assert_eq!(settle(&store, &job, result("1")).await, 1);
    let deadlines = "SELECT count(*) FROM rouse.deadline";
    assert_eq!(enforce(&store).await, (0, Vec::new()));
    assert_eq!(
        one::<i64>(&client, deadlines).await,
        2,
        "settlements and cancellations leave deadlines alone"
    );
    let before = (events(&client, id).await, events(&client, cancelled).await);
    pass(&client, id).await;
    pass(&client, cancelled).await;
    assert_eq!(enforce(&store).await, (2, Vec::new()));
    assert_eq!(one::<i64>(&client, deadlines).await, 0);
    let states = (
        show(&client, id).await.state,
        show(&client, cancelled).await.state,
    );
    assert_eq!(states, ("succeeded".into(), "cancelled".into()));
    let after = (events(&client, id).await, events(&client, cancelled).await);
    assert_eq!(after, before);
}

#[tokio::test]
async fn the_retry_of_a_job_and_the_next_job_of_its_chain_have_no_deadline() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = enqueue_sql(&client, "'x', job_timeout => '3 days'").await;
    pass(&client, id).await;
    assert_eq!(enforced(&store).await, [id]);
    let retry: i64 = one(&client, &format!("SELECT rouse.retry({id})")).await;
    assert_eq!(deadline_after(&client, retry, "now()").await, "");
    let retried = claim_one(&store).await;
    assert_eq!(settle(&store, &retried, result("1")).await, 1);

    let first = enqueue_sql(&client, "'x', job_timeout => '3 days'").await;
    let job = claim_one(&store).await;
    let next = NewJob {
        kind: NewJobKind::Next,
        handler: "y".into(),
        payload: JsonText("1".into()),
        options: None,
    };
    let next = settlement_with(&job, result("1"), vec![next]);
    store.settle(&[next], Locked::Wait).await.unwrap();
    pass(&client, first).await;
    assert_eq!(enforce(&store).await, (1, Vec::new()));
    assert_eq!(claim(&store, 9).await.len(), 1, "the next job of the chain");
}

#[tokio::test]
async fn a_job_timeout_is_printed_in_words() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for (ms, words) in [
        (1_i64, "0.001 seconds"),
        (1_000, "1 second"),
        (60_000, "1 minute"),
        (5_400_000, "1 hour 30 minutes"),
        (129_600_000, "1 day 12 hours"),
        (316_224_000_000, "3660 days"),
    ] {
        let sql = format!("SET intervalstyle = 'iso_8601'; SELECT rouse._format_duration({ms})");
        client.batch_execute(&sql).await.unwrap();
        let printed: String = one(&client, &format!("SELECT rouse._format_duration({ms})")).await;
        assert_eq!(printed, words);
    }
}
