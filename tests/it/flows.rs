//! Graphs of jobs that are enqueued in one call.

mod counts;
mod retries;

use rouse::job::{ErrorKind, Outcome};
use rouse::store::{Locked, Store};
use rouse::worker::Settings;
use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::claims::{claim, error, result, settlement};
use crate::support::worker::{SESSION_WAITS, TestWorker, enqueue, events, until_true};

/// Enqueues a flow.
async fn enqueue_flow(client: &Client, jobs: Value) -> i64 {
    let row = client
        .query_one("SELECT rouse.enqueue_flow($1)", &[&jobs])
        .await;
    row.unwrap().get(0)
}

/// The error message of a graph that is refused.
async fn refused(client: &Client, jobs: Value) -> String {
    let error = client
        .query_one("SELECT rouse.enqueue_flow($1)", &[&jobs])
        .await
        .unwrap_err();
    error
        .as_db_error()
        .expect("an error of the database")
        .message()
        .into()
}

/// The jobs of a flow as `name state`, in order.
async fn states(client: &Client, flow: i64) -> Vec<String> {
    let rows = client
        .query("SELECT name || ' ' || state FROM rouse.flow($1)", &[&flow])
        .await
        .unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

/// Calls a function of flows that returns a number.
async fn act(client: &Client, function: &str, flow: i64) -> i32 {
    let row = client
        .query_one(&format!("SELECT rouse.{function}($1)"), &[&flow])
        .await;
    row.unwrap().get(0)
}

/// The id of the job of a flow with this name.
async fn job_of(client: &Client, flow: i64, name: &str) -> i64 {
    let sql = "SELECT job FROM rouse.flow($1) WHERE name = $2";
    client.query_one(sql, &[&flow, &name]).await.unwrap().get(0)
}

/// Claims the ready jobs and settles those whose id is in `failing` as failed, the others as succeeded.
async fn settle_ready(store: &Store, failing: &[i64]) {
    let jobs = claim(store, 100).await;
    let outcome = |id: i64| match failing.contains(&id) {
        true => Outcome::Failed(error(ErrorKind::GuestError)),
        false => result("1"),
    };
    let batch: Vec<_> = jobs
        .iter()
        .map(|job| settlement(job, outcome(job.id.0)))
        .collect();
    store.settle(&batch, Locked::Wait).await.unwrap();
}

fn order() -> Value {
    json!([
        {"name": "ship", "handler": "shop.ship", "after": {"paid": "charge", "stock": "reserve"}},
        {"name": "charge", "handler": "shop.charge", "payload": {"order": 17}},
        {"name": "reserve", "handler": "shop.reserve", "queue": "stock"},
        {"name": "refund", "handler": "shop.refund", "after": {"ship": {"job": "ship", "on_failure": "wait"}}},
    ])
}

#[tokio::test]
async fn a_flow_runs_in_the_order_of_its_graph() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let flow = enqueue_flow(&client, order()).await;
    assert_eq!(
        states(&client, flow).await,
        [
            "charge queued",
            "reserve queued",
            "ship queued",
            "refund queued"
        ]
    );
    for expected in ["1 2", "0 3", "0 4"] {
        settle_ready(&store, &[]).await;
        let sql = "SELECT waiting || ' ' || succeeded FROM rouse.flows WHERE id = $1";
        let row = client.query_one(sql, &[&flow]).await.unwrap();
        assert_eq!(row.get::<_, String>(0), expected);
    }
    let sql = "SELECT state, jobs, finished_at IS NOT NULL FROM rouse.flows WHERE id = $1";
    let row = client.query_one(sql, &[&flow]).await.unwrap();
    assert_eq!(
        (row.get::<_, String>(0), row.get::<_, i64>(1), row.get(2)),
        ("succeeded".into(), 4, true)
    );
}

