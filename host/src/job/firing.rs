//! Decides what happens at each due time of a schedule, also if it was missed, or if the previous job is live.

use jiff::{SignedDuration, Timestamp};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::cron::DueTimes;

/// A due time that is handled later than this is missed: no host was running. A host that runs is never this late.
const MISSED_AFTER: SignedDuration = SignedDuration::from_secs(60);

/// The maximum number of due times of one schedule that are handled at once; the rest follow.
const FIRED_MAX: usize = 100;

/// A schedule whose due times this host cannot compute is tried again after this time: a newer host may know its time
/// zone.
const INVALID_AGAIN_AFTER: SignedDuration = SignedDuration::from_hours(1);

/// The number of upcoming due times that are shown for a schedule.
pub const UPCOMING: usize = 5;

/// The maximum number of due times of a backfill.
pub const BACKFILL_MAX: usize = 10_000;

/// The policy for a due time at which the previous job is live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Overlap {
    /// The new one is left out.
    Skip,
    /// The new one waits for the end of the previous one; if one is already waiting, it is left out.
    Queue,
    /// Both are live.
    Allow,
    /// The previous one is cancelled.
    Cancel,
}

/// The missed due times that get a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CatchUp {
    /// None of them.
    None,
    /// The latest one, unless a later due time is not missed.
    One,
    /// All of them.
    All,
}

/// A live previous job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Previous {
    /// It has not started.
    Waiting,
    /// It has started, or waits for its next attempt.
    Running,
}

/// The part of a schedule on which the decisions about its due times depend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// Its name.
    pub name: String,
    /// The policy for a due time at which the previous job is live.
    pub overlap: Overlap,
    /// The missed due times that get a job.
    pub catch_up: CatchUp,
    /// Missed due times that are older than this get no job. `None` means no limit.
    pub window: Option<SignedDuration>,
    /// Jobs start up to this much later.
    pub jitter: SignedDuration,
    /// All due times up to this one have been handled.
    pub handled_until: Timestamp,
    /// The previous job, if it is live.
    pub previous: Option<Previous>,
}

/// The action at a due time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// A job is enqueued.
    Enqueue,
    /// A job is enqueued that waits for the previous one.
    Queue,
    /// The previous job is cancelled, and a job is enqueued.
    Replace,
    /// No job: the previous one is live.
    Skip,
    /// No job: the due time was missed, and so were all earlier ones without an action of their own.
    Miss,
}

/// A due time, and the action at it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Firing {
    /// The due time.
    pub due_at: Timestamp,
    /// The action at it.
    pub action: Action,
    /// The time at which its job starts, if that is later than now.
    pub run_at: Option<Timestamp>,
}

/// The decision about a schedule, which a host writes to the database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// Its due times, in order.
    pub firings: Vec<Firing>,
    /// All due times up to this one are handled.
    pub handled_until: Timestamp,
    /// The next due time that is not handled. It is in the past if there were too many due times to handle at once. If
    /// the due times cannot be computed, the time at which the schedule is tried again.
    pub next_at: Option<Timestamp>,
    /// The next due times after now.
    pub upcoming: Vec<Timestamp>,
    /// Why there is no next due time.
    pub error: Option<String>,
}

/// Decides what happens at the due times of a schedule up to now, by the database's clock.
pub fn fire(schedule: &Schedule, due: &Result<DueTimes, String>, now: Timestamp) -> Decision {
    let due = match due {
        Ok(due) => due,
        Err(why) => return invalid(schedule, why, now),
    };
    let (mut firings, times, handled_until) = handled(schedule, due, now);
    overlap(schedule, times, now, &mut firings);
    let upcoming = due.upcoming(now.max(handled_until), UPCOMING);
    let next_at = match handled_until < now {
        true => due.next_after(handled_until),
        false => upcoming.first().copied(),
    };
    let never = "the schedule is never due again: its cron expression matches no later date; change the expression, or delete the schedule";
    Decision {
        firings,
        handled_until,
        next_at,
        error: upcoming.is_empty().then(|| never.into()),
        upcoming,
    }
}

fn invalid(schedule: &Schedule, why: &str, now: Timestamp) -> Decision {
    Decision {
        firings: Vec::new(),
        handled_until: schedule.handled_until,
        next_at: now.checked_add(INVALID_AGAIN_AFTER).ok(),
        upcoming: Vec::new(),
        error: Some(why.to_owned()),
    }
}

