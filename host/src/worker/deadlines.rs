//! Ends jobs whose job timeout is over.
//!
//! Any host does it, whether or not it serves the job. The looks of an idle host notice that a deadline has passed. A
//! host whose slots are all taken does not look, so this task also acts when the next deadline that it knows of passes,
//! and every 15 s (`Intervals::deadlines`). The task of `releases.rs` would not do: it acts only on request.

use std::sync::Arc;
use std::time::Duration;

use super::Shared;
use super::events;
use super::reach::warn_unless_unreachable;
use crate::store::StoreError;

/// The wait after an error.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Enforces deadlines until the worker ends.
pub(super) async fn run_forever(shared: Arc<Shared>) {
    let every = shared.settings.intervals.deadlines;
    loop {
        let wait = match enforce(&shared).await {
            Ok(next_in) => next_in.map_or(every, |next_in| next_in.min(every)),
            Err(error) => {
                if !shared.is_incarnation_over(&error) {
                    warn_unless_unreachable!(
                        error,
                        "cannot end jobs whose job timeout is over; trying again in a second"
                    );
                }
                RETRY_AFTER
            }
        };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = shared.deadlines.notified() => {}
        }
    }
}

/// Handles all deadlines that have passed. Returns the time until the next one passes, if there is one.
async fn enforce(shared: &Shared) -> Result<Option<Duration>, StoreError> {
    loop {
        let enforced = shared.store.enforce_deadlines().await?;
        for missed in &enforced.ended {
            events::missed_deadline(&shared.settings.worker_id, missed);
        }
        if !enforced.ended.is_empty() {
            // Their ends may have left jobs that wait for them.
            shared.releases.notify_one();
        }
        if enforced.handled == 0 {
            return Ok(enforced.next_in);
        }
    }
}