#[tokio::test]
async fn the_arguments_of_the_flow_apply_to_jobs_that_have_none() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let flow: i64 = client
        .query_one(
            "SELECT rouse.enqueue_flow($1, name => 'nightly', queue => 'q', tenant => 't', source => 's', priority => 'low')",
            &[&json!([
                {"name": "a", "handler": "x", "max_attempts": 3, "lease": "1 minute", "timeout": "2 minutes", "grants": {"memory_mb": 8},
                 "run_at": "2999-01-01T00:00:00Z", "tags": ["gpu"], "unique_key": "k"},
                {"name": "b", "handler": "x", "queue": "other", "tenant": "u", "source": "v", "priority": "high"},
            ])],
        )
        .await
        .unwrap()
        .get(0);
    let rows = client
        .query(
            "SELECT concat_ws(' ', j.queue, j.tenant, j.source, j.priority, j.tags, j.max_attempts, j.lease_ms, j.timeout_ms, j.grants,
                              extract(year FROM j.available_at AT TIME ZONE 'UTC'), j.unique_key)
             FROM rouse.flow($1) AS f JOIN rouse.jobs AS j ON j.id = f.job ORDER BY f.name",
            &[&flow],
        )
        .await
        .unwrap();
    let a: String = rows[0].get(0);
    assert_eq!(
        a,
        "q t s low {gpu} 3 60000 120000 {\"memory_mb\": 8} 2999 k"
    );
    let b: String = rows[1].get(0);
    assert!(b.starts_with("other u v high {} "), "{b}");
    let row = client
        .query_one("SELECT name, tenant FROM rouse.flows", &[])
        .await
        .unwrap();
    assert_eq!((row.get(0), row.get(1)), ("nightly", "t"));
}

