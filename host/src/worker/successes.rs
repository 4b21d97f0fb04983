//! The successes of a handler that wait for the commit of their effects, and how many of them fit into a transaction.
//!
//! `effects/together.rs` commits them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

use super::Shared;
use super::settler::{self, Unsettled};
use crate::job::{RetryPolicy, SqlCall, Tries};
use crate::sandbox::Handler;
use crate::store::Settlement;

/// The maximum size of the results and parameters of the waiting successes of a handler, in KiB. Further attempts keep
/// their slots until theirs fit.
const WAITING_KIB_MAX: u32 = 64 << 10;

/// The minimum size that a waiting success counts as, in KiB. So at most 512 wait, and four concurrent transactions
/// take half of them.
const WAITING_KIB_MIN: u32 = 128;

/// The largest number of successes in one transaction. At this size, the share of each in the cost of the transaction
/// itself is small.
const BATCH_MAX: usize = 64;

/// The maximum number of successes in the first transaction.
const BATCH_FIRST: usize = 8;

/// The maximum size of the results and parameters in one transaction, in bytes.
const BATCH_BYTES_MAX: usize = 1 << 20;

/// An attempt that has succeeded and has effects.
pub(super) struct Success {
    pub(super) shared: Arc<Shared>,
    /// The handler, with the grants of the job.
    pub(super) handler: Arc<Handler>,
    /// `None` once it has been passed on.
    pub(super) one: Option<Unsettled>,
    pub(super) calls: Vec<SqlCall>,
    /// These decide the outcome if the success fails after all.
    pub(super) tries: Tries,
    pub(super) retry: RetryPolicy,
    /// Its share of [`Waiting::space`], until it is committed or has failed.
    pub(super) space: Option<OwnedSemaphorePermit>,
}

impl Success {
    pub(super) fn new(
        shared: &Arc<Shared>,
        handler: &Arc<Handler>,
        one: Unsettled,
        calls: Vec<SqlCall>,
        (tries, retry): (Tries, &RetryPolicy),
    ) -> Self {
        Self {
            shared: shared.clone(),
            handler: handler.clone(),
            one: Some(one),
            calls,
            tries,
            retry: retry.clone(),
            space: None,
        }
    }

    pub(super) fn one(&self) -> &Unsettled {
        self.one
            .as_ref()
            .expect("it is there until it is passed on")
    }

    pub(super) fn bytes(&self) -> usize {
        self.one().bytes + self.calls.iter().map(SqlCall::bytes).sum::<usize>()
    }

    /// True if its job is lost.
    pub(super) fn is_given_up(&self) -> bool {
        settler::give_up_if_lost(&self.shared, self.one())
    }
}

impl Drop for Success {
    /// If the committer has panicked, the job is adopted once its lease has expired.
    fn drop(&mut self) {
        if let Some(one) = &self.one {
            let Settlement { id, fence, .. } = one.settlement;
            self.shared.leases.remove(id, fence);
        }
    }
}

/// The successes of one handler that wait for their commit.
pub(super) struct Waiting {
    gathered: Mutex<Gathered>,
    space: Arc<Semaphore>,
    /// The part of the space that is taken by successes whose jobs are locked, in KiB.
    locked_kib: Arc<AtomicUsize>,
    /// Held by one success at a time, of those whose jobs were locked.
    turn: Semaphore,
    /// The number of those that wait for it.
    in_line: AtomicUsize,
}

/// The space that a success takes, in KiB.
fn waiting_kib(bytes: usize) -> u32 {
    let kib = u32::try_from(bytes / 1024).unwrap_or(u32::MAX);
    kib.clamp(WAITING_KIB_MIN, WAITING_KIB_MAX)
}

/// The space of a success whose job is locked.
pub(super) struct LockedSpace {
    kib: usize,
    locked_kib: Arc<AtomicUsize>,
}

impl Drop for LockedSpace {
    fn drop(&mut self) {
        self.locked_kib.fetch_sub(self.kib, Ordering::Relaxed);
    }
}

/// The turn of a success whose job was locked.
pub(super) struct Turn<'a> {
    _permit: SemaphorePermit<'a>,
    in_line: &'a AtomicUsize,
}

impl Turn<'_> {
    /// True if no other success waits for its turn.
    pub(super) fn is_last(&self) -> bool {
        self.in_line.load(Ordering::Relaxed) == 0
    }
}

/// Counts a success while it waits for its turn.
struct InLine<'a>(&'a AtomicUsize);

impl<'a> InLine<'a> {
    fn new(in_line: &'a AtomicUsize) -> Self {
        in_line.fetch_add(1, Ordering::Relaxed);
        Self(in_line)
    }
}

impl Drop for InLine<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

pub(super) struct Gathered {
    pub(super) successes: VecDeque<Success>,
    pub(super) committers: usize,
    /// The maximum number in one transaction. It grows by one after each full transaction. It is halved after a
    /// transaction with several successes that fails or takes too long.
    batch_max: usize,
}

impl Waiting {
    pub(super) fn new() -> Self {
        Self {
            gathered: Mutex::new(Gathered {
                successes: VecDeque::new(),
                committers: 0,
                batch_max: BATCH_FIRST,
            }),
            space: Arc::new(Semaphore::new(WAITING_KIB_MAX as usize)),
            locked_kib: Arc::default(),
            turn: Semaphore::new(1),
            in_line: AtomicUsize::new(0),
        }
    }

