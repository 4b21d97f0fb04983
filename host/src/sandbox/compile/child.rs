//! The process that compiles one file: a file on its standard input, what was made of it on its standard output.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::process::ExitCode;

use rustix::process::{
    Pid, Resource, Rlimit, Signal, getppid, getrlimit, set_parent_process_death_signal, setrlimit,
};
use wasmtime::Engine;

use super::{CompilerLimits, compiled};
use crate::sandbox::engine::code_config;

/// The file cannot be compiled; standard error says why, in a sentence that begins with "it …".
pub(super) const EXIT_REFUSED: u8 = 3;
/// The compiler itself could not work.
pub(super) const EXIT_UNABLE: u8 = 4;

/// What `rouse compile-module` does, for the host with this process id. Call it before anything else is done in the
/// process: it begins with limiting itself, for good.
pub fn compile_stdin(host: u32, limits: CompilerLimits) -> ExitCode {
    let (code, said) = match limit(host, limits) {
        Ok(()) => match compile() {
            Ok(()) => return ExitCode::SUCCESS,
            Err(Failed::Refused(why)) => (EXIT_REFUSED, why),
            Err(Failed::Unable(error)) => (EXIT_UNABLE, error.to_string()),
        },
        Err(error) => (
            EXIT_UNABLE,
            format!("the compiler cannot limit itself: {error}"),
        ),
    };
    eprintln!("{said}");
    ExitCode::from(code)
}

enum Failed {
    Refused(String),
    Unable(io::Error),
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self::Unable(error)
    }
}

fn compile() -> Result<(), Failed> {
    let mut wasm = Vec::new();
    io::stdin().lock().read_to_end(&mut wasm)?;
    let engine =
        Engine::new(&code_config()).map_err(|error| io::Error::other(format!("{error:#}")))?;
    let compiled = compiled(&engine, &wasm).map_err(Failed::Refused)?;
    let mut out = io::stdout().lock();
    out.write_all(&compiled)?;
    out.flush()?;
    Ok(())
}

fn limit(host: u32, limits: CompilerLimits) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // It may have died before the line above; then no signal would come.
    let host = i32::try_from(host).ok().and_then(Pid::from_raw);
    if getppid() != host {
        return Err(io::Error::other("its host is gone"));
    }
    // Where the machine has no memory left, this process has to go, and not the host. Not everywhere can that be said.
    let _ = fs::write("/proc/self/oom_score_adj", "1000");
    let cpu_secs = limits.cpu_max.as_secs().max(1);
    // A crash is expected here, and its memory is of no use.
    at_most(Resource::Core, 0, 0)?;
    at_most(
        Resource::As,
        limits.memory_bytes_max as u64,
        limits.memory_bytes_max as u64,
    )?;
    // The first one sends SIGXCPU, which tells the host why it ended.
    at_most(Resource::Cpu, cpu_secs, cpu_secs + 1)
}

/// Sets a limit, and where one is set already, never a looser one.
fn at_most(resource: Resource, current: u64, maximum: u64) -> io::Result<()> {
    let already = getrlimit(resource).maximum.unwrap_or(u64::MAX);
    let limit = Rlimit {
        current: Some(current.min(already)),
        maximum: Some(maximum.min(already)),
    };
    Ok(setrlimit(resource, limit)?)
}
