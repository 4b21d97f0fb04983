//! The slots of a worker, which take claims from the line.
//!
//! A slot ([`serve`]) is a task on the guest threads that takes claims from the line, one after another, until none in
//! line may start. So a short job needs no hand-over between threads: the task that ended the last attempt starts the
//! next one.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rouse_turns::START_TIMEOUT;
use tokio::sync::Notify;

use super::Shared;
use super::attempt;
use super::claim::{Claim, HostLimit};
use super::line::Line;
use crate::job::{Fence, JobId, RunEnd};

/// How often the line is checked for claims that wait too long.
const LATE_EVERY: Duration = Duration::from_millis(250);

/// The slots of one worker, and the claims that wait for one.
pub(super) struct Slots {
    max: usize,
    /// A copy of [`Self::in_hand`] for [`Health`](super::Health).
    in_hand_gauge: Arc<AtomicUsize>,
    inner: Mutex<Inner>,
    /// Signals that the claimer can claim again.
    freed: Notify,
}

struct Inner {
    line: Line,
    running: usize,
    /// The number of attempts that have ended.
    ended: usize,
    /// The total time for which slots were taken, up to `taken_at`.
    taken: Duration,
    taken_at: Instant,
    /// The claimer is notified once fewer claims than this are in hand; 0 if it does not wait.
    notify_below: usize,
}

/// An attempt that has ended.
struct Ended<'a> {
    host_limit: Option<&'a HostLimit>,
}

impl Inner {
    /// Takes this many more slots.
    fn take(&mut self, more: usize) {
        self.count_taken(Instant::now());
        self.running += more;
    }

    fn free_one(&mut self) {
        self.count_taken(Instant::now());
        self.running -= 1;
    }

    fn count_taken(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.taken_at);
        self.taken += passed * u32::try_from(self.running).unwrap_or(u32::MAX);
        self.taken_at = self.taken_at.max(now);
    }

    fn in_hand(&self) -> usize {
        self.line.len() + self.running
    }
}

