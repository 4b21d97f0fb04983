//! `rouse job retry`: retries named jobs, or all that match a filter, in batches.

use std::collections::BTreeSet;
use std::future::ready;
use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;

use clap::Args as ClapArgs;
use serde_json::{Value, json};

use super::change::{EXIT_REFUSED, retry_each};
use super::filter::Filter;
use crate::cli::number::job_id;
use crate::cli::signals::Signals;
use crate::cli::target::Target;
use crate::cli::text::{as_json, plain};
use crate::store::{RetryAll, Store};

/// Jobs per transaction, which then takes some hundred milliseconds.
const BATCH: i32 = 500;
/// The maximum number of jobs that one statement counts.
const COUNTED: i32 = 10_000;
/// How many of the refused jobs the message names.
const REFUSED_NAMED: usize = 20;

/// Nothing was done, because `--confirm` was missing.
const EXIT_UNCONFIRMED: u8 = 2;
/// A signal stopped the command.
const EXIT_STOPPED: u8 = 130;

/// Options of `rouse job retry`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
With ids: retries each ended job as a new job, and prints its id. A refused job does not stop the others.\n\
With filters: retries each job that matches and was never retried. For instance\n\n  \
rouse job retry --state failed,timed_out --handler email.send --since 2h\n\n\
counts them, and --confirm retries them, newest first, 500 in each transaction. Refused jobs are tried again at the end, because \
they may wait for jobs that were retried after them. It can be stopped at any time: the same command \
with the --until that it prints continues, because jobs that were retried are skipped. Each retry leaves a record with the login. \
Jobs that end while it runs are skipped.\n\
Exit codes: 0 all done, now or by an earlier call · 2 nothing was done: --confirm is missing · 3 no such job · \
6 a job is not in a state for that, its unique key belongs to a live job, its payload was removed, or it waits for a job that has \
failed · 130 stopped by a signal")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// The jobs' ids
    #[arg(value_name = "ID", value_parser = job_id)]
    ids: Vec<i64>,

    #[command(flatten)]
    filter: Filter,

    /// With filters: confirm the retries
    #[arg(long, visible_alias = "yes")]
    confirm: bool,

    /// Print one JSON object for each named job and one for the summary; with filters, one for all
    #[arg(long)]
    json: bool,
}

/// Retries.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    match (args.ids.as_slice(), args.filter.is_empty()) {
        ([], true) => anyhow::bail!(
            "which jobs? give ids, or filters such as --state failed --handler NAME --since 2h"
        ),
        ([], false) => {}
        (ids, true) => {
            return retry_each(&args.target.checked_store().await?, ids, args.json).await;
        }
        (_, false) => anyhow::bail!("give ids or filters, not both"),
    }
    anyhow::ensure!(
        args.filter.names_states(),
        "give the states, for instance --state failed,timed_out"
    );
    anyhow::ensure!(
        !args.filter.names_live_states(),
        "only ended jobs can be retried: --state takes succeeded, failed, timed_out and cancelled here"
    );
    let store = args.target.checked_store().await?;
    let signals = Signals::install()?;
    // From here on, the set of jobs is fixed.
    let mut filter = args.filter.until_now(store.now().await?);
    let mut work = Work {
        store: &store,
        signals,
        done: 0,
        looked_at: 0,
        refused: BTreeSet::new(),
    };
    let verb = if args.confirm { "retried" } else { "found" };
    let until = plain(filter["until"].as_str().unwrap_or_default());
    let ended = match args.confirm {
        true => work.retry(&filter).await,
        false => {
            filter["retried"] = false.into();
            work.count(&filter).await
        }
    };
    work.end_progress();
    let complete = match ended {
        Ok(complete) => complete,
        Err(error) => {
            if args.confirm && work.done > 0 {
                eprintln!(
                    "rouse: {} jobs were retried before this; the same command with --until {until} continues",
                    work.done
                );
            }
            return Err(error);
        }
    };
    if work.done == 0 && work.refused.is_empty() && complete {
        args.filter.warn_of_unused_names(&store).await?;
    }
    if args.json {
        println!(
            "{}",
            as_json(json!({
                "fit": if args.confirm { Value::Null } else { work.done.into() },
                "retried": if args.confirm { work.done } else { 0 },
                "refused": work.refused,
                "looked_at": work.looked_at,
                "complete": complete,
            }))
        );
    } else {
        println!(
            "{verb} {} of the {} jobs that were looked at",
            work.done, work.looked_at
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
        eprintln!("rouse: nothing was done; --confirm retries them");
        return Ok(ExitCode::from(EXIT_UNCONFIRMED));
    }
    if !work.refused.is_empty() {
        eprintln!("rouse: {}", work.refusals());
        return Ok(ExitCode::from(EXIT_REFUSED));
    }
    Ok(ExitCode::SUCCESS)
}

/// The work on all matching jobs, and its progress.
struct Work<'a> {
    store: &'a Store,
    signals: Signals,
    /// Jobs that were counted or retried.
    done: usize,
    looked_at: i64,
    refused: BTreeSet<i64>,
}

impl Work<'_> {
    /// Counts the jobs. Returns false if a signal arrived before the end.
    async fn count(&mut self, filter: &Value) -> anyhow::Result<bool> {
        let mut before = None;
        loop {
            let found = self.store.search_jobs(filter, before, COUNTED).await?;
            self.done += found.ids.len();
            self.looked_at += i64::from(found.looked_at);
            before = found.next_before;
            if before.is_none() || self.is_stopped("found").await {
                return Ok(before.is_none());
            }
        }
    }

    /// Retries the jobs. Returns false if a signal arrived before the end.
    async fn retry(&mut self, filter: &Value) -> anyhow::Result<bool> {
        let mut all = RetryAll::new(filter.clone(), BATCH);
        loop {
            let has_more = all.go_on(self.store).await?;
            self.done = all.retried;
            self.looked_at = all.looked_at;
            if !has_more || self.is_stopped("retried").await {
                self.refused = all.refused;
                return Ok(!has_more);
            }
        }
    }

    /// Shows the progress between batches. Returns true if a signal has arrived.
    async fn is_stopped(&mut self, verb: &str) -> bool {
        if std::io::stderr().is_terminal() {
            eprint!("\r{verb} {}, examined {}", self.done, self.looked_at);
            // The progress is not essential, so an error is ignored.
            let _ = std::io::stderr().flush();
        }
        self.signals.unless(ready(())).await.is_none()
    }

    fn end_progress(&self) {
        if std::io::stderr().is_terminal() && self.looked_at > 0 {
            eprintln!();
        }
    }

    fn refusals(&self) -> String {
        let named: Vec<String> = self
            .refused
            .iter()
            .take(REFUSED_NAMED)
            .map(ToString::to_string)
            .collect();
        let more = match self.refused.len() > REFUSED_NAMED {
            true => ", …",
            false => "",
        };
        format!(
            "{} were refused, because a live job has their unique key, their payload was removed, or a job that they wait for has failed: {}{more}",
            self.refused.len(),
            named.join(", ")
        )
    }
}
