//! Admin actions on jobs and queues: complete, fail, retry, reschedule, edit, delete, pause, purge.

mod edit;
mod queues;

use rouse::job::{Fence, JobId, Outcome};
use rouse::store::{JsonText, Locked, Renewal, Settlement, Store};
use rouse::worker::Settings;
use serde_json::{Value, json};
use tokio_postgres::Client;
use tokio_postgres::types::ToSql;

use crate::support::claims::orders;
use crate::support::worker::{
    SESSION_WAITS, TIMEOUT, TestWorker, enqueue, lease, show, until, until_true,
};
use crate::support::{Host, TestDb};

async fn claim(store: &Store, fence: i64) -> Vec<i64> {
    let orders = orders(store, 60_000).await;
    let claimed = store
        .claim(Fence(fence), &orders, 100, None)
        .await
        .unwrap()
        .jobs();
    claimed.iter().map(|job| job.id.0).collect()
}

async fn is_true(client: &Client, sql: &str, params: &[&(dyn ToSql + Sync)]) -> bool {
    let row = client.query_one(sql, params).await;
    row.unwrap_or_else(|error| panic!("{sql}: {error:?}"))
        .get(0)
}

/// The error's code, message and hint.
async fn refusal(client: &Client, sql: &str, params: &[&(dyn ToSql + Sync)]) -> (String, String) {
    let error = client.query(sql, params).await.expect_err(sql);
    let error = error.as_db_error().unwrap_or_else(|| panic!("{sql}"));
    let text = format!("{}; {}", error.message(), error.hint().unwrap_or_default());
    (error.code().code().to_string(), text)
}

async fn history(client: &Client, id: i64) -> Vec<(String, Option<Value>)> {
    let rows = client
        .query("SELECT event, detail FROM rouse.history($1)", &[&id])
        .await
        .unwrap();
    let rows = rows.iter().map(|row| (row.get(0), row.get(1)));
    rows.collect()
}

async fn events(client: &Client, id: i64) -> Vec<String> {
    let history = history(client, id).await;
    history.into_iter().map(|(event, _)| event).collect()
}

const COMPLETE: &str = "SELECT rouse.complete($1, $2)";

const FAIL: &str = "SELECT rouse.fail($1, $2)";

const DELETE: &str = "SELECT rouse.delete($1)";

const RETRY: &str = "SELECT rouse.retry($1)";

const RESCHEDULE: &str = "SELECT rouse.reschedule($1, $2::text::timestamptz)";

