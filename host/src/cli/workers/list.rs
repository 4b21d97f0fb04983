//! `rouse workers ls`.

use std::process::ExitCode;

use clap::Args as ClapArgs;
use serde_json::{Value, json};

use crate::cli::ago;
use crate::cli::list::{List, Shown};
use crate::cli::screen::{Colour, Screen};
use crate::cli::target::{Target, seen};
use crate::cli::text::{as_json, plain, words};

/// Options of `rouse workers ls`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Needs the role rouse_observer, rouse_operator or rouse_worker. `running` is as of the worker's last heartbeat; `timed out` counts the attempts that \
timed out since the last `rouse workers clear ID`.\n\
Exit code: 0, even if there are no workers")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// List every incarnation of every worker, including those that stopped cleanly
    #[arg(long)]
    all: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Lists the workers.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    let workers = seen(match args.all {
        true => store.all_incarnations().await?,
        false => store.workers().await?,
    })?;
    match args.json {
        true => println!("{}", as_json(json!({"workers": workers}))),
        false => table(&workers, store.now().await?).print("no workers"),
    }
    Ok(ExitCode::SUCCESS)
}

fn table(workers: &[Value], now: f64) -> List {
    let screen = Screen::from_stdout();
    let mut list = List::new([
        "worker",
        "state",
        "host",
        "version",
        "slots",
        "running",
        "timed out",
        "handlers",
        "tags",
        "queues",
        "last seen",
    ]);
    list.expendable(&[
        "timed out",
        "version",
        "handlers",
        "tags",
        "host",
        "queues",
        "slots",
        "running",
    ]);
    for worker in workers {
        let text = |key: &str| plain(worker[key].as_str().unwrap_or_default());
        let handlers = worker["handlers"].as_array().map_or(0, Vec::len);
        let running = worker["stats"]["active"].as_u64();
        let timed_out = worker["timeouts"].as_u64();
        let state = text("state");
        let colour = Colour::for_state(&state);
        let none = || Shown::nothing("-");
        list.row([
            text("worker_id").into(),
            Shown::in_colour(state, colour),
            text("hostname").into(),
            text("version").into(),
            worker["slots"].to_string().into(),
            running.map_or_else(none, |running| running.to_string().into()),
            match timed_out {
                None => none(),
                Some(0) => Shown::nothing("0"),
                Some(attempts) => attempts.to_string().into(),
            },
            handlers.to_string().into(),
            words_or(&worker["tags"], "-"),
            words_or(&worker["queues"], "all"),
            ago::listed(&worker["seen_at"], now, screen).into(),
        ]);
    }
    list
}

/// The words of a list, or `nothing` if it is empty.
fn words_or(values: &Value, nothing: &str) -> Shown {
    match values.as_array().is_none_or(Vec::is_empty) {
        true => Shown::nothing(nothing),
        false => words(values).into(),
    }
}
