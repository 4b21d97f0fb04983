//! `rouse schedule`: lists, shows, sets, runs, pauses, resumes, backfills and deletes schedules.

mod backfill;
mod next;
mod set;
mod show;

use std::process::ExitCode;

use clap::{Args as ClapArgs, Subcommand};
use serde_json::{Value, json};

use super::ago;
use super::each::{Done, Refusal, each};
use super::list::{List, Shown};
use super::screen::{Colour, Screen};
use super::target::Target;
use super::text::{as_json, plain};
use crate::store::StoreError;

/// There is no such schedule.
const EXIT_UNKNOWN: u8 = 3;
/// The database refused the change, and nothing was changed.
const EXIT_REFUSED: u8 = 6;

/// The word for an item in messages.
const SCHEDULE: &str = "schedule";

const EXIT_CODES: &str = "\
Exit codes: 0 done · 3 no such schedule · 6 the schedule belongs to another login, or another transaction \
has locked it";

const PAUSE_HELP: &str = "\
Producers may change the schedules that their login has created, and operators may change all schedules. A refused \
schedule does not stop the others, and a summary follows.\n\
Exit codes: 0 all done · 3 no such schedule · 6 a schedule belongs to another login, or another transaction has \
locked it; with several schedules, the highest code";

const DELETE_HELP: &str = "\
Producers may delete the schedules that their login has created, and operators may delete all schedules. A refused \
schedule does not stop the others, and a summary follows.\n\
Exit codes: 0 all done · 3 no such schedule · 6 a schedule belongs to another login, a module declares it, or another \
transaction has locked it; with several schedules, the highest code";

/// Options of `rouse schedule`.
#[derive(Debug, ClapArgs)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Without a command: lists the schedules, like `rouse schedule ls`. A schedule enqueues a job whenever it is due:
  rouse schedule next '0 3 * * *' --time-zone Europe/Berlin       print the next due times (no database needed)
  rouse schedule set nightly report.make '0 3 * * *' --time-zone Europe/Berlin
  rouse schedule run nightly                                      enqueue one job now"
)]
pub(super) struct Args {
    #[command(subcommand)]
    operation: Option<Operation>,

    #[command(flatten)]
    list: Ls,
}

#[derive(Debug, Subcommand)]
enum Operation {
    /// List the schedules: when each is due next, and the outcome of its last due time
    #[command(visible_alias = "list")]
    Ls(Ls),
    /// Show one schedule: its next five due times, and the outcomes of the last ones
    Show(show::Args),
    /// Print the next due times of a cron expression, or of a schedule
    Next(next::Args),
    /// Create or replace a schedule
    Set(Box<set::Args>),
    /// Enqueue a job of a schedule now, even if the schedule is paused or its last job is running, and print the
    /// job's id
    Run(Named),
    /// Pause schedules: nothing is enqueued until they are resumed
    #[command(after_help = PAUSE_HELP)]
    Pause(NamedMany),
    /// Resume paused schedules; due times during the pause get no jobs
    #[command(after_help = PAUSE_HELP)]
    Resume(NamedMany),
    /// Enqueue jobs for due times of the past that have none
    Backfill(backfill::Args),
    /// Delete schedules; their jobs stay
    #[command(after_help = DELETE_HELP)]
    Delete(NamedMany),
}

/// Options of `rouse schedule ls`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Needs the role rouse_observer or rouse_operator.")]
struct Ls {
    #[command(flatten)]
    target: Target,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Options that name a schedule.
#[derive(Debug, ClapArgs)]
#[command(after_help = EXIT_CODES)]
struct Named {
    #[command(flatten)]
    target: Target,

    /// The name of the schedule
    name: String,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Options that name schedules.
#[derive(Debug, ClapArgs)]
struct NamedMany {
    #[command(flatten)]
    target: Target,

    /// The names of the schedules
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,

    /// Print one JSON object for each schedule, and one for the summary of several
    #[arg(long)]
    json: bool,
}

/// Runs the subcommand.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.operation {
        None => ls(args.list).await,
        Some(Operation::Ls(args)) => ls(args).await,
        Some(Operation::Show(args)) => show::run(args).await,
        Some(Operation::Next(args)) => next::run(args).await,
        Some(Operation::Set(args)) => set::run(*args).await,
        Some(Operation::Run(args)) => run_now(args).await,
        Some(Operation::Pause(args)) => pause(args).await,
        Some(Operation::Resume(args)) => resume(args).await,
        Some(Operation::Backfill(args)) => backfill::run(args).await,
        Some(Operation::Delete(args)) => delete(args).await,
    }
}