#[tokio::test]
async fn repeating_an_admin_action_that_ended_a_job_succeeds_and_a_different_one_is_refused() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (done, failed, deleted) = (
        enqueue(&client, "x", json!({})).await,
        enqueue(&client, "x", json!({})).await,
        enqueue(&client, "x", json!({})).await,
    );
    for _ in 0..2 {
        assert!(is_true(&client, COMPLETE, &[&done, &json!({"n": 1})]).await);
        assert!(is_true(&client, FAIL, &[&failed, &"by hand"]).await);
        assert!(is_true(&client, DELETE, &[&deleted]).await);
    }
    assert_eq!(show(&client, done).await.result, Some(json!({"n": 1})));
    assert_eq!(
        show(&client, failed).await.error,
        Some(json!({"kind": "admin", "message": "by hand"}))
    );
    let by = Some(json!({"by": "rouse"}));
    assert_eq!(
        history(&client, done).await[1..],
        [("succeeded".to_string(), by.clone())]
    );
    assert_eq!(
        history(&client, deleted).await[1..],
        [
            ("deleted".to_string(), by.clone()),
            ("cancelled".to_string(), by)
        ]
    );

    for (sql, params, expected) in [
        (
            COMPLETE,
            &[&done as &(dyn ToSql + Sync), &json!(2)][..],
            "succeeded, with a different result",
        ),
        (COMPLETE, &[&failed, &json!(2)], "ended as failed"),
        (
            FAIL,
            &[&failed, &"else"],
            "failed, with a different message",
        ),
        (FAIL, &[&done, &"else"], "ended as succeeded"),
        (DELETE, &[&done], "cannot be deleted: it has already ended"),
        (
            RESCHEDULE,
            &[&done, &None::<String>],
            "cannot be rescheduled: it has already ended",
        ),
    ] {
        let (code, text) = refusal(&client, sql, params).await;
        assert!(
            code == "55000" && text.contains(expected) && text.contains("rouse.retry("),
            "{sql}: {code} {text}"
        );
    }
    for (sql, params) in [
        (COMPLETE, &[&9999_i64 as &(dyn ToSql + Sync), &json!(2)][..]),
        (FAIL, &[&9999_i64, &"x"]),
        (DELETE, &[&9999_i64]),
        (RETRY, &[&9999_i64]),
        (RESCHEDULE, &[&9999_i64, &None::<String>]),
    ] {
        let (code, text) = refusal(&client, sql, params).await;
        assert!(
            code == "P0002" && text.contains("job 9999 does not exist, or is no longer kept"),
            "{sql}: {code} {text}"
        );
    }
    for (sql, code) in [
        ("SELECT rouse.complete(NULL)", "22023"),
        ("SELECT rouse.complete(1, NULL)", "22023"),
        (
            "SELECT rouse.complete(1, to_jsonb(repeat('x', 4194304)))",
            "54000",
        ),
        ("SELECT rouse.fail(1, '')", "22023"),
        ("SELECT rouse.fail(1, repeat('x', 16385))", "22023"),
        ("SELECT rouse.cancel(NULL)", "22023"),
        ("SELECT rouse.delete(NULL)", "22023"),
        ("SELECT rouse.retry(NULL)", "22023"),
        ("SELECT rouse.reschedule(NULL)", "22023"),
        ("SELECT rouse.reschedule(1, 'infinity')", "22023"),
        ("SELECT rouse.pause_queue(NULL)", "22023"),
        ("SELECT rouse.resume_queue('a b')", "22023"),
        ("SELECT rouse.purge_queue('')", "22023"),
        ("SELECT rouse.purge_queue('x', 0)", "22023"),
    ] {
        assert_eq!(refusal(&client, sql, &[]).await.0, code, "{sql}");
    }
}

#[tokio::test]
async fn a_running_job_can_be_completed_or_failed_but_not_rescheduled_deleted_or_retried() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let (a, b) = (
        enqueue(&client, "x", json!({})).await,
        enqueue(&client, "x", json!({})).await,
    );
    assert_eq!(claim(&store, 7).await, [a, b]);
    for (sql, params, expected) in [
        (DELETE, &[&a as &(dyn ToSql + Sync)][..], "rouse.cancel("),
        (RETRY, &[&a], "it is running"),
        (RESCHEDULE, &[&a, &None::<String>], "it is running"),
    ] {
        let (code, text) = refusal(&client, sql, params).await;
        assert!(code == "55000" && text.contains(expected), "{sql}: {text}");
    }
    assert!(is_true(&client, COMPLETE, &[&a, &json!(1)]).await);
    assert!(is_true(&client, FAIL, &[&b, &"no"]).await);
    // The outcomes of these attempts are refused.
    let late = store
        .settle(&[succeeded(a), succeeded(b)], Locked::Wait)
        .await
        .unwrap();
    assert!(late.accepted.is_empty(), "{late:?}");
    assert_eq!(
        events(&client, a).await,
        ["requested", "claimed", "succeeded"]
    );
    assert_eq!(show(&client, b).await.state, "failed");
}

fn succeeded(id: i64) -> Settlement {
    Settlement {
        id: rouse::job::JobId(id),
        fence: Fence(7),
        started_after: None,
        guest_run: None,
        handler: None,
        outcome: Outcome::Succeeded(JsonText("\"its own\"".into())),
        jobs: Vec::new(),
        trace: None,
    }
}

