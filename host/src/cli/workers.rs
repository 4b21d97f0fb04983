//! `rouse workers`: lists, shows, forgets and verifies workers.

mod list;
mod show;
mod verify;

use std::process::ExitCode;

use clap::{Args as ClapArgs, Subcommand};
use serde_json::{Value, json};

use super::each::{Done, Refusal, each};
use super::nearest::{did_you_mean, nearest};
use super::target::Target;
use super::text::{plain, strings, words};
use crate::store::Store;

/// There is no such worker.
const EXIT_UNKNOWN: u8 = 3;
/// The state of the worker does not allow the change.
const EXIT_REFUSED: u8 = 6;

/// Options of `rouse workers`.
#[derive(Debug, ClapArgs)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Without a command: lists the workers, like `rouse workers ls`."
)]
pub(super) struct Args {
    #[command(subcommand)]
    operation: Option<Operation>,

    #[command(flatten)]
    list: list::Args,
}

#[derive(Debug, Subcommand)]
enum Operation {
    /// List the workers: those that are alive, and dead ones until they are forgotten
    #[command(visible_alias = "list")]
    Ls(list::Args),
    /// Show one worker with its handlers
    Show(show::Args),
    /// Remove dead and stopped workers from the list; the history of their jobs still names them
    #[command(after_help = "\
Exit codes: 0 all done · 3 no such worker · 6 a worker is alive, or another transaction has locked it; \
with several workers, the highest code")]
    Forget(Workers),
    /// Clear the timeout flag of workers
    #[command(after_help = "\
A worker on which an attempt timed out has a flag with the time of the first timeout, the number of such attempts, and the last job and handler \
(`rouse workers show`). It stays until it is cleared or the worker is forgotten, including on dead workers. A record names the login that \
clears it.\n\
Exit codes: 0 all done, even if there was no flag · 3 no such worker · 6 another transaction has locked \
a worker; with several workers, the highest code")]
    Clear(Workers),
    /// Ask a worker to prove that it has the module of a handler
    Verify(verify::Args),
}

/// Options that name workers.
#[derive(Debug, ClapArgs)]
struct Workers {
    #[command(flatten)]
    target: Target,

    /// The workers' ids
    #[arg(value_name = "ID", required = true)]
    ids: Vec<String>,

    /// Print one JSON object for each worker, and one for the summary of several
    #[arg(long)]
    json: bool,
}

/// Runs the subcommand.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.operation {
        None => list::run(args.list).await,
        Some(Operation::Ls(args)) => list::run(args).await,
        Some(Operation::Show(args)) => show::run(args).await,
        Some(Operation::Forget(args)) => forget(args).await,
        Some(Operation::Clear(args)) => clear(args).await,
        Some(Operation::Verify(args)) => verify::run(args).await,
    }
}

/// The message for an unknown worker.
async fn unknown(store: &Store, id: &str) -> String {
    unlisted(store, id, "is listed").await
}

/// The message if there is no such worker; `state` names the state that was required, such as `is alive`.
async fn unlisted(store: &Store, id: &str, state: &str) -> String {
    // If this fails, only the suggestion is missing.
    let ids = store.worker_ids().await.ok().flatten().unwrap_or_default();
    format!(
        "no worker {} {state} (`rouse workers ls --all`){}",
        plain(id),
        did_you_mean(nearest(id, ids.iter().map(String::as_str)))
    )
}

async fn forget(args: Workers) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    each(&args.ids, "worker", args.json, async |id| {
        let refusal = match store.forget_worker(id).await {
            Ok(incarnations) => {
                return Ok(Ok(Done {
                    text: format!("worker {} is forgotten", plain(id)),
                    json: json!({"worker_id": id, "incarnations": incarnations}),
                }));
            }
            Err(error) if error.is_unknown_worker() => Refusal {
                code: EXIT_UNKNOWN,
                why: unknown(&store, id).await,
            },
            Err(error) if error.is_refused_by_state() => Refusal {
                code: EXIT_REFUSED,
                why: error.to_string(),
            },
            Err(error) => return Err(error.into()),
        };
        Ok(Err(refusal))
    })
    .await
}

async fn clear(args: Workers) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    each(&args.ids, "worker", args.json, async |id| {
        match store.clear_timeouts(id).await {
            Ok(incarnations) => {
                let text = match incarnations {
                    0 => format!("worker {} has no timeout flag", plain(id)),
                    _ => format!("the timeout flag of worker {} is cleared", plain(id)),
                };
                let json = json!({"worker_id": id, "incarnations": incarnations});
                Ok(Ok(Done { text, json }))
            }
            Err(error) if error.is_unknown_worker() => Ok(Err(Refusal {
                code: EXIT_UNKNOWN,
                why: unknown(&store, id).await,
            })),
            Err(error) => Err(error.into()),
        }
    })
    .await
}

/// The words of a list, or `nothing` if it is empty.
fn list(values: &Value, nothing: &str) -> String {
    match strings(values).next() {
        None => nothing.to_string(),
        Some(_) => words(values),
    }
}
