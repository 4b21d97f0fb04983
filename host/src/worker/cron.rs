//! Fires schedules: enqueues their jobs when they are due.
//!
//! No host has a special role. Each knows when the next schedule is due, and looks then; the database lets one of them
//! write the outcome of a due time. Nothing is kept in memory in between: if a host dies, the others handle the due
//! time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use tokio::task::spawn_blocking;
use tracing::{debug, error, info, warn};

use super::Shared;
use super::reach::warn_unless_unreachable;
use crate::job::cron::DueTimes;
use crate::job::firing::{Action, Decision, backfill, fire};
use crate::store::{Backfill, DueSchedule, ScheduleDecision, StoreError};

/// The longest time between two looks: within this time, a host notices a new schedule whose notification was lost, or
/// a change of the database's clock.
const LOOK_EVERY: Duration = Duration::from_secs(30);
/// The maximum number of schedules that are listed, and fired, at once. A transaction of this size takes tens of
/// milliseconds.
const LISTED_MAX: i32 = 250;
/// The maximum number of due times that one transaction handles.
const FIRED_MAX: usize = 500;
/// The time between two looks for all due schedules. The others leave out those that were due long before the last look
/// that found none: while a transaction is open all day, the index keeps an entry for each firing.
const ALL_EVERY: Duration = Duration::from_secs(600);
/// The margin before that look: a schedule that was due within it may not have been visible, because its transaction
/// was open.
const LATE: Duration = Duration::from_secs(60);
/// The wait after a round in which nothing could be written, because other hosts were faster, or a transaction that has
/// changed the schedule is still open. It doubles with each such round, up to [`RETRY_AFTER`].
const AGAIN_AFTER: Duration = Duration::from_millis(20);
/// The wait after an error.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Fires schedules until the worker ends.
pub(super) async fn run_forever(shared: Arc<Shared>) {
    if !shared.settings.schedules {
        return;
    }
    let mut retry_wait = AGAIN_AFTER;
    let mut looks = Looks::default();
    loop {
        let wait = match round(&shared, &mut looks).await {
            Ok(Round::Idle(wait)) => wait,
            Ok(Round::Fired) => {
                retry_wait = AGAIN_AFTER;
                Duration::ZERO
            }
            Ok(Round::Refused(next_in)) => {
                let wait = retry_wait.min(next_in);
                retry_wait = (retry_wait * 2).min(RETRY_AFTER);
                wait
            }
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

/// How a round ended.
enum Round {
    /// Nothing was due. The next schedule is due after this time, if any is.
    Idle(Duration),
    /// Something was written; more may be due.
    Fired,
    /// Nothing could be written. Another schedule is due after this time, if any is.
    Refused(Duration),
}

/// Fires what is due.
async fn round(shared: &Arc<Shared>, looks: &mut Looks) -> Result<Round, StoreError> {
    let started_at = Instant::now();
    let since = looks.since(started_at);
    let due = shared.store.due_schedules(LISTED_MAX, since).await?;
    let next_in = due.next_in.unwrap_or(LOOK_EVERY);
    if due.schedules.is_empty() {
        looks.found_none(started_at, due.now, since);
    }
    if due.schedules.is_empty() && due.backfills.is_empty() {
        return Ok(Round::Idle(next_in));
    }
    // It can take milliseconds to find that an expression is never due, and a backfill has thousands of due times.
    let (now, schedules, backfills) = (due.now, due.schedules, due.backfills);
    let decided = blocking(move || decide(schedules, now)).await;
    let mut progress = fire_all(shared, &decided).await?;
    let steps = blocking(move || next_steps(backfills)).await;
    for next in steps {
        progress |= advance_backfill(shared, next).await?;
    }
    Ok(match progress {
        true => Round::Fired,
        false => Round::Refused(next_in),
    })
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

/// Writes decisions in batches; those that lock a previous job one by one, after the others, so that no two
/// transactions wait for each other. Returns whether any of them was applied.
async fn fire_all(
    shared: &Shared,
    decided: &[(DueSchedule, Decision)],
) -> Result<bool, StoreError> {
    let mut progress = false;
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
        let fired = ScheduleDecision {
            due,
            decision,
            refused: None,
        };
        let locks = |action| matches!(action, Action::Queue | Action::Replace);
        if decision.firings.iter().any(|firing| locks(firing.action)) {
            locking.push(fired);
            continue;
        }
        batch.push(fired);
        size += 1 + decision.firings.len();
        if size >= FIRED_MAX {
            progress |= fire_batch(shared, &batch).await?;
            batch.clear();
            size = 0;
        }
    }
    if !batch.is_empty() {
        progress |= fire_batch(shared, &batch).await?;
    }
    for fired in locking {
        progress |= fire_one(shared, &fired).await?;
    }
    Ok(progress)
}

/// Writes a batch. If the database refuses a job of it, or a job has to wait for another transaction, each schedule is
/// written separately.
async fn fire_batch(shared: &Shared, batch: &[ScheduleDecision<'_>]) -> Result<bool, StoreError> {
    match shared.store.fire_schedules(batch).await {
        Ok(fired) => {
            debug!(schedules = fired.len(), of = batch.len(), "fired schedules");
            return Ok(!fired.is_empty());
        }
        Err(error) if is_refusal(&error) || error.is_locked() => {}
        Err(error) => return Err(error),
    }
    let mut progress = false;
    for one in batch {
        progress |= fire_one(shared, one).await?;
    }
    Ok(progress)
}

/// Writes one schedule. If the database refuses its job, the error is stored in its row. If another transaction has
/// locked its previous job, or enqueues a job of the same key of a gate, the next round tries again.
async fn fire_one(shared: &Shared, one: &ScheduleDecision<'_>) -> Result<bool, StoreError> {
    match shared.store.fire_schedules(&[*one]).await {
        Ok(fired) => Ok(!fired.is_empty()),
        Err(error) if is_refusal(&error) => refuse(shared, one, &error).await,
        Err(error) if error.is_locked() => {
            debug!(schedule = one.due.schedule.name, %error, "another transaction blocks the job of this schedule");
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Skips the current due times of this schedule, and stores the error. The next due times are tried again.
async fn refuse(
    shared: &Shared,
    one: &ScheduleDecision<'_>,
    error: &StoreError,
) -> Result<bool, StoreError> {
    let name = &one.due.schedule.name;
    warn!(schedule = name, %error, "the job of this schedule cannot be enqueued");
    let why = error.to_string();
    let refused = ScheduleDecision {
        refused: Some(&why),
        ..*one
    };
    let fired = shared.store.fire_schedules(&[refused]).await?;
    Ok(!fired.is_empty())
}

/// True if the same call would be refused again.
fn is_refusal(error: &StoreError) -> bool {
    error.is_about_data()
}

/// Enqueues the next jobs of a backfill. Returns whether this host did it.
async fn advance_backfill(shared: &Shared, next: BackfillStep) -> Result<bool, StoreError> {
    let (listed, step) = next;
    let (due, is_last, error) = match step {
        Ok((due, is_last)) => (due, is_last, None),
        Err(why) => (Vec::new(), true, Some(why)),
    };
    let written = shared
        .store
        .fire_backfill(&listed, &due, is_last, error.as_deref());
    let written = match written.await {
        Err(error) if is_refusal(&error) => {
            let why = error.to_string();
            warn!(schedule = listed.schedule, backfill = listed.id, %error, "the jobs of this backfill cannot be enqueued");
            shared
                .store
                .fire_backfill(&listed, &[], true, Some(&why))
                .await?
        }
        // Another transaction enqueues a job of the same key of a gate: the next round tries again.
        Err(error) if error.is_locked() => false,
        other => other?,
    };
    if written && is_last {
        info!(
            schedule = listed.schedule,
            backfill = listed.id,
            error,
            "finished a backfill"
        );
    }
    Ok(written)
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
