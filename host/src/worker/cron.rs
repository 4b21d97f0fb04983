//! Fires schedules: enqueues their jobs when they are due.
//!
//! No host has a special role. Each knows when the next schedule is due, and looks then; the database lets one of them
//! write the outcome of a due time. Only hints are kept in memory in between: if a host dies, the others handle the due
//! time.

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
/// The wait after a round in which nothing could be written about backfills. It doubles with each such round, up to
/// [`RETRY_AFTER`].
const AGAIN_AFTER: Duration = Duration::from_millis(20);
/// The wait after an error.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Fires schedules until the worker ends.
pub(super) async fn run_forever(shared: Arc<Shared>) {
    if !shared.settings.schedules {
        return;
    }
    let mut retry_wait = AGAIN_AFTER;
    let (mut looks, mut postponed) = (Looks::default(), Postponed::default());
    loop {
        let wait = match round(&shared, &mut looks, &mut postponed).await {
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
    /// Nothing was due. The next schedule is due, or is tried again, after this time, if any is.
    Idle(Duration),
    /// Something was written, or postponed; more may be due.
    Fired,
    /// Nothing could be written. Another schedule is due, or is tried again, after this time, if any is.
    Refused(Duration),
}

/// Fires what is due.
async fn round(
    shared: &Arc<Shared>,
    looks: &mut Looks,
    postponed: &mut Postponed,
) -> Result<Round, StoreError> {
    let started_at = Instant::now();
    let since = looks.since(started_at);
    let except = postponed.revisions(started_at);
    let due = shared
        .store
        .due_schedules(LISTED_MAX, since, &except)
        .await?;
    if due.schedules.is_empty() && except.is_empty() {
        looks.found_none(started_at, due.now, since);
    }
    let is_idle = due.schedules.is_empty() && due.backfills.is_empty();
    // It can take milliseconds to find that an expression is never due, and a backfill has thousands of due times.
    let (now, schedules, backfills) = (due.now, due.schedules, due.backfills);
    let decided = match schedules.is_empty() {
        true => Vec::new(),
        false => blocking(move || decide(schedules, now)).await,
    };
    let mut fired = Fired::default();
    let result = fire_all(shared, &decided, &mut fired).await;
    // Those that were not fired are left out of the next list, which may have others.
    postponed.note(&fired.not_fired, started_at, Instant::now());
    result?;
    let mut progress = fired.any || !fired.not_fired.is_empty();
    if !backfills.is_empty() {
        let steps = blocking(move || next_steps(backfills)).await;
        for next in steps {
            progress |= advance_backfill(shared, next).await?;
        }
    }
    let next_in = postponed.next_in(Instant::now()).into_iter();
    let next_in = next_in.chain(due.next_in).min().unwrap_or(LOOK_EVERY);
    Ok(match progress {
        true => Round::Fired,
        false if is_idle => Round::Idle(next_in),
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

/// What was fired.
#[derive(Default)]
struct Fired {
    /// True if anything was written.
    any: bool,
    /// The revisions of the schedules that were not fired.
    not_fired: Vec<(i64, Cause)>,
}

impl Fired {
    /// Notes the result of a call: the names of the schedules that it has fired.
    fn add(&mut self, tried: &[ScheduleDecision<'_>], fired: &[String]) {
        self.any |= !fired.is_empty();
        for one in tried {
            if !fired.contains(&one.due.schedule.name) {
                self.postpone(one, Cause::Busy);
            }
        }
    }

    fn postpone(&mut self, one: &ScheduleDecision<'_>, cause: Cause) {
        self.not_fired.push((one.due.revision, cause));
    }
}

/// Writes decisions in batches; those that lock a previous job one by one, after the others, so that no two
/// transactions wait for each other.
///
/// # Errors
/// If none of the rest can be written.
async fn fire_all(
    shared: &Shared,
    decided: &[(DueSchedule, Decision)],
    fired: &mut Fired,
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
            fire_batch(shared, &batch, fired).await?;
            batch.clear();
            size = 0;
        }
    }
    if !batch.is_empty() {
        fire_batch(shared, &batch, fired).await?;
    }
    for one in locking {
        fire_one(shared, &one, fired).await?;
    }
    Ok(())
}

/// Writes a batch. If that fails, for instance because the database refuses a job of it, or because a job has to wait
/// for another transaction, each schedule is written separately.
async fn fire_batch(
    shared: &Shared,
    batch: &[ScheduleDecision<'_>],
    fired: &mut Fired,
) -> Result<(), StoreError> {
    match shared.store.fire_schedules(batch).await {
        Ok(names) => {
            debug!(schedules = names.len(), of = batch.len(), "fired schedules");
            fired.add(batch, &names);
            return Ok(());
        }
        Err(error) if concerns_all(shared, &error) => return Err(error),
        Err(error) => {
            debug!(%error, schedules = batch.len(), "cannot fire schedules together; firing each of them separately");
        }
    }
    for one in batch {
        fire_one(shared, one, fired).await?;
    }
    Ok(())
}

/// Writes one schedule. If the database refuses its job, its current due times are skipped, and the error is stored in
/// its row; the next due times are tried again. If another transaction has locked its previous job, or enqueues a job
/// of the same key of a gate, or if there is another error, the schedule is postponed.
async fn fire_one(
    shared: &Shared,
    one: &ScheduleDecision<'_>,
    fired: &mut Fired,
) -> Result<(), StoreError> {
    let name = &one.due.schedule.name;
    let written = match shared.store.fire_schedules(&[*one]).await {
        Err(error) if is_refusal(&error) => {
            warn!(schedule = name, %error, "the job of this schedule cannot be enqueued");
            let why = error.to_string();
            let refused = ScheduleDecision {
                refused: Some(&why),
                ..*one
            };
            shared.store.fire_schedules(&[refused]).await
        }
        written => written,
    };
    match written {
        Ok(names) => fired.add(&[*one], &names),
        Err(error) if error.is_locked() => {
            debug!(schedule = name, %error, "another transaction blocks the job of this schedule");
            fired.postpone(one, Cause::Busy);
        }
        Err(error) if concerns_all(shared, &error) => return Err(error),
        Err(error) => {
            warn!(schedule = name, %error, "cannot fire this schedule; trying again after 1, 2, 4 … 60 s");
            fired.postpone(one, Cause::Failed);
            if error.is_silence() {
                // The others might wait just as long.
                return Err(error);
            }
        }
    }
    Ok(())
}

/// True if the same error is to be expected for all schedules.
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
