//! `rouse job`: looks at jobs, and changes them from outside.

mod change;
mod filter;
mod list;
mod logs;
mod retry;
mod show;
mod tries;

use std::process::ExitCode;

use clap::{Args as ClapArgs, Subcommand};

use super::attempt_error::cell;

/// There is no such job (any more).
const EXIT_UNKNOWN: u8 = 3;

/// Options of `rouse job`.
#[derive(Debug, ClapArgs)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
With an id: shows that job. Without one: lists the newest, as `rouse job ls` does.\n\
Exit codes: 0 found, or done · 3 no such job · 6 the job is not in a state for that · \
with --wait also 4 ended without success · 5 not ended in time"
)]
pub(super) struct Args {
    #[command(subcommand)]
    verb: Option<Verb>,

    #[command(flatten)]
    show: show::Args,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Show one job with its history; `rouse job ID` does the same
    Show(show::Args),
    /// List jobs, the newest first
    #[command(visible_alias = "list")]
    Ls(list::Args),
    /// Print what the attempts at a job have printed and logged
    Logs(logs::Args),
    /// Cancel jobs, queued or running; what runs is stopped
    Cancel(change::Args),
    /// Make new jobs of ended ones: of those that are named, or of all that fit filters
    Retry(retry::Args),
    /// Let a job succeed with a result, without a worker
    Complete(change::Complete),
    /// Let a job fail for good, with a message
    Fail(change::Fail),
    /// Change when queued jobs may start
    Reschedule(change::Reschedule),
    /// Take queued jobs away
    Delete(change::Args),
}

/// Does what is asked.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.verb {
        None => match args.show.id() {
            Some(_) => show::run(args.show).await,
            None => list::run(args.show.into()).await,
        },
        Some(Verb::Show(args)) => show::run(args).await,
        Some(Verb::Ls(args)) => list::run(args).await,
        Some(Verb::Logs(args)) => logs::run(args).await,
        Some(Verb::Cancel(args)) => change::cancel(args).await,
        Some(Verb::Retry(args)) => retry::run(args).await,
        Some(Verb::Complete(args)) => change::complete(args).await,
        Some(Verb::Fail(args)) => change::fail(args).await,
        Some(Verb::Reschedule(args)) => change::reschedule(args).await,
        Some(Verb::Delete(args)) => change::delete(args).await,
    }
}

/// That there is no such job.
pub(super) fn unknown(id: i64) -> String {
    format!(
        "no job {id}: it was never enqueued (or its transaction is not committed), or it finished so long ago that it is not kept any more"
    )
}
