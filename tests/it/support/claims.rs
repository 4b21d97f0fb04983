//! Claims and settlements like those of a worker, made by hand.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rouse::job::{
    AttemptError, ErrorKind, Fence, JobId, JsonText, LaneId, NewJob, Outcome, RecordedStep,
    after_loss,
};
use rouse::store::{
    Adoption, AdoptionResult, ClaimOrder, ClaimedJob, LostJob, Orphan, Renewal, Settlement, Store,
    StoreError,
};
use tokio_postgres::{Client, Transaction};

/// The outcome `succeeded` with this JSON.
pub(crate) fn result(text: &str) -> Outcome {
    Outcome::Succeeded(JsonText(text.into()))
}

/// An error with a message.
pub(crate) fn error(kind: ErrorKind) -> AttemptError {
    AttemptError::new(kind, "no")
}

/// The settlement of a claimed job that ran for a millisecond.
pub(crate) fn settlement(job: &ClaimedJob, outcome: Outcome) -> Settlement {
    Settlement {
        id: job.id,
        fence: job.fence,
        started_after: Some(Duration::from_millis(1)),
        guest_run: None,
        handler: None,
        outcome,
        jobs: Vec::new(),
        trace: None,
    }
}

/// The renewal of a claimed job, for this long from now.
pub(crate) fn renewal(job: &ClaimedJob, lease_ms: i64) -> Renewal {
    Renewal {
        id: job.id,
        fence: job.fence,
        lease_ms,
    }
}

/// The settlement of a claimed job whose attempt enqueues these jobs.
pub(crate) fn settlement_with(job: &ClaimedJob, outcome: Outcome, jobs: Vec<NewJob>) -> Settlement {
    Settlement {
        jobs,
        ..settlement(job, outcome)
    }
}

/// Claim orders for all lanes, from their start.
pub(crate) async fn orders(store: &Store, lease_ms: i64) -> Vec<ClaimOrder> {
    let lanes = store.catalog_after(i64::MIN, None).await.unwrap().lanes;
    lanes
        .iter()
        .map(|lane| ClaimOrder {
            lane: lane.id,
            after: i64::MIN,
            lease_ms,
            max: None,
            overdue: None,
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

/// Claims the next job.
pub(crate) async fn claim_one(store: &Store) -> ClaimedJob {
    let mut jobs = claim(store, 1).await;
    jobs.pop().expect("a job is ready")
}

/// Locks the row of a job until the end of this transaction.
pub(crate) async fn lock_job(transaction: &Transaction<'_>, id: i64) {
    transaction
        .execute("SELECT FROM rouse.job WHERE id = $1 FOR UPDATE", &[&id])
        .await
        .unwrap();
}

/// Makes a waiting job due.
pub(crate) async fn make_due(client: &Client, id: i64) {
    client
        .execute(
            "UPDATE rouse.job SET available_at = now() WHERE id = $1",
            &[&id],
        )
        .await
        .unwrap();
}

/// Adopts orphans as a worker does, and fails jobs with `lost_max` crashes, but does not wait until their workers have
/// been silent for some time.
pub(crate) async fn adopt(
    store: &Store,
    fence: Fence,
    orders: &[ClaimOrder],
    wanted: usize,
    lost_max: u32,
    since: Option<SystemTime>,
) -> Result<AdoptionResult, StoreError> {
    let lanes: Vec<LaneId> = orders.iter().map(|order| order.lane).collect();
    let orphans = store.orphans(&lanes, None, wanted, since, u32::MAX).await?;
    let adoption = |orphan: Orphan| {
        let order = orders.iter().find(|order| order.lane == orphan.lane);
        let lease_ms = order.expect("only these lanes are read").lease_ms;
        Adoption {
            next: after_loss(orphan.crashes, lost_max),
            lease: Duration::from_millis(lease_ms.try_into().unwrap_or(0)),
            orphan,
        }
    };
    let adoptions: Vec<Adoption> = orphans.into_iter().map(adoption).collect();
    store.adopt(fence, &adoptions).await
}

/// The recorded steps of a job that the worker has claimed.
pub(crate) async fn recorded_steps(
    store: &Store,
    id: JobId,
    fence: Fence,
) -> Result<HashMap<String, RecordedStep>, LostJob> {
    let asked = [(id, fence)];
    let mut read = store.recorded_steps(&asked, Vec::new()).await.unwrap();
    read.remove(0).map(|read| Arc::unwrap_or_clone(read.steps))
}

/// A random number, large enough that no two callers get the same one.
pub(crate) fn rand() -> i64 {
    use std::hash::{BuildHasher as _, RandomState};
    RandomState::new().hash_one(0) as i64
}
