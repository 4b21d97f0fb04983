//! Runs the SQL statements of attempts: queries, effects that are committed with a step, and effects that are committed
//! with the outcome. Outcomes of one handler share transactions (`together.rs`).
//!
//! If the response to a commit is lost, the commit is looked up before it is retried: the fence and the finished row
//! show whether it took effect.

mod together;

use std::future::pending;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tracing::{debug, info, warn};

use super::Shared;
use super::journal::{AttemptJournal, FailedTries};
use super::reach::warn_unless_unreachable;
use super::repeats::Repeats;
use super::settler::{self, Unsettled};
use super::sql::{Rechecked, Statements, recheck};
use super::successes::Turn;
use crate::job::{AbortReason, Attempt, Fence, JobId, RunEnd, SqlCall, SqlErrorClass, SqlFailure};
use crate::sandbox::{GrantedSql, Handler, JournalFuture, SqlRefusal, SqlStore};
use crate::store::{
    CheckedCall, CommitError, CommitResult, CommitStatus, Effects, FencedWrite, QueryError,
    SqlError, StoreError,
};

pub(super) use together::commit as commit_with_others;

/// The maximum number of tries of a transaction that conflicts with others. After that, the attempt fails, and counts.
const CONFLICTS_MAX: u32 = 5;

/// The wait after a conflict. Each further one doubles it.
const CONFLICT_RETRY_AFTER: Duration = Duration::from_millis(10);

/// The wait after a lost connection, and before a commit in doubt is looked up again.
const RETRY_AFTER: Duration = Duration::from_millis(200);

/// The maximum number of commits in doubt that are looked up at a time. It leaves most of the worker's few connections
/// to claims, settlements and renewals.
pub(super) const LOOKUPS_MAX: usize = 2;

/// The time that the first try of an outcome waits for the lock of its job.
const LOCK_WAIT: Duration = Duration::from_millis(20);

/// The time that each further try waits for the lock if no other outcome waits for its turn.
const LOCK_WAIT_LONG: Duration = Duration::from_millis(250);

/// The time that each further try waits for the lock if other outcomes wait for their turns: a lock that is held for
/// long would delay them, although theirs may be free.
const LOCK_WAIT_SHORT: Duration = Duration::from_millis(1);

/// The consequence of a failure.
enum Then {
    /// The same call is retried.
    Again,
    /// The handler is parked.
    Parked,
    /// The statement has failed.
    Failed(SqlFailure),
}

/// Decides the consequence of a failure of one of these statements. Waits if the call is retried.
async fn after_failure(
    shared: &Shared,
    handler: &Handler,
    statements: &Arc<Statements>,
    error: SqlError,
    conflicts: &mut u32,
) -> Then {
    match error.class() {
        SqlErrorClass::Conflict if *conflicts < CONFLICTS_MAX => {
            let wait = CONFLICT_RETRY_AFTER * (1 << *conflicts);
            *conflicts += 1;
            debug!(handler = %handler.manifest.name, %error, "conflict with another transaction; trying again");
            tokio::time::sleep(wait.mul_f64(rand::random_range(0.5..1.5))).await;
            Then::Again
        }
        SqlErrorClass::Unavailable => {
            debug!(handler = %handler.manifest.name, %error, "cannot run SQL statements of the handler; trying again");
            shared.sql.follow_login(handler);
            tokio::time::sleep(RETRY_AFTER).await;
            Then::Again
        }
        SqlErrorClass::Mismatch => match recheck(shared, handler, statements).await {
            Rechecked::Waits => Then::Parked,
            Rechecked::FitsSince if *conflicts < CONFLICTS_MAX => {
                *conflicts += 1;
                Then::Again
            }
            Rechecked::FitsSince | Rechecked::Fits => Then::Failed(error.into_failure()),
        },
        SqlErrorClass::Conflict | SqlErrorClass::Temporary | SqlErrorClass::Data => {
            Then::Failed(error.into_failure())
        }
    }
}

/// The statements of calls, in order. `granted`: the statements of the attempt's version of the module. `None` if one
/// of them is not what the attempt's version of the module declares: a new version has replaced the file of the module.
fn checked<'a>(
    statements: &'a Statements,
    granted: &Arc<GrantedSql>,
    calls: &'a [SqlCall],
) -> Option<Vec<CheckedCall<'a>>> {
    let checked = calls
        .iter()
        .map(|call| Some((statements.declared_by(granted, &call.statement)?, call)));
    checked.collect()
}

