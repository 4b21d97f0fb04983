//! The leases of running attempts: renewed in one statement, given up when they cannot be trusted.
//!
//! The worker counts its own trust from before it asked the database, so that it stops trusting a
//! lease before the database does.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tracing::{debug, info, warn};

use super::Shared;
use super::journal::Watched;
use super::policy::LEASE_MIN;
use crate::job::{AbortReason, Fence, JobId};
use crate::sandbox::{AbortHandle, BootTime};
use crate::store::{Refusal, Renewal, RunningUsage};

/// How often the leases are looked at.
const TICK: Duration = Duration::from_millis(250);
/// A lease is renewed after this share of it (SPEC row Q2: below half).
const RENEWED_AFTER: f64 = 0.4;

/// The lease of one running attempt.
pub(super) struct Lease {
    pub(super) fence: Fence,
    pub(super) lease: Duration,
    pub(super) grace: Duration,
    pub(super) abort: AbortHandle,
    /// What the attempt uses.
    pub(super) watched: Arc<Watched>,
    /// From before the database was asked, plus the lease.
    pub(super) trusted_until: BootTime,
    /// Lost or given up: it is renewed no more.
    pub(super) over: bool,
    /// Somebody else may have changed the job since it was last asked for: it is asked for now, and not when it is due.
    pub(super) doubted: bool,
}

/// A job may be changed from when its claim is committed, and its attempt begins when the answer has come and it has waited in line:
/// what is heard of it in between is kept for so long.
const EARLY_KEPT: Duration = Duration::from_secs(30);

/// The leases of all running attempts.
#[derive(Default)]
pub(super) struct Leases {
    running: Mutex<HashMap<JobId, Lease>>,
    /// Why all of them have been aborted. Changed and read under the lock of `running`, so that an
    /// attempt whose claim had just left the line is not forgotten.
    all_aborted: OnceLock<AbortReason>,
    /// Jobs that were changed, and do not run here (yet); since when that is known. Changed under the lock of `running`.
    early: Mutex<HashMap<JobId, Instant>>,
    /// There are leases that are doubted.
    doubts: Notify,
}

