//! Commits the effects of attempts that have succeeded, several of one handler in one transaction.
//!
//! A success waits in line (`successes.rs`), not in its slot. A committer takes as many as fit into a transaction;
//! while it commits, the next ones gather. If the transaction fails for any reason, nothing of it is committed: its
//! halves are tried, down to individual successes, which [`super::commit`] commits or fails. So a bad effect delays the
//! others by a few milliseconds only, and the locks of a transaction are held no longer than that. A success whose job
//! another transaction has locked continues in its own task, and takes turns with others like it.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tracing::debug;

use super::super::Shared;
use super::super::meters::OutcomeLabel;
use super::super::settler::{self, Unsettled};
use super::super::sql::Statements;
use super::super::successes::Success;
use super::{LOCK_WAIT, checked};
use crate::job::{RunEnd, decide};
use crate::store::{CommitError, Effects, FencedWrite, Settlement};

const CHECKED: &str = "it was looked up before it waited";

/// A transaction should take no longer than this, because it holds locks.
const TRANSACTION_MAX: Duration = Duration::from_millis(20);

/// A success that takes longer than this to commit alone continues in its own task: its statements may wait for the
/// lock of another transaction.
const ALONE_MAX: Duration = Duration::from_millis(500);

/// After this time, a transaction no longer delays the successes that are waiting: another transaction starts.
const JOINED_AFTER: Duration = Duration::from_millis(5);

impl Success {
    /// Commits it in its own transaction. If that is not possible, settles it with the end that results. Returns
    /// whether it is committed. `is_locked`: notified when another transaction has locked its job.
    async fn commit_alone(mut self, is_locked: Arc<Notify>) -> bool {
        let mut one = self.one.take().expect("it is passed on once");
        let (shared, handler) = (&self.shared, &self.handler);
        match super::commit(shared, handler, &mut one, &self.calls, &is_locked).await {
            Ok(()) => true,
            Err(end) => {
                self.settle_instead(one, end).await;
                false
            }
        }
    }

    /// Gives its job back: it waits until the login of its handler responds.
    async fn park(mut self) {
        let one = self.one.take().expect("it is passed on once");
        self.settle_instead(one, RunEnd::Parked).await;
    }

    /// Decides and settles it with this end, because it could not be committed with its effects.
    async fn settle_instead(&self, mut one: Unsettled, end: RunEnd) {
        let shared = &self.shared;
        match decide(end, self.tries, &self.retry, rand::random()) {
            Ok(outcome) => {
                one.replace(outcome);
                settler::send(shared, one).await;
            }
            Err(reason) => {
                one.trace
                    .end(OutcomeLabel::Dropped.as_str(), Some((reason.as_str(), "")));
                let Settlement { id, fence, .. } = one.settlement;
                let context = one.event_context(shared);
                settler::drop_attempt(shared, (id, fence), &one.meters, context, reason);
                settler::free(shared, one.frees);
            }
        }
    }
}

/// Commits a success with others of its handler. Returns as soon as there is space for it to wait. If there is no space
/// because the login of the handler does not respond, the job is given back, so that others can use its slot.
pub(in crate::worker) async fn commit(mut success: Success) {
    let name = &success.handler.manifest.name;
    let statements = success.shared.sql.statements(name);
    let statements = statements.filter(|it| {
        let granted = success.handler.sql();
        granted.is_some_and(|granted| checked(it, granted, &success.calls).is_some())
    });
    let Some(statements) = statements else {
        // The handler was parked after the attempt had started, or a new version of its module has other statements.
        // This call ends the attempt for that reason.
        success.commit_alone(Arc::default()).await;
        return;
    };
    let waiting = &statements.waiting;
    let Settlement { id, fence, .. } = success.one().settlement;
    let space = tokio::select! {
        biased;
        space = waiting.space_for(success.bytes()) => Some(space),
        () = success.shared.sql.until_unavailable(name) => None,
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

/// A task that commits the waiting successes until none is left.
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

    /// Commits a success in its own transaction. Returns whether it was committed before the committer stopped waiting
    /// for it.
    async fn commit_alone(&self, only: Success) -> bool {
        let is_locked = Arc::new(Notify::new());
        let committing = only.commit_alone(is_locked.clone());
        let committing = self.shared.attempts.tasks.spawn(committing);
        tokio::select! {
            biased;
            committed = tokio::time::timeout(ALONE_MAX, committing) => matches!(committed, Ok(Ok(true))),
            () = is_locked.notified() => false,
        }
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
                    let committing = success.commit_alone(Arc::default());
                    self.shared.attempts.tasks.spawn(committing);
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
        let calls = part
            .iter()
            .map(|it| checked(&self.statements, it.handler.sql()?, &it.calls));
        let calls: Vec<_> = calls.collect::<Option<_>>().expect(CHECKED);
        let settlements: Vec<&Settlement> = part.iter().map(|it| &it.one().settlement).collect();
        let committed = self.shared.store.commit_effects(
            &self.statements.login,
            Effects {
                write: FencedWrite::Outcomes {
                    settlements: &settlements,
                    job_lock_wait: LOCK_WAIT,
                },
                calls: &calls,
                limits: &part[0].handler.sql().expect(CHECKED).limits,
            },
        );
        Ok(committed.await?.has_releases)
    }
}
