//! Direct dispatch: recovers the jobs of workers that are dead or have stopped.
//!
//! Any worker does this, when it starts and every two minutes (`Intervals::recovery`), whether or not it serves the
//! queue. A worker that stops empties its inboxes itself, and a worker that declares another one dead moves the first
//! jobs out of its inboxes. The rest is left for this task: long inboxes, late commits, and handlers that a live worker
//! has lost.

use std::sync::Arc;

use tracing::{info, warn};

use super::Shared;
use super::reach::warn_unless_unreachable;

/// The number of jobs per call, which takes tens of milliseconds.
const BATCH: i32 = 1_000;

/// Recovers inboxes until the worker ends.
pub(super) async fn recover_forever(shared: Arc<Shared>) {
    loop {
        recover(&shared).await;
        // Hosts that were started together do not call together.
        let every = shared.settings.intervals.recovery;
        tokio::time::sleep(every.mul_f64(rand::random_range(0.9..1.1))).await;
    }
}

/// Recovers all inboxes. After an error, the next round tries again.
async fn recover(shared: &Shared) {
    let (mut moved, mut late, mut from) = (0, 0, None);
    let failed = loop {
        let _permit = shared.calls.patient.acquire().await;
        match shared.store.recover_direct(BATCH, from).await {
            Ok(recovered) => {
                moved += recovered.moved;
                late += recovered.late;
                from = recovered.next;
                if from.is_none() {
                    break None;
                }
            }
            Err(error) => break Some(error),
        }
    };
    if moved > 0 {
        info!(
            jobs = moved,
            "moved jobs to their shared lanes from inboxes of workers that no longer take them"
        );
    }
    if late > 0 {
        warn!(
            jobs = late,
            "jobs waited for more than a day in inboxes of workers that no longer took them; they are in their shared lanes now"
        );
    }
    if let Some(error) = failed
        && !shared.has_incarnation_ended(&error)
    {
        warn_unless_unreachable!(
            error,
            "could not recover the inboxes of other workers; trying again in two minutes"
        );
    }
}
