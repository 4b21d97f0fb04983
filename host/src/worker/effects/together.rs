//! Commits the effects of attempts that have succeeded, several of one handler in one transaction.
//!
//! A success waits here, not in its slot. A committer takes as many as fit into a transaction; while it commits, the
//! next ones gather. If the transaction fails, for whatever reason, nothing of it is committed: its halves are tried,
//! down to individual successes, which [`super::commit`] commits or fails. So a bad effect delays the others by a few
//! milliseconds only, and the locks of a transaction are held no longer than that.

use std::collections::VecDeque;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::debug;

use super::super::Shared;
use super::super::attempt;
use super::super::settler::{self, Unsettled};
use super::super::sql::Statements;
use super::checked;
use crate::job::{RetryPolicy, RunEnd, SqlCall, Tries};
use crate::sandbox::Handler;
use crate::store::{CommitError, Effects, FencedWrite, Settlement};

const CHECKED: &str = "it was looked up before it waited";

/// The maximum size of the results and parameters of the waiting successes of a handler, in KiB. Further attempts keep
/// their slots until theirs fit.
const WAITING_KIB_MAX: u32 = 64 << 10;

/// The minimum size that a waiting success counts as, in KiB. So at most 512 wait, and four concurrent transactions
/// take half of them.
const WAITING_KIB_MIN: u32 = 128;

/// The largest number of successes in one transaction. At this size, the cost of the transaction itself is small for
/// each of them.
const BATCH_MAX: usize = 64;

/// The maximum number of successes in the first transaction.
const BATCH_FIRST: usize = 8;

/// The maximum size of the results and parameters in one transaction, in bytes.
const BATCH_BYTES_MAX: usize = 1 << 20;

/// A transaction should take no longer than this, because it holds locks.
const TRANSACTION_MAX: Duration = Duration::from_millis(20);

/// A success that takes longer than this to commit alone continues in a task of its own: another transaction may have
/// locked its job.
const ALONE_MAX: Duration = Duration::from_millis(500);

/// After this time, a transaction no longer delays the successes that are waiting: another transaction starts.
const JOINED_AFTER: Duration = Duration::from_millis(5);

/// An attempt that has succeeded and has effects.
pub(in crate::worker) struct Success {
    shared: Arc<Shared>,
    /// The handler, with the grants of the job.
    handler: Arc<Handler>,
    /// `None` once it has been passed on.
    one: Option<Unsettled>,
    calls: Vec<SqlCall>,
    /// These decide the outcome if the success fails after all.
    tries: Tries,
    retry: RetryPolicy,
    /// Its share of [`Waiting::space`], until it is committed or has failed.
    space: Option<OwnedSemaphorePermit>,
}

