//! Admin actions on queues: pause, resume, purge; and the views of the jobs that wait in them.

use std::time::{Duration, SystemTime};

use rouse::job::Fence;
use rouse::store::PeekParams;
use rouse::worker::Settings;
use serde_json::json;

use super::{claim, is_true};
use crate::support::claims::orders;
use crate::support::proxy::{Proxy, Side};
use crate::support::worker::{
    SESSION_WAITS, TIMEOUT, TestWorker, enqueue, enqueue_sql, show, until, until_true,
};
use crate::support::{Host, TestDb, run_rouse};

#[tokio::test]
async fn jobs_of_a_paused_queue_are_not_claimed_adopted_or_peeked_until_it_is_resumed() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let orphan = enqueue(&client, "x", json!({})).await;
    assert_eq!(claim(&store, 7).await, [orphan]);
    client
        .batch_execute("UPDATE rouse.job SET lease_until = now() - interval '10 min'")
        .await
        .unwrap();
    let ready = enqueue(&client, "x", json!({})).await;
    let other: i64 = client
        .query_one("SELECT rouse.enqueue('x', queue => 'other')", &[])
        .await
        .unwrap()
        .get(0);
    for _ in 0..2 {
        client
            .query("SELECT rouse.pause_queue('default')", &[])
            .await
            .unwrap();
    }
    let orders = orders(&store, 60_000).await;
    let looking = PeekParams {
        lanes: &orders,
        catalog_after: 0,
        catalog_sum: 0,
        orphaned_since: None,
        due_since: None,
        writers: None,
    };
    let peek = store.peek(&looking).await.unwrap();
    assert!(peek.ready.len() == 1 && !peek.orphans, "{peek:?}");
    let adopted = crate::support::claims::adopt(&store, Fence(8), &orders, 10, 3, None)
        .await
        .unwrap()
        .claimed;
    assert!(adopted.is_empty());
    assert_eq!(claim(&store, 9).await, [other]);

    let since = Some(SystemTime::now() - Duration::from_secs(5));
    assert!(is_true(&client, "SELECT rouse.resume_queue('default')", &[]).await);
    assert!(!is_true(&client, "SELECT rouse.resume_queue('default')", &[]).await);
    assert!(!is_true(&client, "SELECT rouse.resume_queue('never')", &[]).await);
    // The same holds for a look that considers only leases that ended a moment ago.
    let run_out =
        format!("SELECT lease_until < clock_timestamp() FROM rouse.job WHERE id = {orphan}");
    until_true(&client, &run_out).await;
    let recent = PeekParams {
        orphaned_since: since,
        ..looking
    };
    let peek = store.peek(&recent).await.unwrap();
    assert!(peek.orphans && peek.ready.len() == 1, "{peek:?}");
    let adopted = crate::support::claims::adopt(&store, Fence(8), &orders, 10, 3, since)
        .await
        .unwrap()
        .claimed;
    assert_eq!(adopted.len(), 1);
    assert_eq!(claim(&store, 10).await, [ready]);
    let records = client
        .query(
            "SELECT event FROM rouse.record WHERE queue = 'default' ORDER BY at",
            &[],
        )
        .await
        .unwrap();
    let records: Vec<String> = records.iter().map(|row| row.get(0)).collect();
    assert_eq!(records, ["paused", "resumed"]);
}

#[tokio::test]
async fn a_pause_stops_new_claims_and_does_not_wait_for_a_claim_in_progress() {
    let db = TestDb::new().await;
    let (mut claimer, client, store) = (db.client().await, db.client().await, db.worker().await);
    enqueue(&client, "x", json!({})).await;
    // A claim that has locked its jobs but is not committed yet.
    let transaction = claimer.transaction().await.unwrap();
    transaction
        .batch_execute(
            "UPDATE rouse.job SET state = 'running', attempt = 1, fence = 1, worker = 1, claimed_at = now(),
                    lease_until = now() + interval '1 min'",
        )
        .await
        .unwrap();
    let left = enqueue(&client, "x", json!({})).await;
    client
        .query("SELECT rouse.pause_queue('default')", &[])
        .await
        .unwrap();
    assert!(claim(&store, 7).await.is_empty());
    transaction.commit().await.unwrap();
    assert_eq!(show(&client, left).await.state, "queued");
    assert!(claim(&store, 7).await.is_empty());
}

