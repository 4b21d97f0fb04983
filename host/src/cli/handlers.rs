//! `rouse handlers`: the handlers of a folder of modules, and those of the fleet.

mod filter;
mod fleet;
mod folder;
mod gates;
mod held;
mod in_force;
mod lock;
mod show;
mod sign;
mod trouble;
mod types;

pub(super) use folder::{Folder, FolderLocation};

use std::process::ExitCode;

use clap::{Args as ClapArgs, Subcommand};

/// Options of `rouse handlers`.
#[derive(Debug, ClapArgs)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Without a command: lists the handlers of a folder, without a database, and checks whether a host would start with the settings: \
whether its secrets, tokens, keys and logins can be read, and which granted directories are missing.\n\
Exit codes: 0 every file serves, and a host would start · 1 a file is refused, a host would not start, or the folder \
cannot be read"
)]
pub(super) struct Args {
    #[command(subcommand)]
    operation: Option<Operation>,

    #[command(flatten)]
    folder: folder::Args,
}

#[derive(Debug, Subcommand)]
enum Operation {
    /// List the handlers of the running workers, and the jobs that no worker can run
    #[command(visible_alias = "list")]
    Ls(fleet::Args),
    /// Show one handler: its workers and versions, its waiting jobs, and its manifest
    Show(show::Args),
    /// Write handlers.lock: the modules of a folder that may serve (pin = "lock" in rouse.toml)
    Lock(lock::Args),
    /// Make a key that signs modules, and print its public key (for trusted_keys in rouse.toml)
    Keygen(sign::KeygenArgs),
    /// Sign modules
    Sign(sign::SignArgs),
    /// Print types of payloads and results, and typed calls, for producers in other languages
    Types(types::Args),
}

/// Runs the subcommand.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.operation {
        None => folder::run(&args.folder).await,
        Some(Operation::Ls(args)) => fleet::run(args).await,
        Some(Operation::Show(args)) => show::run(args).await,
        Some(Operation::Lock(args)) => lock::run(&args),
        Some(Operation::Keygen(args)) => sign::keygen(&args),
        Some(Operation::Sign(args)) => sign::sign(&args),
        Some(Operation::Types(args)) => types::run(args).await,
    }
}
