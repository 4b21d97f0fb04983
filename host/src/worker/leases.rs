//! The leases of claims and running attempts: renewed in one statement, given up when they cannot be trusted.
//!
//! A claim is held from when its answer arrives, so that a change of its job is noticed while it waits for a slot too: an attempt
//! whose job was changed starts only once the database has said that it may.
//!
//! The worker counts its own trust from before it asked the database, so that it stops trusting a
//! lease before the database does.

use std::collections::{HashMap, HashSet};
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tracing::{debug, info, warn};

use super::Shared;
use super::attempt::Claim;
use super::journal::Watched;
use super::policy::LEASE_MIN;
use super::reach::warn_unless_unreachable;
use crate::job::{AbortReason, Fence, JobId, RunEnd};
use crate::sandbox::{AbortHandle, BootTime};
use crate::store::{Refusal, Renewal, RunningUsage};

/// How often the leases are looked at.
const TICK: Duration = Duration::from_millis(250);
/// A lease is renewed after this share of it (below half).
const RENEWED_AFTER: f64 = 0.4;
/// A claim in doubt keeps its slot waiting for no longer than this; then it is given back.
const ANSWERED_WITHIN: Duration = Duration::from_secs(1);

/// The lease of one claim.
struct Lease {
    fence: Fence,
    lease: Duration,
    /// From before the database was asked, plus the lease.
    trusted_until: BootTime,
    abort: AbortHandle,
    /// None: it waits for a slot.
    attempt: Option<Begun>,
    /// Lost or given up: it is renewed no more.
    over: bool,
    /// Somebody else may have changed the job since it was last asked for: it is asked for now, and not when it is due.
    doubted: bool,
    /// It is being asked for.
    asked: bool,
}

/// An attempt that has started.
#[derive(Clone)]
pub(super) struct Begun {
    /// For how long it renews its lease.
    pub(super) lease: Duration,
    pub(super) grace: Duration,
    /// What it uses.
    pub(super) watched: Arc<Watched>,
}

impl Lease {
    fn new(fence: Fence, asked: BootTime, lease: Duration) -> Self {
        Self {
            fence,
            lease,
            trusted_until: asked.plus(lease),
            abort: AbortHandle::new(),
            attempt: None,
            over: false,
            doubted: false,
            asked: false,
        }
    }

    /// Of a claim that waits, none: nothing runs that would have to end.
    fn grace(&self) -> Duration {
        self.attempt
            .as_ref()
            .map_or(Duration::ZERO, |attempt| attempt.grace)
    }

    /// A claim that waits is renewed only where it is in doubt: it is given back before its lease needs that.
    fn is_due(&self, now: BootTime) -> bool {
        let renewed = now.plus(self.lease.mul_f64(1.0 - RENEWED_AFTER)) >= self.trusted_until;
        !self.over && (self.doubted || (self.attempt.is_some() && renewed))
    }

    /// Why its attempt may not start; none: that is not known yet.
    fn start(&mut self, attempt: &Begun, now: BootTime) -> Option<Result<AbortHandle, RunEnd>> {
        if let Some(reason) = self.abort.reason() {
            return Some(Err(RunEnd::Aborted(reason)));
        }
        // Others may run it by now. Where nobody has it, nothing is lost.
        if self.trusted_until <= now {
            return Some(Err(RunEnd::NotStarted));
        }
        if self.doubted || self.asked {
            return None;
        }
        self.lease = attempt.lease;
        // The trust is that of the claim, which a new version of the handler, or one that the operator
        // bound to the source, need not agree with.
        self.abort.trust_until(self.trusted_until, attempt.grace);
        self.attempt = Some(attempt.clone());
        Some(Ok(self.abort.clone()))
    }
}

/// The leases of all claims, from their arrival to their settlement.
#[derive(Default)]
pub(super) struct Leases {
    inner: Mutex<Inner>,
    /// There are leases that are doubted.
    doubts: Notify,
    /// Of some of them it is known what they are now.
    answers: Notify,
}