#[tokio::test]
async fn resuming_a_queue_wakes_a_sleeping_worker() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .query("SELECT rouse.pause_queue('default')", &[])
        .await
        .unwrap();
    let id = enqueue(&client, "test.echo", json!({})).await;
    // The worker does not poll.
    let never = Duration::from_secs(600);
    let settings = Settings {
        poll_min: never,
        poll_max: never,
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, settings).await;
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
    assert_eq!(show(&client, id).await.state, "queued");
    client
        .query("SELECT rouse.resume_queue('default')", &[])
        .await
        .unwrap();
    until(&client, id, |job| job.state == "succeeded").await;
    worker.drain().await;
}

#[tokio::test]
async fn a_purge_removes_only_ready_jobs_in_batches() {
    let db = TestDb::new().await;
    let (mut client, store) = (db.client().await, db.worker().await);
    let running = enqueue(&client, "x", json!({})).await;
    assert_eq!(claim(&store, 7).await, [running]);
    client
        .batch_execute(
            "SELECT rouse.enqueue('x', run_at => now() + interval '1 h'), rouse.enqueue('x', queue => 'other');
             SELECT rouse.enqueue_many('x', array_fill('{}'::jsonb, ARRAY[12]));
             SELECT rouse.enqueue_many('y', array_fill('{}'::jsonb, ARRAY[12]))",
        )
        .await
        .unwrap();
    // A job that another transaction has locked is left alone.
    let mut holder = db.client().await;
    let held = holder.transaction().await.unwrap();
    held.query(
        "SELECT FROM rouse.job WHERE state = 'queued' AND turn IS NOT NULL ORDER BY id DESC LIMIT 1 FOR UPDATE",
        &[],
    )
    .await
    .unwrap();
    let mut purged = Vec::new();
    while purged.last() != Some(&0) {
        let row = client
            .query_one("SELECT rouse.purge_queue('default', 10)", &[])
            .await
            .unwrap();
        purged.push(row.get::<_, i32>(0));
    }
    assert_eq!(purged, [10, 10, 3, 0]);
    held.commit().await.unwrap();
    let transaction = client.transaction().await.unwrap();
    let row = transaction
        .query_one(
            "SELECT (SELECT count(*) FROM rouse.job), (SELECT count(*) FROM rouse.finished WHERE state = 'cancelled'),
                    (SELECT array_agg((detail->>'jobs')::integer ORDER BY at) FROM rouse.record WHERE event = 'purged' AND job IS NULL)",
            &[],
        )
        .await
        .unwrap();
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (4, 23));
    assert_eq!(row.get::<_, Vec<i32>>(2), [10, 10, 3]);
}

const PURGE: &[&str] = &["queue", "purge", "default", "--yes"];
/// More jobs than the command cancels in one batch, which are 1,000.
const ENQUEUE: &str = "SELECT rouse.enqueue_many('x', array_fill('{}'::jsonb, ARRAY[2500]))";
/// Blocks every purge.
const LOCK_RECORDS: &str = "LOCK TABLE rouse.record IN SHARE MODE";