    /// Waits until a success whose job was locked may try again. Each try may wait for the lock, in a session of the
    /// login: without turns, a few dozen of them would keep all sessions busy, and the login would seem not to respond.
    pub(super) async fn turn(&self) -> Turn<'_> {
        let waiting = InLine::new(&self.in_line);
        let permit = self.turn.acquire().await.expect("it is never closed");
        drop(waiting);
        Turn {
            _permit: permit,
            in_line: &self.in_line,
        }
    }

    /// Notes that the job of a success of this size is locked, until the returned value is dropped.
    pub(super) fn locked(&self, bytes: usize) -> LockedSpace {
        let kib = waiting_kib(bytes) as usize;
        self.locked_kib.fetch_add(kib, Ordering::Relaxed);
        LockedSpace {
            kib,
            locked_kib: self.locked_kib.clone(),
        }
    }

    /// True if successes whose jobs are locked take more than half of the space. Others are committed soon, so they do
    /// not count.
    pub(super) fn is_crowded(&self) -> bool {
        self.locked_kib.load(Ordering::Relaxed) > (WAITING_KIB_MAX / 2) as usize
    }

    /// True if successes whose jobs are locked take more than three quarters of the space.
    pub(super) fn is_full(&self) -> bool {
        self.locked_kib.load(Ordering::Relaxed) > (WAITING_KIB_MAX / 4 * 3) as usize
    }

    /// Waits for the space that a success of this size takes.
    pub(super) async fn space_for(&self, bytes: usize) -> OwnedSemaphorePermit {
        let kib = waiting_kib(bytes);
        let space = self.space.clone().acquire_many_owned(kib).await;
        space.expect("it is never closed")
    }

    pub(super) fn gathered(&self) -> MutexGuard<'_, Gathered> {
        self.gathered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Gathered {
    /// The successes of the next transaction; empty if none wait.
    pub(super) fn next(&mut self) -> Vec<Success> {
        let mut bytes = 0;
        let fit = self
            .successes
            .iter()
            .take(self.batch_max)
            .take_while(|success| {
                bytes += success.bytes();
                bytes <= BATCH_BYTES_MAX
            });
        let count = fit.count().max(1).min(self.successes.len());
        self.successes.drain(..count).collect()
    }

    /// True if another committer has to start. `is_late`: the transaction of a committer takes a long time.
    pub(super) fn wants_another(&self, connections: usize, is_late: bool) -> bool {
        let count = self.successes.len();
        let is_wanted = match self.committers {
            0 => count > 0,
            _ => count >= self.batch_max || (is_late && count > 0),
        };
        is_wanted && self.committers < connections
    }

    pub(super) fn learn(&mut self, count: usize, is_good: bool) {
        match is_good {
            true if count >= self.batch_max => self.batch_max = (self.batch_max + 1).min(BATCH_MAX),
            false if count > 1 => self.batch_max = (self.batch_max / 2).max(1),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    fn gathered(batch_max: usize, committers: usize) -> Gathered {
        Gathered {
            successes: VecDeque::new(),
            committers,
            batch_max,
        }
    }

    #[test]
    fn transactions_grow_while_they_are_full_and_are_halved_by_failures() {
        let mut it = gathered(8, 1);
        it.learn(8, true);
        it.learn(3, true);
        assert_eq!(it.batch_max, 9);
        it.learn(9, false);
        assert_eq!(it.batch_max, 4);
        // The number of successes did not cause the failure.
        it.learn(1, false);
        assert_eq!(it.batch_max, 4);
        for _ in 0..5 {
            it.learn(2, false);
        }
        assert_eq!(it.batch_max, 1);
        for _ in 0..1000 {
            it.learn(it.batch_max, true);
        }
        assert_eq!(it.batch_max, BATCH_MAX);
    }

    #[tokio::test]
    async fn a_turn_is_the_last_while_no_other_success_waits_for_one() {
        let waiting = Waiting::new();
        let first = waiting.turn().await;
        assert!(first.is_last());
        let mut second = Box::pin(waiting.turn());
        assert!((&mut second).now_or_never().is_none());
        assert!(!first.is_last());
        // It has given up.
        drop(second);
        assert!(first.is_last());
        let mut third = Box::pin(waiting.turn());
        assert!((&mut third).now_or_never().is_none());
        drop(first);
        assert!(third.await.is_last());
    }

    #[tokio::test]
    async fn only_successes_whose_jobs_are_locked_crowd_out_others() {
        let waiting = Waiting::new();
        let mut spaces = Vec::new();
        for _ in 0..512 {
            spaces.push(waiting.space_for(1).await);
        }
        assert!(!waiting.is_crowded(), "all of them will be committed soon");
        let mut locked: Vec<LockedSpace> = (0..256).map(|_| waiting.locked(1)).collect();
        assert!(!waiting.is_crowded());
        locked.push(waiting.locked(1));
        assert!(waiting.is_crowded() && !waiting.is_full());
        locked.extend((0..128).map(|_| waiting.locked(1)));
        assert!(waiting.is_full());
        locked.clear();
        assert!(!waiting.is_crowded());
    }

    #[test]
    fn nothing_starts_a_committer_while_nothing_waits() {
        assert!(!gathered(1, 0).wants_another(8, true));
        assert!(!gathered(1, 3).wants_another(8, true));
    }
}
