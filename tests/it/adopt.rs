//! Jobs whose worker is gone.

use rouse::job::{Fence, JobId, LaneId};
use rouse::store::{ClaimOrder, Locked};
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
            .adopt(Fence(rand()), &orders, 10, 3, None)
            .await
            .unwrap()
    };
    let first = claim(&store, 1).await.remove(0);
    assert!(adopt().await.is_empty(), "its lease has not run out");

    expire(&client, first.id).await;
    let second = adopt().await.remove(0);
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
    assert!(adopt().await.is_empty(), "after a second loss it waits");
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

    expire(&client, first.id).await;
    assert!(adopt().await.is_empty());
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
    let adopted = store.adopt(Fence(1), &other, 10, 3, None).await.unwrap();
    assert!(adopted.is_empty());
}
