//! `rouse handlers show`: one handler, in the fleet and in a folder.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args as ClapArgs;
use serde::Serialize;
use serde_json::Value;

use super::fleet::{backlog, worker};
use super::folder::{Folder, FolderLocation, Manifest};
use super::gates;
use super::in_force::{self, Setting};
use crate::cli::attempt_error::cell;
use crate::cli::dev_file::Serves;
use crate::cli::invoke::unknown;
use crate::cli::list::List;
use crate::cli::nearest::{did_you_mean, nearest};
use crate::cli::target::{Target, seen};
use crate::cli::text::{as_json, digest, plain, words};
use crate::config::File;
use crate::job::OnError;
use crate::sandbox::{Handler, Missing, annotated};

/// No worker and no folder has the handler, and no job waits for it.
const EXIT_UNKNOWN: u8 = 3;

/// Options of `rouse handlers show`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Needs the role rouse_observer, rouse_operator or rouse_worker; with --handlers no database.\n\
Exit codes: 0 found · 3 no worker and no folder has it, and no job waits for it")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// The handler, for instance text.stats
    name: String,

    /// Show only the manifest in this folder, without a database; default: the fleet, and the manifest in the folder of
    /// a `rouse dev` that runs here, else in ./handlers-wasm if that exists
    #[arg(long = "handlers", value_name = "DIR", conflicts_with = "database_url")]
    folder: Option<PathBuf>,

    /// Settings for the manifest; default: those of a `rouse dev` that serves the folder from here, else ./rouse.toml
    /// if it exists
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Also print the schemas of payload and result
    #[arg(long)]
    schema: bool,

    /// Also print the settings that have their default
    #[arg(long)]
    defaults: bool,

    /// Print everything, including the schemas, as one JSON object
    #[arg(long)]
    json: bool,
}