#[tokio::test]
async fn completing_a_job_during_its_settlement_waits_for_the_outcome() {
    let db = TestDb::new().await;
    let (mut holder, client, other) = (db.client().await, db.client().await, db.client().await);
    let id = enqueue(&client, "x", json!({})).await;
    let transaction = holder.transaction().await.unwrap();
    // Locks the row, as a settlement does.
    transaction
        .query("SELECT rouse.complete($1, '1')", &[&id])
        .await
        .unwrap();
    let (same, another): (&(dyn ToSql + Sync), &(dyn ToSql + Sync)) = (&json!(1), &json!(2));
    let repeated = async { is_true(&client, COMPLETE, &[&id, same]).await };
    let refused = async { refusal(&other, COMPLETE, &[&id, another]).await };
    let ends = async {
        let watcher = db.client().await;
        until_true(
            &watcher,
            "SELECT count(*) = 2 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
        )
        .await;
        transaction.commit().await.unwrap();
    };
    let (same, (code, _), ()) = tokio::join!(repeated, refused, ends);
    assert!(same);
    assert_eq!(code, "55000");
}

#[tokio::test]
async fn completing_a_running_job_stops_its_guest_at_once() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // The lease is renewed after 4 minutes: waiting for that would take too long.
    let settings = Settings {
        overrides: lease("test.sleep", 600),
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, settings).await;
    let id = enqueue(&client, "test.sleep", json!({"ms": 600_000})).await;
    until(&client, id, |job| job.state == "running").await;
    assert!(is_true(&client, COMPLETE, &[&id, &json!("from outside")]).await);
    // The worker waits until the guest has stopped.
    worker.drain().await;
    assert_eq!(show(&client, id).await.result, Some(json!("from outside")));
}

#[tokio::test]
async fn a_retry_repeats_the_job_and_only_one_is_live_at_a_time() {
    let db = TestDb::new().await;
    let (client, other) = (db.client().await, db.client().await);
    let old: i64 = client
        .query_one(
            "SELECT rouse.enqueue('x', '{\"n\": 1}', 'q', 'acme', 's', 'high', NULL, 3, 'key', '{gpu}')",
            &[],
        )
        .await
        .unwrap()
        .get(0);
    let (code, text) = refusal(&client, RETRY, &[&old]).await;
    assert!(code == "55000" && text.contains("it is queued"), "{text}");
    assert!(is_true(&client, FAIL, &[&old, &"no"]).await);
    let params: [&(dyn ToSql + Sync); 1] = [&old];
    let (first, second) = tokio::join!(
        client.query_one(RETRY, &params),
        other.query_one(RETRY, &params)
    );
    let (first, second): (i64, i64) = (first.unwrap().get(0), second.unwrap().get(0));
    assert_eq!(first, second);
    assert!(
        is_true(
            &client,
            "SELECT (a.handler, a.payload, a.queue, a.tenant, a.source, a.priority, a.max_attempts, a.unique_key, a.tags, a.id)
                  = (b.handler, b.payload, b.queue, b.tenant, b.source, b.priority, b.max_attempts, b.unique_key, b.tags, b.retried_from)
             FROM rouse.job($1) AS a, rouse.job($2) AS b",
            &[&old, &first]
        )
        .await
    );
    assert_eq!(
        events(&client, old).await,
        ["requested", "failed", "retried"]
    );
    // A retry is refused while another job has the unique key.
    assert!(is_true(&client, DELETE, &[&first]).await);
    client
        .query(
            "SELECT rouse.enqueue('x', unique_key => 'key', tenant => 'acme')",
            &[],
        )
        .await
        .unwrap();
    let (code, text) = refusal(&client, RETRY, &[&old]).await;
    assert!(
        code == "55000" && text.contains("unique key 'key'"),
        "{text}"
    );
}

