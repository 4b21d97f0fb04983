//! Suspended jobs: sleeps, signals and calls, as a worker settles them.

mod interleavings;

use std::time::{Duration, SystemTime};

use rouse::job::{
    ErrorKind, JobId, JsonText, NewJob, NewJobKind, Outcome, RecordedStep, ReturnedCall,
    Suspension, Usage, Wait, WaitKind,
};
use rouse::store::{ClaimedJob, Locked, NotMine, Ran, Settled, Settlement, Store};
use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::commands::run;
use crate::support::TestDb;
use crate::support::claims::{claim, error, make_due, result, settlement};
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
        has_begun: false,
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

async fn settle(store: &Store, job: &ClaimedJob, outcome: Outcome, jobs: Vec<NewJob>) -> Settled {
    let settlement = Settlement {
        jobs,
        ..settlement(job, outcome)
    };
    store.settle(&[settlement], Locked::Wait).await.unwrap()
}

async fn one(store: &Store) -> ClaimedJob {
    let mut jobs = claim(store, 1).await;
    jobs.pop().expect("a job is ready")
}

async fn none(store: &Store) -> bool {
    claim(store, 9).await.is_empty()
}

/// Suspends a new job.
async fn suspend(client: &Client, store: &Store, outcome: Outcome, jobs: Vec<NewJob>) -> i64 {
    let id = enqueue(client, "x", json!(1)).await;
    let job = one(store).await;
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

/// The end of the wait that an earlier attempt of the job began.
async fn end_of_wait(store: &Store, job: &ClaimedJob) -> SystemTime {
    let steps = store.recorded_steps(job.id, job.fence).await;
    let steps = steps.unwrap().unwrap();
    let Some(RecordedStep::Waits(begun)) = steps.values().next() else {
        panic!("{steps:?}");
    };
    begun.until.unwrap()
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
    let job = one(&store).await;
    assert_eq!((job.attempt.0, job.uncounted), (2, 1));
    assert_eq!(wait_of(&client, id).await, Value::Null);
    let steps = store
        .recorded_steps(job.id, job.fence)
        .await
        .unwrap()
        .unwrap();
    let Some(RecordedStep::Waits(begun)) = steps.get("nap") else {
        panic!("{steps:?}");
    };
    assert_eq!(begun.kind, WaitKind::Sleep);
    let late = begun.until.unwrap().duration_since(until).unwrap();
    assert!(late < Duration::from_millis(1), "{late:?}");
    assert_eq!(
        events(&client, id).await,
        ["requested", "started", "suspended", "claimed"]
    );
}

#[tokio::test]
async fn the_usage_of_a_suspended_attempt_is_kept() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = enqueue(&client, "x", json!(1)).await;
    let job = one(&store).await;
    let mut ended = settlement(&job, sleep(in_an_hour()));
    ended.ran = Some(Ran {
        usage: Usage::default(),
        digest: [7; 32],
    });
    store.settle(&[ended], Locked::Wait).await.unwrap();
    let sql = "SELECT detail ? 'usage' AND detail->>'kind' = 'sleep' FROM rouse.history($1) WHERE event = 'suspended'";
    let row = client.query_one(sql, &[&id]).await.unwrap();
    assert!(row.get::<_, bool>(0));
}

#[tokio::test]
async fn a_signal_wakes_the_job_that_waits_for_it_and_no_other() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = suspend(&client, &store, signal(None), Vec::new()).await;
    let sleeps = suspend(&client, &store, sleep(in_an_hour()), Vec::new()).await;
    let sql = "SELECT rouse.signal($1, 'other', '1')";
    assert!(
        client
            .query_one(sql, &[&id])
            .await
            .unwrap()
            .get::<_, bool>(0)
    );
    assert!(send(&client, sleeps, json!(1)).await, "kept");
    assert!(none(&store).await);
    assert!(send(&client, id, json!({"by": "Ada"})).await);
    let job = one(&store).await;
    assert_eq!(job.id.0, id);
    let taken = Some(json!({"payload": {"by": "Ada"}}));
    assert_eq!(take(&store, &job, None).await, taken);
    // A repeated call, because its answer was lost, gets the same.
    assert_eq!(take(&store, &job, None).await, taken);
    assert!(none(&store).await);
}

