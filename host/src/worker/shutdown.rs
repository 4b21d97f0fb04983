//! The end of a worker.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::Shared;
use crate::job::AbortReason;
use crate::store::StoreError;

/// How long a worker that stops during an outage waits for the database before its last try to unregister.
const UNREGISTER_WITHIN: Duration = Duration::from_secs(5);
/// The time limit, after the order to abort, for writing the last outcomes, and again for unregistering.
const LAST_WITHIN: Duration = Duration::from_secs(5);

/// The result of this work. `None` if it is not done [`LAST_WITHIN`] after the order to abort.
pub(super) async fn before_last_deadline<T>(
    now: &CancellationToken,
    work: impl Future<Output = T>,
) -> Option<T> {
    tokio::select! {
        done = work => Some(done),
        () = async {
            now.cancelled().await;
            tokio::time::sleep(LAST_WITHIN).await;
        } => None,
    }
}

/// Unregisters without waiting for the backoff: otherwise attempts that were lost in an outage would count as crashes. During an outage it
/// tries twice.
pub(super) async fn unregister(shared: &Shared) -> Result<(), StoreError> {
    let store = &shared.store;
    store.try_now();
    match store.unregister().await {
        Err(error) if error.is_unreachable() => {
            // Tries again whether or not the database became reachable in time.
            let _ = tokio::time::timeout(UNREGISTER_WITHIN, store.ready()).await;
            store.try_now();
            store.unregister().await
        }
        answer => answer,
    }
}

/// Waits for the running attempts, for as long as the settings allow; then aborts them.
pub(super) async fn wait_for_attempts(shared: &Arc<Shared>) {
    let running = shared.slots.in_hand();
    if running > 0 {
        info!(running, "waiting for running attempts");
    }
    tokio::select! {
        () = shared.attempts.tasks.wait() => return,
        () = shared.stop.now.cancelled() => {}
        () = tokio::time::sleep(shared.settings.drain_timeout) => {}
    }
    let ids = shared.leases.abort_all(AbortReason::Shutdown);
    if !ids.is_empty() {
        warn!(job.ids = ?ids, "aborting attempts that have not finished; their jobs are given back");
    }
    shared.attempts.tasks.wait().await;
}
