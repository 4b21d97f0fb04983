//! Tests of leases without a database.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::store::RENEWALS_MAX;

const JOB: JobId = JobId(1);
const FENCE: Fence = Fence(7);
const LEASE: Duration = Duration::from_secs(10);
const GRACE: Duration = Duration::from_secs(5);

impl Leases {
    /// The leases of a worker whose heartbeats are always answered.
    fn new_live() -> Self {
        Self::new(BootTime::default(), Duration::MAX)
    }

    /// A claim of one job arrives; it was sent at this time.
    fn arrives(&self, id: JobId, fence: Fence, sent: BootTime, lease: Duration) {
        self.lock().hold(id, Lease::new(fence, sent, lease));
    }

    /// The attempt of a claim starts at once.
    fn starts(&self, id: JobId, fence: Fence, lease: Duration) -> Result<AbortHandle, RunEnd> {
        let started = self.try_start(id, fence, &attempt(lease));
        started.expect("the lease is not in doubt")
    }

    /// A running attempt of a claim that was sent at this time.
    fn runs(&self, id: JobId, fence: Fence, sent: BootTime) -> AbortHandle {
        self.arrives(id, fence, sent, LEASE);
        self.starts(id, fence, LEASE).expect("it may start")
    }
}

fn attempt(lease: Duration) -> StartedAttempt {
    StartedAttempt {
        lease,
        grace: GRACE,
        usage: Arc::default(),
    }
}

fn renewal() -> Renewal {
    Renewal {
        id: JOB,
        fence: FENCE,
        lease_ms: 10_000,
    }
}

/// This long before now.
fn ago(duration: Duration) -> BootTime {
    let now = BootTime::now().since(BootTime::default());
    BootTime::default().plus(now.saturating_sub(duration))
}

proptest! {
    /// The database counts a lease from its response, and the worker from before it sent the claim. So the worker
    /// always stops trusting the lease first, and renewals are due in the first half.
    #[test]
    fn the_worker_stops_trusting_a_lease_before_the_database_does(
        lease_ms in 2_000_u64..10_000_000, latency_ms in 0_u64..5_000, later_ms in 0_u64..20_000_000,
    ) {
        let sent = BootTime::now();
        let lease = Duration::from_millis(lease_ms);
        let expires_in_the_database = sent.plus(Duration::from_millis(latency_ms)).plus(lease);
        let leases = Leases::new_live();
        leases.arrives(JOB, FENCE, sent, lease);
        let abort = leases.starts(JOB, FENCE, lease).expect("it may start");

        let now = sent.plus(Duration::from_millis(later_ms));
        let due = !leases.due(now).is_empty();
        prop_assert_eq!(due, later_ms * 10 >= lease_ms * 4, "renewed after four tenths");
        leases.distrust(now);
        let trusted = abort.reason().is_none();
        prop_assert_eq!(trusted, now < sent.plus(lease));
        prop_assert!(!trusted || now < expires_in_the_database);
    }
}

const SILENCE: Duration = Duration::from_secs(10);
const LONG: Duration = Duration::from_secs(3600);

proptest! {
    /// The database counts the silence of a worker from when it receives a heartbeat, and the worker from before it
    /// sent it. So the worker always stops trusting its leases before it can be declared dead, regardless of what it
    /// renews.
    #[test]
    fn the_worker_stops_trusting_long_leases_before_it_can_be_declared_dead(
        sent_ms in 0_u64..10_000, latency_ms in 0_u64..5_000, later_ms in 0_u64..40_000, is_renewed in any::<bool>(),
    ) {
        // The time is in the future, so that the duration of the test does not matter.
        let registered = BootTime::now().plus(Duration::from_secs(60));
        let leases = Leases::new(registered, SILENCE);
        leases.arrives(JOB, FENCE, registered, LONG);
        let abort = leases.starts(JOB, FENCE, LONG).expect("it may start");

        let sent = registered.plus(Duration::from_millis(sent_ms));
        let answered = sent.plus(Duration::from_millis(latency_ms));
        let is_in_time = leases.heartbeat_answered(sent, answered);
        prop_assert_eq!(is_in_time, sent_ms + latency_ms < 10_000);
        if is_renewed {
            prop_assert!(leases.extend(&renewal(), answered));
        }
        let now = answered.plus(Duration::from_millis(later_ms));
        leases.distrust(now);
        let last = if is_in_time { sent } else { registered };
        prop_assert_eq!(abort.reason().is_none(), now < last.plus(SILENCE));
    }
}