#[tokio::test]
async fn early_signals_are_kept_in_order_and_each_ends_one_wait() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = enqueue(&client, "x", json!(1)).await;
    assert!(send(&client, id, json!(1)).await, "before it runs");
    let job = one(&store).await;
    assert!(send(&client, id, json!(2)).await, "while it runs");
    assert_eq!(take(&store, &job, None).await, Some(json!({"payload": 1})));
    let second = store.take_signal(job.id, job.fence, "signal:go#2", "go", None);
    let second = second.await.unwrap().unwrap().unwrap();
    assert_eq!(second, br#"{"payload" : 2}"#);
    let third = store.take_signal(job.id, job.fence, "signal:go#3", "go", None);
    assert_eq!(third.await.unwrap().unwrap(), None);
    // A wait that begins while a signal is there is over at once.
    assert!(send(&client, id, json!(3)).await);
    settle(&store, &job, signal(None), Vec::new()).await;
    assert_eq!(one(&store).await.id.0, id);
}

#[tokio::test]
async fn a_wait_for_a_signal_ends_with_its_timeout_by_the_databases_clock() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = suspend(&client, &store, signal(Some(in_an_hour())), Vec::new()).await;
    make_due(&client, id).await;
    promote(&store).await;
    let job = one(&store).await;
    assert_eq!(take(&store, &job, Some(in_an_hour())).await, None);
    let over = Some(SystemTime::now() - Duration::from_secs(1));
    let timed_out = Some(json!({"timed_out": true}));
    assert_eq!(take(&store, &job, over).await, timed_out);
    // A signal after that is kept for another wait.
    assert!(send(&client, id, json!(1)).await);
    assert_eq!(take(&store, &job, over).await, timed_out);
}

#[tokio::test]
async fn a_signal_to_an_ended_or_unknown_job_is_refused() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = enqueue(&client, "x", json!(1)).await;
    let job = one(&store).await;
    settle(&store, &job, result("1"), Vec::new()).await;
    assert!(!send(&client, id, json!(1)).await);
    let refused = |sql: &str| {
        let (client, sql) = (&client, sql.to_owned());
        async move {
            let error = client.query_one(&sql, &[]).await.unwrap_err();
            error.as_db_error().unwrap().message().to_owned()
        }
    };
    let unknown = refused("SELECT rouse.signal(987654, 'go')").await;
    assert!(unknown.contains("does not exist"), "{unknown}");
    let name = refused(&format!("SELECT rouse.signal({id}, '')")).await;
    assert!(name.contains("1 to 200 characters"), "{name}");
    let live = enqueue(&client, "x", json!(1)).await;
    let large = refused(&format!(
        "SELECT rouse.signal({live}, 'go', to_jsonb(repeat('x', 300000)))"
    ))
    .await;
    assert!(large.contains("at most 262144"), "{large}");
    let many = format!("SELECT rouse.signal({live}, 'go') FROM generate_series(1, 1000)");
    client.query(&many, &[]).await.unwrap();
    let full = refused(&format!("SELECT rouse.signal({live}, 'go')")).await;
    assert!(full.contains("1000 signals"), "{full}");
    let null = refused("SELECT rouse.signal(NULL, 'go')").await;
    assert!(null.contains("must not be null"), "{null}");
}

