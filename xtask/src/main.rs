//! The commands that Rouse is developed with; start them as `cargo xtask`.

mod demo;

mod test;

mod check;

mod fuzz;

mod package;

mod program;

mod tool;

mod other_guests;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use rouse_workbench::guests;
use rouse_workbench::workspace::Workspace;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about = "Rouse's own commands: see it run, test it, check it, measure it.",
    after_help = "New here? `cargo xtask demo` shows the whole of it in half a minute after the build, and\n\
                  `cargo xtask test` runs all tests. Both bring their own Postgres; neither leaves anything running."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build everything, run a few hundred real jobs on a private Postgres, show the results, stop
    Demo,
    /// Run all tests: unit, documentation, handlers, and the whole system on a private Postgres
    #[command(after_help = "Examples:\n  \
        cargo xtask test                        all tests\n  \
        cargo xtask test rollback cursor        those with one of these words in their name\n  \
        cargo xtask test rollback -- --nocapture\n  \
        cargo xtask test --postgres 18          what touches SQL, on Postgres 18 from the npm registry\n\n\
        The exit code is that of the test runner.")]
    Test(test::Options),
    /// What CI checks besides the tests: format, lints, docs, licences, the conformance table
    Check(check::Options),
    /// Build handlers/* as WebAssembly components into the folder that `rouse dev` watches
    Handlers {
        /// Where the .wasm files go; files whose bytes are the same are left alone
        #[arg(long, default_value = "handlers-wasm")]
        out: PathBuf,
    },
    /// Make a tarball and a .deb of an optimised `rouse`, with a systemd unit
    #[command(after_help = "Examples:\n  \
        cargo xtask package                  the release: compiles everything once more, with link-time optimisation\n  \
        cargo xtask package --profile dev    the binary of the tests, in seconds, to try the package out")]
    Package(package::Options),
    /// Measure: each benchmark starts a private Postgres with fsync on, and probes it beside
    #[command(disable_help_flag = true)]
    Bench(program::Arguments),
    /// Kill, freeze, crash and interfere under load, then check that every promise was kept
    #[command(disable_help_flag = true)]
    Chaos(program::Arguments),
    /// Feed hostile modules, manifests, schemas and values to the code of the host
    #[command(after_help = "Examples:\n  \
        cargo xtask fuzz                                 a minute, another seed each time\n  \
        cargo xtask fuzz --seconds 3600 --seed 7         the cases are made of the seed alone\n  \
        cargo xtask fuzz --target schemas --seconds 10\n  \
        cargo xtask fuzz --repeat target/fuzz/mutated-7.wasm\n\n\
        A panic of the host, an abort, a case that does not end within a minute, and more than 2 GiB of memory are findings:\n\
        the input is kept, the command that repeats it is printed, and the exit code is 1.")]
    Fuzz(fuzz::Options),
}

/// Commands that read their arguments by themselves.
const PROGRAMS: [&str; 2] = ["bench", "chaos"];

fn main() -> ExitCode {
    let arguments = program::with_help_last(std::env::args_os().collect(), &PROGRAMS);
    let cli = Cli::parse_from(arguments);
    run(cli.command).unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    let workspace = Workspace::find()?;
    match command {
        Command::Demo => demo::run(&workspace)?,
        Command::Test(options) => return test::run(&workspace, &options),
        Command::Check(options) => return check::run(&workspace, &options),
        Command::Handlers { out } => {
            let out = workspace.root.join(out);
            let placed = guests::build_handlers(&workspace, &out)?;
            println!("{placed}");
        }
        Command::Package(options) => package::run(&workspace, &options)?,
        Command::Bench(arguments) => return arguments.hand_to(&workspace, "rouse-bench"),
        Command::Chaos(arguments) => return arguments.hand_to(&workspace, "rouse-chaos"),
        Command::Fuzz(options) => return fuzz::run(&workspace, &options),
    }
    Ok(ExitCode::SUCCESS)
}
