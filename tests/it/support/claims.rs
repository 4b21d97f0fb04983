//! Claims and settlements like those of a worker, made by hand.

use std::time::Duration;

use rouse::job::Fence;
use rouse::store::{ClaimOrder, ClaimedJob, Fate, JsonText, Settlement, Store};

/// The outcome `succeeded` with this JSON.
pub(crate) fn result(text: &str) -> Fate {
    Fate::Succeeded(JsonText(text.into()))
}

/// The settlement of a claimed job that ran for a millisecond.
pub(crate) fn settlement(job: &ClaimedJob, fate: Fate) -> Settlement {
    Settlement {
        id: job.id,
        fence: job.fence,
        started_after: Some(Duration::from_millis(1)),
        ran: None,
        handler: None,
        fate,
    }
}

/// Claim orders for all lanes, from their start.
pub(crate) async fn orders(store: &Store, lease_ms: i64) -> Vec<ClaimOrder> {
    let lanes = store.lanes_after(i64::MIN).await.unwrap();
    lanes
        .iter()
        .map(|lane| ClaimOrder {
            lane: lane.id,
            after: i64::MIN,
            lease_ms,
            only: None,
        })
        .collect()
}

/// Claims jobs from any lane.
pub(crate) async fn claim(store: &Store, wanted: usize) -> Vec<ClaimedJob> {
    let orders = orders(store, 60_000).await;
    store
        .claim(Fence(rand()), &orders, wanted, None)
        .await
        .unwrap()
        .jobs()
}

/// A number that no other caller draws.
pub(crate) fn rand() -> i64 {
    use std::hash::{BuildHasher as _, RandomState};
    RandomState::new().hash_one(0) as i64
}