impl Slots {
    pub(super) fn new(max: usize, in_hand_gauge: Arc<AtomicUsize>) -> Self {
        Self {
            max,
            in_hand_gauge,
            inner: Mutex::new(Inner {
                line: Line::default(),
                running: 0,
                ended: 0,
                taken: Duration::ZERO,
                taken_at: Instant::now(),
                notify_below: 0,
            }),
            freed: Notify::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing panics while holding the lock, and the counts are consistent at every step.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Updates the gauge, and notifies the claimer if it can now claim as many jobs as it waits for.
    fn changed(&self, mut inner: MutexGuard<'_, Inner>) {
        self.in_hand_gauge.store(inner.in_hand(), Ordering::Relaxed);
        if inner.in_hand() < inner.notify_below {
            inner.notify_below = 0;
            drop(inner);
            self.freed.notify_one();
        }
    }

    /// The number of claimed jobs whose attempt has not ended; a batch counts as one.
    pub(super) fn in_hand(&self) -> usize {
        self.lock().in_hand()
    }

    /// The number of claimed jobs of a limited handler whose attempt has not ended; a batch counts as one.
    pub(super) fn in_hand_of(&self, handler: &str) -> usize {
        self.lock().line.in_hand_of(handler)
    }

    /// The number of running attempts.
    pub(super) fn running(&self) -> usize {
        self.lock().running
    }

    /// True while claims wait for a slot.
    pub(super) fn have_waiting_claims(&self) -> bool {
        !self.lock().line.is_empty()
    }

    /// True if no slot is free.
    pub(super) fn are_taken(&self) -> bool {
        self.lock().in_hand() >= self.max
    }

    /// The number of attempts that have ended, and the total time for which slots were taken so far.
    pub(super) fn ended(&self, now: Instant) -> (usize, Duration) {
        let mut inner = self.lock();
        inner.count_taken(now);
        (inner.ended, inner.taken)
    }

    /// The number of jobs that may be claimed, if `ahead` of them may wait for a slot. `None` if there are too few to
    /// be worth a claim; [`freed`](Self::freed) then signals when there are enough.
    pub(super) fn capacity(&self, ahead: usize) -> Option<usize> {
        let mut inner = self.lock();
        let all = self.max + ahead;
        // Jobs cost Postgres less in larger claims, so the line is refilled once half of it is empty.
        let worthwhile = (ahead / 2).max(1);
        let capacity = all.saturating_sub(inner.in_hand());
        if capacity >= worthwhile {
            return Some(capacity);
        }
        inner.notify_below = all - worthwhile + 1;
        None
    }

    /// The number of jobs that may be claimed although the line is full, because they go ahead in it.
    pub(super) fn extra(&self, ahead: usize) -> usize {
        (2 * self.max + ahead).saturating_sub(self.lock().in_hand())
    }

    pub(super) async fn freed(&self) {
        self.freed.notified().await;
    }

    /// Puts claims in line. Returns the number of slots that have to be started for them.
    fn put(&self, claims: Vec<Claim>) -> usize {
        let mut inner = self.lock();
        for claim in claims {
            inner.line.put(claim);
        }
        let more = inner.line.len().min(self.max - inner.running);
        // The new slots count from now on. If a running slot takes the claim first, the new slot finds the line empty
        // and ends.
        inner.take(more);
        self.in_hand_gauge.store(inner.in_hand(), Ordering::Relaxed);
        more
    }

    /// The next claim for a free slot. `None` if no claim in line may start, and the slot has to end. `ended`: the
    /// attempt that the slot has run before.
    fn next(&self, ended: Option<Ended<'_>>) -> Option<Claim> {
        let mut inner = self.lock();
        if let Some(ended) = ended {
            inner.ended += 1;
            inner.line.note_end(ended.host_limit);
        }
        let next = inner.line.start_next();
        if next.is_none() {
            inner.free_one();
        }
        self.changed(inner);
        next
    }

    /// Takes a free slot for a claim that may start, and had to wait for the end of another attempt of its handler.
    /// False if there is none.
    fn take_free_slot(&self) -> bool {
        let mut inner = self.lock();
        let is_any = inner.running < self.max && inner.line.has_startable_behind_limit();
        inner.take(usize::from(is_any));
        is_any
    }

    /// Frees a slot whose task ended in the middle of an attempt.
    fn crashed(&self, host_limit: Option<&HostLimit>) {
        let mut inner = self.lock();
        inner.ended += 1;
        inner.line.note_end(host_limit);
        inner.free_one();
        self.changed(inner);
    }

    /// Takes the claims that arrived up to `then` out of the line. Returns one for each job.
    fn take_late(&self, then: Instant) -> Vec<Claim> {
        let mut inner = self.lock();
        let late = inner.line.take_late(then);
        self.changed(inner);
        late.into_iter().flat_map(Claim::split).collect()
    }
}

/// Puts claims in line, and starts the slots that they need.
pub(super) fn start(shared: &Arc<Shared>, claims: Vec<Claim>) {
    for _ in 0..shared.slots.put(claims) {
        start_slot(shared);
    }
}

/// Starts another slot if a claim in line may start now because an attempt of its handler has ended.
fn start_more(shared: &Arc<Shared>) {
    if shared.slots.take_free_slot() {
        start_slot(shared);
    }
}

fn start_slot(shared: &Arc<Shared>) {
    shared
        .attempts
        .tasks
        .spawn_on(serve(shared.clone()), shared.sandbox.guests());
}

/// Runs one slot: takes claims through their attempts, one after another, until none in line may start.
async fn serve(shared: Arc<Shared>) {
    let mut slot = Slot {
        shared: &shared,
        current: Vec::new(),
        host_limit: None,
        finished: false,
    };
    loop {
        let next = shared.slots.next(slot.ended());
        slot.announce_room();
        let Some(claim) = next else {
            break;
        };
        slot.current.clear();
        slot.current
            .extend(claim.jobs().map(|job| (job.id, job.fence)));
        // Claims of the same handler may have waited for the end of the previous attempt.
        if slot.host_limit.is_some() {
            start_more(&shared);
        }
        slot.host_limit.clone_from(&claim.host_limit);
        let delay = attempt::run(&shared, claim).await;
        if !delay.is_zero() {
            // The slot stays taken during the delay, so nothing is claimed for it.
            let _ = shared
                .stop
                .drain
                .run_until_cancelled(tokio::time::sleep(delay))
                .await;
        }
        // Without this, a series of jobs that take a few microseconds each would monopolise the thread.
        tokio::task::consume_budget().await;
    }
    slot.finished = true;
}

/// Frees a slot if its task ends in the middle of an attempt because something panicked outside [`Sandbox::run`], such
/// as middleware. The attempt is then lost. After a panic within [`Sandbox::run`], the attempt is retried, and
/// counts.
///
/// [`Sandbox::run`]: crate::sandbox::Sandbox::run
struct Slot<'a> {
    shared: &'a Arc<Shared>,
    /// The job that the slot took last, or the jobs of a batch.
    current: Vec<(JobId, Fence)>,
    host_limit: Option<HostLimit>,
    finished: bool,
}

impl Slot<'_> {
    /// Announces that the last attempt of this slot no longer counts for its handler: the attempt has ended, and so has
    /// its job delay. The handler is not always that of the lane, because the source of the job may be bound.
    fn announce_room(&self) {
        if let Some(limit) = &self.host_limit {
            self.shared.wakeups.freed_handler(&limit.handler);
        }
    }

