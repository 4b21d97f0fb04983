//! Changes to many jobs, in batches, in the background. The process keeps their progress in memory; the audit contains
//! each change.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use axum::http::StatusCode;
use axum::response::Response;
use rouse_display::pages::{self, Bulk, JobFilter, NavPage, live_main, page};
use serde_json::Value;

use super::access::User;
use super::problem::Problem;
use super::{Ui, html};
use crate::job::JobId;
use crate::store::{LockWait, NEW_JOBS_MAX, RetryAll, Store, StoreError};

/// Why a change ended early.
#[derive(Debug, thiserror::Error)]
enum Stopped {
    /// The host is stopping.
    #[error("the host stopped before the end; start the change again for the rest")]
    Host,
    /// The database refused, or did not respond.
    #[error("{0}; start the change again for the rest")]
    Database(#[from] StoreError),
    /// Its task panicked.
    #[error(
        "the change has panicked, which is a bug in Rouse; the message of the panic is on this host's standard error; \
         start the change again for the rest"
    )]
    Panic,
}

/// The number of changes that are remembered, and so the maximum number of those that run at the same time.
const KEPT: usize = 50;
/// The number of jobs that one statement finds.
const BATCH: i32 = 500;
/// The maximum number of jobs that are counted before a change.
const COUNTED_MAX: i32 = 10_000;

/// The action on each job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BulkAction {
    /// A new job like it is enqueued.
    Retry,
    /// It ends as cancelled.
    Cancel,
    /// A queued job is due now, unless it waits for something other than its time.
    RunNow,
    /// A queued job ends, and its history shows that it was deleted.
    Delete,
}

impl BulkAction {
    fn bulk(self, who: &str) -> Bulk {
        let (action, done_word) = match self {
            Self::Retry => ("Retry", "retried"),
            Self::Cancel => ("Cancel", "cancelled"),
            Self::RunNow => ("Run", "due now"),
            Self::Delete => ("Delete", "deleted"),
        };
        Bulk {
            action,
            done_word,
            who: who.to_owned(),
            is_running: true,
            ..Bulk::default()
        }
    }

    /// The same filter, limited to jobs that allow this action.
    ///
    /// # Errors
    /// If the filter names states, and none of them allows the action.
    fn applicable(self, filter: &JobFilter) -> Result<JobFilter, Problem> {
        let mut filter = filter.clone();
        match self {
            Self::Retry if filter.is_of_ended() => {}
            Self::Retry => {
                return Err(Problem::invalid(
                    "Only jobs that have ended can be retried: choose their states.".into(),
                ));
            }
            Self::Cancel => keep_states(&mut filter, &["queued", "running"], "cancelled")?,
            Self::RunNow => keep_states(&mut filter, &["queued"], "made due now")?,
            Self::Delete => keep_states(&mut filter, &["queued"], "deleted")?,
        }
        Ok(filter)
    }

    /// The filter of `rouse.search_jobs` for the jobs that this changes.
    fn json(self, filter: &JobFilter, until: f64) -> Value {
        let mut filter = filter.until(until);
        if self == Self::Retry {
            filter["retried"] = false.into();
        }
        filter
    }
}

/// Keeps only these states in the filter; sets all of them if the filter names none. `changed`: what the change does to
/// a job, for instance `cancelled`.
///
/// # Errors
/// If the filter names only other states.
fn keep_states(filter: &mut JobFilter, states: &[&str], changed: &str) -> Result<(), Problem> {
    if filter.states.is_empty() {
        filter.states = states.iter().map(|&state| state.to_owned()).collect();
        return Ok(());
    }
    filter
        .states
        .retain(|state| states.contains(&state.as_str()));
    if filter.states.is_empty() {
        let states = states.join(" and ");
        let why = format!("Only {states} jobs can be {changed}.");
        return Err(Problem::invalid(why));
    }
    Ok(())
}

/// The changes of this process, by number.
#[derive(Clone, Default)]
pub(super) struct Bulks(Arc<Mutex<Numbered>>);

/// Changes, the oldest first, and the number of the newest.
#[derive(Default)]
struct Numbered {
    last: u64,
    changes: VecDeque<(u64, Bulk)>,
}

