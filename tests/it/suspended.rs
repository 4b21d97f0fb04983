//! Suspended jobs: sleeps, signals and calls, as a worker settles them.

mod admin;
mod calls;
mod interleavings;
mod retention;
mod signals;

use std::time::{Duration, SystemTime};

use rouse::job::{
    ErrorKind, JobId, JsonText, NewJob, NewJobKind, Outcome, RecordedStep, Suspension, Usage, Wait,
    WaitKind,
};
use rouse::store::{ClaimedJob, GuestRun, Locked, LostJob, SettleResult, Store};
use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::claims::{
    claim, claim_one, error, make_due, recorded_steps, result, settlement, settlement_with,
};
use crate::support::worker::{enqueue, events};

fn in_an_hour() -> SystemTime {
    SystemTime::now() + Duration::from_secs(3600)
}

fn sleep(until: SystemTime) -> Outcome {
    suspended("nap", Wait::Sleep { until })
}

fn signal(until: Option<SystemTime>) -> Outcome {
    let name = "go".into();
    suspended("signal:go", Wait::Signal { name, until })
}

fn suspended(step: &str, wait: Wait) -> Outcome {
    Outcome::Suspended(Suspension {
        step: step.into(),
        wait,
        is_recorded: false,
    })
}

fn call(step: &str, payload: Value) -> NewJob {
    NewJob {
        kind: NewJobKind::Call { step: step.into() },
        handler: "callee".into(),
        payload: JsonText(payload.to_string()),
        options: None,
    }
}

async fn settle(
    store: &Store,
    job: &ClaimedJob,
    outcome: Outcome,
    jobs: Vec<NewJob>,
) -> SettleResult {
    let settlement = settlement_with(job, outcome, jobs);
    store.settle(&[settlement], Locked::Wait).await.unwrap()
}

async fn none(store: &Store) -> bool {
    claim(store, 9).await.is_empty()
}

/// Suspends a new job.
async fn suspend(client: &Client, store: &Store, outcome: Outcome, jobs: Vec<NewJob>) -> i64 {
    let id = enqueue(client, "x", json!(1)).await;
    let job = claim_one(store).await;
    let settled = settle(store, &job, outcome, jobs).await;
    assert!(settled.accepted.contains(&job.id));
    id
}

/// Sends the signal `go`; returns whether the job has it.
async fn send(client: &Client, id: i64, payload: Value) -> bool {
    let sql = "SELECT rouse.signal($1, 'go', $2)";
    let row = client.query_one(sql, &[&id, &payload]).await.unwrap();
    row.get(0)
}

async fn take(store: &Store, job: &ClaimedJob, until: Option<SystemTime>) -> Option<Value> {
    let taken = store.take_signal(job.id, job.fence, "signal:go", "go", until);
    let taken = taken.await.unwrap().unwrap();
    taken.map(|json| serde_json::from_slice(&json).unwrap())
}

/// `wait` of a job.
async fn wait_of(client: &Client, id: i64) -> Value {
    let sql = "SELECT wait FROM rouse.jobs WHERE id = $1";
    let row = client.query_one(sql, &[&id]).await.unwrap();
    row.get::<_, Option<Value>>(0).unwrap_or_default()
}

/// The end of the wait that an earlier attempt of the job started.
async fn end_of_wait(store: &Store, job: &ClaimedJob) -> SystemTime {
    let steps = recorded_steps(store, job.id, job.fence).await.unwrap();
    let Some(RecordedStep::Waits(wait)) = steps.values().next() else {
        panic!("{steps:?}");
    };
    wait.until.unwrap()
}

async fn promote(store: &Store) {
    store.promote(None, false).await.unwrap();
}

#[tokio::test]
async fn a_sleeping_job_holds_no_claim_spends_no_attempt_and_wakes_when_it_is_due() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let until = in_an_hour();
    let id = suspend(&client, &store, sleep(until), Vec::new()).await;
    assert!(none(&store).await);
    let wait = wait_of(&client, id).await;
    assert_eq!(
        (&wait["kind"], &wait["step"]),
        (&json!("sleep"), &json!("nap"))
    );
    promote(&store).await;
    assert!(none(&store).await, "not before its time");
    make_due(&client, id).await;
    promote(&store).await;
    let job = claim_one(&store).await;
    assert_eq!((job.attempt.0, job.uncounted), (2, 1));
    assert_eq!(wait_of(&client, id).await, Value::Null);
    let steps = recorded_steps(&store, job.id, job.fence).await.unwrap();
    let Some(RecordedStep::Waits(wait)) = steps.get("nap") else {
        panic!("{steps:?}");
    };
    assert_eq!(wait.kind, WaitKind::Sleep);
    let late = wait.until.unwrap().duration_since(until).unwrap();
    assert!(late < Duration::from_millis(1), "{late:?}");
    assert_eq!(
        events(&client, id).await,
        ["requested", "started", "suspended", "claimed"]
    );
}