#[tokio::test]
async fn jobs_of_a_flow_may_wait_for_jobs_outside_it_and_jobs_outside_for_them() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let outside = enqueue(&client, "x", json!(1)).await;
    let jobs = json!([{"name": "a", "handler": "x", "after": [outside]}]);
    let flow = enqueue_flow(&client, jobs).await;
    let a = job_of(&client, flow, "a").await;
    let sql = "SELECT rouse.enqueue('x', after => jsonb_build_array($1::bigint))";
    let last: i64 = client.query_one(sql, &[&a]).await.unwrap().get(0);
    for id in [outside, a, last] {
        let jobs = claim(&store, 10).await;
        assert_eq!(jobs.iter().map(|job| job.id.0).collect::<Vec<_>>(), [id]);
        store
            .settle(&[settlement(&jobs[0], result("1"))], Locked::Wait)
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn invalid_graphs_are_refused_with_the_name_of_the_job_and_nothing_is_enqueued() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let a = |more: Value| {
        let mut job = json!({"name": "a", "handler": "x"});
        for (key, value) in more.as_object().unwrap() {
            job[key] = value.clone();
        }
        json!([job])
    };
    let cycle = json!([
        {"name": "start", "handler": "x"},
        {"name": "a", "handler": "x", "after": ["start", "c"]},
        {"name": "b", "handler": "x", "after": ["a"]},
        {"name": "c", "handler": "x", "after": ["b"]},
        {"name": "end", "handler": "x", "after": ["c"]},
    ]);
    let large: Vec<Value> = (0..30)
        .map(|n| json!({"name": n.to_string(), "handler": "x", "after": [((n + 29) % 30).to_string()]}))
        .collect();
    let many: Vec<Value> = (0..10_001)
        .map(|n| json!({"name": n.to_string(), "handler": "x"}))
        .collect();
    for (jobs, message) in [
        (
            json!({}),
            "jobs must be an array of 1 to 10000 objects, not {}",
        ),
        (
            json!([]),
            "jobs must be an array of 1 to 10000 objects, not 0 of them",
        ),
        (
            json!(many),
            "jobs must be an array of 1 to 10000 objects, not 10001 of them",
        ),
        (
            json!([7]),
            "job 1 must be an object with a name of 1 to 200 characters, not 7",
        ),
        (
            json!([{"handler": "x"}]),
            "job 1 must be an object with a name of 1 to 200 characters, not {\"handler\": \"x\"}",
        ),
        (
            json!([{"name": "a", "handler": "x"}, {"name": "a", "handler": "x"}]),
            "two jobs have the name 'a'",
        ),
        (
            a(json!({"retries": 3})),
            "job 'a' has the unknown key 'retries'",
        ),
        (
            a(json!({"trace": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"})),
            "job 'a' has the unknown key 'trace'",
        ),
        (
            a(json!({"after": "b"})),
            "after of job 'a' must be an array or an object, not \"b\"",
        ),
        (
            a(json!({"after": ["b"]})),
            "job 'a' waits for 'b', which is not in the flow",
        ),
        (
            a(json!({"after": [99_999_999]})),
            "job 'a': after names job 99999999 (as '99999999'), which does not exist or is no longer kept",
        ),
        (
            a(json!({"after": ["a", "a"]})),
            "its jobs wait for each other in a cycle: 'a' → 'a'",
        ),
        (
            json!([{"name": "1", "handler": "x"}, {"name": "b", "handler": "x", "after": ["1", 1]}]),
            "after of job 'b' has two entries with the name '1'",
        ),
        (
            a(json!({"tags": "gpu"})),
            "tags of job 'a' must be an array, not \"gpu\"",
        ),
        (
            a(json!({"after": [true]})),
            "job 'a': entry 'true' of after must be a job id, not true",
        ),
        (
            a(json!({"handler": null})),
            "job 'a': null is not a handler name",
        ),
        (
            a(json!({"max_attempts": "many"})),
            "job 'a': invalid input syntax for type integer: \"many\"",
        ),
        (
            a(json!({"lease": "1 second"})),
            "job 'a': lease must be between 2 seconds and 1 day, not 00:00:01",
        ),
        (
            a(json!({"after": ["a"]})),
            "its jobs wait for each other in a cycle: 'a' → 'a'",
        ),
        (
            cycle,
            "its jobs wait for each other in a cycle: 'a' → 'b' → 'c' → 'a'",
        ),
        (
            json!(large),
            "its jobs wait for each other in a cycle: '0' → '1' → '2' → '3' → '4' → '5' → '6' → '7' → '8' → '9' → '10' → …",
        ),
    ] {
        assert_eq!(
            refused(&client, jobs).await,
            format!("rouse.enqueue_flow: {message}")
        );
    }
    let nothing = "SELECT count(*) FROM (SELECT id FROM rouse.flow UNION ALL SELECT id FROM rouse.job UNION ALL SELECT job FROM rouse.dependency) AS x";
    assert_eq!(
        client
            .query_one(nothing, &[])
            .await
            .unwrap()
            .get::<_, i64>(0),
        0
    );
}

#[tokio::test]
async fn a_retry_of_a_flow_repeats_what_failed_and_what_was_cancelled_because_of_it() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let flow = enqueue_flow(&client, order()).await;
    let charge = job_of(&client, flow, "charge").await;
    settle_ready(&store, &[charge]).await;
    assert_eq!(
        states(&client, flow).await,
        [
            "charge failed",
            "reserve succeeded",
            "ship cancelled",
            "refund queued"
        ]
    );
    let sql = "SELECT state, stuck FROM rouse.flows WHERE id = $1";
    let row = client.query_one(sql, &[&flow]).await.unwrap();
    assert_eq!((row.get::<_, &str>(0), row.get::<_, i64>(1)), ("live", 1));
    assert_eq!(act(&client, "retry_flow", flow).await, 2);
    assert_eq!(act(&client, "retry_flow", flow).await, 0, "they are live");
    for _ in 0..3 {
        settle_ready(&store, &[]).await;
    }
    assert_eq!(
        states(&client, flow).await,
        [
            "charge succeeded",
            "reserve succeeded",
            "ship succeeded",
            "refund succeeded"
        ]
    );
    let reserved = "SELECT count(*) FROM rouse.finished WHERE flow_name = 'reserve'";
    assert_eq!(
        client
            .query_one(reserved, &[])
            .await
            .unwrap()
            .get::<_, i64>(0),
        1
    );
}

#[tokio::test]
async fn a_flow_is_cancelled_in_batches_that_leave_records() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let flow = enqueue_flow(&client, order()).await;
    let running = claim(&store, 1).await.remove(0);
    let cancel = "SELECT rouse.cancel_flow($1, max => 2)";
    for expected in [2, 2, 0] {
        let row = client.query_one(cancel, &[&flow]).await.unwrap();
        assert_eq!(row.get::<_, i32>(0), expected);
    }
    assert_eq!(
        states(&client, flow).await,
        [
            "charge cancelled",
            "reserve cancelled",
            "ship cancelled",
            "refund cancelled"
        ]
    );
    let settled = store
        .settle(&[settlement(&running, result("1"))], Locked::Wait)
        .await
        .unwrap();
    assert!(settled.accepted.is_empty());
    let ship = job_of(&client, flow, "ship").await;
    assert_eq!(events(&client, ship).await, ["requested", "cancelled"]);
    let records = "SELECT array_agg(detail ->> 'jobs') FROM rouse.record WHERE event = 'flow_cancelled' AND who = session_user";
    let row = client.query_one(records, &[]).await.unwrap();
    assert_eq!(row.get::<_, Vec<String>>(0), ["2", "2"]);
    let outbox = "SELECT array_agg(event) FROM rouse.audit_outbox";
    let row = client.query_one(outbox, &[]).await.unwrap();
    assert_eq!(
        row.get::<_, Vec<String>>(0),
        ["flow_cancelled", "flow_cancelled"]
    );
    let left = "SELECT NOT EXISTS (SELECT FROM rouse.dependency) AND NOT EXISTS (SELECT FROM rouse.pending_release)";
    until_true(&client, left).await;
    let error = client
        .query_one("SELECT rouse.cancel_flow($1, 0)", &[&flow])
        .await
        .unwrap_err();
    assert_eq!(
        error.as_db_error().unwrap().message(),
        "rouse.cancel_flow: max must be at least 1, not 0"
    );
}

/// The deletion waits for the row of a job whose chain another job is about to continue.
#[tokio::test]
async fn a_job_that_replaces_another_while_its_flow_is_deleted_is_deleted_too() {
    let db = TestDb::new().await;
    let (mut other, client, deleting) = (db.client().await, db.client().await, db.client().await);
    let jobs = json!([{"name": "a", "handler": "x"}, {"name": "b", "handler": "x"}]);
    let flow = enqueue_flow(&client, jobs).await;
    let a = job_of(&client, flow, "a").await;
    let editing = other.transaction().await.unwrap();
    let edit = "SELECT rouse.replace_payload($1, '2')";
    editing.query_one(edit, &[&a]).await.unwrap();
    let deleted = tokio::spawn(async move {
        let delete = "SELECT rouse.delete_flow($1)";
        let row = deleting.query_one(delete, &[&flow]).await.unwrap();
        row.get::<_, i32>(0)
    });
    until_true(&client, SESSION_WAITS).await;
    editing.commit().await.unwrap();
    assert_eq!(deleted.await.unwrap(), 2);
    let live = client.query("SELECT FROM rouse.job", &[]).await.unwrap();
    assert!(live.is_empty());
}

#[tokio::test]
async fn a_flow_is_deleted_unless_one_of_its_jobs_runs_or_others_wait_for_it() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let flow = enqueue_flow(
        &client,
        json!([{"name": "a", "handler": "x"}, {"name": "b", "handler": "x", "after": ["a"]}]),
    )
    .await;
    let b = job_of(&client, flow, "b").await;
    let sql = "SELECT rouse.enqueue('x', after => jsonb_build_array($1::bigint))";
    let outside: i64 = client.query_one(sql, &[&b]).await.unwrap().get(0);
    let delete = "SELECT rouse.delete_flow($1)";
    let error = client.query_one(delete, &[&flow]).await.unwrap_err();
    assert_eq!(
        error.as_db_error().unwrap().message(),
        format!("rouse: flow {flow} cannot be deleted: job {outside} waits for it")
    );
    client
        .execute("SELECT rouse.delete($1)", &[&outside])
        .await
        .unwrap();
    let job = claim(&store, 1).await.remove(0);
    let error = client.query_one(delete, &[&flow]).await.unwrap_err();
    assert_eq!(
        error.as_db_error().unwrap().message(),
        format!(
            "rouse: flow {flow} cannot be deleted: job {} is running",
            job.id.0
        )
    );
    store
        .settle(&[settlement(&job, Outcome::Released)], Locked::Wait)
        .await
        .unwrap();
    assert_eq!(act(&client, "delete_flow", flow).await, 2);
    assert_eq!(states(&client, flow).await, ["a cancelled", "b cancelled"]);
    assert_eq!(
        events(&client, b).await,
        ["requested", "deleted", "cancelled"]
    );
    let error = client
        .query_one(delete, &[&99_999_999_i64])
        .await
        .unwrap_err();
    assert_eq!(
        error.as_db_error().unwrap().message(),
        "rouse: flow 99999999 does not exist, or is no longer kept"
    );
}