async fn ls(args: Ls) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    let schedules = store.schedules(None).await?;
    if args.json {
        println!("{}", as_json(json!({"schedules": schedules})));
        return Ok(ExitCode::SUCCESS);
    }
    table(&schedules, store.now().await?).print("no schedules");
    Ok(ExitCode::SUCCESS)
}

fn table(schedules: &[Value], now: f64) -> List {
    let screen = Screen::from_stdout();
    let mut list = List::new([
        "name",
        "state",
        "next",
        "cron",
        "time zone",
        "handler",
        "last",
        "error",
    ]);
    list.expendable(&["error", "handler"]);
    for schedule in schedules {
        let text = |key: &str| plain(schedule[key].as_str().unwrap_or_default());
        list.row([
            text("name").into(),
            state(schedule),
            ago::listed(&schedule["next_at"], now, screen).into(),
            text("cron").into(),
            text("time_zone").into(),
            text("handler").into(),
            last(&schedule["last_runs"][0]).into(),
            text("error").into(),
        ]);
    }
    list
}

/// The state of a schedule, in red if it is an error.
fn state(schedule: &Value) -> Shown {
    let word = schedule["state"].as_str().unwrap_or_default();
    let colour = (word == "error").then_some(Colour::Red);
    Shown::in_colour(plain(word), colour)
}

/// The outcome of a due time: that of its job, or the reason why it has no job.
fn last(run: &Value) -> String {
    let word = |key: &str| run[key].as_str().map(plain);
    word("state").or(word("outcome")).unwrap_or_default()
}

async fn run_now(args: Named) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    each(&[args.name], SCHEDULE, args.json, async |name| {
        let done = store.run_schedule(name).await.map(|job| Done {
            text: job.to_string(),
            json: json!({"schedule": name, "job": job}),
        });
        refusal(name, done)
    })
    .await
}

async fn pause(args: NamedMany) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    each(&args.names, SCHEDULE, args.json, async |name| {
        let shown = plain(name);
        let done = store.pause_schedule(name).await.map(|since| Done {
            text: format!(
                "schedule {shown} has been paused since {since} (`rouse schedule resume {shown}`)"
            ),
            json: json!({"schedule": name, "paused_at": since}),
        });
        refusal(name, done)
    })
    .await
}

async fn resume(args: NamedMany) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    each(&args.names, SCHEDULE, args.json, async |name| {
        let shown = plain(name);
        let done = store.resume_schedule(name).await.map(|was_paused| Done {
            text: match was_paused {
                true => format!("schedule {shown} is resumed"),
                false => format!("schedule {shown} was not paused"),
            },
            json: json!({"schedule": name, "was_paused": was_paused}),
        });
        refusal(name, done)
    })
    .await
}

async fn delete(args: NamedMany) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    each(&args.names, SCHEDULE, args.json, async |name| {
        match store.unschedule(name).await {
            Ok(false) => Ok(Err(Refusal {
                code: EXIT_UNKNOWN,
                why: no_schedule(name),
            })),
            deleted => refusal(
                name,
                deleted.map(|_| Done {
                    text: format!("schedule {} is deleted; its jobs stay", plain(name)),
                    json: json!({"schedule": name, "deleted": true}),
                }),
            ),
        }
    })
    .await
}

/// An item that the database refuses does not stop the others.
fn refusal(name: &str, done: Result<Done, StoreError>) -> anyhow::Result<Result<Done, Refusal>> {
    match done {
        Ok(done) => Ok(Ok(done)),
        Err(error) if error.is_unknown_schedule() => Ok(Err(Refusal {
            code: EXIT_UNKNOWN,
            why: no_schedule(name),
        })),
        Err(error) if error.is_refused_by_state() || error.is_of_another_login() => {
            Ok(Err(Refusal {
                code: EXIT_REFUSED,
                why: error.to_string(),
            }))
        }
        Err(error) => Err(error.into()),
    }
}

fn no_schedule(name: &str) -> String {
    format!("no schedule {} (`rouse schedule ls`)", plain(name))
}

fn unknown(name: &str) -> ExitCode {
    eprintln!("rouse: {}", no_schedule(name));
    ExitCode::from(EXIT_UNKNOWN)
}
