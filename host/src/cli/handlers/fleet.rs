//! `rouse handlers ls`: the handlers of the running workers.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args as ClapArgs;
use serde_json::{Value, json};

use super::filter::Filter;
use super::folder;
use crate::cli::ago;
use crate::cli::list::List;
use crate::cli::screen::Screen;
use crate::cli::target::{Target, seen};
use crate::cli::text::{as_json, digest, plain, words};
use crate::store::Store;

/// The maximum number of workers that are named for each handler.
const NAMED_MAX: usize = 4;

/// Options of `rouse handlers ls`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Needs the role rouse_observer, rouse_operator or rouse_worker. Exit code: 0, even if no handler matches; with --handlers, as for \
`rouse handlers`")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// Only handlers that match (repeat for several conditions, which must all match): handler=image.*, version=1.2.0,
    /// queue=mail, tag=gpu, worker=mail-1, grant=http
    #[arg(long = "where", value_name = "KEY=VALUE")]
    filters: Vec<Filter>,

    /// List the handlers of this folder instead, without a database
    #[arg(long = "handlers", value_name = "DIR", conflicts_with_all = ["filters", "database_url"])]
    folder: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Lists the handlers, and the jobs that no worker can run.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    if let Some(handlers) = args.folder {
        let args = folder::Args {
            handlers: Some(handlers),
            config: None,
            json: args.json,
        };
        return folder::run(&args).await;
    }
    let store = args.target.checked_store().await?;
    let mut rows = seen(store.fleet_handlers(None).await?)?;
    rows.retain(|row| args.filters.iter().all(|filter| filter.passes(row)));
    let mut waiting = unknown(&store).await?;
    waiting.retain(|row| args.filters.iter().all(|filter| filter.passes_waiting(row)));
    if args.json {
        println!("{}", as_json(json!({"handlers": rows, "waiting": waiting})));
        return Ok(ExitCode::SUCCESS);
    }
    table(&rows).print("no running worker has a handler");
    if !waiting.is_empty() {
        let waiting = backlog(&waiting, store.now().await?);
        println!("\nno worker can run these:\n{waiting}");
    }
    Ok(ExitCode::SUCCESS)
}

/// The jobs that no worker can run.
async fn unknown(store: &Store) -> anyhow::Result<Vec<Value>> {
    let mut rows = store.backlog(None).await?.unwrap_or_default();
    rows.retain(|row| row["workers"] == 0 && waits(row));
    Ok(rows)
}

fn waits(row: &Value) -> bool {
    ["ready", "scheduled", "orphans"]
        .iter()
        .any(|key| row[key].as_i64() > Some(0))
}

/// One line for each version of a handler.
fn table(rows: &[Value]) -> List {
    let mut versions: BTreeMap<[&str; 3], Vec<&Value>> = BTreeMap::new();
    for row in rows {
        let key = ["handler", "version", "sha256"].map(|key| row[key].as_str().unwrap_or_default());
        versions.entry(key).or_default().push(row);
    }
    let mut table = List::new(["handler", "version", "sha256", "slots", "workers"]);
    table.expendable(&["sha256", "slots", "version"]);
    for ([handler, version, _], on) in versions {
        let slots: i64 = on.iter().filter_map(|row| row["slots"].as_i64()).sum();
        let mut named: Vec<String> = on.iter().take(NAMED_MAX).map(|row| worker(row)).collect();
        if on.len() > NAMED_MAX {
            named.push(format!("and {} more", on.len() - NAMED_MAX));
        }
        table.row([
            plain(handler),
            plain(version),
            digest(&on[0]["sha256"]),
            slots.to_string(),
            named.join(", "),
        ]);
    }
    table
}

/// The worker's id, marked if the worker is draining, or if the handler is parked there.
pub(super) fn worker(row: &Value) -> String {
    let id = plain(row["worker_id"].as_str().unwrap_or_default());
    match (row["state"] == "draining", row["parked"].is_string()) {
        (true, _) => format!("{id} (draining)"),
        (false, true) => format!("{id} (parked)"),
        (false, false) => id,
    }
}

/// A table of rows of `rouse.backlog`.
pub(super) fn backlog(rows: &[Value], now: f64) -> String {
    let screen = Screen::from_stdout();
    let mut table = List::new([
        "handler",
        "queue",
        "tags",
        "ready",
        "scheduled",
        "orphans",
        ago::waits(screen),
        "workers",
    ]);
    table.expendable(&["workers", "scheduled", "orphans", "tags", "oldest waits"]);
    for row in rows {
        let text = |key: &str| plain(row[key].as_str().unwrap_or_default());
        let more = if row["at_least"] == true { "+" } else { "" };
        table.row([
            text("handler"),
            text("queue"),
            words(&row["tags"]),
            format!("{}{more}", row["ready"]),
            format!("{}{more}", row["scheduled"]),
            row["orphans"].to_string(),
            row["oldest_wait_s"]
                .as_f64()
                .map(|secs| ago::waited(secs, now, screen))
                .unwrap_or_default(),
            row["workers"].to_string(),
        ]);
    }
    table.text()
}
