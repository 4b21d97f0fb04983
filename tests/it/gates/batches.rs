//! Batches: several jobs in one attempt.

mod claims;

use std::collections::BTreeMap;
use std::sync::Arc;

use rouse::http::install_metrics;
use rouse::job::{AbortReason, RunEnd};
use rouse::sandbox::Catalog;
use rouse::worker::{AttemptInfo, Middleware, Next, Parts, Running, Settings};
use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::worker::{
    TestWorker, cancel, ended, events_at_any_speed, guests_dir, sandbox, until, until_true,
};

use super::set_gate;

/// The handler that takes batches: of four jobs, or of the jobs that are ready after 400 ms.
async fn catalog() -> Arc<Catalog> {
    let folder = guests_dir().with_file_name("batch");
    let catalog = Catalog::open(sandbox(), folder).await;
    Arc::new(catalog.expect("the guest loads"))
}

/// A worker with that handler.
async fn worker(db: &TestDb, slots: usize) -> TestWorker {
    let settings = Settings {
        slots,
        ..Settings::default()
    };
    TestWorker::start_on(db, settings, catalog().await)
}

/// A database in which a worker has set the gate of the handler.
async fn started(slots: usize) -> (TestDb, Client, TestWorker) {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = worker(&db, slots).await;
    until_true(
        &client,
        "SELECT EXISTS (SELECT FROM rouse.gate WHERE name = 'batch.any/batch')",
    )
    .await;
    (db, client, worker)
}