#[derive(Default)]
struct Inner {
    held: HashMap<JobId, Lease>,
    /// Why all of them have been aborted, and those that arrive later are too.
    all_aborted: Option<AbortReason>,
    /// Which jobs (none: any) were changed while a claim is under way, which may bring them; none: no claim is.
    heard: Option<HashSet<Option<JobId>>>,
}

/// A claim that was asked for and has not been answered.
pub(super) struct UnderWay<'a>(&'a Leases);

impl UnderWay<'_> {
    /// Its answer has come. A job of it that was changed meanwhile is in doubt from the start.
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
        // An earlier attempt at one of them may have waited for an answer.
        self.0.answers.notify_waiters();
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.lock().heard = None;
    }
}

impl Inner {
    /// True where it is in doubt.
    fn hold(&mut self, id: JobId, mut lease: Lease) -> bool {
        let doubted = self
            .heard
            .as_ref()
            .is_some_and(|heard| heard.contains(&Some(id)) || heard.contains(&None));
        lease.doubted = doubted;
        if let Some(reason) = self.all_aborted {
            lease.abort.abort(reason, lease.grace());
        }
        // This worker has adopted its own job (after a suspension, for instance) before it noticed
        // that it had lost it. From here on nobody could tell the earlier attempt to stop.
        if let Some(before) = self.held.insert(id, lease) {
            before
                .abort
                .abort(AbortReason::TakenByAnotherWorker, Duration::ZERO);
        }
        doubted
    }

    fn get(&mut self, id: JobId, fence: Fence) -> Option<&mut Lease> {
        // The same job may be here again, under another fence, when its lease was lost.
        self.held.get_mut(&id).filter(|lease| lease.fence == fence)
    }

    /// Those of attempts that have started.
    fn running(&self) -> impl Iterator<Item = (JobId, &Lease)> {
        self.held
            .iter()
            .filter(|(_, lease)| lease.attempt.is_some())
            .map(|(id, lease)| (*id, lease))
    }
}

