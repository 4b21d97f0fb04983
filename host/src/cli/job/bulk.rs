//! `rouse job retry`, `cancel` and `delete`: named jobs, or all that match a filter, in batches.

use std::collections::BTreeSet;
use std::future::ready;
use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;

use clap::Args as ClapArgs;
use rouse_display::plural::{choose, counted};
use serde_json::{Value, json};

use super::change::{EXIT_REFUSED, cancel_each, delete_each, retry_each};
use super::filter::Filter;
use crate::cli::number::job_id;
use crate::cli::signals::Signals;
use crate::cli::target::Target;
use crate::cli::text::{as_json, plain};
use crate::job::JobId;
use crate::store::{LockWait, RetryAll, Store, StoreError};

/// The number of jobs that one statement finds.
const BATCH: i32 = 500;
/// The maximum number of jobs that one statement counts.
const COUNTED: i32 = 10_000;
/// The maximum number of jobs that a message names.
const NAMED: usize = 20;

/// The arguments do not fit together. The code is clap's.
const EXIT_USAGE: u8 = 2;
/// Nothing was done, because `--confirm` was missing.
const EXIT_UNCONFIRMED: u8 = 2;
/// A signal stopped the command.
const EXIT_STOPPED: u8 = 130;

/// Options of `rouse job retry`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
With ids: retries each ended job as a new job, and prints its id. It waits up to 3 s for a job that another transaction has \
locked. A refused job does not stop the others.\n\
With filters: retries each job that matches and was never retried. For instance\n\n  \
rouse job retry --state failed,timed_out --handler email.send --since 2h\n\n\
counts them, and --confirm retries them, newest first, 60 in each transaction. Refused jobs are tried again at the end, \
because they may wait for jobs that were retried after them. Jobs that another transaction has locked are tried again \
at the end, for 3 s in all. The command can be stopped at any time: running it again with the --until that it prints \
continues, because jobs that were retried are skipped. Each retry leaves a record with the login. Jobs that end while \
it runs are skipped.\n\
Exit codes: 0 all done, now or by an earlier call · 2 nothing was done: --confirm is missing · 3 no such job · 6 a job \
is not in a state that allows it, its unique key belongs to a live job, its payload was removed, it waits for a job \
that has failed, or another transaction has locked it: run the command again · 130 stopped by a signal")]
pub(super) struct Retry {
    #[command(flatten)]
    chosen: Chosen,
}

/// Options of `rouse job cancel`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
With ids: cancels one job after the other, and waits up to 3 s for a job that another transaction has locked. \
A refused job does not stop the others, and a summary follows.\n\
With filters: cancels each queued or running job that matches. For instance\n\n  \
rouse job cancel --handler email.send --tenant acme\n\n\
counts them, and --confirm cancels them, newest first, each in a separate transaction. --state queued excludes running \
jobs, but a job that starts at the moment of its cancellation may still be stopped. Jobs that another transaction has \
locked are tried again at the end, for 3 s in all. The command can be stopped at any time: running it again continues. \
Each job gets a record with the login. Jobs that are enqueued while it runs are skipped.\n\
Exit codes: 0 all done, now or by an earlier call · 2 nothing was done: --confirm is missing · 3 no such job · 6 a job \
is not in a state that allows it, or another transaction has locked it: run the command again; with several ids, the \
highest code · 130 stopped by a signal")]
pub(super) struct Cancel {
    #[command(flatten)]
    chosen: Chosen,
}

/// Options of `rouse job delete`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
With ids: deletes one job after the other, and waits up to 3 s for a job that another transaction has locked. \
A refused job does not stop the others, and a summary follows.\n\
With filters: deletes each queued job that matches, as `rouse job cancel` cancels them: counted first, then with --confirm.\n\
Exit codes: 0 all done, now or by an earlier call · 2 nothing was done: --confirm is missing · 3 no such job · 6 a job \
is not in a state that allows it, or another transaction has locked it: run the command again; with several ids, the \
highest code · 130 stopped by a signal")]
pub(super) struct Delete {
    #[command(flatten)]
    chosen: Chosen,
}

/// The jobs.
#[derive(Debug, ClapArgs)]
struct Chosen {
    #[command(flatten)]
    target: Target,

    /// The jobs' ids
    #[arg(value_name = "ID", value_parser = job_id)]
    ids: Vec<i64>,