/// Shows the handler.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut fleet = Fleet::default();
    let here = match &args.folder {
        None => {
            fleet = Fleet::query(&args).await?;
            in_the_usual_folder(&args).await
        }
        Some(dir) => {
            let location = FolderLocation::resolve(Some(dir), args.config.as_deref(), Serves::here);
            let folder = Folder::open(&location).await?;
            let Some(handler) = folder.handlers.get(&args.name) else {
                eprintln!("{}", unknown(&args.name, dir, &folder.handlers));
                return Ok(ExitCode::from(EXIT_UNKNOWN));
            };
            Some(Here::for_handler(&folder, handler))
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
            "rouse: no worker has a handler {}, and no job waits for it (`rouse handlers ls`){}",
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
            true => "no running worker has it".to_string(),
            false => workers(&on),
        });
    }
    let parked: Vec<String> = on.iter().filter_map(parked).collect();
    if !parked.is_empty() {
        parts.push(format!("parked\n{}", parked.join("\n")));
    }
    if !waiting.is_empty() {
        parts.push(format!("waiting\n{}", backlog(&waiting, now)));
    }
    if let Some(here) = &here {
        parts.push(format!("manifest\n{}", here.shown()));
        parts.push(here.as_in.clone());
        parts.push(format!("granted\n{}", here.granted));
        if !here.statements.is_empty() {
            parts.push(format!("statements\n{}", here.statements));
        }
        if !here.gates.is_empty() {
            parts.push(format!(
                "gates, unless an operator has set a gate with the same name\n{}",
                here.gates
            ));
        }
        if !here.withheld.is_empty() {
            parts.push(format!(
                "withheld, because its table is not bound to a module\n{}",
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
        // Printed last, so that they can be copied.
        if !here.lines.is_empty() {
            parts.push(format!(
                "add these lines to rouse.toml to grant what is missing or withheld; replace each … with a value\n\n{}",
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

/// The handler in a folder.
struct Here {
    manifest: Manifest,
    granted: String,
    /// The SQL statements that it declares, in full: an operator grants their exact text.
    statements: String,
    /// The gates that it declares, with the names that they get.
    gates: String,
    withheld: String,
    settings: Vec<Setting>,
    /// Names the file from which grants and settings were read: a host may have been started with another one.
    as_in: String,
    /// Lines for `rouse.toml` that grant what is missing.
    lines: String,
}

impl Here {
    fn for_handler(folder: &Folder, handler: &Handler) -> Self {
        Self {
            manifest: folder.manifest(handler),
            granted: folder.held(handler).table(),
            statements: statements(handler),
            gates: gates::table(&handler.manifest.name, &handler.manifest.gates),
            withheld: withheld(handler),
            settings: folder.in_force(handler),
            as_in: match folder.file.found() {
                Some(file) if folder.of_dev => format!(
                    "grants and settings as in {}, with which the `rouse dev` here was started",
                    file.display()
                ),
                None if folder.of_dev => format!(
                    "grants and settings without any {}, because the `rouse dev` here was started without one",
                    File::USUAL
                ),
                Some(file) => format!(
                    "grants and settings as in {}; a host that was started with another --config may have others",
                    file.display()
                ),
                None => format!(
                    "grants and settings without any {}, which does not exist here; a host that was started with --config, or elsewhere, may have others",
                    File::USUAL
                ),
            },
            lines: annotated(&lines(handler), folder.file.text()),
        }
    }
}

/// Why the handler is parked on this worker.
fn parked(row: &Value) -> Option<String> {
    let why = row["parked"].as_str()?;
    let id = row["worker_id"].as_str().unwrap_or_default();
    Some(format!("{}: {}", plain(id), plain(why)))
}

/// The statements with their text, each line indented.
fn statements(handler: &Handler) -> String {
    let mut text = String::new();
    for statement in &handler.manifest.statements {
        let granted = handler.sql().and_then(|sql| sql.statement(&statement.name));
        let mut notes = vec![match granted {
            Some(_) => "granted".to_owned(),
            None => "not granted".to_owned(),
        }];
        notes.extend(statement.rows.map(|rows| format!("rows = {rows}")));
        if statement.on_error == OnError::Retry {
            notes.push("retried after an error".into());
        }
        text += &format!("{}: {}\n", plain(&statement.name), notes.join(", "));
        for line in statement.sql.lines() {
            text += &format!("    {}\n", plain(line));
        }
    }
    text.trim_end().to_owned()
}

/// A line for each kind of grant that is withheld.
fn withheld(handler: &Handler) -> String {
    let mut table = List::plain();
    for withheld in &handler.withheld {
        table.row([
            withheld.what.to_owned(),
            format!("[handlers.\"{}\"]", withheld.table),
        ]);
    }
    table.text()
}

/// The lines that grant what is missing, and those that bind tables whose grants are withheld. No table occurs twice.
fn lines(handler: &Handler) -> String {
    let mut missing = handler.missing();
    missing.retain(|missing| {
        let lines = missing.lines.as_ref();
        let mut withheld = handler.withheld.iter();
        lines.is_none_or(|lines| withheld.all(|withheld| !lines.contains(&withheld.lines)))
    });
    let mut tables: Vec<&str> = handler
        .withheld
        .iter()
        .map(|withheld| withheld.lines.as_str())
        .collect();
    tables.dedup();
    let missing = Missing::lines(&missing);
    tables.extend((!missing.is_empty()).then_some(missing.as_str()));
    tables.join("\n\n")
}

/// The workers that have the handler, and the jobs that wait for it.
#[derive(Default)]
struct Fleet {
    on: Vec<Value>,
    waiting: Vec<Value>,
    /// The time of the database.
    now: f64,
    /// The handler with the most similar name, if no worker has this one and no job waits for it.
    nearest: Option<String>,
}

impl Fleet {
    async fn query(args: &Args) -> anyhow::Result<Self> {
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

/// The handler in the usual folder; `None` if there is no such folder, if it does not have the handler, or if it cannot
/// be opened. A folder that cannot be opened is reported, and the fleet is still shown.
async fn in_the_usual_folder(args: &Args) -> Option<Here> {
    // Another database has other hosts, with settings of their own.
    let dev = || args.target.is_implicit().then(Serves::here).flatten();
    let location = FolderLocation::resolve(None, args.config.as_deref(), dev);
    if !location.folder.is_dir() {
        return None;
    }
    match Folder::open(&location).await {
        Ok(folder) => {
            let handler = folder.handlers.get(&args.name)?;
            Some(Here::for_handler(&folder, handler))
        }
        Err(error) => {
            eprintln!(
                "rouse: the manifest is not shown, because {} cannot be opened: {error:#}",
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
    /// The manifest, without the parts that have a section of their own.
    fn shown(&self) -> String {
        let mut table = List::plain();
        for (key, text) in &self.manifest {
            let value = serde_json::from_str(text.get()).unwrap_or(Value::Null);
            let value = match key.as_str() {
                "input_schema" | "output_schema" => continue,
                "requested" => words(&value),
                "missing" => {
                    let names = value
                        .as_array()
                        .into_iter()
                        .flatten()
                        .map(|missing| &missing["what"]);
                    words(&names.cloned().collect())
                }
                "granted" | "grants" | "from" | "limits" | "state" | "statements" | "gates"
                | "withheld" => continue,
                "bound_by" if value.is_null() => {
                    "no table: the name belongs to the first file that had it".into()
                }
                key if self.settings.iter().any(|setting| setting.is_named(key)) => continue,
                _ => cell(&value),
            };
            table.row([key.clone(), value]);
        }
        table.text()
    }

    /// The schemas as written, each in a section of its own.
    fn schemas(&self) -> impl Iterator<Item = String> {
        ["input_schema", "output_schema"]
            .into_iter()
            .filter_map(|key| {
                let text = self.manifest.get(key)?;
                Some(format!("{key}\n{}", plain(text.get())))
            })
    }
}