/// For example, because the settlement was delayed.
#[tokio::test]
async fn a_wait_that_has_ended_before_its_settlement_is_due_now() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let past = SystemTime::UNIX_EPOCH + Duration::from_secs(1);
    for outcome in [sleep(past), signal(Some(past))] {
        enqueue(&client, "x", json!(1)).await;
        let job = claim_one(&store).await;
        settle(&store, &job, outcome, Vec::new()).await;
        let promotion = store.promote(Some(job.claimed_at), false).await.unwrap();
        assert_eq!(promotion.promoted, 1);
        let again = claim_one(&store).await;
        assert!(again.ready_at.is_some_and(|at| at >= job.claimed_at));
    }
}

#[tokio::test]
async fn the_usage_of_a_suspended_attempt_is_kept() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = enqueue(&client, "x", json!(1)).await;
    let job = claim_one(&store).await;
    let mut ended = settlement(&job, sleep(in_an_hour()));
    ended.guest_run = Some(GuestRun {
        usage: Usage::default(),
        digest: [7; 32],
    });
    store.settle(&[ended], Locked::Wait).await.unwrap();
    let sql = "SELECT detail ? 'usage' AND detail->>'kind' = 'sleep' FROM rouse.history($1) WHERE event = 'suspended'";
    let row = client.query_one(sql, &[&id]).await.unwrap();
    assert!(row.get::<_, bool>(0));
}

#[tokio::test]
async fn parents_are_listed_by_name_with_their_ends() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let mut ids = Vec::new();
    for n in 1..=4 {
        ids.push(enqueue(&client, "x", json!(n)).await);
    }
    let run = |id: i64| json!({"job": id, "on_failure": "run"});
    let after = json!({"b": ids[0], "a": run(ids[1]), "d": run(ids[2]), "c": run(ids[3])});
    let sql = "SELECT rouse.enqueue('sum', after => $1)";
    client.query_one(sql, &[&after]).await.unwrap();
    let mut jobs = claim(&store, 9).await;
    jobs.sort_by_key(|job| job.id.0);
    settle(&store, &jobs[0], result("10"), Vec::new()).await;
    let failed = Outcome::Failed(error(ErrorKind::GuestError));
    settle(&store, &jobs[1], failed.clone(), Vec::new()).await;
    let timed_out = Outcome::TimedOut(error(ErrorKind::TimedOut));
    settle(&store, &jobs[2], timed_out, Vec::new()).await;
    let sql = "SELECT rouse.cancel($1)";
    client.query_one(sql, &[&ids[3]]).await.unwrap();
    let sum = claim_one(&store).await;
    let page = |after: Option<&'static str>| {
        let store = &store;
        let sum = &sum;
        async move {
            let ends = store.parent_ends(sum.id, sum.fence, after, &[]).await;
            let ends = ends.unwrap().unwrap().ends;
            let end = |end: rouse::job::ParentEnd| {
                (end.name, end.state.unwrap(), end.output.map(|it| it.0))
            };
            ends.into_iter().map(end).collect::<Vec<_>>()
        }
    };
    let all = page(None).await;
    let names: Vec<_> = all
        .iter()
        .map(|(n, s, _)| (n.as_str(), s.as_str()))
        .collect();
    assert_eq!(
        names,
        [
            ("a", "failed"),
            ("b", "succeeded"),
            ("c", "cancelled"),
            ("d", "timed_out")
        ]
    );
    assert_eq!(all[1].2.as_deref(), Some("10"));
    assert_eq!(page(Some("b")).await.len(), 2);
    assert!(page(Some("d")).await.is_empty());
}

#[tokio::test]
async fn a_page_of_parents_ends_once_their_results_reach_a_mebibyte() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let mut after = serde_json::Map::new();
    for name in ["a", "b", "c", "d"] {
        let id = enqueue(&client, "x", json!(1)).await;
        after.insert(name.into(), id.into());
    }
    let sql = "SELECT rouse.enqueue('sum', after => $1)";
    let after = Value::Object(after);
    client.query_one(sql, &[&after]).await.unwrap();
    let large = json!("x".repeat(600 << 10)).to_string();
    for job in claim(&store, 9).await {
        settle(&store, &job, result(&large), Vec::new()).await;
    }
    let sum = claim_one(&store).await;
    let page = async |after: Option<&str>, names: &[&str]| {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let page = store.parent_ends(sum.id, sum.fence, after, &names).await;
        let page = page.unwrap().unwrap();
        let ends: Vec<String> = page.ends.into_iter().map(|end| end.name).collect();
        (ends.concat(), page.next.concat())
    };
    let of = |ends: &str, next: &str| (ends.to_owned(), next.to_owned());
    assert_eq!(page(None, &[]).await, of("ab", "cd"));
    assert_eq!(page(Some("b"), &[]).await, of("cd", ""));
    assert_eq!(page(Some("d"), &[]).await, of("", ""));
    // Parents are also read by their names. The last name is not that of a parent.
    assert_eq!(page(None, &["a", "c", "d", "e"]).await, of("ac", "d"));
}