impl Leases {
    fn lock(&self) -> MutexGuard<'_, HashMap<JobId, Lease>> {
        // Nothing panics while it holds the lock, and the map is whole at every step.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn insert(&self, id: JobId, mut lease: Lease) {
        let mut running = self.lock();
        if self.early().remove(&id).is_some() {
            lease.doubted = true;
            self.doubts.notify_one();
        }
        if let Some(reason) = self.all_aborted.get() {
            lease.abort.abort(*reason, lease.grace);
        }
        lease.abort.trust_until(lease.trusted_until, lease.grace);
        let before = running.insert(id, lease);
        // This worker has adopted its own job (after a suspension, for instance) before it noticed
        // that it had lost it. From here on nobody could tell the earlier attempt to stop.
        if let Some(before) = before {
            before
                .abort
                .abort(AbortReason::TakenByAnotherWorker, Duration::ZERO);
        }
    }

    pub(super) fn remove(&self, id: JobId, fence: Fence) {
        let mut running = self.lock();
        // The same job may run here again, under another fence, when its lease was lost.
        if running.get(&id).is_some_and(|lease| lease.fence == fence) {
            running.remove(&id);
        }
    }

    /// Aborts all attempts, those that start later too; returns the jobs of those that run.
    pub(super) fn abort_all(&self, reason: AbortReason) -> Vec<i64> {
        let running = self.lock();
        let reason = *self.all_aborted.get_or_init(|| reason);
        for lease in running.values() {
            lease.abort.abort(reason, lease.grace);
        }
        running.keys().map(|id| id.0).collect()
    }

    /// Somebody else has changed this job (none: any of them): it is found out what it is now.
    pub(super) fn doubt(&self, id: Option<JobId>) {
        let mut running = self.lock();
        let mut any = false;
        for (_, lease) in running
            .iter_mut()
            .filter(|(one, _)| id.is_none_or(|id| id == **one))
        {
            lease.doubted = true;
            any = true;
        }
        if any {
            self.doubts.notify_one();
        } else if let Some(id) = id {
            let mut early = self.early();
            early.retain(|_, since| since.elapsed() < EARLY_KEPT);
            early.insert(id, Instant::now());
        }
    }

    fn early(&self) -> MutexGuard<'_, HashMap<JobId, Instant>> {
        self.early.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// These were asked for, and there was no answer: what was doubted of them still is.
    fn unanswered(&self, renewals: &[Renewal]) {
        let mut running = self.lock();
        for renewal in renewals {
            if let Some(lease) = running.get_mut(&renewal.id) {
                lease.doubted = true;
            }
        }
    }

    /// Every lease is lost, for this reason; returns the jobs of those that run.
    pub(super) fn lose_all(&self, reason: AbortReason) -> Vec<i64> {
        let all: Vec<(JobId, Fence)> = self
            .lock()
            .iter()
            .map(|(id, lease)| (*id, lease.fence))
            .collect();
        for (id, fence) in &all {
            self.lose(*id, *fence, reason);
        }
        all.iter().map(|(id, _)| id.0).collect()
    }

    /// What the attempts that have run for so long have used so far.
    pub(super) fn used(&self, runs_for: Duration) -> Vec<RunningUsage> {
        let used = |(id, lease): (&JobId, &Lease)| {
            Some(RunningUsage {
                id: *id,
                fence: lease.fence,
                usage: lease.watched.usage(runs_for)?,
            })
        };
        self.lock().iter().filter_map(used).collect()
    }

    /// What is to be asked for now. A doubt that comes while that is under way is one of its own.
    fn due(&self, now: BootTime) -> Vec<Renewal> {
        self.lock()
            .iter_mut()
            .filter(|(_, lease)| {
                !lease.over
                    && (lease.doubted
                        || now.plus(lease.lease.mul_f64(1.0 - RENEWED_AFTER))
                            >= lease.trusted_until)
            })
            .map(|(id, lease)| {
                lease.doubted = false;
                Renewal {
                    id: *id,
                    fence: lease.fence,
                    lease_ms: i64::try_from(lease.lease.as_millis()).unwrap_or(i64::MAX),
                }
            })
            .collect()
    }

    /// Takes in that a lease was extended. False where the attempt has been told to stop meanwhile, because its
    /// lease could not be trusted any more: there is no way back.
    #[must_use]
    fn extend(&self, renewal: &Renewal, asked: BootTime) -> bool {
        if let Some(lease) = self.lock().get_mut(&renewal.id)
            && lease.fence == renewal.fence
        {
            if lease.abort.reason() == Some(AbortReason::Error) {
                return false;
            }
            lease.trusted_until = asked.plus(lease.lease);
            lease.abort.trust_until(lease.trusted_until, lease.grace);
        }
        true
    }

    /// The job is this worker's no more.
    pub(super) fn lose(&self, id: JobId, fence: Fence, reason: AbortReason) {
        if let Some(lease) = self.lock().get_mut(&id)
            && lease.fence == fence
            && !lease.over
        {
            lease.over = true;
            let grace = match reason {
                // Whoever has it now is running already.
                AbortReason::TakenByAnotherWorker => Duration::ZERO,
                AbortReason::AlreadyCompleted
                | AbortReason::NotFound
                | AbortReason::Error
                | AbortReason::TimedOut
                | AbortReason::Cancelled
                | AbortReason::Shutdown => lease.grace,
            };
            lease.abort.abort(reason, grace);
            let told = "lease lost; the attempt is told to stop";
            match reason {
                // Somebody has asked for it.
                AbortReason::AlreadyCompleted | AbortReason::Cancelled => {
                    info!(job.id = %id, reason = reason.as_str(), "{told}");
                }
                AbortReason::TakenByAnotherWorker
                | AbortReason::NotFound
                | AbortReason::Error
                | AbortReason::TimedOut
                | AbortReason::Shutdown => {
                    warn!(job.id = %id, reason = reason.as_str(), "{told}");
                }
            }
        }
    }

    /// Stops renewing the lease of an attempt that has ended, so that it runs out.
    pub(super) fn give_up(&self, id: JobId, fence: Fence) {
        if let Some(lease) = self.lock().get_mut(&id)
            && lease.fence == fence
        {
            lease.over = true;
        }
    }

    /// True when the lease of an attempt that has ended cannot be trusted any more. One that never
    /// started is not listed, and is trusted for the shortest lease after `asked`.
    pub(super) fn is_lost(&self, id: JobId, fence: Fence, asked: BootTime) -> bool {
        let until = self
            .lock()
            .get(&id)
            .filter(|lease| lease.fence == fence)
            .map_or(asked.plus(LEASE_MIN), |lease| lease.trusted_until);
        until <= BootTime::now()
    }

    /// Gives up what cannot be trusted any more; true where there was any.
    fn distrust(&self, now: BootTime) -> bool {
        let expired: Vec<(JobId, Fence)> = self
            .lock()
            .iter()
            .filter(|(_, lease)| lease.trusted_until <= now && !lease.over)
            .map(|(id, lease)| (*id, lease.fence))
            .collect();
        for (id, fence) in &expired {
            self.lose(*id, *fence, AbortReason::Error);
        }
        !expired.is_empty()
    }
}