impl Success {
    pub(in crate::worker) fn new(
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

    fn one(&self) -> &Unsettled {
        self.one
            .as_ref()
            .expect("it is there until it is passed on")
    }

    fn bytes(&self) -> usize {
        self.one().bytes + self.calls.iter().map(SqlCall::bytes).sum::<usize>()
    }

    /// True if its job is lost.
    fn is_given_up(&self) -> bool {
        settler::give_up_if_lost(&self.shared, self.one())
    }

    /// Commits it in a transaction of its own. If that is not possible, settles it with the end that results. Returns
    /// whether it is committed.
    async fn commit_alone(mut self) -> bool {
        let mut one = self.one.take().expect("it is passed on once");
        match super::commit(&self.shared, &self.handler, &mut one, &self.calls).await {
            Ok(()) => true,
            Err(end) => {
                self.settle_instead(one, end).await;
                false
            }
        }
    }

    /// Gives its job back: it waits until the login of its handler answers.
    async fn park(mut self) {
        let one = self.one.take().expect("it is passed on once");
        self.settle_instead(one, RunEnd::Parked).await;
    }

    async fn settle_instead(&self, one: Unsettled, end: RunEnd) {
        attempt::settle_instead(&self.shared, one, end, self.tries, &self.retry).await;
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
pub(in crate::worker) struct Waiting {
    gathered: Mutex<Gathered>,
    space: Arc<Semaphore>,
}

struct Gathered {
    successes: VecDeque<Success>,
    committers: usize,
    /// The number that fit into a transaction. It grows by one after each full transaction. It is halved after a
    /// transaction with several successes that fails or takes too long.
    batch_max: usize,
}

impl Waiting {
    pub(in crate::worker) fn new() -> Self {
        Self {
            gathered: Mutex::new(Gathered {
                successes: VecDeque::new(),
                committers: 0,
                batch_max: BATCH_FIRST,
            }),
            space: Arc::new(Semaphore::new(WAITING_KIB_MAX as usize)),
        }
    }

    fn gathered(&self) -> MutexGuard<'_, Gathered> {
        self.gathered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Gathered {
    /// The successes of the next transaction; empty if none wait.
    fn next(&mut self) -> Vec<Success> {
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
    fn wants_another(&self, connections: usize, is_late: bool) -> bool {
        let count = self.successes.len();
        let is_wanted = match self.committers {
            0 => count > 0,
            _ => count >= self.batch_max || (is_late && count > 0),
        };
        is_wanted && self.committers < connections
    }

    fn learn(&mut self, count: usize, is_good: bool) {
        match is_good {
            true if count >= self.batch_max => self.batch_max = (self.batch_max + 1).min(BATCH_MAX),
            false if count > 1 => self.batch_max = (self.batch_max / 2).max(1),
            _ => {}
        }
    }
}

/// Commits a success with others of its handler. Returns as soon as there is space for it to wait. If there is no space
/// because the login of the handler does not answer, the job is given back, so that others can use its slot.
pub(in crate::worker) async fn commit(mut success: Success) {
    let name = &success.handler.manifest.name;
    let statements = success.shared.sql.statements(name);
    let statements = statements
        .filter(|it| success.handler.sql().is_some() && checked(it, &success.calls).is_some());
    let Some(statements) = statements else {
        // The handler was parked after the attempt had started. This call ends the attempt for that reason.
        success.commit_alone().await;
        return;
    };
    let waiting = &statements.waiting;
    let kib = u32::try_from(success.bytes() / 1024).unwrap_or(u32::MAX);
    let kib = kib.clamp(WAITING_KIB_MIN, WAITING_KIB_MAX);
    let space = waiting.space.clone().acquire_many_owned(kib);
    let Settlement { id, fence, .. } = success.one().settlement;
    let space = tokio::select! {
        biased;
        space = space => Some(space.expect("it is never closed")),
        () = success.shared.sql.until_away(name) => None,
        () = settler::give_up_when_stopping(&success.shared, id, fence) => unreachable!("it never returns"),
    };
    if space.is_none() {
        success.park().await;
        return;
    }
    success.space = space;
    let shared = success.shared.clone();
    waiting.gathered().successes.push_back(success);
    start_committer(&shared, &statements, false);
}

fn start_committer(shared: &Arc<Shared>, statements: &Arc<Statements>, is_late: bool) {
    let mut gathered = statements.waiting.gathered();
    if gathered.wants_another(statements.login.connections(), is_late) {
        gathered.committers += 1;
        let committer = Committer {
            shared: shared.clone(),
            statements: statements.clone(),
            has_ended: false,
        };
        let running: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(committer.run());
        shared.attempts.tasks.spawn(running);
    }
}

/// A task that commits what waits, until nothing does.
struct Committer {
    shared: Arc<Shared>,
    statements: Arc<Statements>,
    has_ended: bool,
}

impl Drop for Committer {
    fn drop(&mut self) {
        if !self.has_ended {
            self.statements.waiting.gathered().committers -= 1;
        }
    }
}

impl Committer {
    async fn run(mut self) {
        loop {
            let batch = {
                let mut gathered = self.statements.waiting.gathered();
                let batch = gathered.next();
                if batch.is_empty() {
                    // This happens under the same lock, so that no success that arrives now is left behind.
                    gathered.committers -= 1;
                    self.has_ended = true;
                    return;
                }
                batch
            };
            let mut committing = pin!(self.commit(batch));
            while tokio::time::timeout(JOINED_AFTER, &mut committing)
                .await
                .is_err()
            {
                start_committer(&self.shared, &self.statements, true);
            }
        }
    }

    async fn commit(&self, mut batch: Vec<Success>) {
        let (count, started) = (batch.len(), Instant::now());
        let is_committed = match batch.pop() {
            Some(only) if batch.is_empty() => only.is_given_up() || self.commit_alone(only).await,
            last => {
                batch.extend(last);
                self.commit_parts(batch).await
            }
        };
        let is_good = is_committed && started.elapsed() <= TRANSACTION_MAX;
        self.statements.waiting.gathered().learn(count, is_good);
    }

    /// Commits a success in a transaction of its own. Returns whether it has already been committed.
    async fn commit_alone(&self, only: Success) -> bool {
        let committing = self.shared.attempts.tasks.spawn(only.commit_alone());
        let committed = tokio::time::timeout(ALONE_MAX, committing).await;
        matches!(committed, Ok(Ok(true)))
    }

    /// Returns whether all were committed at once.
    async fn commit_parts(&self, batch: Vec<Success>) -> bool {
        let count = batch.len();
        let mut parts = vec![batch];
        let mut is_whole = true;
        while let Some(mut part) = parts.pop() {
            part.retain(|success| !success.is_given_up());
            if part.len() < 2 {
                for success in part {
                    // The commit may take as long as the lease lasts.
                    self.shared.attempts.tasks.spawn(success.commit_alone());
                }
                continue;
            }
            match self.commit_part(&part).await {
                Ok(has_releases) => {
                    if has_releases {
                        self.shared.releases.notify_one();
                    }
                    let meters = &self.shared.attempts.meters;
                    meters.settle_batch_jobs.record(part.len() as f64);
                    for mut success in part {
                        if let Some(one) = success.one.take() {
                            settler::report(&self.shared, &one, true);
                        }
                    }
                }
                Err(failure) => {
                    debug!(
                        ?failure,
                        jobs = part.len(),
                        of = count,
                        "a transaction with the effects of several jobs has failed; trying its halves"
                    );
                    is_whole = false;
                    if let CommitError::InDoubt(_) = failure {
                        // The outcome of each of them has to be looked up.
                        for success in &mut part {
                            if let Some(one) = &mut success.one {
                                one.unanswered = true;
                            }
                        }
                        parts.extend(part.into_iter().map(|success| vec![success]));
                    } else {
                        let half = part.split_off(part.len() / 2);
                        parts.extend([half, part]);
                    }
                }
            }
        }
        is_whole
    }

    /// Returns whether there are releases to continue.
    async fn commit_part(&self, part: &[Success]) -> Result<bool, CommitError> {
        let calls = part.iter().map(|it| checked(&self.statements, &it.calls));
        let calls: Vec<_> = calls.collect::<Option<_>>().expect(CHECKED);
        let settlements: Vec<&Settlement> = part.iter().map(|it| &it.one().settlement).collect();
        let committed = self.shared.store.commit_effects(
            &self.statements.login,
            Effects {
                write: FencedWrite::Outcomes(&settlements),
                calls: &calls,
                limits: &part[0].handler.sql().expect(CHECKED).limits,
            },
        );
        Ok(committed.await?.has_releases)
    }
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn nothing_starts_a_committer_while_nothing_waits() {
        assert!(!gathered(1, 0).wants_another(8, true));
        assert!(!gathered(1, 3).wants_another(8, true));
    }
}