#[tokio::test]
async fn waits_of_another_workers_job_are_refused() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    enqueue(&client, "x", json!(1)).await;
    let job = claim_one(&store).await;
    let thief = db.worker().await;
    let steps = ["s".to_owned()];
    let taken = thief.take_signal(job.id, job.fence, "s", "go", None).await;
    assert!(matches!(taken, Ok(Err(LostJob(_)))), "{taken:?}");
    let calls = thief.returned_calls(job.id, job.fence, &steps, 1).await;
    assert!(matches!(calls, Ok(Err(LostJob(_)))), "{calls:?}");
    let parents = thief.parent_ends(job.id, job.fence, None, &[]).await;
    assert!(matches!(parents, Ok(Err(LostJob(_)))), "{parents:?}");
    let sleep = settlement(&job, sleep(in_an_hour()));
    let settled = thief.settle(&[sleep], Locked::Wait).await.unwrap();
    assert!(settled.accepted.is_empty());
    assert_eq!(JobId(job.id.0), job.id);
}

/// A worker that sends a wait that no host would send.
#[tokio::test]
async fn a_wait_that_names_a_job_which_was_not_called_returns_no_result_of_it() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let other = enqueue(&client, "other", json!(1)).await;
    let job = claim_one(&store).await;
    settle(&store, &job, result(r#""secret""#), Vec::new()).await;
    let id = enqueue(&client, "x", json!(1)).await;
    let job = claim_one(&store).await;
    let wait = json!({"kind": "signal", "step": "nap", "name": "go", "until_ms": 9, "job": other, "chain": other, "jobs": [other]});
    let sql = "SELECT count(*) FROM rouse._settle(NULL, ARRAY[jsonb_populate_record(NULL::rouse.settlement, jsonb_build_object(
        'id', $1::bigint, 'fence', $2::bigint, 'state', 'queued', 'result', $3::jsonb))])";
    let row = client.query_one(sql, &[&id, &job.fence.0, &wait]).await;
    assert_eq!(row.unwrap().get::<_, i64>(0), 1);
    let kept = json!({"kind": "signal", "step": "nap", "name": "go", "until_ms": 9});
    assert_eq!(wait_of(&client, id).await, kept);
    // The same applies if the start of a wait names a job.
    let forged = "UPDATE rouse.step SET wait = $1 WHERE wait IS NOT NULL";
    let unlocked = "SELECT rouse.unlock_history('a test')";
    client.batch_execute("BEGIN").await.unwrap();
    client.query_one(unlocked, &[]).await.unwrap();
    assert_eq!(client.execute(forged, &[&wait]).await.unwrap(), 1);
    client.batch_execute("COMMIT").await.unwrap();
    assert!(send(&client, id, json!(1)).await);
    let job = claim_one(&store).await;
    let steps = ["nap".to_owned()];
    let ends = store.returned_calls(job.id, job.fence, &steps, 1 << 20);
    assert!(ends.await.unwrap().unwrap().is_empty());
}

#[tokio::test]
async fn the_sabotage_for_the_chaos_test_drops_signals_counts_suspensions_and_doubles_children() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let sabotage = include_str!("../chaos/sabotage/broken_suspensions.sql");
    client.batch_execute(sabotage).await.unwrap();
    let id = enqueue(&client, "x", json!(1)).await;
    assert!(send(&client, id, json!(1)).await);
    let job = claim_one(&store).await;
    assert_eq!(take(&store, &job, None).await, None);
    settle(&store, &job, signal(None), Vec::new()).await;
    assert!(send(&client, id, json!(2)).await);
    let job = claim_one(&store).await;
    let taken = take(&store, &job, None).await;
    assert_eq!(taken, Some(json!({"payload": 2})));
    let child = NewJob {
        kind: NewJobKind::Child,
        ..call("", json!(1))
    };
    settle(&store, &job, result("1"), vec![child]).await;
    let sql = "SELECT uncounted, (SELECT count(*) FROM rouse.jobs WHERE parent = $1) FROM rouse.jobs WHERE id = $1";
    let row = client.query_one(sql, &[&id]).await.unwrap();
    assert_eq!((row.get::<_, i32>(0), row.get::<_, i64>(1)), (0, 2));
}