    /// The last attempt of this slot, which has ended. `None` if there has been none yet.
    fn ended(&self) -> Option<Ended<'_>> {
        (!self.current.is_empty()).then_some(Ended {
            host_limit: self.host_limit.as_ref(),
        })
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        for (id, fence) in &self.current {
            // The attempt will not be settled. Without renewals its lease expires, and the job is adopted.
            self.shared.leases.remove(*id, *fence);
        }
        self.shared.slots.crashed(self.host_limit.as_ref());
        self.announce_room();
        start_more(self.shared);
    }
}

/// Gives back claims that wait too long for a slot, until the worker ends.
pub(super) async fn release_late_claims(shared: Arc<Shared>) {
    loop {
        tokio::time::sleep(LATE_EVERY).await;
        // `release_all` does not see the claims that are taken out of the line here. The token keeps the settler
        // running until their outcomes have been sent.
        let _under_way = shared.attempts.tasks.token();
        if let Some(then) = Instant::now().checked_sub(START_TIMEOUT) {
            for claim in shared.slots.take_late(then) {
                attempt::release_claim(&shared, &claim, RunEnd::NotStarted).await;
            }
        }
    }
}

/// Gives back all claims in line. Called when the worker stops, and when its incarnation has ended.
pub(super) async fn release_all(shared: &Shared) {
    for claim in shared.slots.take_late(Instant::now()) {
        attempt::release_claim(shared, &claim, RunEnd::NotStarted).await;
    }
}

#[cfg(test)]
mod tests {
    use super::super::claim::tests::{claim, job};
    use super::*;

    fn claims(ids: std::ops::Range<i64>) -> Vec<Claim> {
        let now = Instant::now();
        ids.map(|id| claim(id, now)).collect()
    }

    #[test]
    fn slots_are_started_up_to_their_number_and_take_the_claims_in_order() {
        let slots = Slots::new(2, Arc::default());
        assert_eq!(slots.put(claims(1..2)), 1);
        assert_eq!(slots.put(claims(2..5)), 1, "one runs already");
        assert_eq!(slots.put(claims(5..6)), 0);
        let taken: Vec<i64> = std::iter::from_fn(|| slots.next(None))
            .map(|claim| claim.job.id.0)
            .collect();
        assert_eq!(taken, [1, 2, 3, 4, 5]);
        assert_eq!(slots.in_hand(), 1, "the other slot has not ended yet");
        assert!(slots.next(None).is_none());
        assert_eq!(slots.in_hand(), 0);
        assert_eq!(slots.put(claims(6..9)), 2, "both are started again");
    }

