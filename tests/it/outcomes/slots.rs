//! Attempts keep their slots while too many outcomes wait.

use std::sync::Arc;

use rouse::worker::{
    AttemptInfo, Health, Middleware, Next, Parts, Running, Settings, UnsettledLimits,
};
use serde_json::json;
use tokio::sync::watch;

use crate::support::TestDb;
use crate::support::proxy::{Proxy, Side};
use crate::support::worker::{
    TestWorker, catalog, ended, enqueue, sandbox, until_in_hand, until_true,
};

use super::settings;
use super::unwritten::{accept_ends, fill_disk};

/// Counts the attempts whose guest has ended.
struct Counting(watch::Sender<usize>);

impl Middleware for Counting {
    fn around<'a>(&'a self, _attempt: &'a AttemptInfo<'a>, next: Next<'a>) -> Running<'a> {
        Box::pin(async move {
            let run = next.run().await;
            self.0.send_modify(|ran| *ran += 1);
            run
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_a_full_disk_attempts_keep_their_slots_once_too_many_outcomes_wait() {
    let db = TestDb::new().await;
    let client = db.client().await;
    fill_disk(&client, "true").await;
    let (ran, has_run) = watch::channel(0);
    let small = Settings {
        slots: 2,
        unsettled_limits: UnsettledLimits {
            count: 10,
            ..UnsettledLimits::default()
        },
        ..settings()
    };
    let counting: Vec<Arc<dyn Middleware>> = vec![Arc::new(Counting(ran))];
    let worker = TestWorker::start_with_middlewares(&db, small, counting).await;
    client
        .batch_execute("SELECT rouse.enqueue_many('noop', ARRAY(SELECT jsonb_build_object('n', n) FROM generate_series(1, 300) AS n))")
        .await
        .unwrap();
    // After these tries, the worker has waited for several seconds, in which all jobs could have run.
    until_true(&client, "SELECT last_value >= 12 FROM public.tries").await;
    let ran = *has_run.borrow();
    assert!(
        ran <= 10 + 10 + 2,
        "{ran} have run: those that were tried, those that wait and those in slots"
    );
    accept_ends(&client).await;
    until_true(
        &client,
        "SELECT count(*) FILTER (WHERE state = 'succeeded') = 300 FROM rouse.finished",
    )
    .await;
    worker.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempts_keep_their_slots_while_too_many_bytes_wait_for_their_settlement() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let proxy = Proxy::start(&db).await;
    let (ran, mut has_run) = watch::channel(0);
    let parts = Parts {
        middleware: vec![Arc::new(Counting(ran))],
        ..proxy.parts(&db, sandbox(), catalog().await)
    };
    let small = Settings {
        slots: 4,
        unsettled_limits: UnsettledLimits {
            bytes: 1 << 20,
            ..UnsettledLimits::default()
        },
        ..settings()
    };
    let health = Health::default();
    let worker = TestWorker::start_with_health(parts, small, health.clone());
    let settling = proxy.hold("rouse.settle(", Side::Statement);
    // One of the outcomes fits.
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(enqueue(&client, "test.big-result", json!({"bytes": 600_000})).await);
    }
    settling.caught().await;
    has_run.wait_for(|ran| *ran == 3).await.unwrap();
    // Small outcomes still fit.
    ids.push(enqueue(&client, "noop", json!({"n": 1})).await);
    has_run.wait_for(|ran| *ran == 4).await.unwrap();
    // The two others keep their slots.
    until_in_hand(&health, 2).await;
    settling.release();
    for id in ids {
        assert_eq!(ended(&client, id).await.state, "succeeded");
    }
    worker.drain().await;
}
