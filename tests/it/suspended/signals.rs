//! Signals: sent before a wait, during it and after it.

use std::time::{Duration, SystemTime};

use rouse::job::{ErrorKind, Outcome};
use serde_json::{Value, json};

use super::{in_an_hour, none, promote, send, settle, signal, sleep, suspend, take, wait_of};
use crate::commands::run;
use crate::support::TestDb;
use crate::support::claims::{claim_one, error, make_due, result};
use crate::support::worker::enqueue;

#[tokio::test]
async fn a_signal_wakes_only_the_job_that_waits_for_it() {
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
    let job = claim_one(&store).await;
    assert_eq!(job.id.0, id);
    let taken = Some(json!({"payload": {"by": "Ada"}}));
    assert_eq!(take(&store, &job, None).await, taken);
    // A repeated call, because its response was lost, gets the same.
    assert_eq!(take(&store, &job, None).await, taken);
    assert!(none(&store).await);
}

#[tokio::test]
async fn early_signals_are_kept_in_order_and_each_ends_one_wait() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = enqueue(&client, "x", json!(1)).await;
    assert!(send(&client, id, json!(1)).await, "before it runs");
    let job = claim_one(&store).await;
    assert!(send(&client, id, json!(2)).await, "while it runs");
    assert_eq!(take(&store, &job, None).await, Some(json!({"payload": 1})));
    let second = store.take_signal(job.id, job.fence, "signal:go#2", "go", None);
    let second = second.await.unwrap().unwrap().unwrap();
    assert_eq!(second, br#"{"payload" : 2}"#);
    let third = store.take_signal(job.id, job.fence, "signal:go#3", "go", None);
    assert_eq!(third.await.unwrap().unwrap(), None);
    // A large payload is not in the response during which the job is locked.
    let large = json!("x".repeat(100_000));
    assert!(send(&client, id, large.clone()).await);
    let taken = store.take_signal(job.id, job.fence, "signal:go#3", "go", None);
    let taken = taken.await.unwrap().unwrap().unwrap();
    let taken: serde_json::Value = serde_json::from_slice(&taken).unwrap();
    assert_eq!(taken, json!({"payload": large}));
    // A wait that starts while a signal is there ends at once.
    assert!(send(&client, id, json!(3)).await);
    settle(&store, &job, signal(None), Vec::new()).await;
    assert_eq!(claim_one(&store).await.id.0, id);
}

#[tokio::test]
async fn a_wait_for_a_signal_ends_with_its_timeout_by_the_databases_clock() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = suspend(&client, &store, signal(Some(in_an_hour())), Vec::new()).await;
    make_due(&client, id).await;
    promote(&store).await;
    let job = claim_one(&store).await;
    assert_eq!(take(&store, &job, Some(in_an_hour())).await, None);
    let over = Some(SystemTime::now() - Duration::from_secs(1));
    let timed_out = Some(json!({"timed_out": true}));
    assert_eq!(take(&store, &job, over).await, timed_out);
    // A later signal is kept for another wait.
    assert!(send(&client, id, json!(1)).await);
    assert_eq!(take(&store, &job, over).await, timed_out);
}

#[tokio::test]
async fn a_signal_to_an_ended_or_unknown_job_is_refused() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = enqueue(&client, "x", json!(1)).await;
    let job = claim_one(&store).await;
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
    for name in [
        "''",
        "NULL",
        "repeat('x', 201)",
        r"E'go\n'",
        "'go' || chr(155)",
    ] {
        let refused = refused(&format!("SELECT rouse.signal({id}, {name})")).await;
        let as_by_hosts = "the name of a signal must have 1 to 200 printable characters";
        assert!(refused.contains(as_by_hosts), "{name}: {refused}");
    }
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
async fn a_signal_is_not_lost_if_the_worker_uses_one_snapshot() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = enqueue(&client, "x", json!(1)).await;
    let job = claim_one(&store).await;
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
async fn a_failure_after_a_wait_is_an_ordinary_retry() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = suspend(&client, &store, signal(None), Vec::new()).await;
    send(&client, id, json!(1)).await;
    let job = claim_one(&store).await;
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
async fn the_command_shows_what_a_job_waits_for_and_sends_signals() {
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
    let job = claim_one(&store).await;
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
