//! `rouse job ls`: the newest jobs.

use std::collections::BTreeSet;
use std::process::ExitCode;

use clap::Args as ClapArgs;
use serde_json::{Value, json};

use super::cell;
use super::tries::tries;
use crate::cli::ago;
use crate::cli::list::{List, Shown};
use crate::cli::number::{between, job_id};
use crate::cli::screen::{Colour, Screen};
use crate::cli::served::{Wanted, waits};
use crate::cli::target::Target;
use crate::cli::text::{as_json, plain};
use crate::cli::used::{warn_of_unused_handler, warn_of_unused_queue};
use crate::store::{LOOKED_AT_MAX, Listing, Store};

/// How many are listed where nobody says how many.
const NEWEST: i64 = 20;

/// Options of `rouse job ls`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Needs the role rouse_observer. What has ended is listed for as long as it is kept (keep_days). \
One listing looks at the newest 100,000 jobs, whatever their queue, handler and state are, and says so where \
it did not find enough among them; --before ID goes on from there.\n\
Exit code: 0, also where there is none")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// Only jobs of this queue
    #[arg(long, value_name = "NAME")]
    queue: Option<String>,

    /// Only jobs for this handler
    #[arg(long, value_name = "NAME")]
    handler: Option<String>,

    /// Only jobs in this state
    #[arg(long, value_parser = ["queued", "running", "succeeded", "failed", "timed_out", "cancelled"])]
    state: Option<String>,

    /// Only jobs with a smaller id: goes on where a listing ended
    #[arg(long, value_name = "ID", value_parser = job_id)]
    before: Option<i64>,

    /// At most so many
    #[arg(long, value_name = "N", default_value_t = NEWEST, value_parser = between(1_i64, 10_000))]
    limit: i64,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Args {
    /// The newest of all jobs.
    pub(super) fn newest(target: Target, json: bool) -> Self {
        Self {
            target,
            queue: None,
            handler: None,
            state: None,
            before: None,
            limit: NEWEST,
            json,
        }
    }
}

/// Lists.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    let mut jobs = store
        .jobs(&Listing {
            queue: args.queue.clone(),
            handler: args.handler.clone(),
            state: args.state,
            before: args.before,
            // One more tells whether there are more.
            limit: args.limit + 1,
        })
        .await?;
    let most = usize::try_from(args.limit).unwrap_or(usize::MAX);
    let more = jobs.len() > most;
    jobs.truncate(most);
    let end = match more {
        true => None,
        false => store.last_looked_at(args.before).await?,
    };
    if args.json {
        let looked_back_to = end.map(|(id, _)| id);
        let listing = json!({"jobs": jobs, "more": more, "looked_back_to": looked_back_to});
        println!("{}", as_json(listing));
        return Ok(ExitCode::SUCCESS);
    }
    table(&jobs, store.now().await?).print("no jobs");
    if jobs.is_empty() {
        if let Some(queue) = &args.queue {
            warn_of_unused_queue(&store, queue).await?;
        }
        if let Some(handler) = &args.handler {
            warn_of_unused_handler(&store, handler).await?;
        }
    }
    tell_what_nobody_takes(&store, &jobs).await?;
    if more {
        eprintln!("rouse: there are more; --limit N lists more of them");
    }
    if let Some((id, at)) = end {
        eprintln!(
            "rouse: there may be more: only the newest {LOOKED_AT_MAX} jobs were looked at, back to {id}, requested at {at}; --before {id} goes on from there"
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Says once for each kind of job that waits, and that no worker takes, why that is so.
async fn tell_what_nobody_takes(store: &Store, jobs: &[Value]) -> anyhow::Result<()> {
    let queued = || jobs.iter().filter(|job| waits(job));
    if queued().next().is_none() {
        return Ok(());
    }
    let Some(workers) = store.serving().await? else {
        return Ok(());
    };
    let why = |job| Wanted::of(job).why_nobody(&workers);
    let told: BTreeSet<String> = queued().filter_map(why).collect();
    for why in &told {
        eprintln!("rouse: {why}");
    }
    let queues: BTreeSet<&str> = queued().filter_map(|job| job["queue"].as_str()).collect();
    for queue in queues {
        if let Some(since) = store.queue_paused_at(queue).await? {
            let queue = plain(queue);
            eprintln!(
                "rouse: queue {queue} is paused since {since} (`rouse queue resume {queue}`)"
            );
        }
    }
    Ok(())
}

fn table(jobs: &[Value], now: f64) -> List {
    let screen = Screen::of_stdout();
    let columns = [
        "id",
        "state",
        "handler",
        "queue",
        "priority",
        "attempt",
        "requested_at",
        "finished_at",
    ];
    let mut list = List::new(columns.map(|column| match (column, screen.is_terminal()) {
        ("requested_at", true) => "requested",
        ("finished_at", true) => "finished",
        (column, _) => column,
    }));
    list.expendable(&["priority", "finished", "queue", "attempt"]);
    for job in jobs {
        list.row(columns.map(|key| match &job[key] {
            Value::Null => Shown::default(),
            time if key.ends_with("_at") => ago::listed(time, now, screen).into(),
            _ if key == "state" && !job["orphaned_at"].is_null() => "orphan".to_owned().into(),
            state if key == "state" => {
                Shown::in_colour(cell(state), Colour::of_state(&cell(state)))
            }
            _ if key == "attempt" => tries(job, job["attempts_max"].as_u64(), now).into(),
            usual if usual == "normal" => Shown::nothing("normal"),
            value => cell(value).into(),
        }));
    }
    list
}
