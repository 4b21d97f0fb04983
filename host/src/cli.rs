//! The `rouse` command: one file per subcommand.

mod ago;
mod attempt_error;
mod audit;
mod chain;
mod compile_module;
mod contract;
mod dev;
mod dev_file;
mod each;
mod enqueue;
mod example;
mod flow;
mod gate;
mod handlers;
mod host;
mod invoke;
mod job;
mod list;
mod migrate;
mod misspelt;
mod nearest;
pub mod new;
mod number;
mod open_files;
mod payload;
mod postgres;
mod queue;
#[cfg(test)]
mod reference;
mod schedule;
mod screen;
mod serve;
mod served;
mod settings;
mod signals;
mod state;
mod target;
mod text;
mod top;
mod ui;
mod used;
mod waiting;
mod why;
mod wit;
mod workers;

use std::process::ExitCode;
use std::sync::Arc;

use clap::{Parser, Subcommand};

use crate::config::Environment;
use crate::telemetry::{self, LogFormat};
use crate::worker::Middleware;

/// Runs Postgres jobs in WebAssembly sandboxes.
///
/// Handlers are WebAssembly modules in a folder; jobs are enqueued with SQL:
/// SELECT rouse.enqueue('text.stats', '{"text": "hello"}');
#[derive(Debug, Parser)]
#[command(
    name = "rouse",
    version,
    max_term_width = 80,
    after_help = "\
Start here:
  rouse dev        a private Postgres, migrated, and a worker on ./handlers-wasm
  rouse new greet  a handler of your own, ready to build
  rouse wit        the contract for handlers in other languages\n\
In production:
  rouse migrate    once, and after each upgrade (DATABASE_URL)
  rouse serve      as many as you like (DATABASE_URL)"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,

    /// The format of log lines, on standard error. Filter them with ROUSE_LOG (for instance
    /// `info,rouse=debug`).
    #[arg(
        long,
        value_name = "text|json",
        default_value = "text",
        global = true,
        display_order = 900
    )]
    log_format: LogFormat,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run everything here: a private Postgres, migrated, and a worker
    Dev(dev::Args),
    /// Run a worker on DATABASE_URL
    Serve(serve::Args),
    /// Bring schema `rouse` of DATABASE_URL up to date
    Migrate(migrate::Args),
    /// Enqueue one job and print its id
    Enqueue(enqueue::Args),
    /// Run one handler once, without a queue or a database
    Invoke(invoke::Args),
    /// Show, list and change jobs
    Job(job::Args),
    /// Explain why a job has not started, and what would change that
    Why(why::Args),
    /// Show a chain: a job and those that continue it
    Chain(chain::Args),
    /// Show, list, cancel, retry and delete flows: graphs of jobs
    Flow(flow::Args),
    /// List, show, set, run, pause, backfill and delete schedules
    Schedule(schedule::Args),
    /// Show what happened, when, and who did it
    Audit(audit::Args),
    /// List, set, drain, pause, resume and purge queues
    Queue(queue::Args),
    /// List, show, set and delete gates: limits on which jobs run
    Gate(gate::Args),
    /// List, read and change what handlers keep between their jobs
    State(state::Args),
    /// Show the running attempts and what they use
    Top(top::Args),
    /// Serve the dashboard of DATABASE_URL, without a worker
    Ui(ui::Args),
    /// List, show, forget and verify workers
    Workers(workers::Args),
    /// List the handlers of a folder, or of the fleet
    Handlers(handlers::Args),
    /// Publish checks and typed functions for producers
    Contract(contract::Args),
    /// Create the crate of a new handler
    New(new::Args),
    /// Write the contract for handlers (WIT), for languages other than Rust
    Wit(wit::Args),
    /// Run only the private Postgres, migrated, without a worker
    Postgres(postgres::Args),
    /// Compile one module for a host
    #[command(hide = true)]
    CompileModule(compile_module::Args),
}

impl Command {
    /// The log filter if ROUSE_LOG is not set. Commands that print one result log errors only.
    fn log_filter(&self) -> &'static str {
        match self {
            Self::Serve(_) | Self::Postgres(_) | Self::Ui(_) => telemetry::USUAL,
            // This command prints the ends of jobs itself.
            Self::Dev(_) => dev::LOG_FILTER,
            // The handler's log is part of its output.
            Self::Invoke(_) => "error,rouse::guest=info",
            // This command may work for hours.
            Self::Queue(args) if args.works() => "warn",
            Self::Migrate(_)
            | Self::Enqueue(_)
            | Self::Job(_)
            | Self::Why(_)
            | Self::Chain(_)
            | Self::Flow(_)
            | Self::Schedule(_)
            | Self::Audit(_)
            | Self::Queue(_)
            | Self::Gate(_)
            | Self::State(_)
            | Self::Top(_)
            | Self::Workers(_)
            | Self::Handlers(_)
            | Self::Contract(_)
            | Self::CompileModule(_)
            | Self::New(_)
            | Self::Wit(_) => "error",
        }
    }

    /// True for commands that run until a signal, or until all work is done.
    fn works(&self) -> bool {
        match self {
            Self::Dev(_) | Self::Serve(_) | Self::Postgres(_) | Self::Ui(_) => true,
            Self::Queue(args) => args.works(),
            Self::Invoke(_)
            | Self::Migrate(_)
            | Self::Enqueue(_)
            | Self::Job(_)
            | Self::Why(_)
            | Self::Chain(_)
            | Self::Flow(_)
            | Self::Schedule(_)
            | Self::Audit(_)
            | Self::Gate(_)
            | Self::State(_)
            | Self::Top(_)
            | Self::Workers(_)
            | Self::Handlers(_)
            | Self::Contract(_)
            | Self::CompileModule(_)
            | Self::New(_)
            | Self::Wit(_) => false,
        }
    }
}

