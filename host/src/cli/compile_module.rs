//! `rouse compile-module`: the process in which a host has one module compiled. Not for people.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args as ClapArgs;

use crate::sandbox::{self, CompilerLimits, compile_stdin};

/// Options of `rouse compile-module`: those that `sandbox::compile` gives it.
#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    /// The process that asks for it, with which it dies
    #[arg(long)]
    host: u32,

    /// CPU time that it may use
    #[arg(long)]
    cpu_secs: u64,

    /// Address space that it may use
    #[arg(long)]
    memory_bytes: usize,
}

/// Reads a module from standard input, and writes its machine code to standard output.
pub(super) fn run(args: &Args) -> ExitCode {
    let limits = CompilerLimits {
        cpu_max: Duration::from_secs(args.cpu_secs),
        memory_bytes_max: args.memory_bytes,
    };
    compile_stdin(args.host, limits)
}

/// These settings, with this very program as the compiler: also when its file has been replaced since it was started.
pub(super) fn with_compiler(settings: sandbox::Settings) -> sandbox::Settings {
    sandbox::Settings {
        compiler: Some(PathBuf::from("/proc/self/exe")),
        ..settings
    }
}
