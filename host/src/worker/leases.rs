//! The leases of claims and running attempts.
//!
//! A lease is held as soon as its claim arrives, so that a change to the job is noticed while the claim waits for a
//! slot. An attempt whose job may have changed starts only after the database has renewed its lease.
//!
//! The worker counts from just before it sent a claim or a renewal, so that it stops trusting a lease before the
//! database does. In the same way it counts from just before it sent its last heartbeat: without another one it is
//! declared dead, which frees its claims regardless of their leases. So it does not trust any lease beyond the time at
//! which it may be declared dead.

mod lease;
mod renewal;

use std::collections::{HashMap, HashSet};
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tracing::{debug, info, warn};

use self::lease::Lease;
pub(super) use self::lease::StartedAttempt;
pub(super) use self::renewal::renew_forever;
use super::claim::Claim;
use super::policy::LEASE_MIN;
use crate::job::{AbortReason, Fence, JobId, RunEnd};
use crate::sandbox::{AbortHandle, BootTime};
use crate::store::{Renewal, RunningUsage};

/// A claim in doubt waits in its slot for at most this long; then it is given back.
const RENEWAL_TIMEOUT: Duration = Duration::from_secs(1);

/// The leases of all claims, from their arrival to their settlement.
pub(super) struct Leases {
    /// The worker may be declared dead this long after its last heartbeat.
    silence_max: Duration,
    inner: Mutex<Inner>,
    /// Notified when some leases are in doubt.
    doubts: Notify,
    /// Notified when renewals of some of them have got a response.
    responses: Notify,
}

#[derive(Default)]
struct Inner {
    held: HashMap<JobId, Lease>,
    /// The time at which the last registration or heartbeat that got a response was sent, plus `silence_max`.
    alive_until: BootTime,
    /// Why all attempts were aborted, including those of claims that arrive later.
    all_aborted: Option<AbortReason>,
    /// The jobs that were changed while a claim was in flight: its response may contain them. `Some(None)` stands for
    /// any job. `None` if no claim is in flight.
    changed: Option<HashSet<Option<JobId>>>,
}

/// A claim that was sent and has no response yet.
pub(super) struct ClaimInFlight<'a>(&'a Leases);

impl ClaimInFlight<'_> {
    /// Notes that the response has arrived. Jobs that were changed since the claim was sent are in doubt from the
    /// start.
    pub(super) fn arrived(self, claims: &[Claim]) {
        let mut inner = self.0.lock();
        let mut doubts = false;
        for claim in claims {
            let lease = Lease::new(claim.job.fence, claim.sent, claim.lease);
            doubts |= inner.hold(claim.job.id, lease);
        }
        drop(inner);
        if doubts {
            self.0.doubts.notify_one();
        }
        // An earlier attempt of one of these jobs may be waiting for the renewal of its lease.
        self.0.responses.notify_waiters();
    }
}

impl Drop for ClaimInFlight<'_> {
    fn drop(&mut self) {
        self.0.lock().changed = None;
    }
}

impl Inner {
    /// Holds the lease from now on. True if it is in doubt.
    fn hold(&mut self, id: JobId, mut lease: Lease) -> bool {
        let doubted = self
            .changed
            .as_ref()
            .is_some_and(|changed| changed.contains(&Some(id)) || changed.contains(&None));
        lease.doubted = doubted;
        if let Some(reason) = self.all_aborted {
            lease.abort.abort(reason, lease.grace());
        }
        // This worker adopted its own job before it noticed that it had lost the lease, for instance after the machine
        // was suspended. This is the last chance to stop the earlier attempt.
        if let Some(before) = self.held.insert(id, lease) {
            before
                .abort
                .abort(AbortReason::TakenByAnotherWorker, Duration::ZERO);
        }
        doubted
    }

    fn get(&mut self, id: JobId, fence: Fence) -> Option<&mut Lease> {
        // If its lease was lost, the same job may be here again under another fence.
        self.held.get_mut(&id).filter(|lease| lease.fence == fence)
    }

    /// The leases of attempts that have started.
    fn running(&self) -> impl Iterator<Item = (JobId, &Lease)> {
        self.held
            .iter()
            .filter(|(_, lease)| lease.attempt.is_some())
            .map(|(id, lease)| (*id, lease))
    }
}