impl Bulks {
    pub(super) fn get(&self, number: u64) -> Option<Bulk> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.changes
            .iter()
            .find(|(it, _)| *it == number)
            .map(|(_, bulk)| bulk.clone())
    }

    /// Adds a change that starts. The oldest one that has ended is forgotten if there is no room.
    ///
    /// # Errors
    /// If all changes are still running.
    fn add(&self, bulk: Bulk) -> Result<u64, Problem> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.changes.len() == KEPT {
            let ended = all.changes.iter().position(|(_, bulk)| !bulk.is_running);
            let Some(ended) = ended else {
                return Err(Problem::busy(format!(
                    "{KEPT} changes are running, which is the limit. Start this one when one of them has ended."
                )));
            };
            all.changes.remove(ended);
        }
        all.last += 1;
        let number = all.last;
        all.changes.push_back((number, bulk));
        Ok(number)
    }

    fn change(&self, number: u64, change: impl FnOnce(&mut Bulk)) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, bulk)) = all.changes.iter_mut().find(|(it, _)| *it == number) {
            change(bulk);
        }
    }

    fn end(&self, number: u64, ended: Result<(), Stopped>) {
        self.change(number, |bulk| {
            bulk.is_running = false;
            bulk.error = ended.err().map(|error| error.to_string());
        });
    }
}

/// A change that is running. It ends when its task ends, even if that panics.
struct Running {
    ui: Ui,
    number: u64,
    ended: Result<(), Stopped>,
}

impl Running {
    fn new(ui: &Ui, number: u64) -> Self {
        Self {
            ui: ui.clone(),
            number,
            ended: Err(Stopped::Panic),
        }
    }

    /// Runs the change to its end.
    async fn run(mut self, change: impl Future<Output = Result<(), Stopped>>) {
        self.ended = change.await;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let ended = std::mem::replace(&mut self.ended, Ok(()));
        self.ui.bulks.end(self.number, ended);
        self.ui.reads.forget();
    }
}

/// Shows how many jobs match, and asks for confirmation.
pub(super) async fn confirm(
    ui: &Ui,
    user: &User,
    what: BulkAction,
    filter: &JobFilter,
) -> Result<Response, Problem> {
    let store = &ui.reads.store;
    let now = store.now().await?;
    let filter = what.applicable(filter)?;
    let found = match store
        .search_jobs(&what.json(&filter, now), None, COUNTED_MAX)
        .await
    {
        Err(error) if error.is_about_data() => return Err(Problem::invalid(error.to_string())),
        found => found?,
    };
    let bulk = Bulk {
        total: Some(i64::try_from(found.ids.len()).unwrap_or(i64::MAX)),
        at_least: found.next_before.is_some(),
        ..what.bulk("")
    };
    let chrome = ui.chrome(user);
    let action = match what {
        BulkAction::Retry => "retry-all",
        BulkAction::Cancel => "cancel-all",
        BulkAction::RunNow => "run-now-all",
        BulkAction::Delete => "delete-all",
    };
    let main = live_main(
        "",
        &pages::bulk_question(&chrome, &filter, &bulk, action, now),
    );
    let text = page(&chrome, Some(NavPage::Jobs), bulk.action, &main).into_string();
    Ok(html(StatusCode::OK, text))
}

/// Starts to change these jobs; returns the number of the change.
///
/// # Errors
/// If too many changes are running.
pub(super) fn change_ids(
    ui: &Ui,
    what: BulkAction,
    mut ids: Vec<i64>,
    who: &str,
) -> Result<u64, Problem> {
    // Jobs are retried after those that they wait for.
    ids.sort_unstable();
    let number = ui.bulks.add(Bulk {
        total: Some(i64::try_from(ids.len()).unwrap_or(i64::MAX)),
        ..what.bulk(who)
    })?;
    let running = Running::new(ui, number);
    let (ui, store) = (ui.clone(), ui.reads.store.on_behalf_of(who));
    let change = async move {
        let states = ["queued", "running"].map(str::to_owned);
        let each = Each {
            ui: &ui,
            store: &store,
            what,
            states: &states,
            number,
        };
        each.change_ids(&ids).await
    };
    tokio::spawn(running.run(change));
    Ok(number)
}

