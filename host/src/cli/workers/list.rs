//! `rouse workers ls`.

use std::process::ExitCode;

use clap::Args as ClapArgs;
use comfy_table::{Table, presets};
use serde_json::{Value, json};

use super::list;
use crate::cli::ago;
use crate::cli::target::{Target, seen};
use crate::cli::text::{as_json, plain};

/// Options of `rouse workers ls`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Needs the role rouse_observer or rouse_worker. `running` is what a worker said with its last heartbeat.
Exit code: 0, also where there is none")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// Every life of every worker, the orderly ended ones too
    #[arg(long)]
    all: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Lists.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    let workers = seen(match args.all {
        true => store.lives(None).await?,
        false => store.workers().await?,
    })?;
    match args.json {
        true => println!("{}", as_json(json!({"workers": workers}))),
        false => println!("{}", table(&workers)),
    }
    Ok(ExitCode::SUCCESS)
}

fn table(workers: &[Value]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header([
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
    for worker in workers {
        let text = |key: &str| plain(worker[key].as_str().unwrap_or_default());
        let handlers = worker["handlers"].as_array().map_or(0, Vec::len);
        let running = worker["stats"]["active"].as_u64();
        let timed_out = worker["stats"]["timed_out"].as_u64();
        table.add_row([
            text("worker_id"),
            text("state"),
            text("hostname"),
            text("version"),
            worker["slots"].to_string(),
            running.map_or("-".into(), |running| running.to_string()),
            timed_out.map_or("-".into(), |attempts| attempts.to_string()),
            handlers.to_string(),
            list(&worker["tags"], "-"),
            list(&worker["queues"], "all"),
            worker["seen_s"]
                .as_f64()
                .map(|secs| format!("{} ago", ago::seconds(secs)))
                .unwrap_or_default(),
        ]);
    }
    table.trim_fmt()
}