#[tokio::test]
async fn a_job_that_calls_others_resumes_once_all_have_ended_and_gets_their_ends() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let calls = vec![call("call:a", json!(1)), call("call:b", json!(2))];
    let none_yet = suspended("call:a", Wait::Calls { jobs: Vec::new() });
    let id = suspend(&client, &store, none_yet, calls).await;
    let called = claim(&store, 9).await;
    assert_eq!(called.len(), 2, "the callees");
    settle(&store, &called[0], result(r#"{"r": 1}"#), Vec::new()).await;
    assert!(none(&store).await, "one is missing");
    let failed = Outcome::Failed(error(ErrorKind::GuestError));
    settle(&store, &called[1], failed, Vec::new()).await;
    let job = one(&store).await;
    assert_eq!(job.id.0, id);
    let steps = ["call:a", "call:b", "call:new"].map(String::from);
    let ends = store.returned_calls(job.id, job.fence, &steps, 1 << 20);
    let ends = ends.await.unwrap().unwrap();
    let end = |step: &str| match &ends[step] {
        ReturnedCall::Done(json) => serde_json::from_slice::<Value>(json).unwrap(),
        ReturnedCall::Pending(job) => panic!("{job:?}"),
    };
    assert_eq!(end("call:a"), json!({"output": {"r": 1}}));
    assert_eq!(end("call:b")["failed"]["kind"], "guest_error");
    assert!(!ends.contains_key("call:new"));
    let too_large = store.returned_calls(job.id, job.fence, &steps, 10).await;
    let too_large = too_large.unwrap_err();
    assert!(too_large.is_about_data(), "{too_large}");
    // They are recorded as steps.
    let steps = store.recorded_steps(job.id, job.fence).await;
    let steps = steps.unwrap().unwrap();
    assert!(steps.values().all(|it| matches!(it, RecordedStep::Done(_))));
}

#[tokio::test]
async fn a_called_job_that_was_retried_meanwhile_is_waited_for_again() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let none_yet = || suspended("call:a", Wait::Calls { jobs: Vec::new() });
    let id = suspend(&client, &store, none_yet(), vec![call("call:a", json!(1))]).await;
    let callee = one(&store).await;
    let failed = Outcome::Failed(error(ErrorKind::GuestError));
    settle(&store, &callee, failed, Vec::new()).await;
    let job = one(&store).await;
    let sql = "SELECT rouse.retry($1)";
    client.query_one(sql, &[&callee.id.0]).await.unwrap();
    let steps = ["call:a".to_owned()];
    let ends = store.returned_calls(job.id, job.fence, &steps, 1 << 20);
    let ends = ends.await.unwrap().unwrap();
    assert_eq!(ends["call:a"], ReturnedCall::Pending(callee.id));
    let jobs = vec![callee.id];
    let again = suspended("call:a", Wait::Calls { jobs });
    settle(&store, &job, again, Vec::new()).await;
    let retry = one(&store).await;
    assert_eq!(wait_of(&client, id).await["jobs"], json!([callee.id.0]));
    settle(&store, &retry, result("2"), Vec::new()).await;
    assert_eq!(one(&store).await.id.0, id);
}

#[tokio::test]
async fn a_job_cannot_call_a_job_that_waits_for_it() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let keyed = |key: &str| NewJob {
        options: Some(JsonText(json!({ "unique_key": key }).to_string())),
        ..call("c", json!(1))
    };
    let sql = "SELECT rouse.enqueue('callee', unique_key => $1, after => $2)";
    let enqueue = async |key: &str, after: Option<Value>| {
        let row = client.query_one(sql, &[&key, &after]).await.unwrap();
        row.get::<_, i64>(0)
    };
    let own = enqueue("own", None).await;
    let job = one(&store).await;
    let waiting = enqueue("waiting", Some(json!([own]))).await;
    enqueue("further", Some(json!([waiting]))).await;
    for key in ["own", "waiting", "further"] {
        let calls = suspended("c", Wait::Calls { jobs: Vec::new() });
        let settlement = Settlement {
            jobs: vec![keyed(key)],
            ..settlement(&job, calls)
        };
        let refused = store.settle(&[settlement], Locked::Wait).await.unwrap_err();
        assert!(refused.to_string().contains("waits for it"), "{refused}");
        assert!(refused.is_about_data(), "the attempt fails");
    }
    // A job that waits for nobody here can be called.
    enqueue("other", None).await;
    let calls = suspended("c", Wait::Calls { jobs: Vec::new() });
    let settled = settle(&store, &job, calls, vec![keyed("other")]).await;
    assert!(settled.accepted.contains(&job.id));
}

#[tokio::test]
async fn a_wait_that_is_over_does_not_come_back_when_its_job_is_rescheduled() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = suspend(&client, &store, signal(None), Vec::new()).await;
    send(&client, id, json!(1)).await;
    let sql = "SELECT rouse.reschedule($1, now() + interval '1 hour')";
    client.query_one(sql, &[&id]).await.unwrap();
    assert_eq!(wait_of(&client, id).await, Value::Null);
    send(&client, id, json!(2)).await;
    assert!(none(&store).await, "not before its time");
}

#[tokio::test]
async fn a_job_suspended_for_longer_than_the_history_is_kept_can_be_rescheduled() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = suspend(&client, &store, sleep(in_an_hour()), Vec::new()).await;
    let old = "SELECT rouse.unlock_history('time passes'); UPDATE rouse.step SET at = at - interval '40 days'; DELETE FROM rouse.attempt";
    client
        .batch_execute(&format!("BEGIN; {old}; COMMIT"))
        .await
        .unwrap();
    for run_at in ["now() + interval '10 minutes'", "NULL"] {
        let sql = format!("SELECT rouse.reschedule({id}, {run_at})");
        client.query_one(&sql, &[]).await.unwrap();
    }
    let job = one(&store).await;
    let steps = store.recorded_steps(job.id, job.fence).await;
    let steps = steps.unwrap().unwrap();
    let Some(RecordedStep::Waits(begun)) = steps.get("nap") else {
        panic!("{steps:?}");
    };
    assert!(begun.until.unwrap() <= SystemTime::now() + Duration::from_millis(1));
}

