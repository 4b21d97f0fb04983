//! `rouse handlers show`: one handler, in the fleet and in a folder.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args as ClapArgs;
use comfy_table::{Table, presets};
use serde_json::{Value, json};

use super::fleet::{backlog, handlers, worker};
use super::folder::Folder;
use crate::cli::attempt_error::cell;
use crate::cli::target::Target;
use crate::cli::text::plain;

/// Neither a worker nor the folder has it, and nothing waits for it.
const EXIT_UNKNOWN: u8 = 3;

/// Where hosts look for modules, unless they are told otherwise.
const FOLDER: &str = "handlers-wasm";

/// Options of `rouse handlers show`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Needs the role rouse_observer or rouse_worker; with --folder no database.
Exit codes: 0 found · 3 no worker and no folder has it, and nothing waits for it")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// The handler, for instance text.stats
    name: String,

    /// Only its manifest in this folder, without a database; default: the fleet's, and ./handlers-wasm where that is there
    #[arg(long, value_name = "DIR", conflicts_with = "database_url")]
    folder: Option<PathBuf>,

    /// Settings for the manifest; default: ./rouse.toml, if there is one
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Shows it.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let (on, waiting) = match args.folder {
        None => fleet(&args).await?,
        Some(_) => (Vec::new(), Vec::new()),
    };
    let manifest = manifest(&args).await?;
    if on.is_empty() && waiting.is_empty() && manifest.is_none() {
        eprintln!(
            "rouse: nobody has a handler {}, and nothing waits for it (`rouse handlers ls`)",
            plain(&args.name)
        );
        return Ok(ExitCode::from(EXIT_UNKNOWN));
    }
    if args.json {
        println!(
            "{}",
            json!({"handler": args.name, "on": on, "waiting": waiting, "manifest": manifest})
        );
        return Ok(ExitCode::SUCCESS);
    }
    let mut parts = Vec::new();
    if args.folder.is_none() {
        parts.push(match on.is_empty() {
            true => "no worker that runs now has it".to_string(),
            false => workers(&on),
        });
    }
    if !waiting.is_empty() {
        parts.push(format!("waiting\n{}", backlog(&waiting)));
    }
    if let Some(manifest) = &manifest {
        parts.push(format!("manifest\n{}", shown(manifest)));
    }
    println!("{}", parts.join("\n\n"));
    Ok(ExitCode::SUCCESS)
}

/// The workers that have it, and what waits for it.
async fn fleet(args: &Args) -> anyhow::Result<(Vec<Value>, Vec<Value>)> {
    let store = args.target.store()?;
    store.check_schema().await?;
    let named = |rows: Vec<Value>| -> Vec<Value> {
        let of_it = |row: &Value| row["handler"] == args.name;
        rows.into_iter().filter(of_it).collect()
    };
    let on = named(handlers(&store).await?);
    Ok((on, named(store.backlog().await?.unwrap_or_default())))
}

/// What the folder's module says of it; none: there is no folder, or it does not have it.
async fn manifest(args: &Args) -> anyhow::Result<Option<Value>> {
    let folder = match &args.folder {
        Some(folder) => folder.as_path(),
        None if Path::new(FOLDER).is_dir() => Path::new(FOLDER),
        None => return Ok(None),
    };
    let folder = Folder::open(folder, args.config.as_deref()).await?;
    let handler = folder.handlers.get(&args.name);
    Ok(handler.map(|handler| folder.manifest(handler)))
}

fn workers(on: &[Value]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(["version", "sha256", "worker", "slots", "granted"]);
    for row in on {
        let text = |key: &str| plain(row[key].as_str().unwrap_or_default());
        let digest = text("sha256");
        let grants: Vec<&str> = row["grants"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        table.add_row([
            text("version"),
            digest.get(..12).unwrap_or(&digest).to_string(),
            worker(row),
            row["slots"].to_string(),
            plain(&grants.join(", ")),
        ]);
    }
    table.trim_fmt()
}

fn shown(manifest: &Value) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    for (key, value) in manifest.as_object().into_iter().flatten() {
        table.add_row([key.clone(), cell(value)]);
    }
    table.trim_fmt()
}
