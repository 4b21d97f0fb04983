//! Admin actions on suspended jobs.

use std::time::{Duration, SystemTime};

use rouse::job::{RecordedStep, Wait};
use serde_json::{Value, json};

use super::{
    call, end_of_wait, in_an_hour, none, send, settle, signal, sleep, suspend, suspended, wait_of,
};
use crate::support::TestDb;
use crate::support::claims::{claim, claim_one, recorded_steps, result};

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
        let job = claim_one(&store).await;
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
async fn a_rescheduled_wait_shows_its_new_end() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    for outcome in [sleep(in_an_hour()), signal(None)] {
        let id = suspend(&client, &store, outcome, Vec::new()).await;
        let sql = "SELECT rouse.reschedule($1, now() + interval '3 days')";
        client.query_one(sql, &[&id]).await.unwrap();
        let sql = "SELECT (j.wait ->> 'until_ms')::bigint = ceil(extract(epoch FROM j.available_at) * 1000), w.sentence
                   FROM rouse.jobs AS j CROSS JOIN LATERAL rouse.why(j.id) AS w WHERE j.id = $1 AND w.reason = 'suspended'";
        let row = client.query_one(sql, &[&id]).await.unwrap();
        let (is_shown, sentence): (bool, String) = (row.get(0), row.get(1));
        assert!(
            is_shown && sentence.contains("for another 3 days"),
            "{sentence}"
        );
    }
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
    let job = claim_one(&store).await;
    let steps = recorded_steps(&store, job.id, job.fence).await.unwrap();
    let Some(RecordedStep::Waits(wait)) = steps.get("nap") else {
        panic!("{steps:?}");
    };
    assert!(wait.until.unwrap() <= SystemTime::now() + Duration::from_millis(1));
}

#[tokio::test]
async fn rescheduling_moves_the_end_of_a_wait_although_the_clock_was_set_back_since_its_start() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = suspend(&client, &store, sleep(in_an_hour()), Vec::new()).await;
    let ahead = "BEGIN; SELECT rouse.unlock_history('the clock was ahead'); UPDATE rouse.step SET at = at + interval '30 minutes'; COMMIT";
    client.batch_execute(ahead).await.unwrap();
    let sql = "SELECT rouse.reschedule($1)";
    client.query_one(sql, &[&id]).await.unwrap();
    let job = claim_one(&store).await;
    assert!(end_of_wait(&store, &job).await <= SystemTime::now() + Duration::from_millis(1));
}

#[tokio::test]
async fn a_wait_that_has_ended_does_not_come_back_when_its_job_is_rescheduled() {
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