#[test]
fn an_attempt_knows_when_its_worker_may_have_been_declared_dead() {
    let leases = Leases::new(BootTime::now(), SILENCE);
    leases.arrives(JOB, FENCE, BootTime::now(), LONG);
    let abort = leases.starts(JOB, FENCE, LONG).expect("it may start");
    assert_eq!(abort.reason(), None);
    assert!(leases.heartbeat_answered(ago(SILENCE), BootTime::now()));
    assert_eq!(abort.reason(), Some(AbortReason::Error));
    assert!(leases.is_lost(JOB, FENCE, BootTime::now(), false));
    leases.arrives(JobId(2), FENCE, BootTime::now(), LONG);
    let started = leases.starts(JobId(2), FENCE, LONG);
    assert_eq!(started.err(), Some(RunEnd::NotStarted));
}

#[test]
fn a_new_incarnation_trusts_new_claims_and_doubts_those_that_were_in_flight() {
    let leases = Leases::new(ago(SILENCE), SILENCE);
    let in_flight = leases.claiming();
    assert!(!leases.heartbeat_answered(BootTime::now(), BootTime::now()));
    leases.lose_all(AbortReason::Error);
    leases.registered(BootTime::now());
    leases.arrives(JOB, FENCE, BootTime::now(), LONG);
    let started = leases.try_start(JOB, FENCE, &attempt(LONG));
    assert!(
        started.is_none(),
        "it may be a claim of the old incarnation"
    );
    drop(in_flight);
    let _in_flight = leases.claiming();
    leases.arrives(JobId(2), FENCE, BootTime::now(), LONG);
    assert!(leases.starts(JobId(2), FENCE, LONG).is_ok());
}

#[test]
fn an_attempt_of_a_changed_job_starts_after_the_database_has_confirmed_it() {
    let (sent, leases) = (BootTime::now(), Leases::new_live());
    leases.arrives(JOB, FENCE, sent, LEASE);
    leases.arrives(JobId(2), FENCE, sent, LEASE);
    leases.doubt(Some(JOB));
    assert!(leases.starts(JobId(2), FENCE, LEASE).is_ok());
    let unknown = || leases.try_start(JOB, FENCE, &attempt(LEASE)).is_none();
    assert!(unknown(), "a renewal is due");
    let due = leases.due(sent);
    let ids: Vec<JobId> = due.iter().map(|renewal| renewal.id).collect();
    assert_eq!(ids, [JOB]);
    assert!(unknown(), "the renewal is in flight");
    leases.unanswered(&due);
    assert!(unknown(), "the renewal was not answered");
    let due = leases.due(sent);
    assert!(leases.extend(&due[0], sent));
    assert!(leases.starts(JOB, FENCE, LEASE).is_ok());
}

