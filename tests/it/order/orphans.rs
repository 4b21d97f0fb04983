//! Orphans go ahead of queued jobs.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rouse::sandbox::Catalog;
use rouse::worker::Settings;
use serde_json::json;

use super::flood;
use crate::sandbox_guest::echo;
use crate::support::TestDb;
use crate::support::claims::claim;
use crate::support::proxy::{Proxy, Side};
use crate::support::worker::{
    START_ORDER, TestWorker, catalog, enqueue, guests_dir, run_all_in_one_slot, sandbox, until_true,
};

#[tokio::test]
async fn an_orphan_goes_ahead_of_older_queued_jobs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut older = Vec::new();
    for _ in 0..5 {
        older.push(enqueue(&client, "test.sleep", json!({"ms": 20})).await);
    }
    let orphan = enqueue(&client, "test.sleep", json!({"ms": 20})).await;
    // In the state in which a crashed worker leaves it.
    client
        .execute(
            "UPDATE rouse.job SET state = 'running', attempt = 1, fence = 1, worker = 1,
                claimed_at = now() - interval '2 min', lease_until = now() - interval '1 min' WHERE id = $1",
            &[&orphan],
        )
        .await
        .unwrap();
    run_all_in_one_slot(&db, &client).await;
    let rows = client
        .query(
            &format!("SELECT id FROM rouse.finished ORDER BY {START_ORDER}"),
            &[],
        )
        .await
        .unwrap();
    let order: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(order[0], orphan, "then {older:?}");
    assert_eq!(order[1..], older);
}

/// A worker with one slot that is never idle: its claims are filled, and its sweeps are a second apart.
#[tokio::test]
async fn a_busy_worker_adopts_waiting_orphans_before_it_claims_queued_jobs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let dead = db.worker().await;
    let mut orphans = Vec::new();
    for priority in ["low", "high", "normal", "low", "high"] {
        let row = client
            .query_one(
                "SELECT rouse.enqueue('test.sleep', '{\"ms\": 20}', priority => $1)",
                &[&priority],
            )
            .await
            .unwrap();
        orphans.push(row.get::<_, i64>(0));
    }
    assert_eq!(claim(&dead, 10).await.len(), 5);
    flood(&client, "high", 400, 10).await;
    let settings = Settings {
        slots: 1,
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, settings).await;
    // Three times, at different moments between two sweeps.
    let mut overtaken = Vec::new();
    let mut order = Vec::new();
    for part in [&orphans[..1], &orphans[1..2], &orphans[2..]] {
        let so_far = client
            .query_one(
                "SELECT count(*) FROM rouse.finished WHERE uncounted = 0",
                &[],
            )
            .await
            .unwrap();
        let so_far: i64 = so_far.get(0);
        let has_progressed = format!(
            "SELECT count(*) > {} FROM rouse.finished WHERE uncounted = 0",
            so_far + 20
        );
        until_true(&client, &has_progressed).await;
        let ended: SystemTime = client
            .query_one(
                "WITH ended AS (
                     UPDATE rouse.job SET lease_until = clock_timestamp() + interval '20 ms' WHERE id = ANY ($1) RETURNING lease_until)
                 SELECT max(lease_until) FROM ended",
                &[&part],
            )
            .await
            .unwrap()
            .get(0);
        let have_ended = format!(
            "SELECT count(*) = {} FROM rouse.finished WHERE id = ANY ('{{{}}}')",
            part.len(),
            part.iter()
                .map(i64::to_string)
                .collect::<Vec<_>>()
                .join(",")
        );
        until_true(&client, &have_ended).await;
        let row = client
            .query_one(
                "WITH adopted AS (SELECT f.id, f.claimed_at FROM rouse.finished AS f WHERE id = ANY ($1))
                 SELECT (SELECT array_agg(id ORDER BY claimed_at) FROM adopted),
                        (SELECT count(*) FROM rouse.jobs WHERE uncounted = 0 AND claimed_at > $2 AND claimed_at < (SELECT max(claimed_at) FROM adopted))",
                &[&part, &ended],
            )
            .await
            .unwrap();
        order.extend(row.get::<_, Vec<i64>>(0));
        overtaken.push(row.get::<_, i64>(1));
    }
    worker.stop_now().await;
    assert_eq!(overtaken, [0, 0, 0]);
    let [first, second, normal, low, high] = orphans[..] else {
        unreachable!("five were enqueued");
    };
    assert_eq!(order, [first, second, high, normal, low]);
}

