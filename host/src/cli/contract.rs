//! `rouse contract`: what producers may enqueue, published in the database.

mod written;

use std::collections::HashSet;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args as ClapArgs, Subcommand};
use serde_json::{Value, json};
use tracing::{info, warn};

use self::written::written;
use super::dev_file::Serves;
use super::handlers::{Folder, FolderLocation};
use super::target::Target;
use super::text::{as_json, plain};
use crate::job::pattern_covers;
use crate::sandbox::{Catalog, Handler, HandlerSet};
use crate::store::connect::Connector;
use crate::store::{Change, ContractChange, delete_contracts, publish_contracts};

/// The schema of the typed functions.
const SCHEMA: &str = "jobs";

/// The time after which `rouse dev` publishes again while a worker still has a removed handler, or after an error.
const AGAIN_AFTER: Duration = Duration::from_secs(2);

/// The maximum number of texts that [`Warned`] keeps.
const TEXTS_MAX: usize = 100;

/// Options of `rouse contract`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
A contract is made from the schema of a handler's payload. Once it is published, rouse.enqueue and rouse.enqueue_many refuse payloads that the handler \
would refuse, and a typed function enqueues its jobs:\n\n  \
SELECT jobs.email_send(\"to\" => 'a@b.c', subject => 'x', rouse_queue => 'mail');\n\n\
`rouse dev` publishes contracts automatically. The view rouse.contracts lists what is published.")]
pub(super) struct Args {
    #[command(subcommand)]
    operation: Operation,
}

#[derive(Debug, Subcommand)]
enum Operation {
    /// Publish the contracts of the handlers in a folder
    #[command(after_help = "\
Needs the role rouse_owner. Either everything is published, in one transaction, or nothing.\n\
While workers run modules with different schemas, a payload is accepted if one of them accepts it. Without HANDLER, the contract of a handler \
that is not in the folder, and that no worker has, is removed: its function raises an error until it is deleted.")]
    Publish(Publish),
    /// Show what `publish` would change
    #[command(after_help = "\
Needs the role rouse_owner. Nothing is changed.\n\
Exit codes: 0 nothing would change · 1 something would, or an error")]
    Diff(Publish),
    /// Delete contracts with their functions
    Delete(Delete),
}

/// Options of `rouse contract publish` and `diff`.
#[derive(Debug, ClapArgs)]
struct Publish {
    #[command(flatten)]
    target: Target,

    /// Only these handlers, by name or pattern such as billing.*; default: all
    #[arg(value_name = "HANDLER")]
    only: Vec<String>,

    /// The folder; default: that of a `rouse dev` that runs here, else handlers-wasm
    #[arg(long, value_name = "DIR")]
    handlers: Option<PathBuf>,

    /// Settings; default: those of a `rouse dev` that serves the folder from here, else ./rouse.toml, if there is one
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// The schema of the typed functions; created if it does not exist
    #[arg(long, value_name = "NAME", default_value = SCHEMA)]
    schema: String,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Options of `rouse contract delete`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Needs the role rouse_owner. The schema of the functions stays.\n\
Exit codes: 0 done · 1 one of the handlers has no contract, and nothing was deleted, or an error")]
struct Delete {
    #[command(flatten)]
    target: Target,

    /// The handlers
    #[arg(value_name = "HANDLER", required_unless_present = "all")]
    handlers: Vec<String>,

    /// Delete the contracts of all handlers
    #[arg(long, conflicts_with = "handlers")]
    all: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the subcommand.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.operation {
        Operation::Publish(args) => publish(&args, false).await,
        Operation::Diff(args) => publish(&args, true).await,
        Operation::Delete(args) => delete(&args).await,
    }
}

async fn publish(args: &Publish, dry_run: bool) -> anyhow::Result<ExitCode> {
    // Check the database first: compiling the modules takes longer.
    let connector = args.target.connector()?;
    args.target.checked_store().await?;
    let (folder, config) = (args.handlers.as_deref(), args.config.as_deref());
    let location = FolderLocation::resolve(folder, config, Serves::here);
    let folder = Folder::open(&location).await?;
    let handlers = chosen(&folder.handlers, &args.only)?;
    let refused = &folder.handlers.refused;
    for refusal in refused {
        eprintln!(
            "rouse: {} is refused, so nothing is removed: {}",
            refusal.file,
            plain(&refusal.why)
        );
    }
    let complete = args.only.is_empty() && refused.is_empty();
    let contracts = contracts(&handlers);
    let mut client = connector.client().await?;
    let changes =
        publish_contracts(&mut client, &contracts, &args.schema, complete, dry_run).await?;
    if args.json {
        let printed = json!({"schema": args.schema, "published": !dry_run, "changes": changes});
        println!("{}", as_json(printed));
    } else {
        print_changes(&changes, dry_run);
    }
    let differs = changes
        .iter()
        .any(|it| !matches!(it.change, Change::Unchanged | Change::Kept));
    Ok(match dry_run && differs {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    })
}

/// The handlers that match these names and patterns; all handlers if there are none.
fn chosen<'a>(handlers: &'a HandlerSet, only: &[String]) -> anyhow::Result<Vec<&'a Handler>> {
    for pattern in only {
        let is_known = handlers
            .handlers
            .keys()
            .any(|name| pattern_covers(pattern, name));
        anyhow::ensure!(
            is_known,
            "no handler of the folder is called {}; `rouse handlers` lists them",
            plain(pattern)
        );
    }
    let is_chosen =
        |name: &str| only.is_empty() || only.iter().any(|pattern| pattern_covers(pattern, name));
    let all = handlers.handlers.iter();
    let chosen = all.filter(|(name, _)| is_chosen(name));
    Ok(chosen.map(|(_, handler)| &**handler).collect())
}