    #[command(flatten)]
    filter: Filter,

    /// With filters: confirm the change
    #[arg(long, visible_alias = "yes")]
    confirm: bool,

    /// Print one JSON object for each named job and one for the summary; with filters, one for all
    #[arg(long)]
    json: bool,
}

/// The change to each job.
#[derive(Debug, Clone, Copy)]
enum Change {
    Retry,
    Cancel,
    Delete,
}

impl Change {
    fn done_word(self) -> &'static str {
        match self {
            Self::Retry => "retried",
            Self::Cancel => "cancelled",
            Self::Delete => "deleted",
        }
    }

    fn verb(self) -> &'static str {
        match self {
            Self::Retry => "retries",
            Self::Cancel => "cancels",
            Self::Delete => "deletes",
        }
    }

    /// The states in which jobs allow this change.
    fn states(self) -> &'static [&'static str] {
        match self {
            Self::Retry => &["succeeded", "failed", "timed_out", "cancelled"],
            Self::Cancel => &["queued", "running"],
            Self::Delete => &["queued"],
        }
    }

    /// Checks the states of the filter, or sets them.
    ///
    /// # Errors
    /// If the filter names another state, or, for a retry, no state: most ended jobs have succeeded.
    fn limit(self, filter: &mut Filter) -> anyhow::Result<()> {
        if matches!(self, Self::Retry) {
            anyhow::ensure!(
                filter.names_states(),
                "give the states, for instance --state failed,timed_out"
            );
        }
        filter.default_states(self.states());
        let (last, others) = self.states().split_last().expect("each has states");
        let listed = match others {
            [] => (*last).to_owned(),
            _ => format!("{} and {last}", others.join(", ")),
        };
        anyhow::ensure!(
            filter.has_only_states(self.states()),
            "only {} jobs can be {}: --state takes {listed} here",
            match self {
                Self::Retry => "ended",
                Self::Cancel => "live",
                Self::Delete => "queued",
            },
            self.done_word(),
        );
        Ok(())
    }
}

/// `rouse job retry`.
pub(super) async fn retry(args: Retry) -> anyhow::Result<ExitCode> {
    run(args.chosen, Change::Retry).await
}

/// `rouse job cancel`.
pub(super) async fn cancel(args: Cancel) -> anyhow::Result<ExitCode> {
    run(args.chosen, Change::Cancel).await
}

/// `rouse job delete`.
pub(super) async fn delete(args: Delete) -> anyhow::Result<ExitCode> {
    run(args.chosen, Change::Delete).await
}

impl Chosen {
    /// Checks what clap cannot, and sets the states of the filter.
    ///
    /// # Errors
    /// If there are neither ids nor filters, or both, or the filter names other states.
    fn check(&mut self, change: Change) -> anyhow::Result<()> {
        if !self.ids.is_empty() {
            anyhow::ensure!(self.filter.is_empty(), "give ids or filters, not both");
            return Ok(());
        }
        anyhow::ensure!(
            !self.filter.is_empty(),
            "no job ids were given: pass ids, or filters such as --state {} --handler NAME --since 2h",
            match change {
                Change::Retry => "failed",
                Change::Cancel | Change::Delete => "queued",
            }
        );
        change.limit(&mut self.filter)
    }
}

async fn run(mut args: Chosen, change: Change) -> anyhow::Result<ExitCode> {
    if let Err(why) = args.check(change) {
        eprintln!("rouse: {why}");
        return Ok(ExitCode::from(EXIT_USAGE));
    }
    if args.ids.is_empty() {
        return all_matching(args, change).await;
    }
    let store = args.target.checked_store().await?;
    match change {
        Change::Retry => retry_each(&store, &args.ids, args.json).await,
        Change::Cancel => cancel_each(&store, &args.ids, args.json).await,
        Change::Delete => delete_each(&store, &args.ids, args.json).await,
    }
}

