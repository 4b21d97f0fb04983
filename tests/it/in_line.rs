//! Claimed jobs that wait in line for a slot, and admin actions on them in the meantime.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rouse::worker::{AttemptInfo, Middleware, Next, Parts, Running, Settings};
use serde_json::json;

use crate::support::TestDb;
use crate::support::proxy::{Proxy, Side};
use crate::support::worker::{
    TIMEOUT, TestWorker, cancel, catalog, ended, enqueue, events, sandbox, show, until, until_true,
};

/// Records which attempts have started and which have ended.
#[derive(Default)]
struct Seen {
    started: Mutex<Vec<i64>>,
    ended: Mutex<Vec<i64>>,
}

fn record(list: &Mutex<Vec<i64>>, id: i64) {
    list.lock().unwrap_or_else(PoisonError::into_inner).push(id);
}

fn is_recorded(list: &Mutex<Vec<i64>>, id: i64) -> bool {
    let list = list.lock().unwrap_or_else(PoisonError::into_inner);
    list.contains(&id)
}

impl Middleware for Seen {
    fn around<'a>(&'a self, attempt: &'a AttemptInfo<'a>, next: Next<'a>) -> Running<'a> {
        Box::pin(async move {
            record(&self.started, attempt.id.0);
            let run = next.run().await;
            record(&self.ended, attempt.id.0);
            run
        })
    }
}

fn recording() -> (Arc<Seen>, Vec<Arc<dyn Middleware>>) {
    let recording = Arc::<Seen>::default();
    (recording.clone(), vec![recording])
}

/// Waits for an event inside this process.
async fn until_recorded(list: &Mutex<Vec<i64>>, id: i64) {
    let recorded = async {
        while !is_recorded(list, id) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let waited = tokio::time::timeout(TIMEOUT, recorded).await;
    waited.unwrap_or_else(|_| panic!("not recorded: job {id}"));
}

#[tokio::test]
async fn a_job_cancelled_while_it_waits_for_a_slot_never_starts() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (recording, around) = recording();
    let one = Settings {
        slots: 1,
        ..Settings::default()
    };
    let worker = TestWorker::start_with_middlewares(&db, one, around).await;
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
    let mut cancelled = Vec::new();
    // If the machine is too slow to cancel them before they are released, there is another round.
    while cancelled.len() < 10 {
        // Short jobs, so that many are claimed ahead; one that occupies the slot; and those that wait behind it.
        let rows = client
            .query(
                "SELECT * FROM rouse.enqueue_many('test.race', array_fill('{\"ms\": 0}'::jsonb, ARRAY[200])
                     || '{\"ms\": 600000}'::jsonb || array_fill('{\"ms\": 0}'::jsonb, ARRAY[50]))",
                &[],
            )
            .await
            .unwrap();
        let ids: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
        let long = ids[200];
        until(&client, long, |job| job.state == "running").await;
        let waiting = client
            .query(
                "SELECT j.id FROM (SELECT id FROM rouse.job WHERE state = 'running' AND id > $1 OFFSET 0) AS j WHERE rouse.cancel(j.id)",
                &[&long],
            )
            .await
            .unwrap();
        // Notifications arrive in the order of their commits: once this job is aborted, the worker knows about the
        // others.
        assert!(cancel(&client, long).await);
        // If the long job was released, others may have started before they were cancelled.
        let is_released = events(&client, long).await.contains(&"released".to_owned());
        for row in waiting {
            let id: i64 = row.get(0);
            // A job that had been released by then did not have an attempt.
            if !is_released && show(&client, id).await.attempt == 1 {
                cancelled.push(id);
            }
        }
        until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    }
    worker.drain().await;
    let started: Vec<i64> = cancelled
        .into_iter()
        .filter(|id| is_recorded(&recording.started, *id))
        .collect();
    assert!(started.is_empty(), "started: {started:?}");
}

#[tokio::test]
async fn a_job_cancelled_before_the_response_to_its_claim_arrives_never_starts() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let proxy = Proxy::start(&db).await;
    let (recording, middleware) = recording();
    let parts = Parts {
        middleware,
        ..proxy.parts(&db, sandbox(), catalog().await)
    };
    let worker = TestWorker::start_with(parts, Settings::default());
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
    let running = enqueue(&client, "test.wait-abort", json!({})).await;
    until_recorded(&recording.started, running).await;
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;

    let response = proxy.hold("FROM rouse.claim(", Side::Response);
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    response.caught().await;
    until(&client, id, |job| job.state == "running").await;
    assert!(cancel(&client, id).await, "cancelled by this call");
    // The notification for this job comes later: once it is aborted, the worker also knows about the other job.
    assert!(cancel(&client, running).await, "cancelled by this call");
    until_recorded(&recording.ended, running).await;
    response.release();

    let next = enqueue(&client, "noop", json!({"n": 2})).await;
    assert_eq!(ended(&client, next).await.state, "succeeded");
    worker.drain().await;
    assert!(!is_recorded(&recording.started, id), "the job has started");
    assert_eq!(show(&client, id).await.state, "cancelled");
}
