//! `rouse workers show`.

use std::process::ExitCode;

use clap::Args as ClapArgs;
use serde_json::{Value, json};

use super::{EXIT_UNKNOWN, list, unknown};
use crate::cli::ago;
use crate::cli::attempt_error::cell;
use crate::cli::list::List;
use crate::cli::screen::Screen;
use crate::cli::target::{Target, seen};
use crate::cli::text::{as_json, digest, plain, strings};

/// Options of `rouse workers show`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Needs the role rouse_observer, rouse_operator or rouse_worker. If the id has had several incarnations, the newest is shown.\n\
Exit codes: 0 found · 3 no such worker")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// The worker's id
    id: String,

    /// Print one JSON object with its newest 100 incarnations, newest first, and the number of all
    #[arg(long)]
    json: bool,
}

/// The maximum number of incarnations in the JSON.
const NEWEST: i64 = 100;

/// Shows the worker.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    let limit = match args.json {
        true => NEWEST,
        false => 1,
    };
    let incarnations = seen(store.incarnations(&args.id, limit).await?)?;
    let Some(newest) = incarnations.newest.first() else {
        eprintln!("rouse: {}", unknown(&store, &args.id).await);
        return Ok(ExitCode::from(EXIT_UNKNOWN));
    };
    match args.json {
        true => println!(
            "{}",
            as_json(json!({"workers": incarnations.newest, "incarnations": incarnations.count}))
        ),
        false => println!(
            "{}",
            show(newest, incarnations.count - 1, store.now().await?)
        ),
    }
    Ok(ExitCode::SUCCESS)
}

fn show(worker: &Value, earlier: i64, now: f64) -> String {
    let mut about = List::plain();
    let mut row = |key: &str, text: String| {
        if !text.is_empty() {
            about.row([key.to_string(), text]);
        }
    };
    let screen = Screen::from_stdout();
    let at = |key: &str| {
        worker[key]
            .as_str()
            .map_or_else(String::new, |time| ago::shown(time, now, screen))
    };
    for key in [
        "worker_id",
        "state",
        "incarnation",
        "hostname",
        "platform",
        "version",
        "slots",
    ] {
        row(key, cell(&worker[key]));
    }
    row("queues", list(&worker["queues"], "all"));
    row("tags", list(&worker["tags"], "none"));
    row("registered_at", at("registered_at"));
    row("last seen", at("seen_at"));
    row("draining_at", at("draining_at"));
    row("ended_at", at("ended_at"));
    if worker["refused"].as_i64() > Some(0) {
        row("refused writes", cell(&worker["refused"]));
    }
    if worker["timeouts"].as_i64() > Some(0) {
        row(
            "timed out",
            format!(
                "{} since {}; last job {} ({}), {}",
                cell(&worker["timeouts"]),
                at("timed_out_since"),
                cell(&worker["timed_out_job"]),
                cell(&worker["timed_out_handler"]),
                at("timed_out_at"),
            ),
        );
    }
    if earlier > 0 {
        row("earlier incarnations", earlier.to_string());
    }
    for (key, value) in worker["stats"].as_object().into_iter().flatten() {
        if !value.is_null() {
            row(key, cell(value));
        }
    }
    let mut text = about.text();
    text.push_str("\n\nhandlers\n");
    let mut handlers = List::plain();
    for name in strings(&worker["handlers"]) {
        // Null if the incarnation has ended.
        let capability = &worker["capabilities"][name];
        handlers.row([
            plain(name),
            plain(capability["version"].as_str().unwrap_or_default()),
            digest(&capability["sha256"]),
            list(&capability["grants"], ""),
        ]);
    }
    text.push_str(&handlers.text());
    text
}