/// Waits for the turn of an outcome whose job was locked. Once the worker stops, the job's lease is no longer renewed.
/// `None` if the worker has been stopping for `drain_timeout`: nothing waits for its turn then.
async fn turn<'a>(
    shared: &Shared,
    statements: &'a Statements,
    one: &Unsettled,
) -> Option<Turn<'a>> {
    let (id, fence) = (one.settlement.id, one.settlement.fence);
    tokio::select! {
        biased;
        turn = statements.waiting.turn() => Some(turn),
        () = shared.drain_timed_out.cancelled() => None,
        () = settler::give_up_when_stopping(shared, id, fence) => unreachable!("it never returns"),
    }
}

/// Commits the effects of an attempt with its outcome, and reports it. It tries until the attempt's lease ends. Once
/// the worker stops, the lease is no longer renewed, and a lock is waited for only until the end of `drain_timeout`.
/// `is_locked`: notified when another transaction has locked the job, or a key of a job that the attempt enqueues.
///
/// # Errors
/// If nothing was committed: how the attempt has ended instead.
async fn commit(
    shared: &Shared,
    handler: &Handler,
    one: &mut Unsettled,
    calls: &[SqlCall],
    is_locked: &Notify,
) -> Result<(), RunEnd> {
    let (mut conflicts, mut locked) = (0, 0);
    let mut locked_space = None;
    loop {
        if settler::give_up_if_lost(shared, one) {
            return Ok(());
        }
        // If an earlier try got no response, it may have been committed.
        if one.unanswered
            && let Some(accepted) = confirmed(shared, one).await
        {
            settler::report(shared, one, accepted);
            return Ok(());
        }
        let (Some(statements), Some(granted)) =
            (shared.sql.statements(&handler.manifest.name), handler.sql())
        else {
            return Err(RunEnd::Parked);
        };
        let Some(checked) = checked(&statements, granted, calls) else {
            return Err(RunEnd::Parked);
        };
        let checked = [checked];
        let committed = {
            let turn = match locked {
                0 => None,
                _ => turn(shared, &statements, one).await,
            };
            // Its turn may have come late.
            if locked > 0 && settler::give_up_if_lost(shared, one) {
                return Ok(());
            }
            let effects = Effects {
                write: FencedWrite::Outcomes {
                    settlements: &[&one.settlement],
                    job_lock_wait: match &turn {
                        _ if locked == 0 => LOCK_WAIT,
                        Some(turn) if turn.is_last() => LOCK_WAIT_LONG,
                        Some(_) | None => LOCK_WAIT_SHORT,
                    },
                },
                calls: &checked,
                limits: &granted.limits,
            };
            shared
                .store
                .commit_effects(&statements.login, effects)
                .await
        };
        let failure = match committed {
            Ok(CommitResult { has_releases }) => {
                if has_releases {
                    shared.releases.notify_one();
                }
                settler::report(shared, one, true);
                return Ok(());
            }
            Err(failure) => failure,
        };
        if !matches!(failure, CommitError::Locked(_)) {
            locked_space = None;
            one.blocked_at = None;
        }
        match failure {
            // The earlier try may have been committed since it was looked up.
            CommitError::Lost if one.unanswered => {
                let accepted = confirmed(shared, one).await;
                settler::report(shared, one, accepted.unwrap_or(false));
                return Ok(());
            }
            CommitError::Lost | CommitError::IncarnationEnded => {
                if matches!(failure, CommitError::IncarnationEnded) {
                    shared.presence.heartbeat_now.notify_one();
                }
                settler::report(shared, one, false);
                return Ok(());
            }
            CommitError::InDoubt(error) => {
                info!(job.id = one.settlement.id.0, handler = %handler.manifest.name, %error, "the response to a commit with effects was lost; looking it up");
                one.unanswered = true;
            }
            CommitError::Statement(failure) => return Err(RunEnd::EffectFailed(failure)),
            CommitError::Recorded => unreachable!("an outcome records no step"),
            CommitError::NoPartition => {
                if !prepare_partitions(shared, &mut one.refusals).await {
                    // As in the settler, the tries end with the lease.
                    let (id, fence) = (one.settlement.id, one.settlement.fence);
                    shared.leases.give_up(id, fence);
                }
            }
            CommitError::Refused(why) => {
                return Err(RunEnd::SettlementRefused(format!(
                    "Postgres cannot store the job's result, or the jobs that it enqueues: {why}"
                )));
            }
            // As in the settler, the lock is not the fault of the attempt.
            CommitError::Locked(error) => {
                debug!(job.id = one.settlement.id.0, %error, "another transaction blocks a commit with effects; trying again");
                is_locked.notify_one();
                one.note_blocked();
                let bytes = || one.bytes + calls.iter().map(SqlCall::bytes).sum::<usize>();
                locked_space.get_or_insert_with(|| statements.waiting.locked(bytes()));
                // A try in doubt may have been committed: it is looked up first.
                let may_give_up = !one.unanswered && !shared.stop.is_stopping();
                if may_give_up
                    && statements.waiting.is_full()
                    && one.is_blocked_for(shared.settings.unsettled_limits.blocked)
                {
                    settler::give_up(shared, one, settler::NO_SPACE);
                    return Ok(());
                }
                if statements.waiting.is_crowded() {
                    // Others need the space: the job runs again once its lease has ended.
                    let (id, fence) = (one.settlement.id, one.settlement.fence);
                    shared.leases.give_up(id, fence);
                }
                tokio::time::sleep(settler::retry_after(locked)).await;
                locked += 1;
            }
            CommitError::Store(error) => {
                if is_logged(&mut one.refusals, &error) {
                    warn_unless_unreachable!(
                        error,
                        job.id = one.settlement.id.0,
                        handler = %handler.manifest.name,
                        "cannot commit effects; trying again"
                    );
                }
                tokio::time::sleep(RETRY_AFTER).await;
            }
            CommitError::Failed(error) => {
                match after_failure(shared, handler, &statements, error, &mut conflicts).await {
                    Then::Again => {}
                    Then::Parked => return Err(RunEnd::Parked),
                    Then::Failed(failure) => return Err(RunEnd::EffectFailed(failure)),
                }
            }
        }
    }
}

