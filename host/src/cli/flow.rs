//! `rouse flow`: lists and shows flows, and cancels, retries and deletes them.

mod graph;

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;

use clap::{Args as ClapArgs, Subcommand};
use rouse_display::plural::{choose, counted};
use serde_json::{Value, json};

use self::graph::draw;
use super::ago;
use super::attempt_error::cell;
use super::list::{List, Shown};
use super::number::{between, job_id};
use super::screen::{Colour, Screen};
use super::target::Target;
use super::text::{as_json, error_line, plain};
use crate::store::StoreError;

/// The maximum number of jobs in one statement of a cancellation or a retry, which takes tens of milliseconds.
const BATCH: i32 = 1_000;

/// There is no such flow, or it is no longer kept.
const EXIT_UNKNOWN: u8 = 3;
/// The state of the flow does not allow the change, or another transaction has locked a job of it.
const EXIT_REFUSED: u8 = 6;

const EXIT_CODES: &str = "\
Exit codes: 0 done · 3 no such flow · 6 another transaction has locked a job of the flow: run the command again";

/// Options of `rouse flow`.
#[derive(Debug, ClapArgs)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
With an id: shows that flow. Without one: lists the newest flows, like `rouse flow ls`. \
Flows are enqueued with SELECT rouse.enqueue_flow(…)."
)]
pub(super) struct Args {
    #[command(subcommand)]
    operation: Option<Operation>,

    #[command(flatten)]
    target: Target,

    /// The flow's id
    #[arg(value_parser = job_id)]
    id: Option<i64>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Operation {
    /// List flows, newest first, with their jobs by state
    #[command(visible_alias = "list")]
    Ls(Ls),
    /// Draw the graph of a flow with the states of its jobs
    Show(Show),
    /// Cancel all live jobs of a flow; running attempts are stopped
    #[command(after_help = EXIT_CODES)]
    Cancel(Named),
    /// Retry the jobs of a flow that failed, and those that were cancelled; the others keep their results
    #[command(after_help = EXIT_CODES)]
    Retry(Named),
    /// Delete the queued jobs of a flow; refused while one runs, or while other jobs wait for the flow
    #[command(after_help = "\
Exit codes: 0 done · 3 no such flow · 6 a job of the flow runs, other jobs wait for the flow, or another \
transaction has locked a job of it")]
    Delete(Named),
}

/// Options of `rouse flow ls`.
#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Needs the role rouse_observer or rouse_operator. The jobs of each flow are counted, so large flows take longer."
)]
struct Ls {
    #[command(flatten)]
    target: Target,

    /// Only flows with a smaller id: continues where a listing ended
    #[arg(long, value_name = "ID", value_parser = job_id)]
    before: Option<i64>,

    /// The maximum number of flows
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = between(1_i32, 1_000))]
    limit: i32,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Options of `rouse flow show`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Each job is drawn below one of the jobs that it waits for; the last column names these, or three of them and the \
number of the others.\n\
Exit codes: 0 found · 3 no such flow")]
struct Show {
    #[command(flatten)]
    target: Target,

    /// The flow's id
    #[arg(value_parser = job_id)]
    id: i64,

    /// Draw all jobs, instead of at most ten below each job
    #[arg(long)]
    all: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Options that name a flow.
#[derive(Debug, ClapArgs)]
struct Named {
    #[command(flatten)]
    target: Target,

    /// The flow's id
    #[arg(value_parser = job_id)]
    id: i64,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the subcommand.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let (target, json) = (args.target, args.json);
    match args.operation {
        None => match args.id {
            Some(id) => {
                let all = false;
                show(Show {
                    target,
                    id,
                    all,
                    json,
                })
                .await
            }
            None => {
                let (before, limit) = (None, 20);
                ls(Ls {
                    target,
                    before,
                    limit,
                    json,
                })
                .await
            }
        },
        Some(Operation::Ls(args)) => ls(args).await,
        Some(Operation::Show(args)) => show(args).await,
        Some(Operation::Cancel(args)) => cancel(args).await,
        Some(Operation::Retry(args)) => retry(args).await,
        Some(Operation::Delete(args)) => {
            let store = args.target.checked_store().await?;
            let done = store.delete_flow(args.id).await;
            report(&args, "deleted", done.map_err(|error| (0, error)))
        }
    }
}

async fn ls(args: Ls) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    let (mut flows, mut left) = (Vec::new(), args.limit);
    let mut next_before = Some(args.before.unwrap_or(i64::MAX));
    // Flows with many jobs come in several pages.
    while let Some(before) = next_before
        && left > 0
    {
        let page = store.flows(before, left).await?;
        left -= i32::try_from(page.flows.len()).unwrap_or(left);
        flows.extend(page.flows);
        next_before = page.next_before;
    }
    let more = next_before.is_some();
    if args.json {
        println!("{}", as_json(json!({"flows": flows, "more": more})));
        return Ok(ExitCode::SUCCESS);
    }
    table(&flows, store.now().await?).print("no flows");
    if more {
        eprintln!("rouse: there are more; --limit N lists more");
    }
    Ok(ExitCode::SUCCESS)
}

