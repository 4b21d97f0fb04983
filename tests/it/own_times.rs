//! Jobs that are enqueued with their own lease or run timeout.

use std::time::Duration;

use rouse::job::Fence;
use rouse::store::BoundSearch;
use rouse::worker::Settings;
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::claims::{self, orders};
use crate::support::worker::{TestWorker, ended, enqueue_sql, lease, timeout, until, until_true};

const MINUTE: Duration = Duration::from_secs(60);

/// The leases with which these jobs were claimed, in seconds.
async fn leases(client: &Client, ids: &[i64]) -> Vec<f64> {
    let rows = client
        .query(
            "SELECT extract(epoch FROM lease_until - claimed_at)::float8 FROM rouse.job WHERE id = ANY ($1) ORDER BY id",
            &[&ids],
        )
        .await
        .unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

#[tokio::test]
async fn each_claim_lasts_as_long_as_its_jobs_lease_and_the_host_knows_it() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    // A small claim returns the jobs; a large one returns ids, and the jobs are read
    // afterwards.
    for payload in ["'{}'", "to_jsonb(repeat('a', 200000))"] {
        let own = enqueue_sql(
            &client,
            &format!("'x', {payload}, source => 's', lease => '5 minutes'"),
        )
        .await;
        let default = enqueue_sql(&client, &format!("'x', {payload}, source => 's'")).await;
        let ids = [own, default];
        let orders = orders(&store, 60_000).await;
        let lanes: Vec<_> = orders.iter().map(|order| order.lane).collect();

        let claimed = store
            .claim(Fence(1), &orders, 10, None)
            .await
            .unwrap()
            .jobs();
        let received: Vec<_> = claimed.iter().map(|job| (job.id.0, job.lease)).collect();
        assert_eq!(
            received,
            [(own, Some(5 * MINUTE)), (default, None)],
            "{payload}"
        );
        assert_eq!(leases(&client, &ids).await, [300.0, 60.0], "{payload}");

        let expire = "UPDATE rouse.job SET lease_until = now() - interval '1 s'";
        client.batch_execute(expire).await.unwrap();
        let adopted = claims::adopt(&store, Fence(2), &orders, 10, 3, None).await;
        assert_eq!(adopted.unwrap().claimed.len(), 2);
        assert_eq!(
            leases(&client, &ids).await,
            [300.0, 60.0],
            "{payload}, adopted"
        );

        let requeue = "UPDATE rouse.job SET state = 'queued', fence = NULL, worker = NULL, claimed_at = NULL, lease_until = NULL";
        client.batch_execute(requeue).await.unwrap();
        let search = BoundSearch {
            lanes: &lanes,
            sources: &["s".to_string()],
            ..BoundSearch::default()
        };
        let claimed = store.claim_bound(Fence(3), search, MINUTE, 10).await;
        assert_eq!(claimed.unwrap().jobs.len(), 2);
        assert_eq!(
            leases(&client, &ids).await,
            [300.0, 60.0],
            "{payload}, by source"
        );
        client.batch_execute("DELETE FROM rouse.job").await.unwrap();
    }
}

#[tokio::test]
async fn a_job_is_renewed_by_its_own_lease_and_not_its_handlers() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // With the handler's lease of 60 s, nothing would be renewed within 4 s.
    let worker = TestWorker::start(&db, Settings::default()).await;
    let short = enqueue_sql(
        &client,
        r#"'test.sleep', '{"ms": 4000}', lease => '2 seconds'"#,
    )
    .await;
    let renewed = format!(
        "SELECT EXISTS (SELECT FROM rouse.record WHERE job = {short} AND event = 'renewed')"
    );
    until_true(&client, &renewed).await;
    let row = client
        .query_one(
            "SELECT lease_until <= clock_timestamp() + interval '2 seconds' FROM rouse.job WHERE id = $1",
            &[&short],
        )
        .await
        .unwrap();
    assert!(row.get::<_, bool>(0), "it was renewed by two seconds");
    let job = ended(&client, short).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
    worker.drain().await;

    let settings = Settings {
        overrides: lease("test.sleep", 2),
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, settings).await;
    let long = enqueue_sql(
        &client,
        r#"'test.sleep', '{"ms": 600000}', lease => '1 hour'"#,
    )
    .await;
    until(&client, long, |job| job.state == "running").await;
    let default = enqueue_sql(&client, r#"'test.sleep', '{"ms": 600000}'"#).await;
    let renewed = format!(
        "SELECT EXISTS (SELECT FROM rouse.record WHERE job = {default} AND event = 'renewed')"
    );
    until_true(&client, &renewed).await;
    // With the handler's lease, this job would have been renewed two seconds before the other.
    let row = client
        .query_one(
            "SELECT lease_until > clock_timestamp() + interval '50 minutes' FROM rouse.job WHERE id = $1",
            &[&long],
        )
        .await
        .unwrap();
    assert!(row.get::<_, bool>(0), "its lease is an hour");
    worker.stop_now().await;
}

