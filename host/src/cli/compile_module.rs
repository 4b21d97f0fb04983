//! `rouse compile-module`: the child process in which a host compiles one module. Internal: the host starts it.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args as ClapArgs;

use crate::sandbox::{self, CompilerLimits, compile_stdin};

/// Options of `rouse compile-module`, which `sandbox::compile` sets.
#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    /// The host's process; the compiler ends with it
    #[arg(long)]
    host: u32,

    /// The limit of CPU time
    #[arg(long)]
    cpu_secs: u64,

    /// The limit of address space
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

/// These settings, with this executable as the compiler, even if its file has been replaced since the process started.
pub(super) fn with_compiler(settings: sandbox::Settings) -> sandbox::Settings {
    sandbox::Settings {
        compiler: Some(PathBuf::from("/proc/self/exe")),
        ..settings
    }
}
