//! The `rouse` command: parse, load settings, run one command.

fn main() -> std::process::ExitCode {
    rouse::cli::main()
}
