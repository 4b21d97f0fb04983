//! The limit on running jobs of a key.

use std::sync::Arc;

use rouse::store::{ClaimedJob, Locked, Store};
use tokio::sync::Barrier;

use crate::support::claims::{claim, result, settlement};
use crate::support::worker::{START_ORDER, until_true};

use super::{enqueue, fair, worker};

/// Claims on all workers at the same time.
async fn claim_at_once(stores: &[Arc<Store>]) -> Vec<Vec<ClaimedJob>> {
    let start = Arc::new(Barrier::new(stores.len()));
    let claims: Vec<_> = stores
        .iter()
        .map(|store| {
            let (store, start) = (store.clone(), start.clone());
            tokio::spawn(async move {
                start.wait().await;
                claim(&store, 100).await
            })
        })
        .collect();
    let mut claimed = Vec::new();
    for task in claims {
        claimed.push(task.await.unwrap());
    }
    claimed
}

#[tokio::test]
async fn no_more_jobs_of_a_key_run_than_its_limit_on_any_number_of_workers() {
    let (db, client) = fair(", max_in_flight => 3").await;
    for handler in ["test.sleep", "test.race"] {
        enqueue(&client, "mail", "a", handler, 1, 20).await;
    }
    enqueue(&client, "mail", "b", "test.sleep", 1, 20).await;
    enqueue(&client, "other", "a", "test.sleep", 1, 20).await;
    let mut stores = Vec::new();
    for _ in 0..8 {
        stores.push(Arc::new(db.worker().await));
    }
    let claimed = claim_at_once(&stores).await;
    let in_flight = "SELECT count(*) FROM rouse.jobs WHERE state = 'running' AND queue = 'mail' AND tenant = $1";
    let running = async |tenant: &str| -> i64 {
        client
            .query_one(in_flight, &[&tenant])
            .await
            .unwrap()
            .get(0)
    };
    assert_eq!((running("a").await, running("b").await), (3, 3));
    let all: usize = claimed.iter().map(Vec::len).sum();
    assert_eq!(all, 26, "the other queue has no limit");
    // Each end lets one more job start, of any handler.
    for (store, jobs) in stores.iter().zip(&claimed) {
        for job in jobs.iter().filter(|job| job.tenant.as_deref() == Some("a")) {
            let done = settlement(job, result("1"));
            store.settle(&[&done], Locked::Wait).await.unwrap();
        }
    }
    claim_at_once(&stores).await;
    assert_eq!((running("a").await, running("b").await), (3, 3));
    let rows = client
        .query(
            "SELECT key, weight, ready, in_flight FROM rouse.fair_keys('mail')",
            &[],
        )
        .await
        .unwrap();
    let keys: Vec<(String, f64, i64, i64)> = rows
        .iter()
        .map(|row| (row.get(0), row.get(1), row.get(2), row.get(3)))
        .collect();
    // 3 of the 26 jobs may have been those of the other queue's tenant of the same name.
    assert_eq!(keys[1], ("b".into(), 1.0, 17, 3));
    assert_eq!((keys[0].0.as_str(), keys[0].3), ("a", 3));
}

/// The end of a job starts the next one of its key at once, and not with the next sweep.
#[tokio::test]
async fn a_key_at_its_limit_continues_as_soon_as_one_of_its_jobs_has_ended() {
    let (db, client) = fair(", max_in_flight => 1").await;
    enqueue(&client, "mail", "a", "test.sleep", 1, 100).await;
    enqueue(&client, "mail", "a", "test.race", 1, 100).await;
    let workers = [worker(&db, 4).await, worker(&db, 4).await];
    // One start per sweep would take 200 s, which is longer than this waits.
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    for worker in workers {
        worker.drain().await;
    }
    let overlapping: i64 = client
        .query_one(
            "SELECT count(*) FROM rouse.finished AS a JOIN rouse.finished AS b
             ON a.id < b.id AND a.started_at < b.finished_at AND b.started_at < a.finished_at",
            &[],
        )
        .await
        .unwrap()
        .get(0);
    assert_eq!(overlapping, 0, "two ran at the same time");
    let sleepers: i64 = client
        .query_one(
            &format!("SELECT count(*) FROM (SELECT handler FROM rouse.jobs ORDER BY {START_ORDER} LIMIT 80) AS j WHERE handler = 'test.sleep'"),
            &[],
        )
        .await
        .unwrap()
        .get(0);
    assert!(
        (20..=60).contains(&sleepers),
        "the handlers take turns: {sleepers} of 80"
    );
}