#[tokio::test]
async fn an_attempt_that_waits_for_a_renewal_starts_or_ends_with_its_response() {
    let (sent, leases) = (BootTime::now(), Arc::new(Leases::new_live()));
    for (id, lost) in [(JOB, None), (JobId(2), Some(AbortReason::Cancelled))] {
        leases.arrives(id, FENCE, sent, LEASE);
        leases.doubt(Some(id));
        let waiting = tokio::spawn({
            let leases = leases.clone();
            async move { leases.start(id, FENCE, &attempt(LEASE)).await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        let due = leases.due(sent);
        match lost {
            None => assert!(leases.extend(&due[0], sent)),
            Some(reason) => leases.lose(id, FENCE, reason),
        }
        leases.responses.notify_waiters();
        let started = waiting.await.expect("it ends");
        assert_eq!(started.err(), lost.map(RunEnd::Aborted));
    }
}

#[tokio::test]
async fn a_claim_in_doubt_whose_renewal_is_not_answered_gives_up_its_slot() {
    let leases = Leases::new_live();
    leases.arrives(JOB, FENCE, BootTime::now(), LEASE);
    leases.doubt(None);
    let started = leases.start(JOB, FENCE, &attempt(LEASE)).await;
    assert_eq!(started.err(), Some(RunEnd::NotStarted));
}

#[test]
fn a_change_notified_before_the_response_to_the_claim_puts_the_lease_in_doubt() {
    let sent = BootTime::now();
    for (changed, doubted) in [
        (Some(JOB), [true, false]),
        (None, [true, true]),
        (Some(JobId(3)), [false, false]),
    ] {
        let leases = Leases::new_live();
        let in_flight = leases.claiming();
        leases.doubt(changed);
        for (id, doubted) in [JOB, JobId(2)].into_iter().zip(doubted) {
            leases.arrives(id, FENCE, sent, LEASE);
            let unknown = leases.try_start(id, FENCE, &attempt(LEASE)).is_none();
            assert_eq!(unknown, doubted, "{changed:?} {id}");
        }
        drop(in_flight);
        // The change does not affect the next claim.
        let _in_flight = leases.claiming();
        leases.arrives(JobId(3), FENCE, sent, LEASE);
        assert!(leases.starts(JobId(3), FENCE, LEASE).is_ok());
    }
}

#[test]
fn leases_that_end_first_are_renewed_first_if_they_need_several_statements() {
    let (now, leases) = (BootTime::now(), Leases::new_live());
    for ms in 0..2_000_u64 {
        // The leases are not added in the order in which they end.
        let id = JobId(i64::try_from(ms * 7 % 2_000).expect("a small number"));
        leases.runs(id, FENCE, now.plus(Duration::from_millis(ms)));
    }
    let due = leases.due(now.plus(LEASE));
    let mut ends: Vec<BootTime> = Vec::new();
    for renewals in due.chunks(RENEWALS_MAX) {
        assert!(renewals.len() <= 500);
        let valid_until = |renewal: &Renewal| leases.lock().held[&renewal.id].valid_until;
        ends.extend(renewals.iter().map(valid_until));
    }
    assert_eq!(ends.len(), 2_000);
    assert!(ends.is_sorted());
}

#[test]
fn a_waiting_claim_is_renewed_only_if_it_is_in_doubt_and_not_given_back() {
    let (now, leases) = (BootTime::now(), Leases::new_live());
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
    let leases = Leases::new_live();
    leases.arrives(JOB, FENCE, ago(LEASE), LEASE);
    leases.distrust(BootTime::now());
    let started = leases.starts(JOB, FENCE, LEASE);
    assert_eq!(started.err(), Some(RunEnd::NotStarted));
}

#[test]
fn a_doubt_that_arrives_during_a_renewal_causes_another_renewal() {
    let (sent, leases) = (BootTime::now(), Leases::new_live());
    leases.runs(JOB, FENCE, sent);
    leases.doubt(Some(JOB));
    let due = leases.due(sent);
    leases.doubt(Some(JOB));
    assert!(leases.extend(&due[0], sent));
    let again = leases.due(sent);
    assert_eq!(again.len(), 1, "it is renewed once more");
    assert!(leases.due(sent).is_empty());
    leases.unanswered(&again);
    assert_eq!(leases.due(sent).len(), 1, "the renewal was not answered");
}

#[test]
fn a_worker_that_adopts_its_own_job_stops_the_attempt_that_still_runs() {
    let (now, leases) = (BootTime::now(), Leases::new_live());
    let first = leases.runs(JOB, FENCE, now);
    assert_eq!(first.reason(), None);
    let second = leases.runs(JOB, Fence(8), now);
    assert_eq!(first.reason(), Some(AbortReason::TakenByAnotherWorker));
    assert_eq!(second.reason(), None);
    // If it was still waiting, it does not start.
    let started = leases.starts(JOB, FENCE, LEASE);
    let taken = RunEnd::Aborted(AbortReason::TakenByAnotherWorker);
    assert_eq!(started.err(), Some(taken));
}

#[test]
fn no_attempt_starts_after_all_were_aborted() {
    let (now, leases) = (BootTime::now(), Leases::new_live());
    let abort = leases.runs(JOB, FENCE, now);
    leases.arrives(JobId(2), FENCE, now, LEASE);
    assert_eq!(leases.abort_all(AbortReason::Shutdown), [JOB.0]);
    assert_eq!(abort.reason(), Some(AbortReason::Shutdown));
    leases.arrives(JobId(3), FENCE, now, LEASE);
    for id in [2, 3] {
        let started = leases.starts(JobId(id), FENCE, LEASE);
        assert_eq!(started.err(), Some(RunEnd::Aborted(AbortReason::Shutdown)));
    }
}

#[test]
fn no_claim_starts_once_the_incarnation_has_ended() {
    let (now, leases) = (BootTime::now(), Leases::new_live());
    let abort = leases.runs(JOB, FENCE, now);
    leases.arrives(JobId(2), FENCE, now, LEASE);
    assert_eq!(leases.lose_all(AbortReason::Error), [JOB.0]);
    assert_eq!(abort.reason(), Some(AbortReason::Error));
    let started = leases.starts(JobId(2), FENCE, LEASE);
    assert_eq!(started.err(), Some(RunEnd::Aborted(AbortReason::Error)));
}

#[test]
fn a_lease_that_can_no_longer_be_trusted_is_lost_once_and_not_renewed() {
    let (now, leases) = (BootTime::now(), Leases::new_live());
    let abort = leases.runs(JOB, FENCE, now);
    // An earlier run timeout prevents neither renewals nor the loss.
    abort.abort(AbortReason::TimedOut, Duration::from_secs(60));
    let later = now.plus(LEASE);
    assert_eq!(leases.due(later).len(), 1);
    leases.distrust(later);
    assert!(leases.due(later).is_empty());
    assert!(abort.grace_remaining() <= Some(GRACE));
}

#[test]
fn an_attempt_knows_when_its_lease_can_no_longer_be_trusted() {
    let leases = Leases::new_live();
    let abort = leases.runs(JOB, FENCE, BootTime::now());
    assert_eq!(abort.reason(), None);
    assert!(!leases.is_lost(JOB, FENCE, BootTime::now(), false));
    // As if the renewal had been sent at the start of the clock: its ten seconds have long passed.
    assert!(leases.extend(&renewal(), BootTime::default()));
    assert_eq!(abort.reason(), Some(AbortReason::Error));
    assert!(leases.is_lost(JOB, FENCE, BootTime::now(), false));
}

#[test]
fn a_late_renewal_does_not_revive_a_lease_that_is_no_longer_trusted() {
    let (now, leases) = (BootTime::now(), Leases::new_live());
    let abort = leases.runs(JOB, FENCE, now);
    abort.trust_until(now, GRACE);
    // The guest has polled its abort signal before the leases were checked.
    assert_eq!(abort.reason(), Some(AbortReason::Error));
    assert!(!leases.extend(&renewal(), now));
    leases.lose(JOB, FENCE, AbortReason::Error);
    assert!(
        leases.due(now.plus(LEASE)).is_empty(),
        "it is no longer renewed"
    );
    assert!(abort.grace_remaining() <= Some(GRACE));
}

#[test]
fn a_claim_that_is_given_back_is_trusted_for_its_lease_and_briefly_while_the_worker_stops() {
    let leases = Leases::new_live();
    let sent = ago(LEASE_MIN);
    leases.arrives(JOB, FENCE, sent, LEASE);
    leases.give_up(JOB, FENCE);
    assert!(!leases.is_lost(JOB, FENCE, sent, false));
    assert!(leases.is_lost(JOB, FENCE, sent, true));
    // An attempt that has started keeps its lease.
    leases.runs(JOB, Fence(8), sent);
    assert!(!leases.is_lost(JOB, Fence(8), sent, true));
}

#[test]
fn a_lease_that_is_given_up_expires_without_being_renewed() {
    let (now, leases) = (BootTime::now(), Leases::new_live());
    let abort = leases.runs(JOB, FENCE, now);
    let late = now.plus(LEASE.mul_f64(0.9));
    assert_eq!(leases.due(late).len(), 1);
    leases.give_up(JOB, FENCE);
    assert!(leases.due(late).is_empty());
    assert!(
        !leases.is_lost(JOB, FENCE, now, false),
        "it is trusted to its end"
    );
    assert_eq!(abort.reason(), None);
}