/// Starts to change all jobs that match the filter and were enqueued or had ended by `until`, in seconds since 1970.
///
/// # Errors
/// If the filter does not fit the action, or too many changes are running.
pub(super) fn change_all(
    ui: &Ui,
    what: BulkAction,
    filter: &JobFilter,
    until: f64,
    who: &str,
) -> Result<u64, Problem> {
    let filter = what.applicable(filter)?;
    let number = ui.bulks.add(what.bulk(who))?;
    let running = Running::new(ui, number);
    let (ui, store) = (ui.clone(), ui.reads.store.on_behalf_of(who));
    let change = async move { change_matching(&ui, &store, what, &filter, until, number).await };
    tokio::spawn(running.run(change));
    Ok(number)
}

async fn change_matching(
    ui: &Ui,
    store: &Store,
    what: BulkAction,
    filter: &JobFilter,
    until: f64,
    number: u64,
) -> Result<(), Stopped> {
    let states = &filter.states;
    let filter = what.json(filter, until);
    if what == BulkAction::Retry {
        return retry_matching(ui, store, filter, number).await;
    }
    let each = Each {
        ui,
        store,
        what,
        states,
        number,
    };
    let (mut before, mut locked) = (None, Vec::new());
    loop {
        if ui.stopping.is_cancelled() {
            return Err(Stopped::Host);
        }
        let batch = store.search_jobs(&filter, before, BATCH).await?;
        locked.extend(each.change(&batch.ids, LockWait::default()).await?);
        match batch.next_before {
            None => return each.change_locked(&locked).await,
            next => before = next,
        }
    }
}

async fn retry_matching(ui: &Ui, store: &Store, filter: Value, number: u64) -> Result<(), Stopped> {
    let mut all = RetryAll::new(filter, RetryAll::BATCH);
    loop {
        if ui.stopping.is_cancelled() {
            return Err(Stopped::Host);
        }
        let has_more = all.advance(store).await?;
        ui.bulks.change(number, |bulk| {
            bulk.done = count(all.retried);
            bulk.refused = count(all.refused.len());
            bulk.locked = count(all.locked.len());
            bulk.new_jobs.clone_from(&all.new_jobs);
        });
        if !has_more {
            return Ok(());
        }
    }
}

/// A change that is made to one job after another.
struct Each<'a> {
    ui: &'a Ui,
    store: &'a Store,
    what: BulkAction,
    /// Only jobs in one of these states are cancelled: jobs may have started since they were found.
    states: &'a [String],
    number: u64,
}

/// The result of the change to one job.
#[derive(Debug, Clone, Copy)]
enum Changed {
    Done,
    /// The job does not exist, or does not allow the change, for instance in its state.
    Refused,
    /// Another transaction has locked it.
    Locked,
}

impl Each<'_> {
    /// Changes these jobs, the locked ones last.
    async fn change_ids(&self, ids: &[i64]) -> Result<(), Stopped> {
        let locked = self.change(ids, LockWait::default()).await?;
        self.change_locked(&locked).await
    }

    /// Tries locked jobs again, and waits for their locks.
    async fn change_locked(&self, ids: &[i64]) -> Result<(), Stopped> {
        let left = self.change(ids, LockWait::start()).await?;
        self.ui
            .bulks
            .change(self.number, |bulk| bulk.locked = count(left.len()));
        Ok(())
    }

    /// Changes these jobs, and returns those that are locked.
    async fn change(&self, ids: &[i64], wait: LockWait) -> Result<Vec<i64>, Stopped> {
        let mut locked = Vec::new();
        for id in ids {
            if self.ui.stopping.is_cancelled() {
                return Err(Stopped::Host);
            }
            match self.change_one(JobId(*id), wait).await? {
                Changed::Done => self.ui.bulks.change(self.number, |bulk| bulk.done += 1),
                Changed::Refused => self.ui.bulks.change(self.number, |bulk| bulk.refused += 1),
                Changed::Locked => locked.push(*id),
            }
        }
        Ok(locked)
    }

    /// Notes a job that a retry has created.
    fn note_new(&self, job: JobId) {
        self.ui.bulks.change(self.number, |bulk| {
            if bulk.new_jobs.len() < NEW_JOBS_MAX {
                bulk.new_jobs.push(job.0);
            }
        });
    }

    async fn change_one(&self, id: JobId, wait: LockWait) -> Result<Changed, StoreError> {
        let store = self.store;
        let done = match self.what {
            BulkAction::Cancel => store.cancel_in(id, self.states, wait).await,
            BulkAction::Retry => store.retry_waiting(id, wait).await.map(|new| {
                self.note_new(new);
                true
            }),
            BulkAction::RunNow => store.run_now(id, wait).await,
            BulkAction::Delete => store.delete_waiting(id, wait).await.map(|()| true),
        };
        match done {
            Ok(true) => Ok(Changed::Done),
            Ok(false) => Ok(Changed::Refused),
            Err(error) if error.is_locked() => Ok(Changed::Locked),
            Err(error)
                if error.is_refused_by_state()
                    || error.is_unknown_job()
                    || error.is_about_data() =>
            {
                Ok(Changed::Refused)
            }
            Err(error) => Err(error),
        }
    }
}

