//! Changes to queued jobs: their priority, and their payload.

use std::time::Duration;

use rouse::job::{ErrorKind, Outcome};
use rouse::store::Locked;
use rouse::worker::Settings;
use serde_json::json;
use tokio_postgres::Client;

use super::{claim, events, history, is_true, refusal};
use crate::support::claims::{claim_one, error, settlement};
use crate::support::worker::{SESSION_WAITS, TestWorker, ended, enqueue, enqueue_sql, until_true};
use crate::support::{TestDb, rouse_in, scratch};

const SET: &str = "SELECT rouse.set_priority($1, $2)";
const REPLACE: &str = "SELECT rouse.replace_payload($1, $2)";

async fn replace(client: &Client, id: i64, payload: serde_json::Value) -> i64 {
    let row = client.query_one(REPLACE, &[&id, &payload]).await;
    row.unwrap().get(0)
}

#[tokio::test]
async fn a_queued_job_can_be_given_another_priority() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let store = db.worker().await;
    let first = enqueue(&client, "x", json!(1)).await;
    let second = enqueue(&client, "x", json!(2)).await;
    let later = enqueue_sql(&client, "'x', run_at => now() + interval '1 day'").await;
    let waiting = enqueue_sql(&client, &format!("'x', after => '[{first}]'")).await;
    for id in [second, later, waiting] {
        assert!(is_true(&client, SET, &[&id, &"high"]).await);
        // The same call changes nothing the second time.
        assert!(is_true(&client, SET, &[&id, &"high"]).await);
        let priority = "SELECT priority = 'high' FROM rouse.jobs WHERE id = $1";
        assert!(is_true(&client, priority, &[&id]).await);
    }
    let set = history(&client, second).await;
    let [_, (event, Some(detail))] = &set[..] else {
        panic!("{set:?}")
    };
    assert_eq!(event, "priority_set");
    assert_eq!(
        (&detail["from"], &detail["to"]),
        (&json!("normal"), &json!("high"))
    );
    // Jobs that were not ready are still not ready.
    let ready = "SELECT array_agg(id ORDER BY id) FROM rouse.job WHERE turn IS NOT NULL";
    let ready: Vec<i64> = client.query_one(ready, &[]).await.unwrap().get(0);
    assert_eq!(ready, [first, second]);
    assert_eq!(claim(&store, 1).await.len(), 2);

    let (code, text) = refusal(&client, SET, &[&first, &"low"]).await;
    assert!(
        code == "55000" && text.contains("cannot be given another priority: it is running"),
        "{text}"
    );
    assert!(is_true(&client, "SELECT rouse.cancel($1)", &[&first]).await);
    let (code, text) = refusal(&client, SET, &[&first, &"low"]).await;
    assert!(
        code == "55000" && text.contains("already ended as cancelled"),
        "{text}"
    );
    for (id, priority, expected) in [
        (Some(later), Some("urgent"), "22023"),
        (Some(later), None, "22023"),
        (None, Some("low"), "22023"),
        (Some(999), Some("low"), "P0002"),
    ] {
        let (code, text) = refusal(&client, SET, &[&id, &priority]).await;
        assert_eq!(code, expected, "{text}");
    }
}

#[tokio::test]
async fn another_payload_makes_a_new_job_that_replaces_the_old_one() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let old = enqueue_sql(
        &client,
        "'noop', '{\"n\": 1}', 'q', 'acme', NULL, 'high', NULL, 3, 'key', '{}', job_timeout => '1 hour'",
    )
    .await;
    let after = enqueue_sql(
        &client,
        &format!("'noop', '{{\"n\": 2}}', after => '[{old}]'"),
    )
    .await;
    let new = replace(&client, old, json!({"n": 7})).await;
    assert_ne!(new, old);
    let same = "SELECT (a.handler, a.queue, a.tenant, a.priority, a.max_attempts, a.unique_key, a.tags, a.id)
                     = (b.handler, b.queue, b.tenant, b.priority, b.max_attempts, b.unique_key, b.tags, b.retried_from)
                   AND a.state = 'cancelled' AND a.payload = '{\"n\": 1}' AND b.state = 'queued' AND b.payload = '{\"n\": 7}'
                FROM rouse.job($1) AS a, rouse.job($2) AS b";
    assert!(is_true(&client, same, &[&old, &new]).await);
    let deadline = "SELECT deadline_at IS NOT NULL FROM rouse.jobs WHERE id = $1";
    assert!(is_true(&client, deadline, &[&new]).await);
    let only = "SELECT array_agg(job) = ARRAY[$1::bigint] FROM rouse.deadline";
    assert!(is_true(&client, only, &[&new]).await);
    assert_eq!(
        events(&client, old).await,
        ["requested", "cancelled", "retried"]
    );
    // Another payload for the old job is refused, because it has ended.
    let (code, text) = refusal(&client, REPLACE, &[&old, &json!(3)]).await;
    assert!(
        code == "55000" && text.contains("already ended as cancelled"),
        "{text}"
    );

    let worker = TestWorker::start(&db, Settings::default()).await;
    let done = ended(&client, new).await;
    assert_eq!(done.result, Some(json!({"n": 7})));
    // This job has waited for the new job.
    assert_eq!(ended(&client, after).await.state, "succeeded");
    worker.drain().await;
}