fn table(flows: &[Value], now: f64) -> List {
    let screen = Screen::from_stdout();
    let counts = [
        "waiting",
        "scheduled",
        "ready",
        "running",
        "succeeded",
        "failed",
        "cancelled",
        "stuck",
    ];
    let mut columns = vec!["id", "name", "state", "jobs"];
    columns.extend(counts);
    columns.push("requested_at");
    let mut list = List::new(columns);
    list.align_right(&["jobs"]);
    for flow in flows {
        let state = flow["state"].as_str().unwrap_or_default();
        let mut row: Vec<Shown> = vec![
            cell(&flow["id"]).into(),
            plain(flow["name"].as_str().unwrap_or_default()).into(),
            Shown::in_colour(plain(state), Colour::for_state(state)),
            cell(&flow["jobs"]).into(),
        ];
        row.extend(counts.map(|key| match flow[key].as_u64() {
            Some(0) | None => Shown::nothing("0"),
            Some(count) => count.to_string().into(),
        }));
        row.push(ago::listed(&flow["requested_at"], now, screen).into());
        list.row(row);
    }
    list
}

async fn show(args: Show) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    let Some(flow) = store.flow(args.id).await? else {
        return Ok(unknown(args.id));
    };
    if args.json {
        println!("{}", as_json(flow));
        return Ok(ExitCode::SUCCESS);
    }
    let jobs = flow["jobs"].as_array().map_or(&[][..], Vec::as_slice);
    let name = flow["name"]
        .as_str()
        .map(|name| format!(", {}", plain(name)));
    let done = jobs
        .iter()
        .filter(|job| !job["finished_at"].is_null())
        .count();
    println!(
        "flow {}{}: {done} of {} {} ended\n",
        args.id,
        name.unwrap_or_default(),
        counted(jobs.len(), "job"),
        choose(jobs.len(), "has", "have")
    );
    let mut list = List::plain();
    for line in draw(jobs, if args.all { usize::MAX } else { 10 }) {
        let state = Shown::in_colour(plain(&line.state), Colour::for_state(&line.state));
        list.row([
            plain(&line.drawn).into(),
            state,
            plain(&line.handler).into(),
            line.job.into(),
            plain(&line.after).into(),
        ]);
    }
    println!("{}", list.text());
    Ok(ExitCode::SUCCESS)
}

async fn cancel(args: Named) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    let done = in_batches("cancelled", async || {
        store.cancel_flow(args.id, BATCH).await
    });
    report(&args, "cancelled", done.await)
}

async fn retry(args: Named) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    // A job that fails again in the meantime is not retried again.
    let before = store.now().await?;
    let done = in_batches("retried", async || {
        store.retry_flow(args.id, BATCH, before).await
    });
    report(&args, "retried", done.await)
}

/// Repeats a change until it has nothing left to change; returns the number of jobs that it has changed. Shows its
/// progress on a terminal.
///
/// # Errors
/// The first error, with the number of jobs that were changed before it: each batch has been committed.
async fn in_batches(
    done_word: &str,
    change: impl AsyncFn() -> Result<i32, StoreError>,
) -> Result<i32, (i32, StoreError)> {
    let shown = std::io::stderr().is_terminal();
    let mut changed = 0;
    let done = loop {
        match change().await {
            Ok(0) => break Ok(changed),
            Ok(batch) => changed += batch,
            Err(error) => break Err((changed, error)),
        }
        if shown {
            eprint!("\r{done_word} {changed}");
            // The progress is not essential, so an error is ignored.
            let _ = std::io::stderr().flush();
        }
    };
    if shown && changed > 0 {
        eprintln!();
    }
    done
}

/// Prints how many jobs were changed, or why the change was refused or stopped, and how many were changed before that.
fn report(
    args: &Named,
    done_word: &str,
    done: Result<i32, (i32, StoreError)>,
) -> anyhow::Result<ExitCode> {
    let id = args.id;
    let (before, error) = match done {
        Ok(jobs) => {
            match args.json {
                true => println!("{}", as_json(json!({"flow": id, done_word: jobs}))),
                false => println!("{}", summary(id, jobs, done_word)),
            }
            return Ok(ExitCode::SUCCESS);
        }
        Err(stopped) => stopped,
    };
    if error.is_unknown_flow() {
        return Ok(unknown(id));
    } else if error.is_locked() {
        // The message of Postgres does not name the flow.
        eprintln!("rouse: flow {id}: {error}");
    } else if error.is_refused_by_state() {
        eprintln!("{}", error_line(error));
    } else if before > 0 {
        let done = format!("{}; others are left", summary(id, before, done_word));
        return Err(anyhow::Error::from(error).context(done));
    } else {
        return Err(error.into());
    }
    if before > 0 {
        eprintln!("rouse: {}; others are left", summary(id, before, done_word));
    }
    Ok(ExitCode::from(EXIT_REFUSED))
}

fn summary(id: i64, jobs: i32, done_word: &str) -> String {
    let are = choose(jobs, "is", "are");
    format!("{} of flow {id} {are} {done_word}", counted(jobs, "job"))
}

fn unknown(id: i64) -> ExitCode {
    eprintln!(
        "rouse: no flow {id}: it was never enqueued, its transaction is not committed, or it is no longer kept"
    );
    ExitCode::from(EXIT_UNKNOWN)
}
