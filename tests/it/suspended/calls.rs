//! Calls: jobs that a suspended job waits for.

use rouse::job::{ErrorKind, JsonText, NewJob, Outcome, RecordedStep, ReturnedCall, Wait};
use rouse::store::Locked;
use serde_json::{Value, json};
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Row};

use super::{call, none, settle, suspend, suspended, wait_of};
use crate::support::TestDb;
use crate::support::claims::{claim, claim_one, error, recorded_steps, result, settlement_with};

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
    let job = claim_one(&store).await;
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
    // The ends are recorded as steps.
    let steps = recorded_steps(&store, job.id, job.fence).await.unwrap();
    assert!(
        steps
            .values()
            .all(|it| matches!(it, RecordedStep::Done { .. }))
    );
}

/// The time at which it was suspended then lies in the future, like the end of a sleep.
#[tokio::test]
async fn a_job_that_calls_another_resumes_at_once_although_the_clock_has_been_set_back() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let calls = vec![call("call:a", json!(1))];
    let none_yet = suspended("call:a", Wait::Calls { jobs: Vec::new() });
    let id = suspend(&client, &store, none_yet, calls).await;
    let set_back =
        "UPDATE rouse.job SET available_at = available_at + interval '1 hour' WHERE id = $1";
    client.execute(set_back, &[&id]).await.unwrap();
    let callee = claim_one(&store).await;
    settle(&store, &callee, result("1"), Vec::new()).await;
    assert_eq!(claim_one(&store).await.id.0, id);
}

/// The row of a statement about the only worker: `$1` is its incarnation, and the statement shows `key` as its key.
async fn as_the_worker(client: &Client, sql: &str, args: &[&(dyn ToSql + Sync)]) -> Row {
    let worker = "SELECT incarnation, key_hash, sha256('key'::bytea) FROM rouse.worker";
    let worker = client.query_one(worker, &[]).await.unwrap();
    let (id, hash, known): (i64, Vec<u8>, Vec<u8>) = (worker.get(0), worker.get(1), worker.get(2));
    let set_hash = "UPDATE rouse.worker SET key_hash = $1";
    client.execute(set_hash, &[&known]).await.unwrap();
    let mut params: Vec<&(dyn ToSql + Sync)> = vec![&id];
    params.extend(args);
    let row = client.query_one(sql, &params).await.unwrap();
    client.execute(set_hash, &[&hash]).await.unwrap();
    row
}

/// The job is locked while the response is sent, and a frozen host reads none.
#[tokio::test]
async fn large_ends_of_calls_are_read_without_a_lock() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let names: Vec<String> = (0..80).map(|n| format!("call:{n}")).collect();
    let calls = names.iter().map(|name| call(name, json!(1))).collect();
    let none_yet = suspended("call:0", Wait::Calls { jobs: Vec::new() });
    suspend(&client, &store, none_yet, calls).await;
    let called = claim(&store, 100).await;
    assert_eq!(called.len(), 80);
    for (n, callee) in called.iter().enumerate() {
        let bytes = if n == 0 { 500_000 } else { 1000 };
        let output = format!("\"{}\"", "x".repeat(bytes));
        settle(&store, callee, result(&output), Vec::new()).await;
    }
    let job = claim_one(&store).await;
    let sql = "SELECT count(*), sum(octet_length(result::text))::bigint FROM rouse.returned_calls($1, 'key', $2, $3, $4, 1000000)";
    let row = as_the_worker(&client, sql, &[&job.id.0, &job.fence.0, &names]).await;
    let (count, bytes): (i64, i64) = (row.get(0), row.get(1));
    assert_eq!(count, 80);
    assert!((60_000..=65_536).contains(&bytes), "{bytes}");
    let ends = store.returned_calls(job.id, job.fence, &names, 1 << 20);
    let ends = ends.await.unwrap().unwrap();
    let mut sizes: Vec<usize> = ends
        .values()
        .map(|end| match end {
            ReturnedCall::Done(json) => json.len(),
            ReturnedCall::Pending(job) => panic!("{job:?}"),
        })
        .collect();
    sizes.sort_unstable();
    let around = r#"{"output" : ""}"#.len();
    assert_eq!(sizes[79], 500_000 + around);
    assert!(sizes[..79].iter().all(|size| *size == 1000 + around));
}