impl Leases {
    /// `registered`: the time just before the registration was sent. `silence_max`: the worker may be declared
    /// dead this long after its last heartbeat.
    pub(super) fn new(registered: BootTime, silence_max: Duration) -> Self {
        Self {
            silence_max,
            inner: Mutex::new(Inner {
                alive_until: registered.plus(silence_max),
                ..Inner::default()
            }),
            doubts: Notify::new(),
            responses: Notify::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing panics while holding the lock, and the map is consistent at every step.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a heartbeat got a response. False if the response came too late: the leases are no longer trusted
    /// until the worker has [registered](Self::registered) again.
    #[must_use]
    pub(super) fn heartbeat_answered(&self, sent: BootTime, now: BootTime) -> bool {
        let mut inner = self.lock();
        if inner.alive_until <= now {
            return false;
        }
        let alive_until = sent.plus(self.silence_max);
        inner.alive_until = alive_until;
        for lease in inner.held.values() {
            lease.trust(alive_until);
        }
        true
    }

    /// Notes that the worker has a new incarnation, whose registration was sent at this time. The leases of the old one
    /// must have been [lost](Self::lose_all).
    pub(super) fn registered(&self, sent: BootTime) {
        // The response to a claim of the old incarnation may still arrive.
        self.doubt(None);
        self.lock().alive_until = sent.plus(self.silence_max);
    }

    /// Notes that a claim is about to be sent. After this call, changes to its jobs are noticed. Only one claim may be
    /// in flight at a time.
    pub(super) fn claiming(&self) -> ClaimInFlight<'_> {
        self.lock().changed = Some(HashSet::new());
        ClaimInFlight(self)
    }

    /// Starts an attempt of a claim that has arrived. If the job may have changed since its claim, the lease is renewed
    /// first.
    ///
    /// # Errors
    /// How the attempt ends without having started: the job has another owner or none, or it has to be given back.
    pub(super) async fn start(
        &self,
        id: JobId,
        fence: Fence,
        attempt: &StartedAttempt,
    ) -> Result<AbortHandle, RunEnd> {
        if let Some(started) = self.try_start(id, fence, attempt) {
            return started;
        }
        let started = async {
            loop {
                let mut responses = pin!(self.responses.notified());
                // Enabled before the check, so that a response between the check and the await is not missed.
                responses.as_mut().enable();
                if let Some(started) = self.try_start(id, fence, attempt) {
                    return started;
                }
                responses.await;
            }
        };
        let answered = tokio::time::timeout(RENEWAL_TIMEOUT, started).await;
        answered.unwrap_or(Err(RunEnd::NotStarted))
    }

    /// True if no lease is trusted, because no heartbeat has got a response for too long.
    pub(super) fn are_distrusted(&self, now: BootTime) -> bool {
        self.lock().alive_until <= now
    }

    fn try_start(
        &self,
        id: JobId,
        fence: Fence,
        attempt: &StartedAttempt,
    ) -> Option<Result<AbortHandle, RunEnd>> {
        let mut inner = self.lock();
        let alive_until = inner.alive_until;
        match inner.get(id, fence) {
            Some(lease) => lease.start(attempt, BootTime::now(), alive_until),
            // A later claim of this worker holds the job.
            None => Some(Err(RunEnd::Aborted(AbortReason::TakenByAnotherWorker))),
        }
    }

    pub(super) fn remove(&self, id: JobId, fence: Fence) {
        let mut inner = self.lock();
        if inner.get(id, fence).is_some() {
            inner.held.remove(&id);
        }
    }

    /// Aborts all attempts, including those that start later; returns the jobs of running attempts.
    pub(super) fn abort_all(&self, reason: AbortReason) -> Vec<i64> {
        let mut inner = self.lock();
        let reason = *inner.all_aborted.get_or_insert(reason);
        for lease in inner.held.values() {
            lease.abort.abort(reason, lease.grace());
        }
        let running = inner.running().map(|(id, _)| id.0).collect();
        drop(inner);
        self.responses.notify_waiters();
        running
    }

    /// The longest grace of the running attempts.
    pub(super) fn longest_grace(&self) -> Duration {
        let inner = self.lock();
        let graces = inner.held.values().map(Lease::grace);
        graces.max().unwrap_or_default()
    }

    /// Notes that another session may have changed this job (`None`: any job): its lease is renewed now.
    pub(super) fn doubt(&self, id: Option<JobId>) {
        let mut inner = self.lock();
        if let Some(changed) = &mut inner.changed {
            changed.insert(id);
        }
        let any = match id {
            Some(id) => match inner.held.get_mut(&id) {
                Some(lease) => {
                    lease.doubted = true;
                    true
                }
                None => false,
            },
            None => {
                for lease in inner.held.values_mut() {
                    lease.doubted = true;
                }
                !inner.held.is_empty()
            }
        };
        drop(inner);
        if any {
            self.doubts.notify_one();
        }
    }

    /// Notes that these renewals got no response: the leases are in doubt.
    fn unanswered(&self, renewals: &[Renewal]) {
        let mut inner = self.lock();
        for renewal in renewals {
            if let Some(lease) = inner.get(renewal.id, renewal.fence) {
                lease.doubted = true;
                lease.renewing = false;
            }
        }
    }

    /// Loses every lease for this reason; returns the jobs of running attempts.
    pub(super) fn lose_all(&self, reason: AbortReason) -> Vec<i64> {
        let inner = self.lock();
        let all: Vec<(JobId, Fence)> = inner
            .held
            .iter()
            .map(|(id, lease)| (*id, lease.fence))
            .collect();
        let running = inner.running().map(|(id, _)| id.0).collect();
        drop(inner);
        for (id, fence) in &all {
            self.lose(*id, *fence, reason);
        }
        running
    }

    /// The usage so far of attempts that have run for at least this long.
    pub(super) fn usage(&self, runs_for: Duration) -> Vec<RunningUsage> {
        let usage = |(id, lease): (JobId, &Lease)| {
            let attempt = lease.attempt.as_ref()?;
            Some(RunningUsage {
                id,
                fence: lease.fence,
                usage: attempt.usage.after(runs_for)?,
            })
        };
        self.lock().running().filter_map(usage).collect()
    }

    /// The renewals to send now, in the order in which the leases end. A doubt that arrives while they are in flight
    /// leads to another renewal.
    fn due(&self, now: BootTime) -> Vec<Renewal> {
        let mut inner = self.lock();
        let due = inner.held.iter_mut().filter(|(_, lease)| lease.is_due(now));
        let mut due: Vec<(BootTime, Renewal)> = due
            .map(|(id, lease)| {
                lease.doubted = false;
                lease.renewing = true;
                let renewal = Renewal {
                    id: *id,
                    fence: lease.fence,
                    lease_ms: i64::try_from(lease.lease.as_millis()).unwrap_or(i64::MAX),
                };
                (lease.valid_until, renewal)
            })
            .collect();
        drop(inner);
        due.sort_unstable_by_key(|(valid_until, _)| *valid_until);
        due.into_iter().map(|(_, renewal)| renewal).collect()
    }

    /// Extends a lease that was renewed. False if its attempt has already been aborted because the lease could no
    /// longer be trusted: an abort is final.
    #[must_use]
    fn extend(&self, renewal: &Renewal, sent: BootTime) -> bool {
        let mut inner = self.lock();
        let alive_until = inner.alive_until;
        if let Some(lease) = inner.get(renewal.id, renewal.fence) {
            lease.renewing = false;
            if lease.abort.reason() == Some(AbortReason::Error) {
                return false;
            }
            lease.valid_until = sent.plus(lease.lease);
            lease.trust(alive_until);
        }
        true
    }

    /// Notes that the job no longer belongs to this worker.
    pub(super) fn lose(&self, id: JobId, fence: Fence, reason: AbortReason) {
        let mut inner = self.lock();
        let Some(lease) = inner.get(id, fence).filter(|lease| !lease.over) else {
            return;
        };
        lease.over = true;
        let grace = match reason {
            // The new owner may already run the job.
            AbortReason::TakenByAnotherWorker => Duration::ZERO,
            AbortReason::AlreadyCompleted
            | AbortReason::NotFound
            | AbortReason::Error
            | AbortReason::TimedOut
            | AbortReason::Cancelled
            | AbortReason::Shutdown => lease.grace(),
        };
        lease.abort.abort(reason, grace);
        let has_started = lease.attempt.is_some();
        drop(inner);
        if !has_started {
            // The claim is dropped when a slot takes it.
            debug!(
                job.id = id.0,
                reason = reason.as_str(),
                "a claim was lost before its attempt started"
            );
            return;
        }
        let message = "lease lost; aborting the attempt";
        match reason {
            // An operator or a program ended the job.
            AbortReason::AlreadyCompleted | AbortReason::Cancelled => {
                info!(job.id = id.0, reason = reason.as_str(), "{message}");
            }
            AbortReason::TakenByAnotherWorker
            | AbortReason::NotFound
            | AbortReason::Error
            | AbortReason::TimedOut
            | AbortReason::Shutdown => {
                warn!(job.id = id.0, reason = reason.as_str(), "{message}");
            }
        }
    }

    /// Stops renewing the lease of a claim that is given back, or of an attempt that has ended.
    pub(super) fn give_up(&self, id: JobId, fence: Fence) {
        if let Some(lease) = self.lock().get(id, fence) {
            lease.over = true;
        }
    }

    /// True if the lease of an attempt that has ended, or of a claim that is given back, can no longer be trusted.
    /// While the worker is stopping, the lease of a claim whose attempt never started is trusted for only [`LEASE_MIN`]
    /// after `claim_sent`, so that a stop during an outage does not wait for it.
    pub(super) fn is_lost(
        &self,
        id: JobId,
        fence: Fence,
        claim_sent: BootTime,
        is_stopping: bool,
    ) -> bool {
        let mut inner = self.lock();
        let alive_until = inner.alive_until;
        let until = inner
            .get(id, fence)
            .filter(|lease| lease.attempt.is_some() || !is_stopping)
            .map_or(claim_sent.plus(LEASE_MIN), |lease| {
                lease.trusted_until(alive_until)
            });
        until <= BootTime::now()
    }

    /// The jobs of all claims that are held.
    pub(super) fn ids(&self) -> Vec<i64> {
        self.lock().held.keys().map(|id| id.0).collect()
    }

    /// Loses the leases that can no longer be trusted; true if there are any.
    fn distrust(&self, now: BootTime) -> bool {
        let inner = self.lock();
        let expired: Vec<(JobId, Fence)> = inner
            .running()
            .filter(|(_, lease)| lease.trusted_until(inner.alive_until) <= now && !lease.over)
            .map(|(id, lease)| (id, lease.fence))
            .collect();
        drop(inner);
        for (id, fence) in &expired {
            self.lose(*id, *fence, AbortReason::Error);
        }
        !expired.is_empty()
    }
}

#[cfg(test)]
mod tests;