#[tokio::test]
async fn a_worker_runs_a_flow_of_ten_thousand_jobs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut jobs =
        vec![json!({"name": "first", "handler": "test.echo", "payload": {"text": "first"}})];
    let names: Vec<String> = (1..9_999).map(|n| format!("n{n}")).collect();
    for name in &names {
        jobs.push(json!({"name": name, "handler": "test.echo", "payload": {"text": name}, "after": ["first"]}));
    }
    jobs.push(json!({"name": "last", "handler": "test.echo", "payload": {"text": "last"}, "after": names}));
    let flow = enqueue_flow(&client, json!(jobs)).await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    until_true(
        &client,
        &format!("SELECT state = 'succeeded' FROM rouse.flows WHERE id = {flow}"),
    )
    .await;
    let row = client
        .query_one(
            "SELECT jobs, succeeded FROM rouse.flows WHERE id = $1",
            &[&flow],
        )
        .await
        .unwrap();
    assert_eq!(
        (row.get::<_, i64>(0), row.get::<_, i64>(1)),
        (10_000, 10_000)
    );
    worker.drain().await;
}

/// There may be any number of older flows and signals that are kept.
#[tokio::test]
async fn maintenance_deletes_flows_without_kept_jobs_and_signals_to_ended_ones() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "SELECT count(rouse.enqueue_flow('[{\"name\": \"a\", \"handler\": \"x\"}]')) FROM generate_series(1, 3000);
             INSERT INTO rouse.flow (requested_at, jobs) SELECT now(), 1 FROM generate_series(1, 500);
             UPDATE rouse.flow SET requested_at = now() - interval '400 days';
             INSERT INTO rouse.flow (requested_at, jobs) VALUES (now(), 1);
             INSERT INTO rouse.signal (job, name, payload, at)
                 SELECT j.id, 'go', '1', now() - interval '2 hours' FROM rouse.job AS j, generate_series(1, 10);
             INSERT INTO rouse.signal (job, name, payload, at)
                 SELECT 0, 'go', '1', now() - interval '2 hours' FROM generate_series(1, 500);
             INSERT INTO rouse.signal (job, name, payload, at) VALUES (0, 'go', '1', now());",
        )
        .await
        .unwrap();
    let worker = TestWorker::start(&db, Settings::default()).await;
    until_true(
        &client,
        "SELECT (SELECT count(*) FROM rouse.flow) = 3001 AND (SELECT count(*) FROM rouse.signal) = 30001",
    )
    .await;
    let left = "SELECT count(*) FROM rouse.flow AS f JOIN rouse.job AS j ON j.flow = f.id";
    let row = client.query_one(left, &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 3000);
    worker.drain().await;
}

