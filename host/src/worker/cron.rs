//! Fires schedules: enqueues their jobs when they are due.
//!
//! No host has a special role. Each knows when the next schedule is due, and looks then; the database lets only one of
//! them fire a due time. Only hints are kept in memory in between: if a host dies, the others handle the due time.

mod postponed;

use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use tokio::task::spawn_blocking;
use tracing::{debug, error, info, warn};

use self::postponed::{Cause, Postponed};
use super::Shared;
use super::reach::warn_unless_unreachable;
use crate::job::cron::DueTimes;
use crate::job::firing::{Action, Decision, backfill, fire};
use crate::store::{Backfill, Due, DueSchedule, ScheduleDecision, StoreError};

/// The longest time between two looks: within this time, a host notices a new schedule whose notification was lost, or
/// a change of the database's clock.
const LOOK_EVERY: Duration = Duration::from_secs(30);
/// The maximum number of schedules that are listed, and fired, at once. A transaction of this size takes tens of
/// milliseconds.
const LISTED_MAX: i32 = 250;
/// A transaction is full once it has at least this many schedules and due times in all.
const FIRED_MAX: usize = 500;
/// The time between two looks for all due schedules. The other looks leave out schedules that became due long before
/// the last look that found none due: while a transaction is open all day, the index keeps an entry for each firing.
const ALL_EVERY: Duration = Duration::from_secs(600);
/// The margin before the last look that found none: a schedule that was due within it may not have been visible,
/// because its transaction was open.
const LATE: Duration = Duration::from_secs(60);
/// The wait after an error.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// The time that a call of a round waits for a lock.
const LOCK_WAIT: Duration = Duration::from_millis(250);
/// The time that a call waits once another call of the round has waited until its timeout.
const LOCK_WAIT_SHORT: Duration = Duration::from_millis(1);

/// Fires schedules until the worker ends.
pub(super) async fn run_forever(shared: Arc<Shared>) {
    if !shared.settings.schedules {
        return;
    }
    let mut hints = Hints::default();
    loop {
        let wait = match round(&shared, &mut hints).await {
            Ok(wait) => wait,
            Err(error) => {
                if !shared.has_incarnation_ended(&error) {
                    warn_unless_unreachable!(
                        error,
                        "cannot fire schedules; trying again in a second"
                    );
                }
                RETRY_AFTER
            }
        };
        tokio::select! {
            () = tokio::time::sleep(wait.min(LOOK_EVERY)) => {}
            () = shared.schedules.notified() => {}
        }
    }
}

/// The state that is kept in memory between rounds.
#[derive(Debug, Default)]
struct Hints {
    looks: Looks,
    /// The schedules that could not be fired, by revision.
    schedules: Postponed,
    /// The backfills that could not be continued, by id.
    backfills: Postponed,
    /// The backfill that was tried last. The next round continues after it: if each round tried the first ones that are
    /// not postponed, dozens of blocked backfills would come up again before the host has tried those behind them.
    last_backfill: Option<i64>,
}

/// The times of the looks that found no due schedule.
#[derive(Debug, Default)]
struct Looks {
    /// The time of the last look for all schedules.
    for_all: Option<Instant>,
    /// The time of the last look (database clock): after the machine was suspended, this is long ago.
    last: Option<Timestamp>,
}

impl Looks {
    /// A look considers only schedules that became due after this time; `None`: all schedules.
    fn since(&self, now: Instant) -> Option<Timestamp> {
        let (for_all, last) = (self.for_all?, self.last?);
        (now.duration_since(for_all) < ALL_EVERY).then(|| last.saturating_sub(LATE).unwrap_or(last))
    }

    /// Notes that a look that started at `now` has found no due schedule. `at`: the same time by the database's clock.
    fn found_none(&mut self, now: Instant, at: Timestamp, since: Option<Timestamp>) {
        self.last = Some(at);
        if since.is_none() {
            self.for_all = Some(now);
        }
    }
}