    #[tokio::test]
    async fn the_claimer_is_notified_once_enough_slots_are_free_for_a_worthwhile_claim() {
        let slots = Slots::new(2, Arc::default());
        assert_eq!(slots.capacity(4), Some(6));
        slots.put(claims(1..7));
        assert_eq!(slots.capacity(4), None);
        slots.next(None);
        slots.next(None);
        slots.next(Some(Ended { host_limit: None }));
        let mut freed = std::pin::pin!(slots.freed());
        assert!(futures_poll(freed.as_mut()).is_pending(), "one is free");
        slots.next(Some(Ended { host_limit: None }));
        assert!(futures_poll(freed.as_mut()).is_ready(), "two are free");
        assert_eq!(slots.capacity(4), Some(2));
        assert_eq!(slots.ended(Instant::now()).0, 2);
    }

    fn futures_poll<F: Future>(future: std::pin::Pin<&mut F>) -> std::task::Poll<F::Output> {
        future.poll(&mut std::task::Context::from_waker(std::task::Waker::noop()))
    }

    #[test]
    fn a_batch_takes_one_slot_and_is_given_back_job_by_job() {
        let slots = Slots::new(1, Arc::default());
        let then = Instant::now();
        let batch = |id| Claim {
            others: vec![job(id + 1), job(id + 2)],
            ..claim(id, then)
        };
        assert_eq!(slots.put(vec![batch(1), batch(11)]), 1);
        let taken: Vec<i64> = slots
            .next(None)
            .unwrap()
            .jobs()
            .map(|job| job.id.0)
            .collect();
        assert_eq!(taken, [1, 2, 3]);
        assert_eq!(slots.in_hand(), 2, "one runs, one waits");
        let late: Vec<i64> = slots.take_late(then).iter().map(|c| c.job.id.0).collect();
        assert_eq!(late, [11, 12, 13]);
        assert_eq!(slots.in_hand(), 1);
    }

    #[test]
    fn attempts_of_a_handler_are_limited_to_those_that_this_host_may_run_at_once() {
        let slots = Slots::new(3, Arc::default());
        let limit = HostLimit {
            handler: "noop".into(),
            max: 1,
        };
        let limited = |id| Claim {
            host_limit: Some(limit.clone()),
            ..claim(id, Instant::now())
        };
        slots.put(vec![limited(1), limited(2), claim(3, Instant::now())]);
        let next = |ended| slots.next(ended).map(|claim| claim.job.id.0);
        let ended = || {
            Some(Ended {
                host_limit: Some(&limit),
            })
        };
        assert_eq!(
            (next(None), next(None), next(None)),
            (Some(1), Some(3), None)
        );
        assert_eq!(slots.in_hand_of("noop"), 2);
        assert!(!slots.take_free_slot(), "the second one has to wait");
        slots.put(vec![claim(4, Instant::now())]);
        assert_eq!(next(None), Some(4), "others go ahead of it");
        assert_eq!(next(ended()), Some(2));
        assert_eq!(slots.in_hand_of("noop"), 1);
        slots.put(vec![limited(5)]);
        slots.crashed(Some(&limit));
        assert!(slots.take_free_slot());
        assert_eq!(next(None), Some(5));
        assert_eq!(next(ended()), None);
        assert_eq!(slots.in_hand_of("noop"), 0);
    }

    #[test]
    fn a_slot_whose_task_crashed_is_free_again() {
        let slots = Slots::new(1, Arc::default());
        slots.put(claims(1..2));
        slots.next(None);
        slots.crashed(None);
        assert_eq!((slots.in_hand(), slots.ended(Instant::now()).0), (0, 1));
        assert_eq!(slots.put(claims(2..3)), 1);
    }
}