/// The worker's claims checked the leases before the worker had the handler of the orphan.
#[tokio::test]
async fn a_busy_worker_adopts_orphans_of_a_new_handler_before_it_claims_its_queued_jobs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let dead = db.worker().await;
    let orphan = enqueue(&client, "test.late", json!({})).await;
    assert_eq!(claim(&dead, 1).await.len(), 1);
    client
        .batch_execute("UPDATE rouse.job SET lease_until = clock_timestamp()")
        .await
        .unwrap();
    for _ in 0..5 {
        enqueue(&client, "test.late", json!({})).await;
    }
    // Enough to be busy for a minute.
    flood(&client, "normal", 5000, 10).await;
    let folder = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(guests_dir()).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    let catalog = Catalog::open(sandbox(), folder.path()).await.unwrap();
    catalog.watch();
    let settings = Settings {
        slots: 1,
        ..Settings::default()
    };
    let worker = TestWorker::start_on(&db, settings, Arc::new(catalog));
    until_true(&client, "SELECT count(*) > 20 FROM rouse.finished").await;
    std::fs::write(folder.path().join("late.wasm"), echo("test.late", "1")).unwrap();
    let are_finished = "SELECT count(finished_at) = 6 FROM rouse.jobs WHERE handler = 'test.late'";
    until_true(&client, are_finished).await;
    let rows = client
        .query(
            &format!(
                "SELECT id FROM rouse.jobs WHERE handler = 'test.late' ORDER BY {START_ORDER}"
            ),
            &[],
        )
        .await
        .unwrap();
    let left = client.query_one("SELECT count(*) FROM rouse.job", &[]);
    assert!(left.await.unwrap().get::<_, i64>(0) > 0, "it is busy");
    worker.stop_now().await;
    assert_eq!(rows[0].get::<_, i64>(0), orphan);
}

/// Other leases have ended in the meantime.
#[tokio::test]
async fn a_worker_that_was_frozen_while_it_adopted_looks_for_orphans_again_before_it_claims() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let dead = db.worker().await;
    let mut orphans = Vec::new();
    for _ in 0..2 {
        orphans.push(enqueue(&client, "test.sleep", json!({"ms": 1})).await);
    }
    assert_eq!(claim(&dead, 2).await.len(), 2);
    // Enough to be busy for half a minute.
    flood(&client, "normal", 10_000, 5).await;
    let proxy = Proxy::start(&db).await;
    let settings = Settings {
        slots: 2,
        ..Settings::default()
    };
    let worker =
        TestWorker::start_through(proxy.store(), db.connector(), settings, catalog().await);
    until_true(&client, "SELECT count(*) > 20 FROM rouse.finished").await;
    let held = proxy.hold("rouse.adopt(", Side::Response);
    let end_lease = "UPDATE rouse.job SET lease_until = clock_timestamp() WHERE id = $1";
    let adopted = |orphan: i64| {
        format!("SELECT EXISTS (SELECT FROM rouse.attempt WHERE job = {orphan} AND lost)")
    };
    client.execute(end_lease, &[&orphans[0]]).await.unwrap();
    held.caught().await;
    // The statement reaches the server after it was caught. The adopted job must not count as claimed after the second
    // lease had ended.
    until_true(&client, &adopted(orphans[0])).await;
    client.execute(end_lease, &[&orphans[1]]).await.unwrap();
    // The adoption counts as slow by its time alone.
    tokio::time::sleep(Duration::from_millis(600)).await;
    held.release();
    until_true(&client, &adopted(orphans[1])).await;
    let left = client.query_one("SELECT count(*) FROM rouse.job", &[]);
    assert!(left.await.unwrap().get::<_, i64>(0) > 0, "it is busy");
    worker.stop_now().await;
    let claimed_between = "
        SELECT count(*) FROM rouse.attempt AS lost
        JOIN LATERAL (SELECT id, claimed_at FROM rouse.finished UNION ALL SELECT id, claimed_at FROM rouse.job WHERE claimed_at IS NOT NULL) AS j
            ON j.claimed_at < lost.ended_at AND j.claimed_at > (lost.error ->> 'lease_ended_at')::timestamptz
        WHERE lost.job = $1 AND lost.lost";
    let row = client
        .query_one(claimed_between, &[&orphans[1]])
        .await
        .unwrap();
    assert_eq!(row.get::<_, i64>(0), 0);
}