/// Fires what is due, and continues backfills. Returns the time until the next round: zero if something was fired,
/// continued or postponed, because there may be more.
async fn round(shared: &Arc<Shared>, hints: &mut Hints) -> Result<Duration, StoreError> {
    let started_at = Instant::now();
    let since = hints.looks.since(started_at);
    let except = hints.schedules.waiting(started_at);
    let except_backfills = hints.backfills.waiting(started_at);
    let Due {
        now,
        next_in,
        schedules,
        backfills,
    } = shared
        .store
        .due_schedules(
            LISTED_MAX,
            since,
            &except,
            &except_backfills,
            hints.last_backfill,
        )
        .await?;
    if schedules.is_empty() && except.is_empty() {
        hints.looks.found_none(started_at, now, since);
    }
    // It can take milliseconds to find that an expression is never due, and a backfill has thousands of due times.
    let decided = match schedules.is_empty() {
        true => Vec::new(),
        false => blocking(move || decide(schedules, now)).await,
    };
    let mut not_fired = NotFired::default();
    let result = fire_all(shared, &decided, &mut not_fired).await;
    // Those that were not fired are left out of the next list, which may have others.
    hints
        .schedules
        .note(&not_fired.schedules, started_at, Instant::now());
    result?;
    let steps = match backfills.is_empty() {
        true => Vec::new(),
        false => blocking(move || next_steps(backfills)).await,
    };
    let is_idle = decided.is_empty() && steps.is_empty();
    let result = continue_backfills(shared, steps, &mut not_fired).await;
    hints.last_backfill = not_fired.last_backfill.or(hints.last_backfill);
    hints
        .backfills
        .note(&not_fired.backfills, started_at, Instant::now());
    result?;
    if !is_idle {
        return Ok(Duration::ZERO);
    }
    let again_at = Instant::now();
    let waits = [
        next_in,
        hints.schedules.next_in(again_at),
        hints.backfills.next_in(again_at),
    ];
    Ok(waits.into_iter().flatten().min().unwrap_or(LOOK_EVERY))
}

type Decided = Vec<(DueSchedule, Decision)>;
type BackfillStep = (Backfill, Result<(Vec<jiff::Timestamp>, bool), String>);

/// Computes on a separate thread, so that it does not block other tasks. After a panic, nothing is decided: the next
/// round tries again.
async fn blocking<T: Default + Send + 'static>(decide: impl FnOnce() -> T + Send + 'static) -> T {
    let decided = spawn_blocking(decide).await;
    decided.unwrap_or_else(|panic| {
        error!(%panic, "the due times of schedules cannot be computed; this is a bug in Rouse");
        T::default()
    })
}

fn decide(schedules: Vec<DueSchedule>, now: jiff::Timestamp) -> Decided {
    let decided = schedules.into_iter().map(|listed| {
        let times = DueTimes::parse(&listed.cron, &listed.time_zone);
        let decision = fire(&listed.schedule, &times, now);
        (listed, decision)
    });
    decided.collect()
}

fn next_steps(backfills: Vec<Backfill>) -> Vec<BackfillStep> {
    let steps = backfills.into_iter().map(|listed| {
        let times = DueTimes::parse(&listed.cron, &listed.time_zone);
        let next = backfill(&times, listed.since, listed.before, listed.handled_until);
        (listed, next)
    });
    steps.collect()
}

/// The schedules that a round could not fire, and the backfills that it could not continue.
#[derive(Default)]
struct NotFired {
    /// By revision.
    schedules: Vec<(i64, Cause)>,
    /// By id.
    backfills: Vec<(i64, Cause)>,
    /// The backfill that the round has tried last.
    last_backfill: Option<i64>,
    /// True if a call of the round has waited for a lock until its timeout. The other calls hardly wait, so that
    /// schedules and backfills that are blocked delay others by one such wait, however many they are.
    has_waited: bool,
}

impl NotFired {
    /// The time that the next call waits for a lock.
    fn lock_wait(&self) -> Duration {
        match self.has_waited {
            false => LOCK_WAIT,
            true => LOCK_WAIT_SHORT,
        }
    }

