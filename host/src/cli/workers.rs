//! `rouse workers`: who works, what they can do, and whether that is true.

mod list;
mod show;
mod verify;

use std::process::ExitCode;

use clap::{Args as ClapArgs, Subcommand};
use serde_json::{Value, json};

use super::target::Target;
use super::text::{as_json, plain, texts, words};

/// There is no such worker.
const EXIT_UNKNOWN: u8 = 3;
/// The worker is not in a state for that.
const EXIT_REFUSED: u8 = 6;

/// Options of `rouse workers`.
#[derive(Debug, ClapArgs)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Without a command: lists, as `rouse workers ls` does."
)]
pub(super) struct Args {
    #[command(subcommand)]
    verb: Option<Verb>,

    #[command(flatten)]
    list: list::Args,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List the workers: those that live, and the dead that nobody has forgotten
    #[command(visible_alias = "list")]
    Ls(list::Args),
    /// Show one worker with its handlers
    Show(show::Args),
    /// Take a worker that has ended off the list; the history of its jobs goes on naming it
    Forget(Forget),
    /// Ask a worker to prove that it can run a handler
    Verify(verify::Args),
}

/// Options of `rouse workers forget`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Exit codes: 0 done · 3 no such worker · 6 it lives")]
struct Forget {
    #[command(flatten)]
    target: Target,

    /// The worker's id
    id: String,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Does what is asked.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.verb {
        None => list::run(args.list).await,
        Some(Verb::Ls(args)) => list::run(args).await,
        Some(Verb::Show(args)) => show::run(args).await,
        Some(Verb::Forget(args)) => forget(args).await,
        Some(Verb::Verify(args)) => verify::run(args).await,
    }
}

fn unknown(id: &str) {
    eprintln!(
        "rouse: no worker {} is listed (`rouse workers ls --all`)",
        plain(id)
    );
}

async fn forget(args: Forget) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    match store.forget_worker(&args.id).await {
        Ok(lives) if args.json => {
            println!("{}", as_json(json!({"worker_id": args.id, "lives": lives})));
        }
        Ok(_) => println!("worker {} is forgotten", plain(&args.id)),
        Err(error) if error.is_unknown_worker() => {
            unknown(&args.id);
            return Ok(ExitCode::from(EXIT_UNKNOWN));
        }
        Err(error) if error.is_refused_by_state() => {
            eprintln!("rouse: {error}");
            return Ok(ExitCode::from(EXIT_REFUSED));
        }
        Err(error) => return Err(error.into()),
    }
    Ok(ExitCode::SUCCESS)
}

/// The words of a list, or what stands for none.
fn list(values: &Value, nothing: &str) -> String {
    match texts(values).next() {
        None => nothing.to_string(),
        Some(_) => words(values),
    }
}