#[tokio::test]
async fn a_queued_job_can_be_rescheduled_later_and_earlier() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = enqueue(&client, "x", json!({})).await;
    let turn = "SELECT turn FROM rouse.job WHERE id = $1";
    let now = None::<String>;
    let (first, later): (Option<i64>, _) = (
        client.query_one(turn, &[&id]).await.unwrap().get(0),
        Some("2999-01-01 00:00Z".to_string()),
    );
    assert!(is_true(&client, RESCHEDULE, &[&id, &now]).await);
    let kept: Option<i64> = client.query_one(turn, &[&id]).await.unwrap().get(0);
    assert_eq!(kept, first, "a ready job keeps its turn");
    for _ in 0..2 {
        assert!(is_true(&client, RESCHEDULE, &[&id, &later]).await);
    }
    assert!(claim(&store, 7).await.is_empty());
    assert!(
        is_true(
            &client,
            RESCHEDULE,
            &[&id, &Some("2000-01-01 00:00Z".to_string())]
        )
        .await
    );
    assert_eq!(claim(&store, 7).await, [id]);
    assert_eq!(
        events(&client, id).await,
        ["requested", "rescheduled", "rescheduled", "claimed"]
    );
}

#[tokio::test]
async fn the_commands_perform_admin_actions_and_report_them_by_exit_code() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let url = db.url();
    let rouse = |args: &[&str]| {
        let (status, output) = Host::rouse(args, &[("DATABASE_URL", &url)]).exit(TIMEOUT);
        (status.code().unwrap(), output)
    };
    let ids: Vec<String> = {
        let mut ids = Vec::new();
        for _ in 0..4 {
            ids.push(enqueue(&client, "x", json!({})).await.to_string());
        }
        ids
    };
    let [a, b, c, d] = [&ids[0], &ids[1], &ids[2], &ids[3]].map(String::as_str);
    for (args, code, expected) in [
        (&["job", "complete", a, "{\"n\": 1}"][..], 0, "is succeeded"),
        (&["job", "complete", a, "2"], 6, "with a different result"),
        (&["job", "complete", a, "{"], 1, "the result is not JSON"),
        (&["job", "cancel", a], 6, "has ended as succeeded"),
        (&["job", "cancel", "9999"], 3, "no job 9999"),
        (
            &["job", "cancel", b, "--json"],
            0,
            "\"state\":\"cancelled\"",
        ),
        (&["job", "fail", c, "by hand"], 0, "is failed"),
        (&["job", "retry", c, "--json"], 0, "\"retried_from\""),
        (&["job", "retry", "9999"], 3, "job 9999 does not exist"),
        (&["job", "reschedule", d, "--in", "2h"], 0, "is queued"),
        (
            &["job", "reschedule", d, "--at", "2999-01-01T00:00Z"],
            0,
            "is queued",
        ),
        (&["job", "reschedule", d], 0, "is queued"),
        (&["job", "reschedule", a], 6, "cannot be rescheduled"),
        (&["job", "show", c], 0, "by rouse: by hand"),
        (&["job", c], 0, "by rouse: by hand"),
        (&["job", "show", "9999"], 3, "no job 9999"),
        (&["job", "ls", "--state", "failed"], 0, c),
        (&["job", "ls", "--limit", "1", "--json"], 0, "\"more\":true"),
        (&["job", "ls", "--limit", "1"], 0, "there are more"),
        (&["queue", "pause", "default"], 0, "has been paused since"),
        (
            &["queue", "pause", "never"],
            0,
            "nothing was enqueued recently",
        ),
        (&["queue", "ls"], 0, "paused since"),
        (&["queue", "ls", "--json"], 0, "\"ready\":2"),
        (&["queue", "resume", "default"], 0, "is resumed"),
        (&["queue", "resume", "default"], 0, "was not paused"),
        (&["queue", "purge", "default"], 2, "--confirm"),
        (
            &["queue", "purge", "default", "--yes", "--json"],
            0,
            "\"purged\":2",
        ),
        (&["queue", "pause", "a b"], 1, "is not a queue name"),
        (
            &["queue", "pause", "a b", "other"],
            1,
            "queue other has been paused since",
        ),
        (&["job", "delete", d], 0, "is cancelled"),
    ] {
        let (exit, output) = rouse(args);
        assert!(
            exit == code && output.contains(expected),
            "{args:?}: exit {exit}: {output}"
        );
    }
}

