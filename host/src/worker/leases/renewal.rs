//! Renews leases, and aborts attempts whose lease is lost or can no longer be trusted.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tracing::debug;

use crate::job::{AbortReason, JobId};
use crate::sandbox::BootTime;
use crate::store::{RENEWALS_MAX, Refusal, Renewal, renew_timeout};
use crate::worker::Shared;
use crate::worker::reach::warn_unless_unreachable;

/// How often the leases are checked.
const TICK: Duration = Duration::from_millis(250);

/// The additional time for a server that needs longer: the longest lease divided by this number, at most 3 s.
const EXTRA_SHARE: u32 = 8;
const EXTRA_MAX: Duration = Duration::from_secs(3);

/// Renews leases that are due, several hundred in one statement.
pub(in crate::worker) async fn renew_forever(shared: Arc<Shared>) {
    let mut patience = Patience::default();
    loop {
        // A notification that a job has changed is followed up at once.
        let _ = tokio::time::timeout(TICK, shared.leases.doubts.notified()).await;
        // This goes first, so that after a suspension of the machine no renewal revives a lease that has expired.
        distrust(&shared);
        let due = shared.leases.due(BootTime::now());
        for renewals in due.chunks(RENEWALS_MAX) {
            if renew(&shared, renewals, &mut patience).await {
                show_life(&shared);
            }
            distrust(&shared);
        }
    }
}

/// Loses the leases that can no longer be trusted.
fn distrust(shared: &Shared) {
    if shared.leases.distrust(BootTime::now()) {
        show_life(shared);
    }
}

/// Sends a heartbeat after a lease was lost, which shows that the job has not crashed this host.
fn show_life(shared: &Shared) {
    shared.presence.heartbeat_now.notify_one();
}

/// Decides how long a renewal waits for its response. The first wait is short: the connection may be dead, and another
/// one works. But with short waits only, a server that needs longer for each statement would lose all long attempts, so
/// the next wait is longer.
#[derive(Default)]
struct Patience {
    has_extra: bool,
}

impl Patience {
    fn timeout(&self, renewals: &[Renewal]) -> Duration {
        let timeout = renew_timeout(renewals.len());
        if !self.has_extra {
            return timeout;
        }
        let leases = renewals.iter().map(|renewal| renewal.lease_ms);
        let longest = u64::try_from(leases.max().unwrap_or(0)).unwrap_or(0);
        timeout + (Duration::from_millis(longest) / EXTRA_SHARE).min(EXTRA_MAX)
    }

    /// Notes that a renewal got no response in time. Several connections may be dead, so waits are long and short in
    /// turn.
    fn was_silent(&mut self) {
        self.has_extra = !self.has_extra;
    }

    /// Notes that these responses arrived after this time.
    fn was_answered(&mut self, responses: &[(JobId, Option<Refusal>)], took: Duration) {
        // A statement that was given up may still lock the jobs. The server then answers quickly, without any renewal.
        let is_busy = |(_, refusal): &(JobId, Option<Refusal>)| *refusal == Some(Refusal::Busy);
        if !responses.iter().all(is_busy) {
            self.has_extra = took > renew_timeout(responses.len());
        }
    }
}

/// Waits for a response. Leases that can no longer be trusted are lost meanwhile.
async fn response_to<T>(shared: &Shared, request: impl Future<Output = T>) -> T {
    let mut request = pin!(request);
    loop {
        match tokio::time::timeout(TICK, request.as_mut()).await {
            Ok(response) => return response,
            Err(_) => distrust(shared),
        }
    }
}

/// Renews these leases; true if another worker has taken over one of the jobs. It takes at most a few seconds: a
/// database that does not answer must not delay the renewals of other leases for long.
async fn renew(shared: &Shared, renewals: &[Renewal], patience: &mut Patience) -> bool {
    let sent = BootTime::now();
    let timeout = patience.timeout(renewals);
    let request = shared.store.renew_within(timeout, renewals);
    match response_to(shared, request).await {
        Ok(responses) => {
            patience.was_answered(&responses, BootTime::now().since(sent));
            // While all slots are taken, it may be a long time until the next claim. In other cases, a host that cannot
            // claim is not ready, even if it can renew.
            if shared.slots.are_taken() {
                shared
                    .health
                    .database_responds
                    .store(true, Ordering::Relaxed);
            }
            apply_responses(shared, renewals, sent, responses)
        }
        Err(error) => {
            shared.leases.unanswered(renewals);
            if error.is_silence() {
                patience.was_silent();
            }
            // A renewal writes a record, so a partition may be missing.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Fence;

    fn renewals(lease_ms: i64) -> [Renewal; 1] {
        [Renewal {
            id: JobId(1),
            fence: Fence(1),
            lease_ms,
        }]
    }

    #[test]
    fn a_renewal_waits_longer_after_one_that_got_no_response() {
        let (minute, short) = (renewals(60_000), renewals(2_000));
        let usual = renew_timeout(1);
        let long = usual + EXTRA_MAX;
        let mut patience = Patience::default();
        assert_eq!(patience.timeout(&minute), usual);
        patience.was_silent();
        assert_eq!(patience.timeout(&minute), long);
        assert_eq!(patience.timeout(&short), usual + Duration::from_millis(250));
        let busy = [(JobId(1), Some(Refusal::Busy))];
        patience.was_answered(&busy, Duration::ZERO);
        assert_eq!(patience.timeout(&minute), long);
        let renewed = [(JobId(1), None)];
        patience.was_answered(&renewed, usual + Duration::from_millis(1));
        assert_eq!(patience.timeout(&minute), long);
        patience.was_answered(&renewed, usual);
        assert_eq!(patience.timeout(&minute), usual);
    }

    #[test]
    fn waits_on_dead_connections_are_long_and_short_in_turn() {
        let renewals = renewals(60_000);
        let mut patience = Patience::default();
        let waits = [0; 8].map(|_| {
            let wait = patience.timeout(&renewals);
            patience.was_silent();
            wait
        });
        // As many as there are pooled connections: the lease has 36 s left when its renewal is due.
        let all: Duration = waits.iter().sum();
        assert!(all < Duration::from_secs(25), "{waits:?}");
    }
}
