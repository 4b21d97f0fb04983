//! `rouse handlers`: what a folder of modules has to offer, and what the fleet can run.

mod filter;
mod fleet;
mod folder;
mod held;
mod in_force;
mod lock;
mod show;
mod sign;
mod trouble;

use std::process::ExitCode;

use clap::{Args as ClapArgs, Subcommand};

/// Options of `rouse handlers`.
#[derive(Debug, ClapArgs)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Without a command: the handlers of a folder, which needs no database, and whether a host would start with the settings: whether \
its secrets and the token of invocations can be read, here and now, and which granted directories are not there.\n\
Exit codes: 0 every file serves, and a host would start · 1 a file is refused, a host would not start, or the folder \
cannot be read"
)]
pub(super) struct Args {
    #[command(subcommand)]
    verb: Option<Verb>,

    #[command(flatten)]
    folder: folder::Args,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List what the workers that live can run, and what waits for a worker that nobody is
    #[command(visible_alias = "list")]
    Ls(fleet::Args),
    /// Show one handler: on which workers, in which versions, what waits for it, and its manifest
    Show(show::Args),
    /// List the modules of a folder in handlers.lock, as those that may serve (pin = "lock" in rouse.toml)
    Lock(lock::Args),
    /// Make a key that signs modules, and print what hosts have to trust (trusted_keys in rouse.toml)
    Keygen(sign::KeygenArgs),
    /// Sign modules
    Sign(sign::SignArgs),
}

/// Does what is asked.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.verb {
        None => folder::run(&args.folder).await,
        Some(Verb::Ls(args)) => fleet::run(args).await,
        Some(Verb::Show(args)) => show::run(args).await,
        Some(Verb::Lock(args)) => lock::run(&args),
        Some(Verb::Keygen(args)) => sign::keygen(&args),
        Some(Verb::Sign(args)) => sign::sign(&args),
    }
}