/// Ends `rouse job 1 | head -1` when `head` ends. Not for workers: a connection that the database closes must not end
/// them.
fn end_quietly_with_the_reader() {
    set_sigpipe(libc::SIG_DFL);
}

/// While it exists, writing to a pipe without a reader is an error, and does not end the process: a compiler that ends
/// before it has read its module must not end the command.
struct PipesFail;

impl PipesFail {
    fn start() -> Self {
        set_sigpipe(libc::SIG_IGN);
        Self
    }
}

impl Drop for PipesFail {
    fn drop(&mut self) {
        end_quietly_with_the_reader();
    }
}

/// Sets what SIGPIPE does: `SIG_DFL` or `SIG_IGN`.
fn set_sigpipe(action: libc::sighandler_t) {
    #[expect(
        unsafe_code,
        reason = "the standard library ignores SIGPIPE, and has no way to change that"
    )]
    // SAFETY: neither action needs a handler.
    unsafe {
        libc::signal(libc::SIGPIPE, action);
    }
}

/// Parses the command line, runs one command, reports its error.
pub fn main() -> ExitCode {
    main_with(Vec::new())
}

/// Like [`main`], with middleware around each attempt that `dev`, `serve` and `queue drain` run, the first one
/// outermost (`examples/embed`). The process must do nothing else: the command sets up logs and signals, and starts the
/// executable of the process to compile modules.
pub fn main_with(middleware: Vec<Arc<dyn Middleware>>) -> ExitCode {
    let cli = Cli::parse();
    // First of all: the compiler limits its own resources, and threads of this process would count.
    if let Command::CompileModule(args) = &cli.command {
        return compile_module::run(args);
    }
    if let Err(error) = Environment.check() {
        eprintln!("rouse: {error}");
        return ExitCode::FAILURE;
    }
    let filter = Environment
        .log_filter()
        .unwrap_or_else(|| cli.command.log_filter().into());
    let jobs = dev::Jobs::new();
    let listener = matches!(cli.command, Command::Dev(_)).then(|| jobs.listener());
    // Nothing here prints or starts anything: long-running commands handle signals from their first statement on.
    if let Err(error) = telemetry::init(cli.log_format, &filter, listener) {
        eprintln!("rouse: {error}");
        return ExitCode::FAILURE;
    }
    // Dropped at the end, and after a panic: it waits until the last lines are written.
    let _flush = if cli.command.works() {
        match telemetry::write_in_background() {
            Ok(flush) => Some(flush),
            Err(error) => {
                eprintln!("rouse: cannot start: {error}");
                return ExitCode::FAILURE;
            }
        }
    } else {
        end_quietly_with_the_reader();
        None
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("rouse")
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("rouse: cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    let done = runtime.block_on(async {
        match cli.command {
            Command::Dev(args) => dev::run(args, &jobs, middleware).await,
            Command::Serve(args) => serve::run(args, middleware).await,
            Command::Migrate(args) => migrate::run(args).await,
            Command::Enqueue(args) => enqueue::run(args).await,
            Command::Invoke(args) => invoke::run(args).await,
            Command::Job(args) => job::run(args).await,
            Command::Chain(args) => chain::run(args).await,
            Command::Flow(args) => flow::run(args).await,
            Command::Schedule(args) => schedule::run(args).await,
            Command::Audit(args) => audit::run(args).await,
            Command::Queue(args) => queue::run(args, middleware).await,
            Command::Gate(args) => gate::run(args).await,
            Command::State(args) => state::run(args).await,
            Command::Top(args) => top::run(args).await,
            Command::Ui(args) => ui::run(args).await,
            Command::Why(args) => why::run(args).await,
            Command::Workers(args) => workers::run(args).await,
            Command::Handlers(args) => handlers::run(args).await,
            Command::Contract(args) => contract::run(args).await,
            Command::New(args) => new::run(&args),
            Command::Wit(args) => wit::run(&args),
            Command::Postgres(args) => postgres::run(args).await,
            // Handled above.
            Command::CompileModule(args) => Ok(compile_module::run(&args)),
        }
    });
    // Stopped guests release their threads soon; do not wait for anything else.
    runtime.shutdown_background();
    match done {
        Ok(code) => code,
        Err(error) => {
            telemetry::line(&text::error_line(format_args!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}