#[tokio::test]
async fn a_job_with_another_payload_starts_no_earlier_and_waits_for_the_same_jobs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let first = enqueue(&client, "noop", json!({"n": 1})).await;
    let later = enqueue_sql(&client, "'noop', run_at => '2999-01-01'").await;
    let waiting = enqueue_sql(&client, &format!("'noop', after => '[{first}]'")).await;
    let later = replace(&client, later, json!("x".repeat(5000))).await;
    let waiting = replace(&client, waiting, json!({"n": 2})).await;
    let due = "SELECT available_at = '2999-01-01' AND length(payload #>> '{}') = 5000 FROM rouse.jobs WHERE id = $1";
    assert!(is_true(&client, due, &[&later]).await);
    let waits = "SELECT waits_for = ARRAY[$2::bigint] FROM rouse.jobs WHERE id = $1";
    assert!(is_true(&client, waits, &[&waiting, &first]).await);
    let ready = "SELECT array_agg(id) = ARRAY[$1::bigint] FROM rouse.job WHERE turn IS NOT NULL";
    assert!(is_true(&client, ready, &[&first]).await);
    let worker = TestWorker::start(&db, Settings::default()).await;
    assert_eq!(ended(&client, waiting).await.result, Some(json!({"n": 2})));
    worker.drain().await;
}

#[tokio::test]
async fn a_ready_job_with_another_payload_is_ready_although_the_clock_has_been_set_back() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let old = enqueue(&client, "x", json!(1)).await;
    let set_back = "UPDATE rouse.job SET requested_at = requested_at + interval '1 hour', available_at = available_at + interval '1 hour'";
    client.batch_execute(set_back).await.unwrap();
    let new = replace(&client, old, json!(2)).await;
    assert_eq!(claim_one(&db.worker().await).await.id.0, new);
}

#[tokio::test]
async fn a_job_that_waits_for_its_next_attempt_keeps_its_time_and_its_old_attempts() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let store = db.worker().await;
    let old = enqueue(&client, "x", json!(1)).await;
    let job = claim_one(&store).await;
    let retry = Outcome::Retry {
        again: Duration::from_secs(3600).into(),
        error: error(ErrorKind::GuestError),
    };
    let settlement = settlement(&job, retry);
    store.settle(&[settlement], Locked::Wait).await.unwrap();
    assert!(is_true(&client, SET, &[&old, &"low"]).await);
    let new = replace(&client, old, json!(2)).await;
    let fresh = "SELECT attempt = 0 AND available_at > now() + interval '50 minutes' AND priority = 'low' FROM rouse.jobs WHERE id = $1";
    assert!(is_true(&client, fresh, &[&new]).await);
    let kept = "SELECT count(*) = 1 FROM rouse.attempt WHERE job = $1";
    assert!(is_true(&client, kept, &[&old]).await);
}

#[tokio::test]
async fn a_payload_that_is_refused_changes_nothing() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue(&client, "x", json!(1)).await;
    let large = json!("x".repeat(300_000));
    for (id, payload, expected) in [
        (Some(id), Some(large), "54000"),
        (Some(id), None, "22023"),
        (None, Some(json!(1)), "22023"),
        (Some(999), Some(json!(1)), "P0002"),
    ] {
        let (code, text) = refusal(&client, REPLACE, &[&id, &payload]).await;
        assert_eq!(code, expected, "{text}");
    }
    let parent = enqueue(&client, "x", json!(1)).await;
    let child = enqueue_sql(
        &client,
        &format!("'x', after => '{{\"a\": {{\"job\": {parent}, \"on_failure\": \"wait\"}}}}'"),
    )
    .await;
    assert!(is_true(&client, "SELECT rouse.fail($1, 'no')", &[&parent]).await);
    // The new job continues to wait for the retry of the failed parent.
    let new = replace(&client, child, json!(2)).await;
    let waits = "SELECT waits_for = ARRAY[$2::bigint] FROM rouse.jobs WHERE id = $1";
    assert!(is_true(&client, waits, &[&new, &parent]).await);
    let unchanged = "SELECT state = 'queued' AND payload = '1' FROM rouse.jobs WHERE id = $1";
    assert!(is_true(&client, unchanged, &[&id]).await);
}

#[tokio::test]
async fn a_change_waits_for_a_claim_that_is_not_committed_and_is_then_refused() {
    let db = TestDb::new().await;
    let (mut claiming, client) = (db.client().await, db.client().await);
    let id = enqueue(&client, "x", json!(1)).await;
    let transaction = claiming.transaction().await.unwrap();
    // As a claim does.
    transaction
        .execute(
            "UPDATE rouse.job SET state = 'running', attempt = 1, fence = 1, worker = 1, claimed_at = now(), lease_until = now() + interval '1 hour' WHERE id = $1",
            &[&id],
        )
        .await
        .unwrap();
    let other = db.client().await;
    let waiting = tokio::spawn(async move {
        let params: [&(dyn tokio_postgres::types::ToSql + Sync); 2] = [&id, &json!(2)];
        refusal(&other, REPLACE, &params).await
    });
    until_true(&client, SESSION_WAITS).await;
    transaction.commit().await.unwrap();
    let (code, text) = waiting.await.unwrap();
    assert!(code == "55000" && text.contains("it is running"), "{text}");
    let payload = "SELECT payload = '1' FROM rouse.jobs WHERE id = $1";
    assert!(is_true(&client, payload, &[&id]).await);
}