    /// Writes these decisions.
    async fn write(
        &mut self,
        shared: &Shared,
        fired: &[ScheduleDecision<'_>],
    ) -> Result<Vec<String>, StoreError> {
        let written = shared.store.fire_schedules(fired, self.lock_wait()).await;
        self.has_waited |= written.as_ref().is_err_and(StoreError::is_locked);
        written
    }

    /// Enqueues these jobs of a backfill.
    async fn continue_backfill(
        &mut self,
        shared: &Shared,
        listed: &Backfill,
        due: &[Timestamp],
        is_last: bool,
        error: Option<&str>,
    ) -> Result<bool, StoreError> {
        let written = shared
            .store
            .fire_backfill(listed, due, is_last, error, self.lock_wait())
            .await;
        self.has_waited |= written.as_ref().is_err_and(StoreError::is_locked);
        written
    }

    /// Adds the schedules that a call has left out. `fired`: the names of the others.
    fn add_left_out(&mut self, tried: &[ScheduleDecision<'_>], fired: &[String]) {
        for one in tried {
            if !fired.contains(&one.due.schedule.name) {
                self.add(one, Cause::Busy);
            }
        }
    }

    fn add(&mut self, one: &ScheduleDecision<'_>, cause: Cause) {
        self.schedules.push((one.due.revision, cause));
    }
}

/// Writes decisions in batches; those that lock a previous job one by one, after the others, so that no two
/// transactions wait for each other.
///
/// # Errors
/// If the remaining decisions cannot be written either.
async fn fire_all(
    shared: &Shared,
    decided: &[(DueSchedule, Decision)],
    not_fired: &mut NotFired,
) -> Result<(), StoreError> {
    let mut batch: Vec<ScheduleDecision<'_>> = Vec::new();
    let mut size = 0;
    // Last, because each may wait for a lock.
    let mut locking = Vec::new();
    for (due, decision) in decided {
        if let Some(why) = &decision.error {
            warn!(
                schedule = due.schedule.name,
                "this schedule has no next due time: {why}"
            );
        }
        let one = ScheduleDecision {
            due,
            decision,
            refused: None,
        };
        let locks = |action| matches!(action, Action::Queue | Action::Replace);
        if decision.firings.iter().any(|firing| locks(firing.action)) {
            locking.push(one);
            continue;
        }
        batch.push(one);
        size += 1 + decision.firings.len();
        if size >= FIRED_MAX {
            fire_batch(shared, &batch, not_fired).await?;
            batch.clear();
            size = 0;
        }
    }
    if !batch.is_empty() {
        fire_batch(shared, &batch, not_fired).await?;
    }
    for one in locking {
        fire_one(shared, &one, not_fired).await?;
    }
    Ok(())
}

/// Writes a batch. If that fails, for instance because the database refuses a job of it, or because a job has to wait
/// for another transaction, each schedule is written separately.
async fn fire_batch(
    shared: &Shared,
    batch: &[ScheduleDecision<'_>],
    not_fired: &mut NotFired,
) -> Result<(), StoreError> {
    match not_fired.write(shared, batch).await {
        Ok(names) => {
            debug!(schedules = names.len(), of = batch.len(), "fired schedules");
            not_fired.add_left_out(batch, &names);
            return Ok(());
        }
        Err(error) if concerns_all(shared, &error) => return Err(error),
        Err(error) => {
            debug!(%error, schedules = batch.len(), "cannot fire schedules together; firing each of them separately");
        }
    }
    for one in batch {
        fire_one(shared, one, not_fired).await?;
    }
    Ok(())
}

/// Writes one schedule. If the database refuses its job, its current due times are skipped, and the error is stored in
/// its row; the next due times are tried again. If another transaction has locked its previous job, or enqueues a job
/// of the same key of a gate, or if there is another error, the schedule is postponed.
async fn fire_one(
    shared: &Shared,
    one: &ScheduleDecision<'_>,
    not_fired: &mut NotFired,
) -> Result<(), StoreError> {
    let name = &one.due.schedule.name;
    let written = match not_fired.write(shared, &[*one]).await {
        Err(error) if is_refusal(&error) => {
            warn!(schedule = name, %error, "the job of this schedule cannot be enqueued; its current due times are skipped");
            let why = error.to_string();
            let refused = ScheduleDecision {
                refused: Some(&why),
                ..*one
            };
            not_fired.write(shared, &[refused]).await
        }
        written => written,
    };
    match written {
        Ok(names) => not_fired.add_left_out(&[*one], &names),
        Err(error) if error.is_locked() => {
            debug!(schedule = name, %error, "another transaction blocks the job of this schedule");
            not_fired.add(one, Cause::Busy);
        }
        Err(error) if concerns_all(shared, &error) => return Err(error),
        Err(error) => {
            warn!(schedule = name, %error, "cannot fire this schedule; trying again after 1, 2, 4 … 60 s");
            not_fired.add(one, Cause::Failed);
            if error.is_silence() {
                // The others might wait just as long.
                return Err(error);
            }
        }
    }
    Ok(())
}

/// True if the same error is to be expected for all schedules and backfills.
fn concerns_all(shared: &Shared, error: &StoreError) -> bool {
    let is_outage = match error.code() {
        None => !error.is_silence(),
        Some(_) => error.is_transient() && !error.may_be_one_rows_fault(),
    };
    shared.note_missing_partition(error);
    is_outage || shared.has_incarnation_ended(error) || error.is_partition_missing()
}

/// True if the same call would be refused again.
fn is_refusal(error: &StoreError) -> bool {
    error.is_about_data()
}

/// Continues backfills. Notes those that could not be continued.
///
/// # Errors
/// If the remaining backfills cannot be continued either.
async fn continue_backfills(
    shared: &Shared,
    steps: Vec<BackfillStep>,
    not_fired: &mut NotFired,
) -> Result<(), StoreError> {
    for step in steps {
        continue_backfill(shared, step, not_fired).await?;
    }
    Ok(())
}

/// Enqueues the next jobs of a backfill. If the database refuses one of them, the backfill ends with this error. If
/// another host has continued it, if another transaction enqueues a job of the same key of a gate, or if there is
/// another error, it is postponed.
async fn continue_backfill(
    shared: &Shared,
    (listed, step): BackfillStep,
    not_fired: &mut NotFired,
) -> Result<(), StoreError> {
    let (schedule, id) = (&listed.schedule, listed.id);
    not_fired.last_backfill = Some(id);
    let (due, is_last, error) = match step {
        Ok((due, is_last)) => (due, is_last, None),
        Err(why) => (Vec::new(), true, Some(why)),
    };
    let written = match not_fired
        .continue_backfill(shared, &listed, &due, is_last, error.as_deref())
        .await
    {
        Err(error) if is_refusal(&error) => {
            warn!(schedule, backfill = id, %error, "the jobs of this backfill cannot be enqueued; the backfill ends with this error");
            let why = error.to_string();
            not_fired
                .continue_backfill(shared, &listed, &[], true, Some(&why))
                .await
        }
        written => written,
    };
    match written {
        Ok(true) => {
            if is_last {
                info!(schedule, backfill = id, error, "finished a backfill");
            }
        }
        Ok(false) => not_fired.backfills.push((id, Cause::Busy)),
        Err(error) if error.is_locked() => {
            debug!(schedule, backfill = id, %error, "another transaction blocks the jobs of this backfill");
            not_fired.backfills.push((id, Cause::Busy));
        }
        Err(error) if concerns_all(shared, &error) => return Err(error),
        Err(error) => {
            warn!(schedule, backfill = id, %error, "cannot continue this backfill; trying again after 1, 2, 4 … 60 s");
            not_fired.backfills.push((id, Cause::Failed));
            if error.is_silence() {
                // The others might wait just as long.
                return Err(error);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_that_were_due_long_before_the_last_look_are_read_only_every_ten_minutes() {
        let start = Instant::now();
        let at = |seconds: i64| Timestamp::from_second(1_000_000 + seconds).expect("in range");
        let mut looks = Looks::default();
        assert_eq!(looks.since(start), None, "the first look is for all");
        looks.found_none(start, at(0), None);
        // The machine was suspended for an hour: its own clock stood still.
        let later = start + Duration::from_secs(15);
        assert_eq!(looks.since(later), Some(at(-60)));
        looks.found_none(later, at(3600), looks.since(later));
        let before = start + ALL_EVERY - Duration::from_secs(1);
        assert_eq!(looks.since(before), Some(at(3540)));
        assert_eq!(looks.since(start + ALL_EVERY), None);
    }
}
