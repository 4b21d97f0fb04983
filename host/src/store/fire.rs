//! Fires schedules: lists those that are due, and writes what was decided about their due times.

use std::time::{Duration, SystemTime};

use jiff::{SignedDuration, Timestamp};
use postgres_types::ToSql;
use serde::Deserialize;
use tokio_postgres::types::Type;

use super::lock_wait::lock_wait_ms;
use super::{JsonText, Store, StoreError};
use crate::job::firing::{Action, CatchUp, Decision, Overlap, Previous, Schedule};

/// The due schedules and unfinished backfills, by the database's clock.
#[derive(Debug, Clone)]
pub struct Due {
    /// The time of the database.
    pub now: Timestamp,
    /// The time until the next schedule that is not listed is due; `None` if none is.
    pub next_in: Option<Duration>,
    /// The schedules, most overdue first.
    pub schedules: Vec<DueSchedule>,
    /// Backfills that are not finished, in the order in which they are tried.
    pub backfills: Vec<Backfill>,
}

/// A schedule that is due, or whose due times no host has computed.
#[derive(Debug, Clone)]
pub struct DueSchedule {
    /// The version of the row. It changes with each change to the row.
    pub revision: i64,
    /// The cron expression.
    pub cron: String,
    /// Its time zone.
    pub time_zone: String,
    /// The values on which the decisions about its due times depend.
    pub schedule: Schedule,
}

/// A backfill that is not finished.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backfill {
    /// Its id.
    pub id: i64,
    /// The name of its schedule.
    pub schedule: String,
    /// The cron expression.
    pub cron: String,
    /// Its time zone.
    pub time_zone: String,
    /// The start of its range.
    pub since: Timestamp,
    /// The end of its range: due times at this time or later do not belong to it.
    pub before: Timestamp,
    /// Due times up to this one are handled.
    pub handled_until: Option<Timestamp>,
}

/// The decision of a host about a schedule.
#[derive(Debug, Clone, Copy)]
pub struct ScheduleDecision<'a> {
    /// The schedule as it was listed.
    pub due: &'a DueSchedule,
    /// The decision.
    pub decision: &'a Decision,
    /// Why its jobs cannot be enqueued, if the database has refused them.
    pub refused: Option<&'a str>,
}

impl Store {
    /// Lists up to `limit` schedules that were due after `since` (`None`: at any time) and are still due, and ten
    /// unfinished backfills, the first of them after the one with the id `after_backfill`; except the schedules with
    /// these revisions and the backfills with these ids. Locks nothing.
    pub async fn due_schedules(
        &self,
        limit: i32,
        since: Option<Timestamp>,
        except: &[i64],
        except_backfills: &[i64],
        after_backfill: Option<i64>,
    ) -> Result<Due, StoreError> {
        let worker = self.identity()?;
        let rows = self
            .query(
                include_str!("due_schedules.sql"),
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&limit, Type::INT4),
                    (&since.map(SystemTime::from), Type::TIMESTAMPTZ),
                    (&except, Type::INT8_ARRAY),
                    (&except_backfills, Type::INT8_ARRAY),
                    (&after_backfill, Type::INT8),
                ],
            )
            .await?;
        let row = rows
            .first()
            .expect("a function with OUT parameters returns one row");
        let wait_ms: Option<i64> = row.get(1);
        let schedules: Vec<ListedSchedule> = list(row.get(2));
        let backfills: Vec<ListedBackfill> = list(row.get(3));
        Ok(Due {
            now: time(row.get(0)),
            next_in: wait_ms.map(|ms| Duration::from_millis(ms.try_into().unwrap_or(0))),
            schedules: schedules.into_iter().map(DueSchedule::from).collect(),
            backfills: backfills.into_iter().map(Backfill::from).collect(),
        })
    }

    /// Writes decisions in one transaction. Returns the names of the schedules for which they were written. These do
    /// not include schedules that have changed since they were listed, or that another host is firing. Waits up to
    /// `lock_wait`, at most 250 ms, for a lock that one of the jobs needs.
    pub async fn fire_schedules(
        &self,
        fired: &[ScheduleDecision<'_>],
        lock_wait: Duration,
    ) -> Result<Vec<String>, StoreError> {
        let (worker, lists) = (self.identity()?, self.lists().await?);
        let changes: Vec<ChangeRecord<'_>> = fired.iter().map(ChangeRecord::from).collect();
        let firings: Vec<FiringRecord<'_>> = fired.iter().flat_map(firings).collect();
        let rows = self
            .query_with_records(
                include_str!("fire_schedules.sql"),
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&changes, lists.array_type("schedule_change")),
                    (&firings, lists.array_type("schedule_firing")),
                    (&lock_wait_ms(lock_wait), Type::INT4),
                ],
            )
            .await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    /// Enqueues jobs for due times of a backfill; with `is_last` or an error, it is finished. Returns false if another
    /// host has already continued it. `lock_wait`: as for [`fire_schedules`](Self::fire_schedules).
    pub async fn fire_backfill(
        &self,
        backfill: &Backfill,
        due: &[Timestamp],
        is_last: bool,
        error: Option<&str>,
        lock_wait: Duration,
    ) -> Result<bool, StoreError> {
        let worker = self.identity()?;
        let due: Vec<SystemTime> = due.iter().copied().map(SystemTime::from).collect();
        let rows = self
            .query(
                "SELECT rouse.fire_backfill($1, $2, $3, $4, $5, $6, $7, $8)",
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&backfill.id, Type::INT8),
                    (
                        &backfill.handled_until.map(SystemTime::from),
                        Type::TIMESTAMPTZ,
                    ),
                    (&due, Type::TIMESTAMPTZ_ARRAY),
                    (&(is_last || error.is_some()), Type::BOOL),
                    (&error, Type::TEXT),
                    (&lock_wait_ms(lock_wait), Type::INT4),
                ],
            )
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(row.get(0))
    }

    /// Deletes rows about due times that are older than the retention in the database, one batch per call. Returns the
    /// number of deleted rows.
    pub async fn maintain_schedules(&self) -> Result<i32, StoreError> {
        let rows = self
            .query_as_worker("SELECT rouse.maintain_schedules($1, $2)")
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(row.get(0))
    }
}