#[tokio::test]
async fn a_claim_skips_a_job_that_is_being_changed() {
    let db = TestDb::new().await;
    let (mut changing, client) = (db.client().await, db.client().await);
    let store = db.worker().await;
    let id = enqueue(&client, "x", json!(1)).await;
    let transaction = changing.transaction().await.unwrap();
    let row = transaction.query_one(REPLACE, &[&id, &json!(2)]).await;
    let new: i64 = row.unwrap().get(0);
    assert_eq!(claim(&store, 1).await, [0; 0]);
    transaction.commit().await.unwrap();
    assert_eq!(claim(&store, 2).await, [new]);
}

#[tokio::test]
async fn rouse_job_edit_changes_the_priority_and_the_payload() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = scratch("edit");
    let rouse = async |args: &[&str]| rouse_in(&db, args, &folder).await;
    let id = enqueue(&client, "x", json!(1)).await.to_string();
    rouse(&["job", "edit", &id])
        .await
        .exits(2)
        .prints("--priority");
    rouse(&["job", "edit", &id, "--priority", "high"])
        .await
        .exits(0)
        .prints("has the priority high");
    let edited = rouse(&[
        "job",
        "edit",
        &id,
        "--priority",
        "low",
        "--payload",
        "{\"n\": 2}",
        "--json",
    ])
    .await;
    edited.exits(0).prints("\"retried_from\":");
    rouse(&["job", "edit", &id, "--payload", "3"])
        .await
        .exits(6)
        .prints("already ended as cancelled");
    rouse(&["job", "edit", "999", "--payload", "3"])
        .await
        .exits(3);
    rouse(&["job", "edit", &id, "--payload", "{"])
        .await
        .exits(1)
        .prints("the payload is not JSON");
    let new = "SELECT count(*) = 1 FROM rouse.jobs WHERE payload = '{\"n\": 2}' AND priority = 'low' AND state = 'queued'";
    assert!(is_true(&client, new, &[]).await);

    // If the payload is refused, the priority is changed, and the output says so.
    let other = enqueue(&client, "x", json!(1)).await;
    client
        .batch_execute("UPDATE rouse.queue SET payload_bytes_max = 1024 WHERE name = 'default'")
        .await
        .unwrap();
    let (job, large) = (other.to_string(), json!("a".repeat(1200)).to_string());
    rouse(&[
        "job",
        "edit",
        &job,
        "--priority",
        "high",
        "--payload",
        &large,
    ])
    .await
    .exits(1)
    .prints("the payload is 1202 bytes long")
    .prints(&format!("job {other} has the priority high"));
    let changed = "SELECT payload = '1' AND priority = 'high' AND state = 'queued' FROM rouse.jobs WHERE id = $1";
    assert!(is_true(&client, changed, &[&other]).await);
}

#[tokio::test]
async fn a_suspended_job_is_ready_with_its_new_payload_and_takes_the_signals_of_the_old_one() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    let old = enqueue(&client, "flow.signals", json!({"name": "go"})).await;
    let waits = format!("SELECT wait IS NOT NULL AND turn IS NULL FROM rouse.job WHERE id = {old}");
    until_true(&client, &waits).await;
    let other = format!("SELECT rouse.signal({old}, 'other', '7')");
    client.batch_execute(&other).await.unwrap();
    assert!(is_true(&client, &waits, &[]).await);
    let new = replace(&client, old, json!({"name": "other"})).await;
    let done = ended(&client, new).await;
    assert_eq!(done.result, Some(json!([{"got": 7}])));
    worker.drain().await;
}

#[tokio::test]
async fn a_job_with_another_payload_replaces_the_old_one_in_gates() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "SELECT rouse.set_gate('one', 'singleton', handler => 'x', key => '{$.n}', during => 'running')",
        )
        .await
        .unwrap();
    let old = enqueue(&client, "x", json!({"n": 1, "v": 1})).await;
    let new = replace(&client, old, json!({"n": 1, "v": 2})).await;
    // The gate returns the job that it let through.
    assert_eq!(enqueue(&client, "x", json!({"n": 1})).await, new);
    let (code, text) = refusal(&client, REPLACE, &[&new, &json!({"n": 2})]).await;
    assert!(
        code == "55000" && text.contains("would change its key of gate one"),
        "{text}"
    );
    let unchanged = "SELECT state = 'queued' FROM rouse.jobs WHERE id = $1";
    assert!(is_true(&client, unchanged, &[&new]).await);
}