async fn all_matching(args: Chosen, change: Change) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    let signals = Signals::install()?;
    // From this point, the set of jobs is fixed.
    let mut filter = args.filter.until_now(store.now().await?);
    let mut work = Work {
        store: &store,
        signals,
        done: 0,
        skipped: 0,
        examined_count: 0,
        refused: BTreeSet::new(),
        locked: BTreeSet::new(),
    };
    let done_word = change.done_word();
    let until = plain(filter["until"].as_str().unwrap_or_default());
    let ended = match (args.confirm, change) {
        (true, Change::Retry) => work.retry(&filter).await,
        (true, Change::Cancel) => {
            let states = args.filter.states();
            work.change(&filter, done_word, async |id, wait| {
                store.cancel_in(id, states, wait).await
            })
            .await
        }
        (true, Change::Delete) => {
            work.change(&filter, done_word, async |id, wait| {
                store.delete_waiting(id, wait).await.map(|()| true)
            })
            .await
        }
        (false, _) => {
            if matches!(change, Change::Retry) {
                filter["retried"] = false.into();
            }
            work.count(&filter).await
        }
    };
    work.end_progress();
    let complete = match ended {
        Ok(complete) => complete,
        Err(error) => {
            if args.confirm && work.done > 0 {
                eprintln!(
                    "rouse: {} {} {done_word} before this; the same command with --until {until} continues",
                    counted(work.done, "job"),
                    choose(work.done, "was", "were")
                );
            }
            return Err(error);
        }
    };
    if work.done == 0 && work.refused.is_empty() && work.locked.is_empty() && complete {
        args.filter.warn_of_unused_names(&store).await?;
    }
    if args.json {
        let mut summary = json!({
            "fit": if args.confirm { Value::Null } else { work.done.into() },
            "refused": work.refused,
            "locked": work.locked,
            "examined_count": work.examined_count,
            "complete": complete,
        });
        let done = if args.confirm { work.done } else { 0 };
        summary[done_word] = done.into();
        println!("{}", as_json(summary));
    } else {
        println!(
            "{} {} of the {} that {} examined",
            if args.confirm { done_word } else { "found" },
            work.done,
            counted(work.examined_count, "job"),
            choose(work.examined_count, "was", "were")
        );
    }
    if work.skipped > 0 {
        eprintln!(
            "rouse: {} had ended or started before {} could be {done_word}",
            counted(work.skipped, "job"),
            choose(work.skipped, "it", "they")
        );
    }
    if !complete {
        match args.confirm {
            true => eprintln!(
                "rouse: stopped by a signal before the end; the same command with --until {until} continues"
            ),
            false => eprintln!(
                "rouse: stopped by a signal before the end; the count starts over at the next call"
            ),
        }
        return Ok(ExitCode::from(EXIT_STOPPED));
    }
    if !args.confirm && work.done > 0 {
        let them = choose(work.done, "it", "them");
        eprintln!(
            "rouse: nothing was done; --confirm {} {them}",
            change.verb()
        );
        return Ok(ExitCode::from(EXIT_UNCONFIRMED));
    }
    if !work.refused.is_empty() {
        eprintln!("rouse: {}", refused(&work.refused));
    }
    if !work.locked.is_empty() {
        let locked = locked(&work.locked, done_word);
        let them = choose(work.locked.len(), "it", "them");
        eprintln!("rouse: {locked}; the same command with --until {until} tries {them} again");
    }
    Ok(match work.refused.is_empty() && work.locked.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(EXIT_REFUSED),
    })
}

/// The work on all matching jobs, and its progress.
struct Work<'a> {
    store: &'a Store,
    signals: Signals,
    /// Jobs that were counted or changed.
    done: usize,
    /// Jobs that left their state after they were found.
    skipped: usize,
    examined_count: i64,
    refused: BTreeSet<i64>,
    /// Jobs that were not changed because another transaction has locked them.
    locked: BTreeSet<i64>,
}