/// True if this error of the worker's own session is logged now. In an outage, nothing is logged as a warning.
fn is_logged(warnings: &mut Repeats, error: &StoreError) -> bool {
    error.is_unreachable() || error.is_cut_off() || warnings.is_logged(Instant::now())
}

/// Creates today's partition of the history. If that fails, or if there was nothing to create, waits. Returns false if
/// there was nothing to create.
async fn prepare_partitions(shared: &Shared, warnings: &mut Repeats) -> bool {
    let is_missing = match shared.store.prepare_partitions().await {
        // Another worker may have created it, or the partition that is missing is one that nobody can create.
        Ok(0) => {
            debug!("no partition of the history was missing");
            false
        }
        Ok(_) => return true,
        Err(error) => {
            if warnings.is_logged(Instant::now()) {
                warn!(%error, "cannot create today's partition of the history; trying again");
            }
            true
        }
    };
    tokio::time::sleep(RETRY_AFTER).await;
    is_missing
}

/// Looks up whether an outcome was committed. `None` if it was not, and the worker still holds the job, or if this is
/// still unknown when the lease ends. The lease then decides whether the commit is retried.
async fn confirmed(shared: &Shared, one: &Unsettled) -> Option<bool> {
    let (id, fence) = (one.settlement.id, one.settlement.fence);
    let mut warnings = Repeats::default();
    loop {
        let status = {
            let _permit = shared.calls.lookups.acquire().await;
            shared.store.confirm(id, fence, one.attempt).await
        };
        match status {
            Ok(CommitStatus::Held) => return None,
            Ok(CommitStatus::Settled) => return Some(true),
            Ok(CommitStatus::Lost) => return Some(false),
            Err(error) if shared.has_incarnation_ended(&error) => return Some(false),
            Err(error) => {
                if error.is_locked() {
                    debug!(job.id = id.0, %error, "the commit to look up has not ended; trying again");
                } else if is_logged(&mut warnings, &error) {
                    warn_unless_unreachable!(
                        error,
                        job.id = id.0,
                        handler = %one.meters.handler,
                        "cannot look up a commit; trying again"
                    );
                }
                if one.is_lost(shared) {
                    return None;
                }
                tokio::time::sleep(RETRY_AFTER).await;
            }
        }
    }
}

impl AttemptJournal {
    fn statements(&self) -> Result<(Arc<Statements>, &Arc<GrantedSql>), SqlRefusal> {
        let statements = self.shared.sql.statements(&self.handler.manifest.name);
        // The handler was parked after the attempt had started.
        statements.zip(self.handler.sql()).ok_or(SqlRefusal::Parked)
    }

    /// The refusal that a guest gets after a failure. `None` if the call is retried.
    async fn refusal(
        &self,
        statements: &Arc<Statements>,
        error: SqlError,
        conflicts: &mut u32,
    ) -> Option<SqlRefusal> {
        match after_failure(&self.shared, &self.handler, statements, error, conflicts).await {
            Then::Again => None,
            Then::Parked => Some(SqlRefusal::Parked),
            Then::Failed(failure) => Some(SqlRefusal::Failed(failure)),
        }
    }

    /// Waits for the abort signal: the job is lost.
    async fn lost(&self) -> ! {
        let (id, fence) = (self.id, self.fence);
        self.shared
            .leases
            .lose(id, fence, AbortReason::TakenByAnotherWorker);
        pending().await
    }