fn contracts(handlers: &[&Handler]) -> String {
    let contracts: Vec<Value> = handlers.iter().map(|handler| written(handler)).collect();
    Value::from(contracts).to_string()
}

fn print_changes(changes: &[ContractChange], dry_run: bool) {
    let mut unchanged = 0;
    for change in changes {
        let ContractChange {
            handler,
            function,
            fields,
            ..
        } = change;
        let what = match change.change {
            Change::New => "new",
            Change::Changed => "changed",
            Change::Removed => "removed",
            Change::Kept => "kept",
            Change::Unchanged => {
                unchanged += 1;
                continue;
            }
        };
        let mut notes = vec![plain(handler)];
        if let Some(version) = &change.version {
            notes[0].push_str(&format!(" {}", plain(version)));
        }
        if !fields.is_empty() {
            notes.push(plain(&fields.join(" ")));
        }
        match (change.change, change.versions) {
            (Change::Removed, _) => notes.push(
                "no worker has it: its function raises an error, `rouse contract delete` deletes it"
                    .into(),
            ),
            (Change::Kept, _) => notes.push("not in the folder, but a worker has it".into()),
            (_, Some(versions @ 2..)) => notes.push(format!(
                "{versions} schemas in use: a payload is accepted if one of them accepts it"
            )),
            _ => {}
        }
        println!("{what:8} {}  ({})", plain(function), notes.join("; "));
    }
    match (unchanged, changes.len()) {
        (_, 0) => println!("no handlers"),
        (0, _) => {}
        (count, all) if count == all => println!(
            "nothing {} ({count} unchanged)",
            if dry_run { "would change" } else { "changed" }
        ),
        (count, _) => println!("{count} unchanged"),
    }
}

async fn delete(args: &Delete) -> anyhow::Result<ExitCode> {
    let client = args.target.connector()?.client().await?;
    args.target.checked_store().await?;
    if !args.all {
        let unknown = "SELECT h FROM unnest($1::text[]) AS h WHERE NOT EXISTS (SELECT FROM rouse.contracts AS c WHERE c.handler = h)";
        let unknown = client.query(unknown, &[&args.handlers]).await?;
        if let Some(row) = unknown.first() {
            let name: &str = row.get(0);
            anyhow::bail!(
                "{} has no contract; the view rouse.contracts lists all contracts",
                plain(name)
            );
        }
    }
    let handlers = (!args.all).then_some(&args.handlers[..]);
    let deleted = delete_contracts(&client, handlers).await?;
    if args.json {
        println!("{}", as_json(json!({"deleted": deleted})));
    } else {
        for handler in &deleted {
            println!("deleted  {}", plain(handler));
        }
        if deleted.is_empty() {
            println!("no handler has a contract");
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Publishes the contracts of all handlers now, and after each change of the folder, until the future
/// is dropped.
pub(super) async fn publish_forever(connector: Connector, catalog: Arc<Catalog>) {
    let mut changed = catalog.changed();
    let mut warned = Warned::default();
    loop {
        changed.mark_unchanged();
        let handlers = catalog.tried().await;
        let again = match publish_all(&connector, &handlers).await {
            Ok(changes) => {
                warned = Warned::default();
                changes.iter().any(|it| it.change == Change::Kept)
            }
            Err(error) => {
                let error = format!("{error:#}");
                if warned.is_new(&error) {
                    warn!(error, "cannot publish the contracts");
                }
                true
            }
        };
        tokio::select! {
            () = tokio::time::sleep(AGAIN_AFTER), if again => {}
            changed = changed.changed() => if changed.is_err() {
                return;
            }
        }
    }
}

/// The errors that were logged since the last success: one that lasts, such as a function of the user's own with the
/// name of a typed function, is logged once.
#[derive(Default)]
struct Warned(HashSet<String>);

impl Warned {
    /// True if this error has not been logged.
    fn is_new(&mut self, error: &str) -> bool {
        if self.0.len() == TEXTS_MAX {
            self.0.clear();
        }
        self.0.insert(error.to_owned())
    }
}

async fn publish_all(
    connector: &Connector,
    handlers: &HandlerSet,
) -> anyhow::Result<Vec<ContractChange>> {
    let all: Vec<&Handler> = handlers.handlers.values().map(|it| &**it).collect();
    let mut client = connector.client().await.context("connect")?;
    let complete = handlers.refused.is_empty() && handlers.slow.is_empty();
    let contracts = contracts(&all);
    let changes = publish_contracts(&mut client, &contracts, SCHEMA, complete, false).await?;
    for change in &changes {
        if matches!(
            change.change,
            Change::New | Change::Changed | Change::Removed
        ) {
            info!(handler = %change.handler, function = %change.function, change = ?change.change, "published a contract");
        }
    }
    Ok(changes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_is_logged_once() {
        let mut warned = Warned::default();
        let logged = ["a", "a", "b", "a", "b", "c"].map(|error| warned.is_new(error));
        assert_eq!(logged, [true, false, true, false, false, true]);
        let all = (0..10 * TEXTS_MAX).filter(|n| warned.is_new(&n.to_string()));
        assert_eq!(all.count(), 10 * TEXTS_MAX);
        assert!(warned.0.len() <= TEXTS_MAX);
    }
}
