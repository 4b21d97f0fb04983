//! The `rouse` command.

fn main() -> std::process::ExitCode {
    rouse::cli::main()
}