#[tokio::test]
async fn a_signal_is_not_lost_if_the_worker_uses_one_snapshot() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = enqueue(&client, "x", json!(1)).await;
    let job = one(&store).await;
    let sql = "SELECT count(*) FROM rouse._settle(NULL, ARRAY[jsonb_populate_record(NULL::rouse.settlement, jsonb_build_object(
                   'id', $1::bigint, 'fence', $2::bigint, 'state', 'queued', 'result', '{\"kind\": \"signal\", \"step\": \"signal:go\", \"name\": \"go\"}'::jsonb))])";
    let mut other = db.client().await;
    let settlement = other
        .build_transaction()
        .isolation_level(tokio_postgres::IsolationLevel::RepeatableRead)
        .start()
        .await
        .unwrap();
    settlement
        .query_one(sql, &[&id, &job.fence.0])
        .await
        .unwrap();
    settlement.commit().await.unwrap();
    let sql = "SELECT available_at < now() + interval '10 seconds' FROM rouse.job WHERE id = $1";
    let looks_again: bool = client.query_one(sql, &[&id]).await.unwrap().get(0);
    assert!(looks_again);
}

#[tokio::test]
async fn admin_actions_end_suspended_jobs() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let run = |sql: String| {
        let client = &client;
        async move { client.query_one(&sql, &[]).await }
    };
    let state = |id: i64| {
        let client = &client;
        async move {
            let sql = "SELECT state::text FROM rouse.jobs WHERE id = $1";
            let row = client.query_one(sql, &[&id]).await.unwrap();
            row.get::<_, String>(0)
        }
    };
    for (action, ends_as) in [
        ("cancel({})", "cancelled"),
        ("complete({}, '7')", "succeeded"),
        ("fail({}, 'no')", "failed"),
    ] {
        let calls = suspended("c", Wait::Calls { jobs: Vec::new() });
        for (outcome, jobs) in [
            (sleep(in_an_hour()), Vec::new()),
            (signal(None), Vec::new()),
            (calls, vec![call("c", json!(1))]),
        ] {
            let id = suspend(&client, &store, outcome, jobs).await;
            let sql = format!("SELECT rouse.{}", action.replace("{}", &id.to_string()));
            run(sql).await.unwrap();
            assert_eq!(state(id).await, ends_as, "{action}");
            for callee in claim(&store, 9).await {
                settle(&store, &callee, result("1"), Vec::new()).await;
            }
            assert!(none(&store).await, "{action}: nothing resumes");
        }
    }
}

#[tokio::test]
async fn rescheduling_moves_the_end_of_a_wait() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    for outcome in [sleep(in_an_hour()), signal(Some(in_an_hour()))] {
        let id = suspend(&client, &store, outcome, Vec::new()).await;
        let sql = "SELECT rouse.reschedule($1)";
        client.query_one(sql, &[&id]).await.unwrap();
        let job = one(&store).await;
        assert_eq!(job.id.0, id);
        assert!(end_of_wait(&store, &job).await <= SystemTime::now() + Duration::from_millis(1));
        settle(&store, &job, result("1"), Vec::new()).await;
    }
    let calls = suspended("c", Wait::Calls { jobs: Vec::new() });
    let id = suspend(&client, &store, calls, vec![call("c", json!(1))]).await;
    let sql = "SELECT rouse.reschedule($1)";
    let refused = client.query_one(sql, &[&id]).await.unwrap_err();
    let refused = refused.as_db_error().unwrap().message().to_owned();
    assert!(refused.contains("jobs that it has called"), "{refused}");
}