/// Returns a record of the missed due times, the due times up to now that get a job unless the previous job prevents
/// it, and the time up to which all due times are then handled.
fn handled(
    schedule: &Schedule,
    due: &DueTimes,
    now: Timestamp,
) -> (Vec<Firing>, Vec<Timestamp>, Timestamp) {
    let since = schedule.handled_until;
    let back = |span| now.checked_sub(span).unwrap_or(Timestamp::MIN);
    // Due times up to this one are missed.
    let missed = back(MISSED_AFTER).max(since);
    let window = schedule.window.map_or(since, back).clamp(since, missed);
    let start = match schedule.catch_up {
        CatchUp::All => window,
        CatchUp::None | CatchUp::One => missed,
    };
    let mut times: Vec<Timestamp> = due.between(start, now).take(FIRED_MAX).collect();
    let mut dropped = due.last_between(since, start);
    if schedule.catch_up == CatchUp::One && times.is_empty() {
        // If the latest one is not within the window, no other is.
        times.extend(dropped.take_if(|last| *last > window));
    }
    let handled_until = match times.last() {
        Some(last) if times.len() == FIRED_MAX => *last,
        _ => now.max(since),
    };
    let missed = dropped.map(|due_at| Firing {
        due_at,
        action: Action::Miss,
        run_at: None,
    });
    (missed.into_iter().collect(), times, handled_until)
}

/// Decides about each due time from the state of the job before it.
fn overlap(schedule: &Schedule, times: Vec<Timestamp>, now: Timestamp, firings: &mut Vec<Firing>) {
    let mut previous = schedule.previous;
    let last = times.last().copied();
    for due_at in times {
        let action = match (schedule.overlap, previous) {
            (Overlap::Allow, _) | (Overlap::Skip | Overlap::Queue, None) => Action::Enqueue,
            // Each of these jobs would be cancelled at once by the next one.
            (Overlap::Cancel, _) if Some(due_at) != last => Action::Skip,
            (Overlap::Cancel, None) => Action::Enqueue,
            (Overlap::Cancel, Some(_)) => Action::Replace,
            (Overlap::Queue, Some(Previous::Running)) => Action::Queue,
            (Overlap::Queue, Some(Previous::Waiting)) | (Overlap::Skip, Some(_)) => Action::Skip,
        };
        let enqueues = action != Action::Skip;
        if enqueues {
            previous = Some(Previous::Waiting);
        }
        let run_at = jittered(&schedule.name, due_at, schedule.jitter);
        firings.push(Firing {
            due_at,
            action,
            run_at: run_at.filter(|at| enqueues && *at > now),
        });
    }
}

/// The due time with a delay of up to `jitter`, which is the same on every host.
fn jittered(name: &str, due_at: Timestamp, jitter: SignedDuration) -> Option<Timestamp> {
    let max = u64::try_from(jitter.as_millis())
        .ok()
        .filter(|ms| *ms > 0)?;
    let hash = Sha256::new()
        .chain_update(name)
        .chain_update([0])
        .chain_update(due_at.as_second().to_be_bytes())
        .finalize();
    let (bytes, _) = hash
        .split_first_chunk()
        .expect("a SHA-256 is 32 bytes long");
    let ms = u64::from_be_bytes(*bytes) % (max + 1);
    due_at
        .checked_add(SignedDuration::from_millis(i64::try_from(ms).ok()?))
        .ok()
}

/// The next due times of a backfill, and whether they are the last ones. The backfill covers the due times from `since`
/// up to, but not including, `before`; those up to `handled_until` have already been handled.
///
/// # Errors
/// If there are too many, or the expression is invalid.
pub fn backfill(
    due: &Result<DueTimes, String>,
    since: Timestamp,
    before: Timestamp,
    handled_until: Option<Timestamp>,
) -> Result<(Vec<Timestamp>, bool), String> {
    let due = due.as_ref().map_err(Clone::clone)?;
    let moment = SignedDuration::from_micros(1);
    let until = before.checked_sub(moment).unwrap_or(Timestamp::MIN);
    let start = since.checked_sub(moment).unwrap_or(Timestamp::MIN);
    if handled_until.is_none() && due.between(start, until).nth(BACKFILL_MAX).is_some() {
        return Err(format!(
            "there are more than {BACKFILL_MAX} due times between these times; backfill a shorter range, then the next one"
        ));
    }
    let times: Vec<Timestamp> = due
        .between(handled_until.unwrap_or(start), until)
        .take(FIRED_MAX)
        .collect();
    let is_last = times.len() < FIRED_MAX;
    Ok((times, is_last))
}

#[cfg(test)]
mod tests;