#[tokio::test]
async fn a_flow_has_a_name_of_at_most_200_characters_and_hints_are_never_empty() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let jobs = json!([{"name": "a", "handler": "x", "max_attempts": "many", "tags": null}]);
    for name in ["", &"n".repeat(201)] {
        let sql = "SELECT rouse.enqueue_flow($1, name => $2)";
        let error = client.query_one(sql, &[&jobs, &name]).await.unwrap_err();
        let error = error.as_db_error().unwrap();
        assert_eq!(
            error.message(),
            "rouse.enqueue_flow: name must have 1 to 200 characters, or be left out"
        );
    }
    let error = client
        .query_one("SELECT rouse.enqueue_flow($1)", &[&jobs])
        .await;
    let error = error.unwrap_err();
    assert_eq!(
        error.as_db_error().unwrap().hint(),
        Some("Nothing was enqueued.")
    );
}

#[tokio::test]
async fn a_live_job_with_the_unique_key_replaces_a_job_of_the_flow() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let sql = "SELECT rouse.enqueue('x', unique_key => 'k')";
    let live: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
    let jobs = json!([
        {"name": "a", "handler": "x", "unique_key": "k"},
        {"name": "b", "handler": "x", "after": ["a"]},
    ]);
    let flow = enqueue_flow(&client, jobs).await;
    let sql = "SELECT name, waits_for FROM rouse.flow($1)";
    let row = client.query_one(sql, &[&flow]).await.unwrap();
    assert_eq!((row.get(0), row.get(1)), ("b", vec![live]));
}