impl Leases {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing panics while it holds the lock, and the map is whole at every step.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A claim is about to be asked for: from here on its jobs may be changed by others. One at a time.
    pub(super) fn claiming(&self) -> UnderWay<'_> {
        self.lock().heard = Some(HashSet::new());
        UnderWay(self)
    }

    /// Starts an attempt of a claim that has arrived. Where somebody may have changed the job meanwhile, the database is asked
    /// first.
    ///
    /// # Errors
    /// How it ends instead: it is another's or nobody's any more, or it has to be given back.
    pub(super) async fn start(
        &self,
        id: JobId,
        fence: Fence,
        attempt: &Begun,
    ) -> Result<AbortHandle, RunEnd> {
        if let Some(started) = self.try_start(id, fence, attempt) {
            return started;
        }
        let started = async {
            loop {
                let mut answers = pin!(self.answers.notified());
                // Waits from here on: an answer between the look and the await is not missed.
                answers.as_mut().enable();
                if let Some(started) = self.try_start(id, fence, attempt) {
                    return started;
                }
                answers.await;
            }
        };
        let answered = tokio::time::timeout(ANSWERED_WITHIN, started).await;
        answered.unwrap_or(Err(RunEnd::NotStarted))
    }

    fn try_start(
        &self,
        id: JobId,
        fence: Fence,
        attempt: &Begun,
    ) -> Option<Result<AbortHandle, RunEnd>> {
        match self.lock().get(id, fence) {
            Some(lease) => lease.start(attempt, BootTime::now()),
            // A later claim of this worker has it.
            None => Some(Err(RunEnd::Aborted(AbortReason::TakenByAnotherWorker))),
        }
    }

    pub(super) fn remove(&self, id: JobId, fence: Fence) {
        let mut inner = self.lock();
        if inner.get(id, fence).is_some() {
            inner.held.remove(&id);
        }
    }

    /// Aborts all attempts, those that start later too; returns the jobs of those that run.
    pub(super) fn abort_all(&self, reason: AbortReason) -> Vec<i64> {
        let mut inner = self.lock();
        let reason = *inner.all_aborted.get_or_insert(reason);
        for lease in inner.held.values() {
            lease.abort.abort(reason, lease.grace());
        }
        let running = inner.running().map(|(id, _)| id.0).collect();
        drop(inner);
        self.answers.notify_waiters();
        running
    }

    /// Somebody else has changed this job (none: any of them): it is found out what it is now.
    pub(super) fn doubt(&self, id: Option<JobId>) {
        let mut inner = self.lock();
        if let Some(heard) = &mut inner.heard {
            heard.insert(id);
        }
        let mut any = false;
        for (_, lease) in inner
            .held
            .iter_mut()
            .filter(|(one, _)| id.is_none_or(|id| id == **one))
        {
            lease.doubted = true;
            any = true;
        }
        drop(inner);
        if any {
            self.doubts.notify_one();
        }
    }

    /// These were asked for, and there was no answer: they are in doubt, if they were not before.
    fn unanswered(&self, renewals: &[Renewal]) {
        let mut inner = self.lock();
        for renewal in renewals {
            if let Some(lease) = inner.get(renewal.id, renewal.fence) {
                lease.doubted = true;
                lease.asked = false;
            }
        }
    }

    /// Every lease is lost, for this reason; returns the jobs of attempts that run.
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

    /// What the attempts that have run for so long have used so far.
    pub(super) fn used(&self, runs_for: Duration) -> Vec<RunningUsage> {
        let used = |(id, lease): (JobId, &Lease)| {
            let attempt = lease.attempt.as_ref()?;
            Some(RunningUsage {
                id,
                fence: lease.fence,
                usage: attempt.watched.usage(runs_for)?,
            })
        };
        self.lock().running().filter_map(used).collect()
    }

    /// What is to be asked for now. A doubt that comes while that is under way is one of its own.
    fn due(&self, now: BootTime) -> Vec<Renewal> {
        self.lock()
            .held
            .iter_mut()
            .filter(|(_, lease)| lease.is_due(now))
            .map(|(id, lease)| {
                lease.doubted = false;
                lease.asked = true;
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
        if let Some(lease) = self.lock().get(renewal.id, renewal.fence) {
            lease.asked = false;
            if lease.abort.reason() == Some(AbortReason::Error) {
                return false;
            }
            lease.trusted_until = asked.plus(lease.lease);
            if let Some(attempt) = &lease.attempt {
                lease.abort.trust_until(lease.trusted_until, attempt.grace);
            }
        }
        true
    }

    /// The job is this worker's no more.
    pub(super) fn lose(&self, id: JobId, fence: Fence, reason: AbortReason) {
        let mut inner = self.lock();
        let Some(lease) = inner.get(id, fence).filter(|lease| !lease.over) else {
            return;
        };
        lease.over = true;
        let grace = match reason {
            // Whoever has it now is running already.
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
            // It is dropped when its turn comes.
            debug!(
                job.id = id.0,
                reason = reason.as_str(),
                "a claim was lost before its attempt started"
            );
            return;
        }
        let told = "lease lost; the attempt is told to stop";
        match reason {
            // Somebody has asked for it.
            AbortReason::AlreadyCompleted | AbortReason::Cancelled => {
                info!(job.id = id.0, reason = reason.as_str(), "{told}");
            }
            AbortReason::TakenByAnotherWorker
            | AbortReason::NotFound
            | AbortReason::Error
            | AbortReason::TimedOut
            | AbortReason::Shutdown => {
                warn!(job.id = id.0, reason = reason.as_str(), "{told}");
            }
        }
    }

    /// Stops renewing the lease of a claim that is given back, or of an attempt that has ended, so that it runs out.
    pub(super) fn give_up(&self, id: JobId, fence: Fence) {
        if let Some(lease) = self.lock().get(id, fence) {
            lease.over = true;
        }
    }

    /// True if the lease of an attempt that has ended, or of a claim that is given back, can no longer be trusted. One that is no longer
    /// held is trusted for the shortest lease after `claim_sent`.
    pub(super) fn is_lost(&self, id: JobId, fence: Fence, claim_sent: BootTime) -> bool {
        let until = self
            .lock()
            .get(id, fence)
            .map_or(claim_sent.plus(LEASE_MIN), |lease| lease.trusted_until);
        until <= BootTime::now()
    }

    /// The jobs of all claims that are held.
    pub(super) fn ids(&self) -> Vec<i64> {
        self.lock().held.keys().map(|id| id.0).collect()
    }

    /// Gives up what cannot be trusted any more; true where there was any.
    fn distrust(&self, now: BootTime) -> bool {
        let inner = self.lock();
        let expired: Vec<(JobId, Fence)> = inner
            .running()
            .filter(|(_, lease)| lease.trusted_until <= now && !lease.over)
            .map(|(id, lease)| (id, lease.fence))
            .collect();
        drop(inner);
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
                Ok(answers) => {
                    // With all slots taken, the next claim may be far away. Otherwise a host that cannot claim is not ready, whatever it renews.
                    if shared.slots.are_taken() {
                        shared.database_answers.store(true, Ordering::Relaxed);
                    }
                    lost |= take_answers(&shared, &due, asked, answers);
                }
                Err(error) => {
                    shared.leases.unanswered(&due);
                    if !shared.doubted(&error) {
                        warn_unless_unreachable!(error, "could not renew leases; trying again");
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
    shared.leases.answers.notify_waiters();
    taken
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const JOB: JobId = JobId(1);
    const FENCE: Fence = Fence(7);
    const LEASE: Duration = Duration::from_secs(10);
    const GRACE: Duration = Duration::from_secs(5);

    impl Leases {
        /// A claim of one job arrives that was asked for then.
        fn arrives(&self, id: JobId, fence: Fence, asked: BootTime, lease: Duration) {
            self.lock().hold(id, Lease::new(fence, asked, lease));
        }

        /// Its attempt starts at once.
        fn starts(&self, id: JobId, fence: Fence, lease: Duration) -> Result<AbortHandle, RunEnd> {
            let started = self.try_start(id, fence, &attempt(lease));
            started.expect("it is known whether it may")
        }

        /// An attempt that runs, of a claim that was asked for then.
        fn runs(&self, id: JobId, fence: Fence, asked: BootTime) -> AbortHandle {
            self.arrives(id, fence, asked, LEASE);
            self.starts(id, fence, LEASE).expect("it may begin")
        }
    }

    fn attempt(lease: Duration) -> Begun {
        Begun {
            lease,
            grace: GRACE,
            watched: Arc::default(),
        }
    }

    fn renewal() -> Renewal {
        Renewal {
            id: JOB,
            fence: FENCE,
            lease_ms: 10_000,
        }
    }

    /// Before now, by so much.
    fn ago(duration: Duration) -> BootTime {
        let now = BootTime::now().since(BootTime::default());
        BootTime::default().plus(now.saturating_sub(duration))
    }

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
            leases.arrives(JOB, FENCE, asked, lease);
            let told = leases.starts(JOB, FENCE, lease).expect("it may begin");

            let now = asked.plus(Duration::from_millis(later_ms));
            let due = !leases.due(now).is_empty();
            prop_assert_eq!(due, later_ms * 10 >= lease_ms * 4, "renewed after four tenths");
            leases.distrust(now);
            let trusted = told.reason().is_none();
            prop_assert_eq!(trusted, now < asked.plus(lease));
            prop_assert!(!trusted || now < runs_out_in_the_database);
        }
    }

    #[test]
    fn an_attempt_of_a_job_that_was_changed_starts_when_the_database_has_said_that_it_may() {
        let (asked, leases) = (BootTime::now(), Leases::default());
        leases.arrives(JOB, FENCE, asked, LEASE);
        leases.arrives(JobId(2), FENCE, asked, LEASE);
        leases.doubt(Some(JOB));
        assert!(leases.starts(JobId(2), FENCE, LEASE).is_ok());
        let unknown = || leases.try_start(JOB, FENCE, &attempt(LEASE)).is_none();
        assert!(unknown(), "it is to be asked for");
        let due = leases.due(asked);
        assert_eq!(due.iter().map(|one| one.id).collect::<Vec<_>>(), [JOB]);
        assert!(unknown(), "it is being asked for");
        leases.unanswered(&due);
        assert!(unknown(), "nobody has answered");
        let due = leases.due(asked);
        assert!(leases.extend(&due[0], asked));
        assert!(leases.starts(JOB, FENCE, LEASE).is_ok());
    }

    #[tokio::test]
    async fn an_attempt_that_waits_for_an_answer_starts_or_ends_with_it() {
        let (asked, leases) = (BootTime::now(), Arc::new(Leases::default()));
        for (id, lost) in [(JOB, None), (JobId(2), Some(AbortReason::Cancelled))] {
            leases.arrives(id, FENCE, asked, LEASE);
            leases.doubt(Some(id));
            let waiting = tokio::spawn({
                let leases = leases.clone();
                async move { leases.start(id, FENCE, &attempt(LEASE)).await }
            });
            tokio::task::yield_now().await;
            assert!(!waiting.is_finished());
            let due = leases.due(asked);
            match lost {
                None => assert!(leases.extend(&due[0], asked)),
                Some(reason) => leases.lose(id, FENCE, reason),
            }
            leases.answers.notify_waiters();
            let started = waiting.await.expect("it ends");
            assert_eq!(started.err(), lost.map(RunEnd::Aborted));
        }
    }

    #[tokio::test]
    async fn a_claim_for_which_no_answer_comes_does_not_keep_its_slot() {
        let leases = Leases::default();
        leases.arrives(JOB, FENCE, BootTime::now(), LEASE);
        leases.doubt(None);
        let started = leases.start(JOB, FENCE, &attempt(LEASE)).await;
        assert_eq!(started.err(), Some(RunEnd::NotStarted));
    }

    #[test]
    fn what_is_heard_of_a_job_before_the_answer_of_its_claim_arrives_is_asked_for() {
        let asked = BootTime::now();
        for (heard, doubted) in [
            (Some(JOB), [true, false]),
            (None, [true, true]),
            (Some(JobId(3)), [false, false]),
        ] {
            let leases = Leases::default();
            let under_way = leases.claiming();
            leases.doubt(heard);
            for (id, doubted) in [JOB, JobId(2)].into_iter().zip(doubted) {
                leases.arrives(id, FENCE, asked, LEASE);
                let unknown = leases.try_start(id, FENCE, &attempt(LEASE)).is_none();
                assert_eq!(unknown, doubted, "{heard:?} {id}");
            }
            drop(under_way);
            // Not for ever: the next claim is another one.
            let _under_way = leases.claiming();
            leases.arrives(JobId(3), FENCE, asked, LEASE);
            assert!(leases.starts(JobId(3), FENCE, LEASE).is_ok());
        }
    }

    #[test]
    fn a_claim_that_waits_is_renewed_only_where_it_is_in_doubt_and_not_once_it_is_given_back() {
        let (now, leases) = (BootTime::now(), Leases::default());
        leases.arrives(JOB, FENCE, now, LEASE);
        let late = now.plus(LEASE.mul_f64(0.9));
        assert!(leases.due(late).is_empty());
        leases.doubt(None);
        assert_eq!(leases.due(late).len(), 1);
        leases.doubt(None);
        leases.give_up(JOB, FENCE);
        assert!(leases.due(late).is_empty());
    }

    #[test]
    fn a_claim_that_waited_past_its_lease_is_given_back() {
        let leases = Leases::default();
        leases.arrives(JOB, FENCE, ago(LEASE), LEASE);
        leases.distrust(BootTime::now());
        let started = leases.starts(JOB, FENCE, LEASE);
        assert_eq!(started.err(), Some(RunEnd::NotStarted));
    }

    #[test]
    fn a_doubt_that_comes_while_leases_are_renewed_is_not_taken_for_answered() {
        let (asked, leases) = (BootTime::now(), Leases::default());
        leases.runs(JOB, FENCE, asked);
        leases.doubt(Some(JOB));
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
        let (now, leases) = (BootTime::now(), Leases::default());
        let first = leases.runs(JOB, FENCE, now);
        assert_eq!(first.reason(), None);
        let second = leases.runs(JOB, Fence(8), now);
        assert_eq!(first.reason(), Some(AbortReason::TakenByAnotherWorker));
        assert_eq!(second.reason(), None);
        // Nor does it start, where it still waited.
        let started = leases.starts(JOB, FENCE, LEASE);
        let taken = RunEnd::Aborted(AbortReason::TakenByAnotherWorker);
        assert_eq!(started.err(), Some(taken));
    }

    #[test]
    fn an_attempt_that_would_start_after_all_were_aborted_does_not() {
        let (now, leases) = (BootTime::now(), Leases::default());
        let told = leases.runs(JOB, FENCE, now);
        leases.arrives(JobId(2), FENCE, now, LEASE);
        assert_eq!(leases.abort_all(AbortReason::Shutdown), [JOB.0]);
        assert_eq!(told.reason(), Some(AbortReason::Shutdown));
        leases.arrives(JobId(3), FENCE, now, LEASE);
        for id in [2, 3] {
            let started = leases.starts(JobId(id), FENCE, LEASE);
            assert_eq!(started.err(), Some(RunEnd::Aborted(AbortReason::Shutdown)));
        }
    }

    #[test]
    fn no_claim_starts_once_the_life_of_the_worker_is_over() {
        let (now, leases) = (BootTime::now(), Leases::default());
        let told = leases.runs(JOB, FENCE, now);
        leases.arrives(JobId(2), FENCE, now, LEASE);
        assert_eq!(leases.lose_all(AbortReason::Error), [JOB.0]);
        assert_eq!(told.reason(), Some(AbortReason::Error));
        let started = leases.starts(JobId(2), FENCE, LEASE);
        assert_eq!(started.err(), Some(RunEnd::Aborted(AbortReason::Error)));
    }

    #[test]
    fn a_lease_that_cannot_be_trusted_any_more_is_lost_once_and_renewed_no_more() {
        let (now, leases) = (BootTime::now(), Leases::default());
        let told = leases.runs(JOB, FENCE, now);
        // A time-out that came first hides neither.
        told.abort(AbortReason::TimedOut, Duration::from_secs(60));
        let later = now.plus(LEASE);
        assert_eq!(leases.due(later).len(), 1);
        leases.distrust(later);
        assert!(leases.due(later).is_empty());
        assert!(told.grace_remaining() <= Some(GRACE));
    }

    #[test]
    fn an_attempt_knows_by_itself_when_its_lease_cannot_be_trusted_any_more() {
        let leases = Leases::default();
        let told = leases.runs(JOB, FENCE, BootTime::now());
        assert_eq!(told.reason(), None);
        assert!(!leases.is_lost(JOB, FENCE, BootTime::now()));
        // As if it had been asked for at the start of the clock: ten seconds of trust, long gone.
        assert!(leases.extend(&renewal(), BootTime::default()));
        assert_eq!(told.reason(), Some(AbortReason::Error));
        assert!(leases.is_lost(JOB, FENCE, BootTime::now()));
    }

    #[test]
    fn a_lease_that_could_not_be_trusted_for_a_while_is_not_made_good_by_a_late_renewal() {
        let (now, leases) = (BootTime::now(), Leases::default());
        let told = leases.runs(JOB, FENCE, now);
        told.trust_until(now, GRACE);
        // The guest has asked, and was told to stop, before anybody looked at the leases.
        assert_eq!(told.reason(), Some(AbortReason::Error));
        assert!(!leases.extend(&renewal(), now));
        leases.lose(JOB, FENCE, AbortReason::Error);
        assert!(
            leases.due(now.plus(LEASE)).is_empty(),
            "it is renewed no more"
        );
        assert!(told.grace_remaining() <= Some(GRACE));
    }

    #[test]
    fn a_lease_that_is_given_up_runs_out_without_being_renewed() {
        let (now, leases) = (BootTime::now(), Leases::default());
        let told = leases.runs(JOB, FENCE, now);
        let late = now.plus(LEASE.mul_f64(0.9));
        assert_eq!(leases.due(late).len(), 1);
        leases.give_up(JOB, FENCE);
        assert!(leases.due(late).is_empty());
        assert!(!leases.is_lost(JOB, FENCE, now), "it is good to its end");
        assert_eq!(told.reason(), None);
    }
}