/// The record of `rouse.fire_schedules` about a schedule.
#[derive(Debug, ToSql)]
#[postgres(name = "schedule_change")]
struct ChangeRecord<'a> {
    name: &'a str,
    revision: i64,
    handled_until: SystemTime,
    next_at: Option<SystemTime>,
    upcoming: Vec<SystemTime>,
    error: Option<&'a str>,
}

impl<'a> From<&ScheduleDecision<'a>> for ChangeRecord<'a> {
    fn from(fired: &ScheduleDecision<'a>) -> Self {
        let ScheduleDecision {
            due,
            decision,
            refused,
        } = *fired;
        Self {
            name: &due.schedule.name,
            revision: due.revision,
            handled_until: decision.handled_until.into(),
            next_at: decision.next_at.map(SystemTime::from),
            upcoming: decision
                .upcoming
                .iter()
                .copied()
                .map(SystemTime::from)
                .collect(),
            error: refused.or(decision.error.as_deref()),
        }
    }
}

/// The record of `rouse.fire_schedules` about a due time.
#[derive(Debug, ToSql)]
#[postgres(name = "schedule_firing")]
struct FiringRecord<'a> {
    name: &'a str,
    due_at: SystemTime,
    action: &'static str,
    run_at: Option<SystemTime>,
    error: Option<&'a str>,
}

fn firings<'a>(fired: &ScheduleDecision<'a>) -> impl Iterator<Item = FiringRecord<'a>> {
    let ScheduleDecision {
        due,
        decision,
        refused,
    } = *fired;
    decision.firings.iter().map(move |firing| {
        let (action, error) = match (firing.action, refused) {
            (Action::Skip, _) => ("skip", None),
            (Action::Miss, _) => ("miss", None),
            (Action::Enqueue | Action::Queue | Action::Replace, Some(why)) => ("refuse", Some(why)),
            (Action::Enqueue, None) => ("enqueue", None),
            (Action::Queue, None) => ("queue", None),
            (Action::Replace, None) => ("replace", None),
        };
        FiringRecord {
            name: &due.schedule.name,
            due_at: firing.due_at.into(),
            action,
            run_at: firing.run_at.map(SystemTime::from),
            error,
        }
    })
}

/// An entry of `due` of `rouse.due_schedules`.
#[derive(Deserialize)]
struct ListedSchedule {
    name: String,
    revision: i64,
    cron: String,
    time_zone: String,
    overlap: Overlap,
    catch_up: CatchUp,
    window_us: Option<i64>,
    jitter_us: i64,
    handled_us: i64,
    previous: Option<Previous>,
}

impl From<ListedSchedule> for DueSchedule {
    fn from(listed: ListedSchedule) -> Self {
        Self {
            revision: listed.revision,
            cron: listed.cron,
            time_zone: listed.time_zone,
            schedule: Schedule {
                name: listed.name,
                overlap: listed.overlap,
                catch_up: listed.catch_up,
                window: listed.window_us.map(SignedDuration::from_micros),
                jitter: SignedDuration::from_micros(listed.jitter_us),
                handled_until: time(listed.handled_us),
                previous: listed.previous,
            },
        }
    }
}

/// An entry of `backfills` of `rouse.due_schedules`.
#[derive(Deserialize)]
struct ListedBackfill {
    id: i64,
    schedule: String,
    cron: String,
    time_zone: String,
    since_us: i64,
    before_us: i64,
    handled_us: Option<i64>,
}

impl From<ListedBackfill> for Backfill {
    fn from(listed: ListedBackfill) -> Self {
        Self {
            id: listed.id,
            schedule: listed.schedule,
            cron: listed.cron,
            time_zone: listed.time_zone,
            since: time(listed.since_us),
            before: time(listed.before_us),
            handled_until: listed.handled_us.map(time),
        }
    }
}

/// A list that the database has built; empty instead of null.
fn list<T: for<'de> Deserialize<'de>>(json: Option<JsonText>) -> Vec<T> {
    let parsed = json.map(|JsonText(text)| serde_json::from_str(&text));
    // A host calls only functions of its protocol, which return lists of this form.
    parsed.map_or_else(Vec::new, |list| {
        list.expect("the list of rouse.due_schedules")
    })
}

/// A time in microseconds since 1970, capped at the first and the last one.
fn time(us: i64) -> Timestamp {
    Timestamp::from_microsecond(us).unwrap_or(match us {
        ..0 => Timestamp::MIN,
        _ => Timestamp::MAX,
    })
}