fn count(jobs: usize) -> i64 {
    i64::try_from(jobs).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cancel_is_only_for_live_jobs() {
        let filter = JobFilter::for_states(&["queued", "failed"]);
        let states =
            |what: BulkAction, filter: &JobFilter| what.applicable(filter).map(|it| it.states).ok();
        let cancelled = |filter: &JobFilter| states(BulkAction::Cancel, filter).unwrap_or_default();
        assert_eq!(cancelled(&filter), ["queued"]);
        assert_eq!(cancelled(&JobFilter::default()), ["queued", "running"]);
        let failed = JobFilter::for_states(&["failed"]);
        assert_eq!(states(BulkAction::Cancel, &failed), None);
        assert_eq!(states(BulkAction::Retry, &filter), None);
        for what in [BulkAction::RunNow, BulkAction::Delete] {
            assert_eq!(states(what, &filter).unwrap_or_default(), ["queued"]);
            assert_eq!(states(what, &JobFilter::for_states(&["running"])), None);
        }
        assert_eq!(BulkAction::Retry.json(&failed, 1.0)["retried"], false);
    }

    #[test]
    fn a_filter_without_jobs_that_allow_the_action_names_those_that_do() {
        let why = |what: BulkAction| {
            let filter = JobFilter::for_states(&["succeeded"]);
            what.applicable(&filter).err().map(|problem| problem.why)
        };
        for (what, text) in [
            (
                BulkAction::Cancel,
                "Only queued and running jobs can be cancelled.",
            ),
            (BulkAction::RunNow, "Only queued jobs can be made due now."),
            (BulkAction::Delete, "Only queued jobs can be deleted."),
        ] {
            assert_eq!(why(what).as_deref(), Some(text));
        }
    }

    fn add(bulks: &Bulks, who: &str) -> u64 {
        let added = bulks.add(BulkAction::Retry.bulk(who));
        added.ok().expect("there is room")
    }

    #[test]
    fn old_changes_are_forgotten() {
        let bulks = Bulks::default();
        let first = add(&bulks, "ada");
        let second = add(&bulks, "");
        bulks.end(second, Ok(()));
        assert!(!bulks.get(second).unwrap().is_running);
        let third = add(&bulks, "");
        bulks.end(third, Err(Stopped::Host));
        let error = bulks.get(third).unwrap().error;
        assert!(error.is_some_and(|error| error.contains("the host stopped")));
        for _ in 3..=KEPT {
            add(&bulks, "");
        }
        assert!(bulks.get(first).is_some(), "it still runs");
        assert!(bulks.get(second).is_none());
    }

    #[test]
    fn no_more_changes_run_than_are_remembered() {
        let bulks = Bulks::default();
        let all: Vec<u64> = (0..KEPT).map(|_| add(&bulks, "")).collect();
        let Err(refused) = bulks.add(BulkAction::Retry.bulk("")) else {
            panic!("it is refused");
        };
        assert!(
            refused.why.contains("50 changes are running"),
            "{}",
            refused.why
        );
        assert!(all.iter().all(|number| bulks.get(*number).is_some()));
        bulks.end(all[7], Ok(()));
        let next = add(&bulks, "");
        assert_eq!(next, all[KEPT - 1] + 1, "a refused change has no number");
        assert!(bulks.get(next).is_some() && bulks.get(all[0]).is_some());
        assert!(bulks.get(all[7]).is_none());
    }
}
