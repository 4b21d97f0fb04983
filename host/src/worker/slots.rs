//! Claims on their way to a slot: which wait, and how many run.
//!
//! A slot is a task on the threads for guests that takes one claim after the other from here for as
//! long as there is one. So a short job costs no hand-over between threads: the task that ended
//! the last attempt starts the next.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::Shared;
use super::attempt::{self, Claim};
use crate::job::RunEnd;

/// A claim that has not started within this long is given back, so that others can have it.
const START_WITHIN: Duration = Duration::from_secs(1);
/// How often it is looked for such claims.
const LATE_EVERY: Duration = Duration::from_millis(250);

/// The slots of one worker, and the claims that wait for one.
pub(super) struct Slots {
    max: usize,
    /// What is in hand, for whoever has started the worker.
    told: Arc<AtomicUsize>,
    inner: Mutex<Inner>,
    /// There is the room that the claimer waits for.
    freed: Notify,
}

struct Inner {
    waiting: VecDeque<Claim>,
    running: usize,
    /// Attempts ended so far.
    ended: usize,
    /// The claimer wants to hear once fewer than this are in hand; 0: it waits for nothing.
    notify_below: usize,
}

impl Inner {
    fn in_hand(&self) -> usize {
        self.waiting.len() + self.running
    }
}

