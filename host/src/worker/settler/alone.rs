//! Settles outcomes one at a time.

use std::sync::Arc;

use tokio::sync::Semaphore;
use tracing::warn;

use super::{Unsettled, give_up_lost, give_up_when_stopping, report, retry_after};
use crate::store::{Locked, Settlement};
use crate::worker::Shared;

/// Settles one outcome whose settlement got no response. If this try gets none either, its lease is no longer renewed,
/// so that the retries end. Returns the outcome if the database refused it.
pub(super) async fn settle_alone(
    shared: Arc<Shared>,
    one_at_a_time: Arc<Semaphore>,
    one: Unsettled,
) -> Option<Unsettled> {
    let Settlement { id, fence, .. } = one.settlement;
    tokio::select! {
        biased;
        refused = try_until_settled(&shared, &one_at_a_time, one) => refused,
        // The outcome may still be waiting for its turn.
        () = give_up_when_stopping(&shared, id, fence) => unreachable!("it never returns"),
    }
}

async fn try_until_settled(
    shared: &Shared,
    one_at_a_time: &Semaphore,
    one: Unsettled,
) -> Option<Unsettled> {
    let Settlement { id, fence, .. } = one.settlement;
    let mut part = vec![one];
    let mut failures = 0;
    loop {
        tokio::time::sleep(retry_after(failures)).await;
        let permit = one_at_a_time.acquire().await;
        give_up_lost(shared, &mut part);
        let one = part.first()?;
        let response = shared.store.settle(&[&one.settlement], Locked::Skip).await;
        drop(permit);
        match response {
            Ok(settled) if settled.locked.contains(&id) => part[0].note_blocked(),
            Ok(settled) => {
                if settled.has_releases {
                    shared.releases.notify_one();
                }
                report(shared, one, settled.accepted.contains(&id));
                return None;
            }
            Err(error) if error.is_unanswered() => {
                warn!(job.id = id.0, handler = %one.meters.handler, %error, "cannot settle; trying until the lease expires");
                shared.leases.give_up(id, fence);
            }
            Err(error) if shared.has_incarnation_ended(&error) => {
                report(shared, one, false);
                return None;
            }
            Err(error) if error.is_transient() => part[0].blocked_at = None,
            Err(_) => return part.pop(),
        }
        failures += 1;
    }
}