#[tokio::test]
async fn large_ends_of_calls_are_read_together_about_a_mebibyte_at_a_time() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let names: Vec<String> = (0..5).map(|n| format!("call:{n}")).collect();
    let calls = names.iter().map(|name| call(name, json!(1))).collect();
    let none_yet = suspended("call:0", Wait::Calls { jobs: Vec::new() });
    suspend(&client, &store, none_yet, calls).await;
    let called = claim(&store, 9).await;
    assert_eq!(called.len(), 5);
    let output = format!("\"{}\"", "x".repeat(400_000));
    for callee in &called {
        settle(&store, callee, result(&output), Vec::new()).await;
    }
    let job = claim_one(&store).await;
    // The ends are read in several statements.
    let ends = store.returned_calls(job.id, job.fence, &names, 4 << 20);
    let ends = ends.await.unwrap().unwrap();
    assert_eq!(ends.len(), 5);
    let is_whole =
        |end: &ReturnedCall| matches!(end, ReturnedCall::Done(json) if json.len() > output.len());
    assert!(ends.values().all(is_whole));
    // One of these statements.
    let sql = "SELECT array_agg(name) FROM rouse.recorded_results($1, 'key', $2, $3, $4)";
    let asked = ["call:4", "call:new", "call:0", "call:2", "call:1"];
    let asked = asked.map(String::from).to_vec();
    let row = as_the_worker(&client, sql, &[&job.id.0, &job.fence.0, &asked]).await;
    let read: Vec<String> = row.get(0);
    assert_eq!(read, ["call:4", "call:0", "call:2"]);
}

#[tokio::test]
async fn a_called_job_that_was_retried_in_the_meantime_is_waited_for_again() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let none_yet = || suspended("call:a", Wait::Calls { jobs: Vec::new() });
    let id = suspend(&client, &store, none_yet(), vec![call("call:a", json!(1))]).await;
    let callee = claim_one(&store).await;
    let failed = Outcome::Failed(error(ErrorKind::GuestError));
    settle(&store, &callee, failed, Vec::new()).await;
    let job = claim_one(&store).await;
    let sql = "SELECT rouse.retry($1)";
    client.query_one(sql, &[&callee.id.0]).await.unwrap();
    let steps = ["call:a".to_owned()];
    let ends = store.returned_calls(job.id, job.fence, &steps, 1 << 20);
    let ends = ends.await.unwrap().unwrap();
    assert_eq!(ends["call:a"], ReturnedCall::Pending(callee.id));
    let jobs = vec![callee.id];
    let again = suspended("call:a", Wait::Calls { jobs });
    settle(&store, &job, again, Vec::new()).await;
    let retry = claim_one(&store).await;
    assert_eq!(wait_of(&client, id).await["jobs"], json!([callee.id.0]));
    settle(&store, &retry, result("2"), Vec::new()).await;
    assert_eq!(claim_one(&store).await.id.0, id);
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
    let job = claim_one(&store).await;
    let waiting = enqueue("waiting", Some(json!([own]))).await;
    enqueue("further", Some(json!([waiting]))).await;
    for key in ["own", "waiting", "further"] {
        let calls = suspended("c", Wait::Calls { jobs: Vec::new() });
        let settlement = settlement_with(&job, calls, vec![keyed(key)]);
        let refused = store.settle(&[settlement], Locked::Wait).await.unwrap_err();
        assert!(refused.to_string().contains("waits for it"), "{refused}");
        assert!(refused.is_about_data(), "the attempt fails");
    }
    // A job that does not wait for any of these can be called.
    enqueue("other", None).await;
    let calls = suspended("c", Wait::Calls { jobs: Vec::new() });
    let settled = settle(&store, &job, calls, vec![keyed("other")]).await;
    assert!(settled.accepted.contains(&job.id));
}
