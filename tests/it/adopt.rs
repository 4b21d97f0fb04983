//! Jobs whose worker is gone.

use std::time::Duration;

use rouse::job::{Attempt, Fence, JobId, LaneId};
use rouse::store::{ClaimOrder, Locked, LostJob};
use serde_json::json;
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::claims::{claim, orders, rand, result, settlement};
use crate::support::worker::{enqueue, events, show};

async fn expire(client: &Client, id: JobId) {
    client
        .execute(
            "UPDATE rouse.job SET lease_until = now() - interval '1 s' WHERE id = $1 AND state = 'running'",
            &[&id.0],
        )
        .await
        .unwrap();
}

#[tokio::test]
async fn a_lost_job_is_adopted_once_then_waits_and_fails_after_its_third_loss() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = enqueue(&client, "x", json!({})).await;
    let orders = orders(&store, 60_000).await;
    let adopt = async || {
        store
            .adopt(Fence(rand()), &orders, None, 10, 3, None)
            .await
            .unwrap()
    };
    let first = claim(&store, 1).await.remove(0);
    let adopted = adopt().await;
    assert!(adopted.claimed.is_empty(), "its lease has not run out");
    let lost = |attempt, lost, has_failed| LostJob {
        id: first.id,
        lane: first.lane,
        attempt: Attempt(attempt),
        lost,
        has_failed,
        after: Duration::ZERO,
    };
    // What is told of a job that nobody has claimed; how long it ran is another matter.
    let told = |all: Vec<LostJob>| -> Vec<LostJob> {
        let without = |one| LostJob {
            after: Duration::ZERO,
            ..one
        };
        all.into_iter().map(without).collect()
    };

    expire(&client, first.id).await;
    let mut adopted = adopt().await;
    let second = adopted.claimed.remove(0);
    assert!(adopted.lost.is_empty(), "its event is the adoption");
    assert_eq!(
        (second.attempt.0, second.lost),
        (2, 1),
        "the first loss is taken up at once"
    );
    let stale = store
        .settle(&[settlement(&first, result("1"))], Locked::Wait)
        .await
        .unwrap();
    assert!(
        stale.accepted.is_empty(),
        "the old owner has no say any more"
    );

    expire(&client, first.id).await;
    let adopted = adopt().await;
    assert!(adopted.claimed.is_empty(), "after a second loss it waits");
    assert_eq!(told(adopted.lost), [lost(2, 2, false)]);
    assert_eq!(show(&client, id).await.state, "queued");
    client
        .execute(
            "UPDATE rouse.job SET available_at = now() WHERE id = $1",
            &[&id],
        )
        .await
        .unwrap();
    store.promote(None).await.unwrap();
    let third = claim(&store, 1).await.remove(0);
    assert_eq!((third.attempt.0, third.lost), (3, 2));

    client
        .execute(
            "UPDATE rouse.job SET claimed_at = now() - interval '1 min', lease_until = now() - interval '1 s'",
            &[],
        )
        .await
        .unwrap();
    let adopted = adopt().await;
    assert!(adopted.claimed.is_empty());
    let ran = adopted.lost[0].after;
    assert!(ran >= Duration::from_secs(60), "since its claim: {ran:?}");
    assert_eq!(told(adopted.lost), [lost(3, 3, true)]);
    let shown = show(&client, id).await;
    assert_eq!(shown.state, "failed");
    let error = shown.error.unwrap();
    assert_eq!(error["kind"], "lost");
    assert!(
        error["message"].as_str().unwrap().contains("3 times"),
        "{error}"
    );
    assert_eq!(
        events(&client, id).await,
        [
            "requested",
            "claimed",
            "lost",
            "claimed",
            "lost",
            "claimed",
            "failed"
        ]
    );
}

#[tokio::test]
async fn a_worker_adopts_only_jobs_of_its_own_lanes() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    enqueue(&client, "x", json!({})).await;
    let job = claim(&store, 1).await.remove(0);
    expire(&client, job.id).await;
    let other = [ClaimOrder {
        lane: LaneId(job.lane.0 ^ 1),
        after: 0,
        lease_ms: 1000,
    }];
    let adopted = store
        .adopt(Fence(1), &other, None, 10, 3, None)
        .await
        .unwrap();
    assert!(adopted.claimed.is_empty());
}