    /// Looks up whether a step was recorded by a commit that got no response.
    async fn is_recorded(&self, step: &str, attempt: Attempt) -> bool {
        let (store, id, fence): (_, JobId, Fence) = (&self.shared.store, self.id, self.fence);
        let mut failed = FailedTries::default();
        loop {
            let status = {
                let _permit = self.shared.calls.lookups.acquire().await;
                // This waits for the transaction in question.
                store.confirm(id, fence, attempt).await
            };
            let response = match status {
                Ok(CommitStatus::Held) => {
                    let _permit = self.shared.calls.steps.acquire().await;
                    store.recorded_step(id, fence, step).await
                }
                Ok(CommitStatus::Settled | CommitStatus::Lost) => self.lost().await,
                Err(error) => Err(error),
            };
            if let Some(result) = self.check_response(response, &mut failed).await {
                return result.is_some();
            }
        }
    }

    async fn commit_step(
        &self,
        step: &str,
        output: &str,
        calls: &[SqlCall],
    ) -> Result<(), SqlRefusal> {
        let (mut conflicts, mut locked) = (0, 0);
        let (mut warnings, mut failed) = (Repeats::default(), FailedTries::default());
        loop {
            let (statements, granted) = self.statements()?;
            let checked = [checked(&statements, granted, calls).ok_or(SqlRefusal::Parked)?];
            let effects = Effects {
                write: FencedWrite::Step {
                    id: self.id,
                    fence: self.fence,
                    name: step,
                    output,
                },
                calls: &checked,
                limits: &granted.limits,
            };
            let committed = self.shared.store.commit_effects(&statements.login, effects);
            let failure = match committed.await {
                Ok(_) => return Ok(()),
                Err(failure) => failure,
            };
            match failure {
                // An earlier try without a response has recorded it.
                CommitError::Recorded => return Ok(()),
                CommitError::Lost => self.lost().await,
                CommitError::IncarnationEnded => {
                    // The next heartbeat aborts the attempt.
                    self.shared.presence.heartbeat_now.notify_one();
                    pending::<()>().await;
                }
                CommitError::Statement(failure) => return Err(SqlRefusal::Failed(failure)),
                CommitError::Refused(why) => return Err(SqlRefusal::Refused(why)),
                CommitError::NoPartition => {
                    prepare_partitions(&self.shared, &mut warnings).await;
                }
                CommitError::Locked(error) => {
                    debug!(job.id = self.id.0, %error, "another transaction blocks a step with effects; trying again");
                    tokio::time::sleep(settler::retry_after(locked)).await;
                    locked += 1;
                }
                CommitError::Store(error) => {
                    let response: Result<_, StoreError> = Err(error);
                    self.check_response::<()>(response, &mut failed).await;
                }
                CommitError::InDoubt(error) => {
                    info!(job.id = self.id.0, %error, "the response to a commit with effects was lost; looking it up");
                    if self.is_recorded(step, self.attempt()).await {
                        return Ok(());
                    }
                }
                CommitError::Failed(error) => {
                    if let Some(refusal) = self.refusal(&statements, error, &mut conflicts).await {
                        return Err(refusal);
                    }
                }
            }
        }
    }
}

impl SqlStore for AttemptJournal {
    fn check(&self, call: &SqlCall) -> Result<(), String> {
        // If the handler has been parked since, or has other statements, this is noticed when the statement runs.
        let Ok((statements, granted)) = self.statements() else {
            return Ok(());
        };
        match statements.declared_by(granted, &call.statement) {
            Some(statement) => statement.check_params(&call.params.0),
            None => Ok(()),
        }
    }

    fn query<'a>(
        &'a self,
        call: &'a SqlCall,
    ) -> JournalFuture<'a, Result<Vec<Vec<u8>>, SqlRefusal>> {
        Box::pin(async move {
            let mut conflicts = 0;
            loop {
                let (statements, granted) = self.statements()?;
                let statement = statements.declared_by(granted, &call.statement);
                let statement = statement.ok_or(SqlRefusal::Parked)?;
                let rows = statements
                    .login
                    .query(statement, &call.params.0, &granted.limits)
                    .await;
                let error = match rows {
                    Ok(rows) => return Ok(rows),
                    Err(QueryError::Refused(why)) => return Err(SqlRefusal::Refused(why)),
                    Err(QueryError::Statement(failure)) => return Err(SqlRefusal::Failed(failure)),
                    Err(QueryError::Failed(error)) => error,
                };
                if let Some(refusal) = self.refusal(&statements, error, &mut conflicts).await {
                    return Err(refusal);
                }
            }
        })
    }

    fn complete_step<'a>(
        &'a self,
        step: &'a str,
        output: &'a [u8],
        effects: &'a [SqlCall],
    ) -> JournalFuture<'a, Result<(), SqlRefusal>> {
        Box::pin(async move {
            let output =
                str::from_utf8(output).map_err(|error| SqlRefusal::Refused(error.to_string()))?;
            self.commit_step(step, output, effects).await
        })
    }
}
