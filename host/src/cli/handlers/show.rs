//! `rouse handlers show`: one handler, in the fleet and in a folder.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args as ClapArgs;
use serde::Serialize;
use serde_json::Value;

use super::fleet::{backlog, worker};
use super::folder::{Folder, FolderLocation, Manifest};
use super::in_force::{self, Setting};
use crate::cli::attempt_error::cell;
use crate::cli::dev::serves::Serves;
use crate::cli::invoke::unknown;
use crate::cli::list::List;
use crate::cli::nearest::{did_you_mean, nearest};
use crate::cli::target::{Target, seen};
use crate::cli::text::{as_json, digest, plain, words};
use crate::config::File;
use crate::sandbox::{Handler, Missing, annotated};

/// Neither a worker nor the folder has it, and nothing waits for it.
const EXIT_UNKNOWN: u8 = 3;

/// Options of `rouse handlers show`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Needs the role rouse_observer or rouse_worker; with --folder no database.\n\
Exit codes: 0 found · 3 no worker and no folder has it, and nothing waits for it")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// The handler, for instance text.stats
    name: String,

    /// Only its manifest in this folder, without a database; default: the fleet's, and the manifest in the folder of a
    /// `rouse dev` that runs here, else in ./handlers-wasm where that is there
    #[arg(long, value_name = "DIR", conflicts_with = "database_url")]
    folder: Option<PathBuf>,

    /// Settings for the manifest; default: those of a `rouse dev` that serves the folder from here, else ./rouse.toml, if
    /// there is one
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Print the schemas of its payload and its result too
    #[arg(long)]
    schema: bool,

    /// Print the settings too that nothing sets for it
    #[arg(long)]
    defaults: bool,

    /// Print everything, schemas too, as one JSON object
    #[arg(long)]
    json: bool,
}

/// Shows it.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut fleet = Fleet::default();
    let here = match &args.folder {
        None => {
            fleet = Fleet::look(&args).await?;
            beside(&args).await
        }
        Some(dir) => {
            let location = FolderLocation::of(Some(dir), args.config.as_deref(), Serves::here);
            let folder = Folder::open(&location, "--folder").await?;
            let Some(handler) = folder.handlers.get(&args.name) else {
                eprintln!("{}", unknown(&args.name, dir, &folder.handlers));
                return Ok(ExitCode::from(EXIT_UNKNOWN));
            };
            Some(Here::of(&folder, handler))
        }
    };
    let Fleet {
        on,
        waiting,
        now,
        nearest,
    } = fleet;
    if on.is_empty() && waiting.is_empty() && here.is_none() {
        eprintln!(
            "rouse: nobody has a handler {}, and nothing waits for it (`rouse handlers ls`){}",
            plain(&args.name),
            did_you_mean(nearest.as_deref())
        );
        return Ok(ExitCode::from(EXIT_UNKNOWN));
    }
    if args.json {
        let shown = Shown {
            handler: &args.name,
            on: &on,
            waiting: &waiting,
            manifest: here.map(|here| here.manifest),
        };
        println!("{}", as_json(serde_json::to_string(&shown)?));
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
        parts.push(format!("waiting\n{}", backlog(&waiting, now)));
    }
    if let Some(here) = &here {
        parts.push(format!("manifest\n{}", here.shown()));
        parts.push(here.as_in.clone());
        parts.push(format!("granted\n{}", here.granted));
        if !here.withheld.is_empty() {
            parts.push(format!(
                "withheld, as its table is for whatever module has such a name\n{}",
                here.withheld
            ));
        }
        parts.push(format!(
            "in force\n{}",
            in_force::table(&here.settings, args.defaults)
        ));
        if args.schema {
            parts.extend(here.schemas());
        }
        // The last, to be copied to the end.
        if !here.lines.is_empty() {
            parts.push(format!(
                "these lines in rouse.toml would grant what is missing or withheld, with your values for …\n\n{}",
                here.lines
            ));
        }
    }
    println!("{}", parts.join("\n\n"));
    Ok(ExitCode::SUCCESS)
}

/// What `--json` prints.
#[derive(Serialize)]
struct Shown<'a> {
    handler: &'a str,
    on: &'a [Value],
    waiting: &'a [Value],
    manifest: Option<Manifest>,
}

/// What a folder has of the handler.
struct Here {
    manifest: Manifest,
    granted: String,
    withheld: String,
    settings: Vec<Setting>,
    /// What decides about both: a host may have been started with another file.
    as_in: String,
    /// Of `rouse.toml`, for what is missing.
    lines: String,
}

