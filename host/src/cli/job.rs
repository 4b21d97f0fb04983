//! `rouse job`: shows jobs, and changes them by admin actions.

mod attempts;
mod bulk;
mod change;
mod filter;
mod list;
mod logs;
mod show;
mod wait;

use std::process::ExitCode;

use clap::{Args as ClapArgs, Subcommand};

/// Options of `rouse job`.
#[derive(Debug, ClapArgs)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
With an id: shows that job. Without one: lists the newest jobs, like `rouse job ls`.\n\
Exit codes: 0 found, or done · 3 no such job · 6 the job is not in a state that allows it, or another transaction \
has locked it · with --wait also 4 failed or timed out · 5 not ended in time · 7 cancelled"
)]
pub(super) struct Args {
    #[command(subcommand)]
    operation: Option<Operation>,

    #[command(flatten)]
    show: show::Args,
}

#[derive(Debug, Subcommand)]
enum Operation {
    /// Show one job with its history, like `rouse job ID`
    Show(show::Args),
    /// List jobs, newest first
    #[command(visible_alias = "list")]
    Ls(list::Args),
    /// Print the log and the output of a job's attempts
    Logs(logs::Args),
    /// Cancel jobs, queued or running: named ones, or all that match filters; running attempts are stopped
    Cancel(bulk::Cancel),
    /// Retry ended jobs as new jobs: named ones, or all that match filters
    Retry(bulk::Retry),
    /// End a job as succeeded with a result, without a worker
    Complete(change::Complete),
    /// End a job as failed, with a message
    Fail(change::Fail),
    /// Send a signal to a job: it ends the job's wait for that signal, now or later
    Signal(change::Signal),
    /// Change when queued jobs may start
    Reschedule(change::Reschedule),
    /// Change the payload or the priority of a queued job
    Edit(change::Edit),
    /// Delete queued jobs: named ones, or all that match filters
    Delete(bulk::Delete),
}

/// Runs the subcommand.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.operation {
        None => match args.show.id() {
            Some(_) => show::run(args.show).await,
            None => list::run(args.show.into()).await,
        },
        Some(Operation::Show(args)) => show::run(args).await,
        Some(Operation::Ls(args)) => list::run(args).await,
        Some(Operation::Logs(args)) => logs::run(args).await,
        Some(Operation::Cancel(args)) => bulk::cancel(args).await,
        Some(Operation::Retry(args)) => bulk::retry(args).await,
        Some(Operation::Complete(args)) => change::complete(args).await,
        Some(Operation::Fail(args)) => change::fail(args).await,
        Some(Operation::Signal(args)) => change::signal(args).await,
        Some(Operation::Reschedule(args)) => change::reschedule(args).await,
        Some(Operation::Edit(args)) => change::edit(args).await,
        Some(Operation::Delete(args)) => bulk::delete(args).await,
    }
}