/// Renews the lease of a job that this fence has claimed.
async fn renew(store: &Store, id: i64, fence: i64) {
    let renewal = Renewal {
        id: JobId(id),
        fence: Fence(fence),
        lease_ms: 60_000,
    };
    let responses = store.renew(&[renewal]).await.unwrap();
    assert_eq!(responses, [(JobId(id), None)]);
}

/// Gives a claim back.
async fn release(store: &Store, id: i64, fence: i64) {
    let settlement = Settlement {
        id: JobId(id),
        fence: Fence(fence),
        started_after: None,
        guest_run: None,
        handler: None,
        outcome: Outcome::Released,
        jobs: Vec::new(),
        trace: None,
    };
    let settled = store.settle(&[settlement], Locked::Wait).await.unwrap();
    assert!(settled.accepted.contains(&JobId(id)));
}

#[tokio::test]
async fn a_history_lists_attempts_in_order_and_the_end_last() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = enqueue(&client, "x", json!({})).await;
    // A released claim does not count, so the job ends with fewer attempts than it had claims.
    claim(&store, 1).await;
    renew(&store, id, 1).await;
    release(&store, id, 1).await;
    let reschedule = "SELECT rouse.reschedule($1, $2::text::timestamptz)";
    assert!(is_true(&client, reschedule, &[&id, &Some("2100-01-01")]).await);
    assert!(is_true(&client, reschedule, &[&id, &None::<&str>]).await);
    claim(&store, 2).await;
    renew(&store, id, 2).await;
    release(&store, id, 2).await;
    assert!(is_true(&client, COMPLETE, &[&id, &json!(1)]).await);
    let expected = [
        "requested",
        "renewed",
        "released",
        "rescheduled",
        "rescheduled",
        "renewed",
        "released",
        "succeeded",
    ];
    assert_eq!(events(&client, id).await, expected);
}

#[tokio::test]
async fn an_admin_end_that_waits_for_a_renewal_is_recorded_after_it() {
    let db = TestDb::new().await;
    let (mut holder, client, store) = (db.client().await, db.client().await, db.worker().await);
    let id = enqueue(&client, "x", json!({})).await;
    claim(&store, 1).await;
    // Another transaction holds the row; the end of the job is requested and waits.
    let transaction = holder.transaction().await.unwrap();
    let lock = "SELECT worker FROM rouse.job WHERE id = $1 FOR NO KEY UPDATE";
    let worker: i64 = transaction.query_one(lock, &[&id]).await.unwrap().get(0);
    let other = db.client().await;
    let ending = tokio::spawn(async move { is_true(&other, COMPLETE, &[&id, &json!(1)]).await });
    until_true(&client, SESSION_WAITS).await;
    // The transaction that holds the row renews the lease.
    transaction
        .execute(
            "INSERT INTO rouse.record (at, job, event, attempt, worker) VALUES (clock_timestamp(), $1, 'renewed', 1, $2)",
            &[&id, &worker],
        )
        .await
        .unwrap();
    transaction.commit().await.unwrap();
    assert!(ending.await.unwrap());
    assert_eq!(
        events(&client, id).await,
        ["requested", "claimed", "renewed", "succeeded"]
    );
    let is_in_order = "SELECT bool_and(at >= before) FROM (
        SELECT at, lag(at, 1, at) OVER (ORDER BY ordinality) AS before FROM rouse.history($1) WITH ORDINALITY) AS h";
    assert!(is_true(&client, is_in_order, &[&id]).await);
}