impl Here {
    fn of(folder: &Folder, handler: &Handler) -> Self {
        Self {
            manifest: folder.manifest(handler),
            granted: folder.held(handler).table(),
            withheld: withheld(handler),
            settings: folder.in_force(handler),
            as_in: match folder.file.found() {
                Some(file) if folder.of_dev => format!(
                    "grants and settings as in {}, with which the `rouse dev` here was started",
                    file.display()
                ),
                None if folder.of_dev => format!(
                    "grants and settings as without any {}, as the `rouse dev` here was started",
                    File::USUAL
                ),
                Some(file) => format!(
                    "grants and settings as in {}; a host that was started with another --config may have others",
                    file.display()
                ),
                None => format!(
                    "grants and settings as without any {}, which is not here; a host that was started with --config, or elsewhere, may have others",
                    File::USUAL
                ),
            },
            lines: annotated(&lines(handler), folder.file.text(), |handler, key| {
                folder.file.table_of(handler, key)
            }),
        }
    }
}

/// A line for each kind of grant that is withheld.
fn withheld(handler: &Handler) -> String {
    let mut table = List::plain();
    for one in &handler.withheld {
        table.row([one.what.to_owned(), format!("[handlers.\"{}\"]", one.table)]);
    }
    table.text()
}

/// The lines for what is missing, and those that bind tables of which something is withheld; no table stands there twice.
fn lines(handler: &Handler) -> String {
    let mut missing = handler.missing();
    missing.retain(|one| {
        let lines = one.lines.as_ref();
        lines.is_none_or(|lines| handler.withheld.iter().all(|it| !lines.contains(&it.lines)))
    });
    let mut tables: Vec<&str> = handler
        .withheld
        .iter()
        .map(|it| it.lines.as_str())
        .collect();
    tables.dedup();
    let missing = Missing::lines(&missing);
    tables.extend((!missing.is_empty()).then_some(missing.as_str()));
    tables.join("\n\n")
}

/// The workers that have it, and what waits for it.
#[derive(Default)]
struct Fleet {
    on: Vec<Value>,
    waiting: Vec<Value>,
    /// By the database's clock.
    now: f64,
    /// Where there is neither: the handler that is probably meant.
    nearest: Option<String>,
}

impl Fleet {
    async fn look(args: &Args) -> anyhow::Result<Self> {
        let store = args.target.checked_store().await?;
        let on = seen(store.fleet_handlers(Some(&args.name)).await?)?;
        let waiting = store.backlog(Some(&args.name)).await?.unwrap_or_default();
        let nearest = match on.is_empty() && waiting.is_empty() {
            true => {
                let all = seen(store.fleet_handlers(None).await?)?;
                let names = all.iter().filter_map(|row| row["handler"].as_str());
                nearest(&args.name, names).map(str::to_owned)
            }
            false => None,
        };
        Ok(Self {
            on,
            waiting,
            now: store.now().await?,
            nearest,
        })
    }
}

/// What the module of the usual folder says of it; none: there is no such folder, it does not have it, or it cannot be
/// opened. That is told, and does not keep the fleet from being shown.
async fn beside(args: &Args) -> Option<Here> {
    // Another database has other hosts, with settings of their own.
    let dev = || args.target.is_unsaid().then(Serves::here).flatten();
    let location = FolderLocation::of(None, args.config.as_deref(), dev);
    if !location.folder.is_dir() {
        return None;
    }
    match Folder::open(&location, "--folder").await {
        Ok(folder) => {
            let handler = folder.handlers.get(&args.name)?;
            Some(Here::of(&folder, handler))
        }
        Err(error) => {
            eprintln!(
                "rouse: no manifest is shown, as {} cannot be opened: {error:#}",
                location.folder.display()
            );
            None
        }
    }
}

fn workers(on: &[Value]) -> String {
    let mut table = List::new(["version", "sha256", "worker", "slots", "granted"]);
    table.expendable(&["slots", "sha256"]);
    for row in on {
        let text = |key: &str| plain(row[key].as_str().unwrap_or_default());
        table.row([
            text("version"),
            digest(&row["sha256"]),
            worker(row),
            row["slots"].to_string(),
            words(&row["grants"]),
        ]);
    }
    table.text()
}

impl Here {
    /// The manifest, but for what is shown beside it.
    fn shown(&self) -> String {
        let mut table = List::plain();
        for (key, text) in &self.manifest {
            let value = serde_json::from_str(text.get()).unwrap_or(Value::Null);
            let value = match key.as_str() {
                "input_schema" | "output_schema" => continue,
                "asked" => words(&value),
                "missing" => {
                    let names = value
                        .as_array()
                        .into_iter()
                        .flatten()
                        .map(|one| &one["what"]);
                    words(&names.cloned().collect())
                }
                "granted" | "grants" | "from" | "limits" | "state" | "withheld" => continue,
                "bound_by" if value.is_null() => {
                    "no table: the name belongs to the file that had it first".into()
                }
                key if self.settings.iter().any(|setting| setting.is_named(key)) => continue,
                _ => cell(&value),
            };
            table.row([key.clone(), value]);
        }
        table.text()
    }

    /// The schemas as they are written, whatever numbers they have; each by itself, to be copied.
    fn schemas(&self) -> impl Iterator<Item = String> {
        ["input_schema", "output_schema"]
            .into_iter()
            .filter_map(|key| {
                let text = self.manifest.get(key)?;
                Some(format!("{key}\n{}", plain(text.get())))
            })
    }
}
