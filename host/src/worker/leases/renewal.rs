//! Renews leases, and aborts attempts whose lease is lost or can no longer be trusted.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tracing::debug;

use crate::job::{AbortReason, JobId};
use crate::sandbox::BootTime;
use crate::store::{RENEWALS_MAX, Refusal, Renewal};
use crate::worker::Shared;
use crate::worker::reach::warn_unless_unreachable;

/// How often the leases are checked.
const TICK: Duration = Duration::from_millis(250);

/// Renews leases that are due, several hundred in one statement.
pub(in crate::worker) async fn renew_forever(shared: Arc<Shared>) {
    loop {
        // A notification that a job has changed is followed up at once.
        let _ = tokio::time::timeout(TICK, shared.leases.doubts.notified()).await;
        // This goes first, so that after a suspension of the machine no renewal revives a lease that has expired.
        let mut lost = shared.leases.distrust(BootTime::now());
        let due = shared.leases.due(BootTime::now());
        for renewals in due.chunks(RENEWALS_MAX) {
            lost |= renew(&shared, renewals).await;
            lost |= shared.leases.distrust(BootTime::now());
        }
        if lost {
            // A heartbeat shows that this host is alive: it did not crash because of these jobs.
            shared.presence.heartbeat_now.notify_one();
        }
    }
}

/// Renews these leases; true if another worker has taken over one of the jobs. It takes at most a few seconds: a
/// database that does not answer must not delay the check for leases that can no longer be trusted.
async fn renew(shared: &Shared, renewals: &[Renewal]) -> bool {
    let sent = BootTime::now();
    match shared.store.renew(renewals).await {
        Ok(responses) => {
            // While all slots are taken, it may be a long time until the next claim. In other cases, a host that cannot
            // claim is not ready, even if it can renew.
            if shared.slots.are_taken() {
                shared
                    .health
                    .database_answers
                    .store(true, Ordering::Relaxed);
            }
            apply_responses(shared, renewals, sent, responses)
        }
        Err(error) => {
            shared.leases.unanswered(renewals);
            // A renewal leaves a record.
            shared.note_missing_partition(&error);
            if !shared.has_incarnation_ended(&error) {
                warn_unless_unreachable!(error, "could not renew leases; trying again");
            }
            false
        }
    }
}

/// Applies the responses; true if another worker has taken over one of the jobs.
fn apply_responses(
    shared: &Shared,
    due: &[Renewal],
    sent: BootTime,
    responses: Vec<(JobId, Option<Refusal>)>,
) -> bool {
    let mut taken = false;
    let renewals: HashMap<JobId, &Renewal> =
        due.iter().map(|renewal| (renewal.id, renewal)).collect();
    for (id, refusal) in responses {
        let Some(renewal) = renewals.get(&id) else {
            continue;
        };
        match refusal {
            None if shared.leases.extend(renewal, sent) => {
                debug!(job.id = id.0, "lease renewed");
            }
            None => shared.leases.lose(id, renewal.fence, AbortReason::Error),
            Some(Refusal::Busy) => shared.leases.unanswered(std::slice::from_ref(*renewal)),
            Some(Refusal::Lost(reason)) => {
                taken |= reason == AbortReason::TakenByAnotherWorker;
                shared.leases.lose(id, renewal.fence, reason);
            }
        }
    }
    shared.leases.responses.notify_waiters();
    taken
}