#[tokio::test]
async fn rescheduling_moves_the_end_of_a_wait_that_is_older_than_the_kept_attempts() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    for outcome in [sleep(in_an_hour()), signal(Some(in_an_hour()))] {
        let id = suspend(&client, &store, outcome, Vec::new()).await;
        // As if the partition of the suspended attempt had been dropped.
        let sql = "BEGIN; SELECT rouse.unlock_history('older'); DELETE FROM rouse.attempt; COMMIT";
        client.batch_execute(sql).await.unwrap();
        let sql = "SELECT rouse.reschedule($1)";
        client.query_one(sql, &[&id]).await.unwrap();
        let job = one(&store).await;
        assert!(end_of_wait(&store, &job).await <= SystemTime::now() + Duration::from_millis(1));
        settle(&store, &job, result("1"), Vec::new()).await;
    }
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
    let sum = one(&store).await;
    let page = |after: Option<&'static str>| {
        let store = &store;
        let sum = &sum;
        async move {
            let ends = store.parent_ends(sum.id, sum.fence, after).await;
            let ends = ends.unwrap().unwrap();
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
async fn waits_of_another_workers_job_are_refused() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    enqueue(&client, "x", json!(1)).await;
    let job = one(&store).await;
    let thief = db.worker().await;
    let steps = ["s".to_owned()];
    let taken = thief.take_signal(job.id, job.fence, "s", "go", None).await;
    assert!(matches!(taken, Ok(Err(NotMine(_)))), "{taken:?}");
    let calls = thief.returned_calls(job.id, job.fence, &steps, 1).await;
    assert!(matches!(calls, Ok(Err(NotMine(_)))), "{calls:?}");
    let parents = thief.parent_ends(job.id, job.fence, None).await;
    assert!(matches!(parents, Ok(Err(NotMine(_)))), "{parents:?}");
    let sleep = settlement(&job, sleep(in_an_hour()));
    let settled = thief.settle(&[sleep], Locked::Wait).await.unwrap();
    assert!(settled.accepted.is_empty());
    assert_eq!(JobId(job.id.0), job.id);
}

#[tokio::test]
async fn a_failure_after_a_wait_is_an_ordinary_retry() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = suspend(&client, &store, signal(None), Vec::new()).await;
    send(&client, id, json!(1)).await;
    let job = one(&store).await;
    let retry = Outcome::Retry {
        again: Duration::from_secs(3600).into(),
        error: error(ErrorKind::GuestError),
    };
    settle(&store, &job, retry, Vec::new()).await;
    assert_eq!(wait_of(&client, id).await, Value::Null);
    // A signal does not end the backoff.
    send(&client, id, json!(2)).await;
    assert!(none(&store).await);
}

#[tokio::test]
async fn the_command_shows_what_a_suspensions_for_and_sends_signals() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = suspend(&client, &store, signal(None), Vec::new()).await;
    let text = id.to_string();
    let (code, shown) = run(&db, &["job", &text]);
    assert_eq!(code, 0, "{shown}");
    assert!(shown.contains("waits for the signal go"), "{shown}");
    assert!(!shown.contains("next in"), "{shown}");
    let (code, sent) = run(
        &db,
        &["job", "signal", &text, "go", r#"{"by": "Ada"}"#, "--json"],
    );
    assert_eq!(
        (code, sent.trim()),
        (0, &*format!(r#"{{"id":{id},"signal":"go"}}"#))
    );
    let job = one(&store).await;
    assert_eq!(
        take(&store, &job, None).await,
        Some(json!({"payload": {"by": "Ada"}}))
    );
    settle(&store, &job, result("1"), Vec::new()).await;
    for (args, code, says) in [
        (["job", "signal", &text, "go"], 6, "has ended"),
        (["job", "signal", "987654", "go"], 3, "does not exist"),
    ] {
        let (found, output) = run(&db, &args);
        assert_eq!(found, code, "{output}");
        assert!(output.contains(says), "{output}");
    }
    let (code, output) = run(&db, &["job", "signal", &text, "go", "{"]);
    assert!(code == 1 && output.contains("not JSON"), "{output}");
}

#[tokio::test]
async fn the_sabotage_for_the_chaos_test_drops_signals_counts_suspensions_and_doubles_children() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let sabotage = include_str!("../chaos/sabotage/broken_flows.sql");
    client.batch_execute(sabotage).await.unwrap();
    let id = enqueue(&client, "x", json!(1)).await;
    assert!(send(&client, id, json!(1)).await);
    let job = one(&store).await;
    assert_eq!(take(&store, &job, None).await, None);
    settle(&store, &job, signal(None), Vec::new()).await;
    assert!(send(&client, id, json!(2)).await);
    let job = one(&store).await;
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
