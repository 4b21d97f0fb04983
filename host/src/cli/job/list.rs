//! `rouse job ls`: the newest jobs.

use std::collections::BTreeSet;
use std::process::ExitCode;

use clap::Args as ClapArgs;
use serde_json::{Value, json};

use super::cell;
use super::filter::Filter;
use super::tries::tries;
use crate::cli::ago;
use crate::cli::list::{List, Shown};
use crate::cli::number::{between, job_id};
use crate::cli::screen::{Colour, Screen};
use crate::cli::served::{Wanted, waits};
use crate::cli::target::Target;
use crate::cli::text::{as_json, plain};
use crate::store::{LOOKED_AT_MAX, Listed, Listing, Store};

/// How many are listed where nobody says how many.
const NEWEST: i32 = 20;

/// Options of `rouse job ls`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Needs the role rouse_observer. What has ended is listed for as long as it is kept (keep_days). \
One listing looks at the newest 100,000 jobs, whatever their queue, handler and so on are, and says so where \
it did not find enough among them; --before ID goes on from there. --since and --until leave out whole days (UTC) of what has \
ended. Where only jobs are wanted that did not succeed (by --state, --error or --kind), only those are looked at.\n\
Exit code: 0, also where there is none")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    #[command(flatten)]
    filter: Filter,

    /// Only jobs with a smaller id: goes on where a listing ended
    #[arg(long, value_name = "ID", value_parser = job_id)]
    before: Option<i64>,

    /// At most so many
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

/// Lists.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    let Listed {
        mut jobs,
        looked_back_to,
    } = store
        .jobs(&Listing {
            filter: args.filter.at(store.now().await?),
            before: args.before,
            // One more tells whether there are more.
            limit: args.limit + 1,
        })
        .await?;
    let most = usize::try_from(args.limit).unwrap_or(usize::MAX);
    let more = jobs.len() > most;
    jobs.truncate(most);
    if args.json {
        let listing = json!({"jobs": jobs, "more": more, "looked_back_to": looked_back_to});
        println!("{}", as_json(listing));
        return Ok(ExitCode::SUCCESS);
    }
    table(&jobs, store.now().await?).print("no jobs");
    if jobs.is_empty() {
        args.filter.warn_of_unused_names(&store).await?;
    }
    tell_what_nobody_takes(&store, &jobs).await?;
    if more {
        eprintln!("rouse: there are more; --limit N lists more of them");
    }
    if let Some(id) = looked_back_to {
        let at = store.requested_at(id).await?.unwrap_or_default();
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