/// Enqueues jobs with these payloads in one transaction, and returns their ids.
async fn enqueue_all(client: &Client, payloads: &[Value], arguments: &str) -> Vec<i64> {
    let sql = format!(
        "SELECT rouse.enqueue('batch.any', p.payload{arguments}) FROM jsonb_array_elements($1) WITH ORDINALITY AS p(payload, n)"
    );
    let rows = client.query(&sql, &[&json!(payloads)]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

/// The payload of a job for which the handler does this.
fn does(what: &str) -> Value {
    json!({"does": what})
}

/// The results of these jobs, which succeed.
async fn results(client: &Client, ids: &[i64]) -> Vec<Value> {
    let mut results = Vec::new();
    for id in ids {
        let job = ended(client, *id).await;
        assert_eq!(job.state, "succeeded", "{job:?}");
        results.push(job.result.unwrap());
    }
    results
}

/// The kind of the error of a job that fails: the handler's own, if it has one.
async fn error_kind(client: &Client, id: i64) -> Value {
    let job = ended(client, id).await;
    assert_eq!(job.state, "failed", "{job:?}");
    let error = job.error.unwrap();
    match &error["guest_kind"] {
        Value::Null => error["kind"].clone(),
        own => own.clone(),
    }
}

#[tokio::test]
async fn jobs_of_a_tenant_run_in_one_attempt_each_with_its_own_outcome() {
    let (_db, client, worker) = started(2).await;
    let a = enqueue_all(
        &client,
        &[
            does("succeeds"),
            does("fails"),
            does("succeeds"),
            does("succeeds"),
        ],
        ", tenant => 'a'",
    )
    .await;
    let b = enqueue_all(&client, &vec![json!({}); 4], ", tenant => 'b'").await;
    let rest = enqueue_all(&client, &vec![json!({}); 2], ", tenant => 'b'").await;
    let alone = enqueue_all(&client, &[json!({})], ", tenant => 'c'").await;
    let none = enqueue_all(&client, &[json!({}), json!({})], "").await;

    assert_eq!(error_kind(&client, a[1]).await, "own");
    for (ids, size, first, tenant) in [
        (&[a[0], a[2], a[3]][..], 4, a[0], json!("a")),
        (&b, 4, b[0], json!("b")),
        (&rest, 2, rest[0], json!("b")),
        (&alone, 1, alone[0], json!("c")),
        (&none, 2, none[0], json!(null)),
    ] {
        for result in results(&client, ids).await {
            let expected = json!({"size": size, "first": first, "attempt": 1, "tenant": tenant});
            assert_eq!(result, expected);
        }
    }
    for id in [a[0], a[1], alone[0]] {
        let events = events_at_any_speed(&client, id).await;
        let last = if id == a[1] { "failed" } else { "succeeded" };
        assert_eq!(events, ["requested", "started", last]);
    }
    worker.drain().await;
}

/// A job that ends the whole attempt is found by running each job alone.
#[tokio::test]
async fn one_bad_job_does_not_fail_the_others() {
    let (_db, client, worker) = started(2).await;
    for (bad, kind) in [
        ("panics", "panic"),
        ("spins", "timed_out"),
        ("returns-too-much", "output_too_large"),
    ] {
        let ids = enqueue_all(&client, &[json!({}), does(bad), json!({}), json!({})], "").await;
        let job = ended(&client, ids[1]).await;
        assert_eq!(job.error.unwrap()["kind"], kind, "{bad}");
        let size = if bad == "returns-too-much" { 4 } else { 1 };
        for id in [ids[0], ids[2], ids[3]] {
            let result = results(&client, &[id]).await.remove(0);
            assert_eq!(result["size"], json!(size), "{bad}");
            // After the run timeout, the rest goes back to the queue.
            if bad != "spins" {
                let events = events_at_any_speed(&client, id).await;
                assert_eq!(events, ["requested", "started", "succeeded"], "{bad}");
            }
        }
    }
    worker.drain().await;
    // The log of the first job has the lines of the batch, followed by those of its own run.
    let numbered =
        "SELECT count(*) > 0 AND count(*) = count(DISTINCT (job, attempt, line)) FROM rouse.log";
    let row = client.query_one(numbered, &[]).await.unwrap();
    assert!(row.get::<_, bool>(0));
}

#[tokio::test]
async fn payloads_are_checked_job_by_job() {
    let (_db, client, worker) = started(2).await;
    let bad = json!({"does": "nothing that exists"});
    let ids = enqueue_all(
        &client,
        &[bad.clone(), json!({}), bad.clone(), json!({})],
        "",
    )
    .await;
    for id in [ids[0], ids[2]] {
        assert_eq!(error_kind(&client, id).await, "invalid_payload");
    }
    for result in results(&client, &[ids[1], ids[3]]).await {
        assert_eq!(
            (&result["size"], &result["first"]),
            (&json!(2), &json!(ids[1]))
        );
    }
    // A single remaining job runs alone; if none remain, nothing runs.
    let ids = enqueue_all(
        &client,
        &[bad.clone(), bad.clone(), bad.clone(), does("fails")],
        "",
    )
    .await;
    assert_eq!(error_kind(&client, ids[3]).await, "own");
    assert_eq!(error_kind(&client, ids[0]).await, "invalid_payload");
    let ids = enqueue_all(&client, &vec![bad; 4], "").await;
    for id in ids {
        assert_eq!(error_kind(&client, id).await, "invalid_payload");
    }
    worker.drain().await;
}

/// A batch is one run of the handler, and after a panic each of its jobs runs again.
#[tokio::test]
async fn the_metrics_have_the_wait_of_each_job_of_a_batch_once() {
    let metrics = install_metrics().unwrap();
    let (_db, client, worker) = started(2).await;
    let whole = enqueue_all(&client, &vec![json!({}); 4], ", queue => 'whole-batches'").await;
    for result in results(&client, &whole).await {
        assert_eq!(result["size"], json!(4));
    }
    let broken = enqueue_all(
        &client,
        &[json!({}), does("panics"), json!({}), json!({})],
        ", queue => 'broken-batches'",
    )
    .await;
    assert_eq!(error_kind(&client, broken[1]).await, "panic");
    results(&client, &[broken[0], broken[2], broken[3]]).await;
    worker.drain().await;
    let (_, page) = metrics.render(None);
    // The job that panics has a second attempt.
    for (queue, waits) in [("whole-batches", 4), ("broken-batches", 5)] {
        let line = format!("rouse_wait_seconds_count{{queue=\"{queue}\"}} {waits}\n");
        assert!(page.contains(&line), "{line} is missing: {page}");
    }
}

/// The jobs of a batch have equal shares of its CPU time, and each has the check of its own payload.
#[tokio::test]
async fn the_check_of_a_payload_is_part_of_the_usage_of_its_job() {
    let (_db, client, worker) = started(2).await;
    let large = json!({"padding": vec![1; 50_000]});
    let ids = enqueue_all(&client, &[large, json!({})], "").await;
    for result in results(&client, &ids).await {
        assert_eq!(result["size"], json!(2));
    }
    let mut cpu_ms = Vec::new();
    for id in ids {
        let sql = "SELECT (usage ->> 'cpu_ms')::float8 FROM rouse.job($1)";
        let row = client.query_one(sql, &[&id]).await.unwrap();
        cpu_ms.push(row.get::<_, f64>(0));
    }
    assert_ne!(cpu_ms[0], cpu_ms[1]);
    worker.drain().await;
}

#[tokio::test]
async fn an_error_of_the_batch_is_that_of_each_job_without_an_outcome() {
    let (_db, client, worker) = started(2).await;
    for (what, kind) in [
        ("fails-all", "all"),
        ("leaves-one-out", "invalid_batch"),
        ("runs-a-step", "step_refused"),
        ("waits", "wait_refused"),
        ("reads-results", "results_refused"),
    ] {
        let ids = enqueue_all(&client, &[does(what), json!({}), json!({}), json!({})], "").await;
        for id in ids {
            assert_eq!(error_kind(&client, id).await, kind, "{what}");
        }
        // A job that runs alone gets the same error, so that a first test of such a handler shows it.
        let ids = enqueue_all(&client, &[does(what)], "").await;
        assert_eq!(error_kind(&client, ids[0]).await, kind, "{what}");
    }
    worker.drain().await;
}

#[tokio::test]
async fn a_job_of_a_batch_is_retried_according_to_its_own_outcome() {
    let (_db, client, worker) = started(2).await;
    let ids = enqueue_all(
        &client,
        &[
            does("fails-for-now"),
            does("fails-for-a-minute"),
            does("retries-in-a-minute"),
            json!({}),
        ],
        "",
    )
    .await;
    let job = ended(&client, ids[0]).await;
    assert_eq!((job.state.as_str(), job.attempt), ("failed", 2));
    results(&client, &ids[3..]).await;
    for id in &ids[1..3] {
        until(&client, *id, |job| {
            job.state == "queued" && job.attempt == 1
        })
        .await;
        let wait = "SELECT available_at - clock_timestamp() BETWEEN '30 s' AND '61 s' FROM rouse.jobs WHERE id = $1";
        let row = client.query_one(wait, &[id]).await.unwrap();
        assert!(row.get::<_, bool>(0));
    }
    worker.drain().await;
}

/// The SQL condition that is true once the attempt of this job has started, and not only its claim is made.
fn sleeping(id: i64) -> String {
    format!("SELECT coalesce(progress ->> 'step' = 'sleeping', false) FROM rouse.job({id})")
}

/// Jobs that are claimed together have leases of their own.
#[tokio::test]
async fn cancelled_jobs_leave_a_running_batch() {
    let (_db, client, worker) = started(1).await;
    let sleeps = json!({"does": "sleeps", "ms": 2200});
    // A job other than the first: the attempt continues.
    let ids = enqueue_all(&client, &vec![sleeps.clone(); 4], ", tenant => 'a'").await;
    until_true(&client, &sleeping(ids[0])).await;
    assert!(cancel(&client, ids[2]).await);
    assert_eq!(ended(&client, ids[2]).await.state, "cancelled");
    for result in results(&client, &[ids[0], ids[1], ids[3]]).await {
        assert_eq!(result["size"], json!(4));
    }
    // The first: the others start again, together.
    let ids = enqueue_all(&client, &vec![sleeps; 4], ", tenant => 'b'").await;
    until_true(&client, &sleeping(ids[0])).await;
    assert!(cancel(&client, ids[0]).await);
    for result in results(&client, &ids[1..]).await {
        assert!([json!(3), json!(4)].contains(&result["size"]), "{result}");
        assert_eq!(result["attempt"], json!(1));
    }
    assert_eq!(ended(&client, ids[0]).await.state, "cancelled");
    worker.drain().await;
}

/// A stop releases the jobs of a batch, so that a deployment does not cost an attempt.
#[tokio::test]
async fn a_stop_releases_all_jobs_of_a_batch() {
    let (db, client, first) = started(1).await;
    let sleeps = json!({"does": "sleeps", "ms": 60_000});
    let mut ids = enqueue_all(&client, &vec![sleeps.clone(); 4], "").await;
    // These jobs are in line behind the batch.
    ids.extend(enqueue_all(&client, &vec![sleeps; 4], "").await);
    until_true(&client, &sleeping(ids[0])).await;
    first.stop_now().await;
    let queued = "SELECT count(*) = 8 AND bool_and(state = 'queued' AND attempt <= uncounted + 1) FROM rouse.job";
    until_true(&client, queued).await;
    client
        .batch_execute("UPDATE rouse.job SET payload = '{}'")
        .await
        .unwrap();
    let second = worker(&db, 1).await;
    // The jobs that had started run alone.
    for (ids, size) in [(&ids[..4], 1), (&ids[4..], 4)] {
        for result in results(&client, ids).await {
            assert_eq!(result["size"], json!(size));
        }
    }
    second.drain().await;
}

/// Jobs with limits of their own, and those that were enqueued before the gate was set, do not share an attempt with
/// others.
#[tokio::test]
async fn jobs_with_limits_of_their_own_run_alone() {
    let (_db, client, worker) = started(1).await;
    client
        .batch_execute("SELECT rouse.pause_queue('default')")
        .await
        .unwrap();
    let others = enqueue_all(&client, &vec![json!({}); 2], "").await;
    let own = enqueue_all(&client, &[json!({})], ", timeout => '20 s'").await;
    let lease = enqueue_all(&client, &[json!({})], ", lease => '20 s'").await;
    let grants = enqueue_all(&client, &[json!({})], ", grants => '{}'").await;
    client
        .batch_execute("SELECT rouse.resume_queue('default')")
        .await
        .unwrap();
    for ids in [&own, &lease, &grants] {
        assert_eq!(results(&client, ids).await[0]["size"], json!(1));
    }
    // While such jobs are in their lane, a claim counts an attempt for each job.
    results(&client, &others).await;
    worker.drain().await;
}

/// The operator's settings take precedence over those of the module.
#[tokio::test]
async fn an_operator_sets_the_size_of_batches() {
    let (_db, client, worker) = started(2).await;
    set_gate(
        &client,
        "'batch.any/batch', 'batch', handler => 'batch.any', max => 7",
    )
    .await;
    client
        .batch_execute("SELECT rouse.pause_queue('default')")
        .await
        .unwrap();
    let ids = enqueue_all(&client, &vec![json!({}); 16], ", tenant => 'a'").await;
    client
        .batch_execute("SELECT rouse.resume_queue('default')")
        .await
        .unwrap();
    let mut sizes: Vec<u64> = Vec::new();
    for result in results(&client, &ids).await {
        sizes.push(result["size"].as_u64().unwrap());
    }
    sizes.sort_unstable();
    assert_eq!(sizes, [vec![2; 2], vec![7; 14]].concat());
    worker.drain().await;
}

/// Reports that the job of the first attempt was cancelled, although it was not.
#[derive(Default)]
struct Pretends(std::sync::atomic::AtomicBool);

impl Middleware for Pretends {
    fn around<'a>(&'a self, _attempt: &'a AttemptInfo<'a>, next: Next<'a>) -> Running<'a> {
        let is_later = self.0.swap(true, std::sync::atomic::Ordering::Relaxed);
        Box::pin(async move {
            match is_later {
                true => next.run().await,
                false => next.instead(RunEnd::Aborted(AbortReason::Cancelled)),
            }
        })
    }
}

/// Otherwise, a batch would be started again forever.
#[tokio::test]
async fn a_batch_that_ends_for_a_job_which_it_has_not_lost_runs_one_by_one() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let parts = Parts {
        store: db.store(),
        listen_connector: db.connector(),
        sandbox: sandbox(),
        catalog: catalog().await,
        sql_logins: BTreeMap::new(),
        middleware: vec![Arc::new(Pretends::default())],
    };
    let worker = TestWorker::start_with(parts, Settings::default());
    until_true(
        &client,
        "SELECT EXISTS (SELECT FROM rouse.gate WHERE name = 'batch.any/batch')",
    )
    .await;
    let ids = enqueue_all(&client, &vec![json!({}); 4], "").await;
    for result in results(&client, &ids).await {
        assert_eq!(
            (&result["size"], &result["attempt"]),
            (&json!(1), &json!(1))
        );
    }
    worker.drain().await;
}