impl Slots {
    pub(super) fn new(max: usize, told: Arc<AtomicUsize>) -> Self {
        Self {
            max,
            told,
            inner: Mutex::new(Inner {
                waiting: VecDeque::new(),
                running: 0,
                ended: 0,
                notify_below: 0,
            }),
            freed: Notify::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing panics while it holds the lock, and the counts are whole at every step.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells how many are in hand, and the claimer where there is now the room that it waits for.
    fn changed(&self, mut inner: MutexGuard<'_, Inner>) {
        self.told.store(inner.in_hand(), Ordering::Relaxed);
        if inner.in_hand() < inner.notify_below {
            inner.notify_below = 0;
            drop(inner);
            self.freed.notify_one();
        }
    }

    /// Jobs that were claimed and whose attempt has not ended.
    pub(super) fn in_hand(&self) -> usize {
        self.lock().in_hand()
    }

    /// Attempts that run.
    pub(super) fn running(&self) -> usize {
        self.lock().running
    }

    /// True while claims wait for a slot: attempts will go on ending.
    pub(super) fn are_full(&self) -> bool {
        !self.lock().waiting.is_empty()
    }

    /// True while no slot is free.
    pub(super) fn are_taken(&self) -> bool {
        self.lock().in_hand() >= self.max
    }

    /// Attempts ended so far.
    pub(super) fn ended(&self) -> usize {
        self.lock().ended
    }

    /// How many jobs may be claimed, where `ahead` may wait for a slot. None: too few to be worth a
    /// claim; [`freed`](Self::freed) says when that is over.
    pub(super) fn room(&self, ahead: usize) -> Option<usize> {
        let mut inner = self.lock();
        let all = self.max + ahead;
        // The more jobs a claim is for, the less each costs Postgres: the line is filled up again when
        // half of it is gone.
        let worthwhile = (ahead / 2).max(1);
        let room = all.saturating_sub(inner.in_hand());
        if room >= worthwhile {
            return Some(room);
        }
        inner.notify_below = all - worthwhile + 1;
        None
    }

    pub(super) async fn freed(&self) {
        self.freed.notified().await;
    }

    /// Puts claims in line. Returns how many slots are to be started for them.
    fn put(&self, claims: Vec<Claim>) -> usize {
        let mut inner = self.lock();
        inner.waiting.extend(claims);
        let more = inner.waiting.len().min(self.max - inner.running);
        // They count from here on. Where a slot that runs takes the claim first, the one that was started
        // for it finds none, and ends.
        inner.running += more;
        self.told.store(inner.in_hand(), Ordering::Relaxed);
        more
    }

    /// The next claim for a slot that is free; none: the slot has to end.
    pub(super) fn next(&self, after_another: bool) -> Option<Claim> {
        let mut inner = self.lock();
        inner.ended += usize::from(after_another);
        let next = inner.waiting.pop_front();
        if next.is_none() {
            inner.running -= 1;
        }
        self.changed(inner);
        next
    }

    /// A slot has ended in the middle of an attempt.
    pub(super) fn broke(&self) {
        let mut inner = self.lock();
        inner.ended += 1;
        inner.running -= 1;
        self.changed(inner);
    }

    /// Takes the claims out that arrived before `then`.
    fn late(&self, then: Instant) -> Vec<Claim> {
        let mut inner = self.lock();
        // They stand in the order of their arrival.
        let late = inner
            .waiting
            .partition_point(|claim| claim.received <= then);
        let late = inner.waiting.drain(..late).collect();
        self.changed(inner);
        late
    }
}

/// Hands claims to the slots, and starts those that it takes.
pub(super) fn start(shared: &Arc<Shared>, claims: Vec<Claim>) {
    for _ in 0..shared.slots.put(claims) {
        shared
            .attempts
            .tasks
            .spawn_on(attempt::serve(shared.clone()), shared.sandbox.guests());
    }
}

/// Gives back what waits too long for a slot, for as long as the worker lives.
pub(super) async fn give_back_late_claims(shared: Arc<Shared>) {
    loop {
        tokio::time::sleep(LATE_EVERY).await;
        // What is taken out of the line here is not seen by `give_back_all`: the settler is told of the
        // end only after it has been sent.
        let _under_way = shared.attempts.tasks.token();
        if let Some(then) = Instant::now().checked_sub(START_WITHIN) {
            for claim in shared.slots.late(then) {
                attempt::give_back(&shared, &claim, RunEnd::NotStarted).await;
            }
        }
    }
}

/// Gives back whatever has not started: this worker is about to stop.
pub(super) async fn give_back_all(shared: &Shared) {
    for claim in shared.slots.late(Instant::now()) {
        attempt::give_back(shared, &claim, RunEnd::NotStarted).await;
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::job::{Attempt, Fence, JobId, LaneId, Priority};
    use crate::sandbox::BootTime;
    use crate::store::{ClaimedJob, JsonText, Lane};

    /// A job of lane 1, as it is claimed.
    pub(in super::super) fn job(id: i64) -> ClaimedJob {
        ClaimedJob {
            id: JobId(id),
            fence: Fence(1),
            lane: LaneId(1),
            turn: id,
            attempt: Attempt(1),
            lost: 0,
            max_attempts: None,
            tenant: None,
            source: None,
            requested_at: SystemTime::UNIX_EPOCH,
            ready_at: None,
            claimed_at: SystemTime::UNIX_EPOCH,
            payload: JsonText("{}".into()),
            memory_bytes: None,
            grants: None,
            lease: None,
            timeout: None,
        }
    }

    fn claim(id: i64, received: Instant) -> Claim {
        Claim {
            job: job(id),
            lane: Arc::new(Lane {
                seq: 1,
                id: LaneId(1),
                queue: "default".into(),
                handler: "noop".into(),
                priority: Priority::Normal,
                tags: Vec::new(),
                retired: false,
            }),
            sent: BootTime::now(),
            received,
            lease: Duration::from_secs(60),
        }
    }

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
        let taken: Vec<i64> = std::iter::from_fn(|| slots.next(false))
            .map(|claim| claim.job.id.0)
            .collect();
        assert_eq!(taken, [1, 2, 3, 4, 5]);
        assert_eq!(slots.in_hand(), 1, "the other slot has not come yet");
        assert!(slots.next(false).is_none());
        assert_eq!(slots.in_hand(), 0);
        assert_eq!(slots.put(claims(6..9)), 2, "both are started anew");
    }

    #[tokio::test]
    async fn the_claimer_hears_of_room_once_there_is_enough_for_a_worthwhile_claim() {
        let slots = Slots::new(2, Arc::default());
        assert_eq!(slots.room(4), Some(6));
        slots.put(claims(1..7));
        assert_eq!(slots.room(4), None);
        slots.next(false);
        slots.next(false);
        slots.next(true);
        let mut freed = std::pin::pin!(slots.freed());
        assert!(futures_poll(freed.as_mut()).is_pending(), "room for one");
        slots.next(true);
        assert!(futures_poll(freed.as_mut()).is_ready(), "room for two");
        assert_eq!(slots.room(4), Some(2));
        assert_eq!(slots.ended(), 2);
    }

    fn futures_poll<F: Future>(future: std::pin::Pin<&mut F>) -> std::task::Poll<F::Output> {
        future.poll(&mut std::task::Context::from_waker(std::task::Waker::noop()))
    }

    #[test]
    fn only_what_waits_too_long_is_taken_out() {
        let slots = Slots::new(1, Arc::default());
        let start = Instant::now();
        let second = start + Duration::from_millis(1);
        slots.put(vec![claim(1, start), claim(2, start), claim(3, second)]);
        slots.next(false);
        let late: Vec<i64> = slots.late(start).iter().map(|c| c.job.id.0).collect();
        assert_eq!(late, [2]);
        assert_eq!(slots.in_hand(), 2, "one runs, one waits");
    }

    #[test]
    fn a_slot_that_broke_is_free_again() {
        let slots = Slots::new(1, Arc::default());
        slots.put(claims(1..2));
        slots.next(false);
        slots.broke();
        assert_eq!((slots.in_hand(), slots.ended()), (0, 1));
        assert_eq!(slots.put(claims(2..3)), 1);
    }
}