impl Work<'_> {
    /// Counts the jobs. Returns false if a signal arrived before the end.
    async fn count(&mut self, filter: &Value) -> anyhow::Result<bool> {
        let mut before = None;
        loop {
            let found = self.store.search_jobs(filter, before, COUNTED).await?;
            self.done += found.ids.len();
            self.examined_count += i64::from(found.examined_count);
            before = found.next_before;
            if before.is_none() || self.is_stopped("found").await {
                return Ok(before.is_none());
            }
        }
    }

    /// Retries the jobs. Returns false if a signal arrived before the end.
    async fn retry(&mut self, filter: &Value) -> anyhow::Result<bool> {
        let mut all = RetryAll::new(filter.clone(), RetryAll::BATCH);
        loop {
            let has_more = all.advance(self.store).await?;
            self.done = all.retried;
            self.examined_count = all.examined_count;
            if !has_more || self.is_stopped("retried").await {
                self.refused = all.refused;
                self.locked = all.locked;
                return Ok(!has_more);
            }
        }
    }

    /// Changes one job after another; `one` returns false if the job has left its state. Jobs that another transaction
    /// has locked are tried again at the end, so that they do not delay the others. Returns false if a signal arrived
    /// before the end.
    async fn change(
        &mut self,
        filter: &Value,
        done_word: &str,
        one: impl AsyncFn(JobId, LockWait) -> Result<bool, StoreError>,
    ) -> anyhow::Result<bool> {
        let mut before = None;
        loop {
            let found = self.store.search_jobs(filter, before, BATCH).await?;
            self.examined_count += i64::from(found.examined_count);
            if !self
                .change_each(found.ids, LockWait::default(), &one)
                .await?
            {
                return Ok(false);
            }
            before = found.next_before;
            if before.is_none() {
                break;
            }
            if self.is_stopped(done_word).await {
                return Ok(false);
            }
        }
        let locked: Vec<i64> = self.locked.iter().rev().copied().collect();
        self.change_each(locked, LockWait::start(), &one).await
    }

    /// Changes these jobs. Returns false if a signal arrived before the last one.
    async fn change_each(
        &mut self,
        ids: Vec<i64>,
        wait: LockWait,
        one: &impl AsyncFn(JobId, LockWait) -> Result<bool, StoreError>,
    ) -> anyhow::Result<bool> {
        for id in ids {
            if self.has_signal().await {
                return Ok(false);
            }
            self.locked.remove(&id);
            match one(JobId(id), wait).await {
                Ok(true) => self.done += 1,
                Ok(false) => self.skipped += 1,
                Err(error) if error.is_unknown_job() || error.is_refused_by_state() => {
                    self.skipped += 1;
                }
                Err(error) if error.is_locked() => {
                    self.locked.insert(id);
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }

    /// Shows the progress between batches. Returns true if a signal has arrived.
    async fn is_stopped(&mut self, done_word: &str) -> bool {
        if std::io::stderr().is_terminal() {
            eprint!(
                "\r{done_word} {}, examined {}",
                self.done, self.examined_count
            );
            // The progress is not essential, so an error is ignored.
            let _ = std::io::stderr().flush();
        }
        self.has_signal().await
    }

    async fn has_signal(&mut self) -> bool {
        self.signals.unless(ready(())).await.is_none()
    }

    fn end_progress(&self) {
        if std::io::stderr().is_terminal() && self.examined_count > 0 {
            eprintln!();
        }
    }
}

/// Why these jobs were not retried.
fn refused(jobs: &BTreeSet<i64>) -> String {
    let (were, their, they_wait) = match jobs.len() {
        1 => ("was", "its", "it waits"),
        _ => ("were", "their", "they wait"),
    };
    format!(
        "{} {were} refused, because a live job has {their} unique key, {their} payload was removed, or a job that {they_wait} for \
         has failed: {}",
        jobs.len(),
        listed(jobs)
    )
}

/// Why these jobs were not changed.
fn locked(jobs: &BTreeSet<i64>, done_word: &str) -> String {
    let (were, them) = match jobs.len() {
        1 => ("was", "it"),
        _ => ("were", "them"),
    };
    format!(
        "{} {were} not {done_word}, because another transaction has locked {them}: {}",
        jobs.len(),
        listed(jobs)
    )
}

/// The first of these jobs.
fn listed(jobs: &BTreeSet<i64>) -> String {
    let named: Vec<String> = jobs.iter().take(NAMED).map(ToString::to_string).collect();
    let more = match jobs.len() > NAMED {
        true => ", …",
        false => "",
    };
    format!("{}{more}", named.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_refused_or_locked_job_is_singular() {
        let (one, two) = (BTreeSet::from([7]), BTreeSet::from([7, 9]));
        assert_eq!(
            refused(&one),
            "1 was refused, because a live job has its unique key, its payload was removed, or a job that it waits for has failed: 7"
        );
        assert_eq!(
            refused(&two),
            "2 were refused, because a live job has their unique key, their payload was removed, or a job that they wait for has failed: 7, 9"
        );
        assert_eq!(
            locked(&one, "cancelled"),
            "1 was not cancelled, because another transaction has locked it: 7"
        );
        assert_eq!(
            locked(&two, "cancelled"),
            "2 were not cancelled, because another transaction has locked them: 7, 9"
        );
    }
}