/// Renews what is due, and aborts what is lost or cannot be trusted any more.
pub(super) async fn renew_forever(shared: Arc<Shared>) {
    loop {
        // Whoever is told that a job has changed asks at once.
        let _ = tokio::time::timeout(TICK, shared.leases.doubts.notified()).await;
        let asked = BootTime::now();
        // First: after a suspension, for instance, no renewal makes a lease good again that was over.
        let mut lost = shared.leases.distrust(asked);
        let due = shared.leases.due(asked);
        if !due.is_empty() {
            // A second at most: a database that does not answer must not keep the distrust below
            // from happening.
            match shared.store.renew(&due).await {
                Ok(answers) => lost |= take_answers(&shared, &due, asked, answers),
                Err(error) => {
                    shared.leases.unanswered(&due);
                    if !shared.doubted(&error) {
                        warn!(%error, "could not renew leases; trying again");
                    }
                }
            }
        }
        lost |= shared.leases.distrust(BootTime::now());
        if lost {
            // The database is to know that this host lives: the jobs have not killed it.
            shared.heartbeat_now.notify_one();
        }
    }
}

/// True where another worker has taken one of them over.
fn take_answers(
    shared: &Shared,
    due: &[Renewal],
    asked: BootTime,
    answers: Vec<(JobId, Option<Refusal>)>,
) -> bool {
    let mut taken = false;
    let renewals: HashMap<JobId, &Renewal> = due.iter().map(|one| (one.id, one)).collect();
    for (id, refusal) in answers {
        let Some(renewal) = renewals.get(&id) else {
            continue;
        };
        match refusal {
            None if shared.leases.extend(renewal, asked) => {
                debug!(job.id = %id, "lease renewed");
            }
            None => shared.leases.lose(id, renewal.fence, AbortReason::Error),
            Some(Refusal::Busy) => shared.leases.unanswered(std::slice::from_ref(*renewal)),
            Some(Refusal::Lost(reason)) => {
                taken |= reason == AbortReason::TakenByAnotherWorker;
                shared.leases.lose(id, renewal.fence, reason);
            }
        }
    }
    taken
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The database counts a lease from when it answers, and the worker from before it asked. So whatever
        /// happens, the worker's trust ends first, and renewals come in the first half.
        #[test]
        fn the_worker_stops_trusting_a_lease_before_the_database_does(
            lease_ms in 2_000_u64..10_000_000, way_there_ms in 0_u64..5_000, later_ms in 0_u64..20_000_000,
        ) {
            let asked = BootTime::now();
            let lease = Duration::from_millis(lease_ms);
            let runs_out_in_the_database = asked.plus(Duration::from_millis(way_there_ms)).plus(lease);
            let leases = Leases::default();
            let (mut one, told) = self::lease(FENCE, asked.plus(lease));
            one.lease = lease;
            leases.insert(JOB, one);

            let now = asked.plus(Duration::from_millis(later_ms));
            let due = !leases.due(now).is_empty();
            prop_assert_eq!(due, later_ms * 10 >= lease_ms * 4, "renewed after four tenths");
            leases.distrust(now);
            let trusted = told.reason().is_none();
            prop_assert_eq!(trusted, now < asked.plus(lease));
            prop_assert!(!trusted || now < runs_out_in_the_database);
        }
    }

    const JOB: JobId = JobId(1);
    const FENCE: Fence = Fence(7);

    fn lease(fence: Fence, trusted_until: BootTime) -> (Lease, AbortHandle) {
        let abort = AbortHandle::new();
        let lease = Lease {
            fence,
            lease: Duration::from_secs(10),
            grace: Duration::from_secs(5),
            watched: Arc::default(),
            abort: abort.clone(),
            trusted_until,
            over: false,
            doubted: false,
        };
        (lease, abort)
    }

    #[test]
    fn what_is_heard_of_a_job_before_its_attempt_begins_is_asked_for_then() {
        let later = BootTime::now().plus(Duration::from_secs(10));
        let leases = Leases::default();
        leases.doubt(Some(JOB));
        for (id, is_doubted) in [(JobId(2), false), (JOB, true)] {
            leases.insert(id, lease(FENCE, later).0);
            let due = leases.due(BootTime::now());
            assert_eq!(due.iter().any(|one| one.id == id), is_doubted, "{id}");
        }
        // Once: a later attempt at it is not doubted.
        leases.remove(JOB, FENCE);
        leases.insert(JOB, lease(FENCE, later).0);
        assert!(leases.due(BootTime::now()).is_empty());
    }

    #[test]
    fn a_doubt_that_comes_while_leases_are_renewed_is_not_taken_for_answered() {
        let (asked, leases) = (BootTime::now(), Leases::default());
        leases.insert(JOB, lease(FENCE, asked).0);
        let due = leases.due(asked);
        leases.doubt(Some(JOB));
        assert!(leases.extend(&due[0], asked));
        let again = leases.due(asked);
        assert_eq!(again.len(), 1, "it is asked for once more");
        assert!(leases.due(asked).is_empty());
        leases.unanswered(&again);
        assert_eq!(leases.due(asked).len(), 1, "nobody has answered");
    }

    #[test]
    fn a_worker_that_adopts_its_own_job_stops_the_attempt_that_still_runs() {
        let later = BootTime::now().plus(Duration::from_secs(10));
        let leases = Leases::default();
        let (first, told) = lease(FENCE, later);
        leases.insert(JOB, first);
        assert_eq!(told.reason(), None);
        let (second, untold) = lease(Fence(8), later);
        leases.insert(JOB, second);
        assert_eq!(told.reason(), Some(AbortReason::TakenByAnotherWorker));
        assert_eq!(untold.reason(), None);
    }

    #[test]
    fn an_attempt_that_starts_after_all_were_aborted_is_aborted_too() {
        let later = BootTime::now().plus(Duration::from_secs(10));
        let leases = Leases::default();
        let (first, told) = lease(FENCE, later);
        leases.insert(JOB, first);
        assert_eq!(leases.abort_all(AbortReason::Shutdown), [JOB.0]);
        assert_eq!(told.reason(), Some(AbortReason::Shutdown));
        let (second, told) = lease(FENCE, later);
        leases.insert(JobId(2), second);
        assert_eq!(told.reason(), Some(AbortReason::Shutdown));
    }

    #[test]
    fn a_lease_that_cannot_be_trusted_any_more_is_lost_once_and_renewed_no_more() {
        let now = BootTime::now();
        let leases = Leases::default();
        let (lease, told) = lease(FENCE, now);
        // A time-out that came first hides neither.
        told.abort(AbortReason::TimedOut, Duration::from_secs(60));
        leases.insert(JOB, lease);
        assert_eq!(leases.due(now).len(), 1);
        leases.distrust(now);
        assert!(leases.due(now).is_empty());
        assert!(told.grace_remaining() <= Some(Duration::from_secs(5)));
        assert!(leases.is_lost(JOB, FENCE, now));
    }

    #[test]
    fn an_attempt_knows_by_itself_when_its_lease_cannot_be_trusted_any_more() {
        let leases = Leases::default();
        let now = BootTime::now();
        let (lease, told) = lease(FENCE, now.plus(Duration::from_secs(3600)));
        leases.insert(JOB, lease);
        assert_eq!(told.reason(), None);
        let renewal = Renewal {
            id: JOB,
            fence: FENCE,
            lease_ms: 10_000,
        };
        // As if it had been asked for at the beginning of the clock: ten seconds of trust, long gone.
        assert!(leases.extend(&renewal, BootTime::default()));
        assert_eq!(told.reason(), Some(AbortReason::Error));
    }

    #[test]
    fn a_lease_that_could_not_be_trusted_for_a_while_is_not_made_good_by_a_late_renewal() {
        let now = BootTime::now();
        let leases = Leases::default();
        let (lease, told) = lease(FENCE, now);
        told.trust_until(now, Duration::from_secs(5));
        leases.insert(JOB, lease);
        // The guest has asked, and was told to stop, before anybody looked at the leases.
        assert_eq!(told.reason(), Some(AbortReason::Error));
        let renewal = Renewal {
            id: JOB,
            fence: FENCE,
            lease_ms: 10_000,
        };
        assert!(!leases.extend(&renewal, now));
        leases.lose(JOB, FENCE, AbortReason::Error);
        assert!(leases.due(now).is_empty(), "it is renewed no more");
        assert!(told.grace_remaining() <= Some(Duration::from_secs(5)));
    }

    #[test]
    fn a_lease_that_is_given_up_runs_out_without_being_renewed() {
        let now = BootTime::now();
        let leases = Leases::default();
        let (lease, told) = lease(FENCE, now.plus(Duration::from_secs(3600)));
        leases.insert(JOB, lease);
        let late = now.plus(Duration::from_secs(3599));
        assert_eq!(leases.due(late).len(), 1);
        leases.give_up(JOB, FENCE);
        assert!(leases.due(late).is_empty());
        assert!(!leases.is_lost(JOB, FENCE, now), "it is good to its end");
        assert_eq!(told.reason(), None);
    }
}
