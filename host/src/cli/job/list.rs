//! `rouse job ls`: the newest jobs.

use std::collections::BTreeSet;
use std::process::ExitCode;

use clap::Args as ClapArgs;
use serde_json::{Value, json};

use super::attempts::attempts;
use super::filter::Filter;
use crate::cli::ago;
use crate::cli::attempt_error::cell;
use crate::cli::list::{List, Shown};
use crate::cli::number::{between, job_id};
use crate::cli::screen::{Colour, Screen};
use crate::cli::served::{Wanted, waits};
use crate::cli::target::Target;
use crate::cli::text::{as_json, plain};
use crate::store::{EXAMINED_MAX, JobList, Listing, Store};

/// The default number of jobs in a listing.
const NEWEST: i32 = 20;

/// Options of `rouse job ls`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Needs the role rouse_observer or rouse_operator. Ended jobs are listed as long as they are kept (keep_days). \
One listing examines the newest 100,000 jobs, of all queues and handlers, and reports if it did not find enough among them; \
--before ID continues from there. With --since and --until, jobs that ended on days (UTC) outside this period are not \
examined. A listing of unsuccessful jobs only (by --state, --error or --kind) examines only those.\n\
Exit code: 0, even if no job matches")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    #[command(flatten)]
    filter: Filter,

    /// Only jobs with a smaller id: continues where a listing ended
    #[arg(long, value_name = "ID", value_parser = job_id)]
    before: Option<i64>,

    /// The maximum number of jobs
    #[arg(long, value_name = "N", default_value_t = NEWEST, value_parser = between(1_i32, 10_000))]
    limit: i32,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Args {
    /// The newest of all jobs.
    pub(super) fn newest(target: Target, json: bool) -> Self {
        Self {
            target,
            filter: Filter::default(),
            before: None,
            limit: NEWEST,
            json,
        }
    }
}

/// Lists the jobs.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    let JobList {
        mut jobs,
        examined_back_to,
    } = store
        .jobs(&Listing {
            max_examined: EXAMINED_MAX,
            filter: args.filter.at(store.now().await?),
            before: args.before,
            // One extra job shows whether there are more.
            limit: args.limit + 1,
        })
        .await?;
    let max = usize::try_from(args.limit).unwrap_or(usize::MAX);
    let more = jobs.len() > max;
    jobs.truncate(max);
    if args.json {
        let listing = json!({"jobs": jobs, "more": more, "examined_back_to": examined_back_to});
        println!("{}", as_json(listing));
        return Ok(ExitCode::SUCCESS);
    }
    table(&jobs, store.now().await?).print("no jobs");
    if jobs.is_empty() {
        args.filter.warn_of_unused_names(&store).await?;
    }
    warn_of_unserved(&store, &jobs).await?;
    if more {
        eprintln!("rouse: there are more; --limit N lists more");
    }
    if let Some(id) = examined_back_to {
        let at = store.requested_at(id).await?.unwrap_or_default();
        eprintln!(
            "rouse: there may be more: only the newest {EXAMINED_MAX} jobs were examined, back to {id}, requested at {at}; --before {id} continues from there"
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Warns once for each kind of waiting job that no worker can run.
async fn warn_of_unserved(store: &Store, jobs: &[Value]) -> anyhow::Result<()> {
    let queued = || jobs.iter().filter(|job| waits(job));
    if queued().next().is_none() {
        return Ok(());
    }
    let Some(workers) = store.serving().await? else {
        return Ok(());
    };
    let why = |job| Wanted::from_row(job).why_unserved(&workers);
    let reasons: BTreeSet<String> = queued().filter_map(why).collect();
    for why in &reasons {
        eprintln!("rouse: {why}");
    }
    let queues: BTreeSet<&str> = queued().filter_map(|job| job["queue"].as_str()).collect();
    for queue in queues {
        if let Some(since) = store.queue_paused_at(queue).await? {
            let queue = plain(queue);
            eprintln!(
                "rouse: queue {queue} has been paused since {since} (`rouse queue resume {queue}`)"
            );
        }
    }
    Ok(())
}

fn table(jobs: &[Value], now: f64) -> List {
    let screen = Screen::from_stdout();
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
                Shown::in_colour(cell(state), Colour::for_state(&cell(state)))
            }
            _ if key == "attempt" => attempts(job, job["attempts_max"].as_u64(), now).into(),
            usual if usual == "normal" => Shown::nothing("normal"),
            value => cell(value).into(),
        }));
    }
    list
}