#[tokio::test]
async fn an_attempt_ends_at_the_shorter_of_its_jobs_and_the_operators_timeout() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let message =
        |job: &crate::support::worker::Shown| job.error.clone().unwrap()["message"].to_string();
    let worker = TestWorker::start(&db, Settings::default()).await;
    let id = enqueue_sql(&client, "'test.spin', timeout => '200 milliseconds'").await;
    let job = ended(&client, id).await;
    assert_eq!(job.state, "timed_out");
    assert!(
        message(&job).contains("that the job was enqueued with"),
        "{job:?}"
    );
    worker.drain().await;

    let settings = Settings {
        overrides: timeout("test.spin", Duration::from_millis(200)),
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, settings).await;
    let id = enqueue_sql(&client, "'test.spin', timeout => '30 days'").await;
    let job = ended(&client, id).await;
    assert_eq!(job.state, "timed_out");
    assert!(
        message(&job).contains("rouse.toml can change it"),
        "{job:?}"
    );
    worker.drain().await;
}

#[tokio::test]
async fn lease_and_timeout_are_shown_and_kept_by_the_ended_job_and_its_retry() {
    const TIMES: &str = "lease => '90 seconds', timeout => '2 hours'";
    let db = TestDb::new().await;
    let client = db.client().await;
    let shown = async |id: i64| {
        let row = client
            .query_one("SELECT lease_ms, timeout_ms FROM rouse.job($1)", &[&id])
            .await
            .unwrap();
        (row.get::<_, Option<i64>>(0), row.get::<_, Option<i64>>(1))
    };
    let both = (Some(90_000), Some(7_200_000));
    let unique = enqueue_sql(&client, &format!("'x', {TIMES}, unique_key => 'k'")).await;
    let many: i64 = client
        .query_one(
            &format!("SELECT rouse.enqueue_many('x', '{{1}}'::jsonb[], {TIMES})"),
            &[],
        )
        .await
        .unwrap()
        .get(0);
    let deleted = enqueue_sql(&client, &format!("'x', {TIMES}")).await;
    for id in [unique, many, deleted] {
        assert_eq!(shown(id).await, both);
    }
    let sql = format!("SELECT rouse.delete({deleted})");
    client.batch_execute(&sql).await.unwrap();
    client
        .batch_execute("SELECT rouse.purge_queue('default')")
        .await
        .unwrap();
    for id in [unique, many, deleted] {
        assert_eq!(shown(id).await, both, "the job has ended");
    }
    let worker = TestWorker::start(&db, Settings::default()).await;
    let run = enqueue_sql(&client, &format!("'noop', {TIMES}")).await;
    until(&client, run, |job| job.state == "succeeded").await;
    worker.drain().await;
    assert_eq!(shown(run).await, both, "the job was settled");
    let row = client.query_one("SELECT rouse.retry($1)", &[&run]).await;
    assert_eq!(
        shown(row.unwrap().get(0)).await,
        both,
        "the job was retried"
    );
    let plain = enqueue_sql(&client, "'x'").await;
    assert_eq!(shown(plain).await, (None, None));
}

#[tokio::test]
async fn the_command_line_sets_and_shows_lease_and_timeout() {
    let db = TestDb::new().await;
    let run = |args: &[&str]| crate::commands::run(&db, args);
    let args = [
        "enqueue",
        "x",
        "--lease",
        "90s",
        "--timeout",
        "2h",
        "--json",
    ];
    let (code, output) = run(&args);
    assert_eq!(code, 0, "{output}");
    let first = output.lines().next().unwrap_or_default();
    let done: serde_json::Value = serde_json::from_str(first).unwrap();
    let id = done["id"].to_string();
    let (_, output) = run(&["job", &id]);
    for (name, time) in [("lease", "1m 30s"), ("timeout", "2h")] {
        let shows = |line: &str| line.trim_start().starts_with(name) && line.ends_with(time);
        assert!(output.lines().any(shows), "{output}");
    }
    let (code, output) = run(&["enqueue", "x", "--lease", "25h"]);
    assert_eq!(code, 1);
    assert!(
        output.contains("lease must be between 2 seconds and 1 day"),
        "{output}"
    );
    run(&["enqueue", "x", "--unique-key", "k"]);
    let (_, again) = run(&[
        "enqueue",
        "x",
        "--unique-key",
        "k",
        "--lease",
        "90s",
        "--timeout",
        "1s",
    ]);
    assert!(again.contains("with a different lease, timeout"), "{again}");
}