#[tokio::test]
async fn an_interrupted_purge_finishes_its_batch_and_reports_how_many_jobs_are_cancelled() {
    let db = TestDb::new().await;
    let (mut holder, client) = (db.client().await, db.client().await);
    client.batch_execute(ENQUEUE).await.unwrap();
    let held = holder.transaction().await.unwrap();
    held.batch_execute(LOCK_RECORDS).await.unwrap();
    let host = Host::rouse(PURGE, &[("DATABASE_URL", &db.url())]);
    until_true(&client, SESSION_WAITS).await;
    host.signal(libc::SIGINT);
    host.until_signal_is_taken(TIMEOUT).await;
    held.rollback().await.unwrap();
    let (status, output) = host.exit(TIMEOUT);
    assert_eq!(status.code(), Some(130), "{output}");
    for part in ["1000 jobs of queue default are", "stopped by a signal"] {
        assert!(output.contains(part), "{part}: {output}");
    }
    let rest = run_rouse(&db, PURGE).await;
    rest.exits(0).prints("1500 jobs of queue default are");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_purge_that_loses_its_connection_reports_how_many_jobs_are_cancelled() {
    let db = TestDb::new().await;
    let (client, proxy) = (db.client().await, Proxy::start(&db).await);
    client.batch_execute(ENQUEUE).await.unwrap();
    let first = proxy.hold("rouse.purge_queue(", Side::Response);
    let host = Host::rouse(PURGE, &[("DATABASE_URL", proxy.url())]);
    first.caught().await;
    let second = proxy.hold("rouse.purge_queue(", Side::Cut);
    first.release();
    let (status, output) = host.exit(TIMEOUT);
    assert_eq!(status.code(), Some(1), "{output}");
    let reported = "1000 jobs of queue default were cancelled before this";
    assert!(output.contains(reported), "{output}");
    drop(second);
}

#[tokio::test]
async fn a_purge_that_another_transaction_blocks_for_too_long_exits_with_6() {
    let db = TestDb::new().await;
    let (mut holder, client) = (db.client().await, db.client().await);
    client.batch_execute(ENQUEUE).await.unwrap();
    let held = holder.transaction().await.unwrap();
    held.batch_execute(LOCK_RECORDS).await.unwrap();
    let blocked = run_rouse(&db, &[PURGE, &["--json"]].concat()).await;
    blocked.exits(6).prints("queue default: ");
    let expected = json!({"queue": "default", "purged": 0, "complete": false});
    assert_eq!(blocked.json(), expected);
}

#[tokio::test]
async fn queues_and_backlog_show_waiting_jobs_their_age_and_capable_workers() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    client
        .batch_execute(
            "SELECT rouse.enqueue_many('x', array_fill('{}'::jsonb, ARRAY[10005]), queue => 'q', tags => '{gpu}');
             SELECT rouse.enqueue('x', queue => 'q'), rouse.enqueue('y', queue => 'q', run_at => now() + interval '1 h');
             UPDATE rouse.worker SET handlers = '{x}', slots = 4",
        )
        .await
        .unwrap();
    assert_eq!(claim(&store, 7).await.len(), 100);
    let row = client
        .query_one(
            "SELECT ready, scheduled, running, at_least, oldest_wait > '0', paused_at IS NULL FROM rouse.queues WHERE name = 'q'",
            &[],
        )
        .await
        .unwrap();
    let counts: (i64, i64, i64) = (row.get(0), row.get(1), row.get(2));
    assert!(
        counts == (9_906, 1, 100) || counts == (9_905, 1, 100),
        "{counts:?}"
    );
    assert!(!row.get::<_, bool>(3) && row.get::<_, bool>(4) && row.get::<_, bool>(5));
    client
        .query("SELECT rouse.enqueue_many('x', array_fill('{}'::jsonb, ARRAY[200]), queue => 'q', tags => '{gpu}')", &[])
        .await
        .unwrap();
    let rows = client
        .query("SELECT handler, tags, ready, scheduled, at_least, workers, slots FROM rouse.backlog ORDER BY 1, 2", &[])
        .await
        .unwrap();
    let rows: Vec<(String, Vec<String>, bool, i64, i64)> = rows
        .iter()
        .map(|row| (row.get(0), row.get(1), row.get(4), row.get(5), row.get(6)))
        .collect();
    let gpu = vec!["gpu".to_string()];
    let expected = [
        ("x".to_string(), vec![], false, 1, 4),
        ("x".to_string(), gpu, true, 0, 0),
        ("y".to_string(), vec![], false, 0, 0),
    ];
    // The lane without tags may have been emptied by a claim.
    assert!(
        rows.iter().all(|row| expected.contains(row)) && rows.len() >= 2,
        "{rows:?}"
    );
}

/// The query that the page recommends to an autoscaler.
const HOSTS: &str = "SELECT coalesce(ceil(sum(ready + running) / 8.0), 0) FROM rouse.backlog WHERE NOT paused AND known AND tags <@ '{gpu}';";

#[tokio::test]
async fn an_autoscaler_starts_no_host_for_handlers_that_no_worker_has_ever_run() {
    let page = include_str!("../../../docs/guides/autoscaling.md");
    assert!(page.contains(HOSTS), "the page shows another query");
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    client
        .batch_execute("UPDATE rouse.worker SET handlers = '{x}', tags = '{gpu}', queues = '{q}'")
        .await
        .unwrap();
    let hosts = async || -> String {
        let sql = format!("SELECT ({})::text", HOSTS.trim_end_matches(';'));
        client.query_one(&sql, &[]).await.unwrap().get(0)
    };
    for args in [
        "'misspelt', queue => 'q'",
        "'x', queue => 'other'",
        "'x', queue => 'q', tags => '{gpu,big}'",
    ] {
        enqueue_sql(&client, args).await;
    }
    assert_eq!(hosts().await, "0");
    let shown = "SELECT sum(ready) = 3 AND NOT bool_or(known) FROM rouse.backlog";
    assert!(is_true(&client, shown, &[]).await, "the jobs are shown");
    enqueue_sql(&client, "'x', queue => 'q', tags => '{gpu}'").await;
    assert_eq!(hosts().await, "1");
    // The worker has stopped, so another worker would help.
    store.unregister().await.unwrap();
    assert_eq!(hosts().await, "1");
    client
        .batch_execute("UPDATE rouse.worker SET stopped_at = now() - interval '8 days'")
        .await
        .unwrap();
    assert_eq!(hosts().await, "0");
}