#[tokio::test]
async fn a_job_waits_once_for_two_jobs_of_its_flow_that_share_a_unique_key() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let jobs = json!([
        {"name": "a", "handler": "x", "unique_key": "k"},
        {"name": "b", "handler": "x", "unique_key": "k"},
        {"name": "c", "handler": "x", "after": {"a": {"job": "a", "on_failure": "run"}, "b": "b"}},
    ]);
    let flow = enqueue_flow(&client, jobs).await;
    let a = job_of(&client, flow, "a").await;
    let sql = "SELECT after, waits_for FROM rouse.flow($1) WHERE name = 'c'";
    let row = client.query_one(sql, &[&flow]).await.unwrap();
    let after = json!({"a": {"job": a, "on_failure": "run"}, "b": a});
    assert_eq!(row.get::<_, Value>(0), after);
    assert_eq!(row.get::<_, Vec<i64>>(1), [a]);
    // The entry `a` of c lets it run after a failure; the entry `b` does not.
    settle_ready(&store, &[a]).await;
    assert_eq!(states(&client, flow).await, ["a failed", "c cancelled"]);
    while act(&client, "retry_flow", flow).await > 0 {}
    assert_eq!(states(&client, flow).await, ["a queued", "c queued"]);
    for _ in 0..2 {
        settle_ready(&store, &[]).await;
    }
    assert_eq!(states(&client, flow).await, ["a succeeded", "c succeeded"]);
}

#[tokio::test]
async fn a_cancellation_waits_for_a_job_that_is_locked_instead_of_reporting_success() {
    let db = TestDb::new().await;
    let (mut other, client) = (db.client().await, db.client().await);
    let flow = enqueue_flow(&client, json!([{"name": "a", "handler": "x"}])).await;
    let a = job_of(&client, flow, "a").await;
    let producer = other.transaction().await.unwrap();
    producer
        .execute(
            "SELECT rouse.enqueue('x', after => jsonb_build_array($1::bigint))",
            &[&a],
        )
        .await
        .unwrap();
    let cancelled = cancel_until_it_waits(&db, flow).await;
    producer.rollback().await.unwrap();
    assert_eq!(cancelled.await.unwrap(), 1);
    assert_eq!(states(&client, flow).await, ["a cancelled"]);
}

#[tokio::test]
async fn a_cancellation_that_meets_the_end_of_a_job_cancels_the_jobs_that_it_releases() {
    let db = TestDb::new().await;
    let (mut other, client) = (db.client().await, db.client().await);
    let jobs = json!([
        {"name": "a", "handler": "x"},
        {"name": "b", "handler": "x", "after": ["a"]},
    ]);
    let flow = enqueue_flow(&client, jobs).await;
    let a = job_of(&client, flow, "a").await;
    let end = other.transaction().await.unwrap();
    end.execute("SELECT rouse.complete($1)", &[&a])
        .await
        .unwrap();
    let cancelled = cancel_until_it_waits(&db, flow).await;
    end.commit().await.unwrap();
    assert_eq!(cancelled.await.unwrap(), 1);
    assert_eq!(states(&client, flow).await, ["a succeeded", "b cancelled"]);
}

#[tokio::test]
async fn a_retry_of_a_flow_leaves_out_jobs_that_wait_for_a_failed_job_outside_the_flow() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let outside = enqueue(&client, "x", json!(1)).await;
    let flow = enqueue_flow(
        &client,
        json!([{"name": "a", "handler": "x", "after": [outside]}]),
    )
    .await;
    settle_ready(&store, &[outside]).await;
    assert_eq!(states(&client, flow).await, ["a cancelled"]);
    assert_eq!(act(&client, "retry_flow", flow).await, 0);
    client
        .execute("SELECT rouse.retry($1)", &[&outside])
        .await
        .unwrap();
    assert_eq!(act(&client, "retry_flow", flow).await, 1);
}

/// Starts to cancel the flow, and returns once the cancellation waits for a lock.
async fn cancel_until_it_waits(db: &TestDb, flow: i64) -> tokio::task::JoinHandle<i32> {
    let (operator, client) = (db.client().await, db.client().await);
    let cancelled = tokio::spawn(async move { act(&operator, "cancel_flow", flow).await });
    until_true(&client, SESSION_WAITS).await;
    cancelled
}
