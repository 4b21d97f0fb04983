//! Sends the outcomes of attempts to the settler. An attempt that has lost its job has no outcome, and is only counted.

use metrics::counter;

use super::{Unsettled, give_up_when_stopping};
use crate::job::{AbortReason, ErrorKind, Fence, JobId};
use crate::store::Settlement;
use crate::worker::Shared;
use crate::worker::events::{self, EventContext};
use crate::worker::meters::{HandlerMeters, OutcomeLabel};

/// Passes an outcome to the settler. Waits while too many outcomes, or too many bytes of outcomes, are not settled yet.
pub(in crate::worker) async fn send(shared: &Shared, one: Unsettled) {
    let Settlement {
        id, fence, outcome, ..
    } = &one.settlement;
    let (id, fence) = (*id, *fence);
    if let Some(error) = outcome.error() {
        one.meters.count_error(error.kind);
        if error.kind == ErrorKind::TimedOut {
            shared.presence.tally.timed_out();
        }
    }
    let is_sent = tokio::select! {
        biased;
        is_sent = send_once_it_fits(shared, one) => is_sent,
        () = give_up_when_stopping(shared, id, fence) => unreachable!("it never returns"),
    };
    // The settler outlives every attempt. If it did not, the lease would expire and another worker would adopt the job.
    if !is_sent {
        shared.leases.remove(id, fence);
    }
}

/// False if the settler has ended.
async fn send_once_it_fits(shared: &Shared, mut one: Unsettled) -> bool {
    // After an immediate stop, outcomes are no longer written.
    let stop = &shared.stop.now;
    let _ = stop.run_until_cancelled(one.take_space(shared)).await;
    shared.attempts.settlements.send(one).await.is_ok()
}

/// Counts an attempt that has lost its job, for this reason: nothing may be written.
pub(in crate::worker) fn drop_attempt(
    shared: &Shared,
    (id, fence): (JobId, Fence),
    meters: &HandlerMeters,
    context: EventContext<'_>,
    reason: AbortReason,
) {
    counter!("rouse_lease_losses_total", "reason" => reason.as_str()).increment(1);
    events::dropped(context, reason);
    meters.count(OutcomeLabel::Dropped);
    shared.leases.remove(id, fence);
}
