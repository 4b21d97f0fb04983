//! The compiler process. It reads modules from standard input, one after another, and writes the results to standard
//! output.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::process::ExitCode;

use rustix::process::{Pid, Resource, Signal, getppid, set_parent_process_death_signal};
use rustix::time::{ClockId, clock_gettime};
use wasmtime::Engine;

use super::confinement::{Confinement, close, confine, lower_limit};
use super::precompile::precompile;
use super::wire::{EXIT_UNABLE, Kind, Reply, Request};
use crate::sandbox::CompilerLimits;
use crate::sandbox::module::code::code_config;

/// Modules below this size are compiled on one thread, within tens of milliseconds.
const SMALL_BYTES: usize = 32 << 10;

/// Runs `rouse compile-module` for the host with this process id. Call it before anything else in the process: it first
/// limits the process permanently.
pub fn compile_stdin(host: u32, limits: CompilerLimits) -> ExitCode {
    let message = match limit(host, limits) {
        Ok(confined) => match compile(limits, confined) {
            Ok(()) => return ExitCode::SUCCESS,
            Err(error) => error.to_string(),
        },
        Err(error) => format!("the compiler cannot limit itself: {error}"),
    };
    eprintln!("{message}");
    ExitCode::from(EXIT_UNABLE)
}

/// Compiles incoming modules until the input ends or the limits are nearly used up.
fn compile(
    limits: CompilerLimits,
    (confinement, statm): (Confinement, Option<File>),
) -> io::Result<()> {
    let engine = |parallel: bool| {
        let mut config = code_config();
        config.parallel_compilation(parallel);
        Engine::new(&config).map_err(|error| io::Error::other(format!("{error:#}")))
    };
    let (one_thread, all_threads) = (engine(false)?, engine(true)?);
    let mut input = io::stdin().lock();
    let mut out = io::stdout().lock();
    let address_space_before = address_space_bytes(statm.as_ref());
    while let Some(request) = Request::read(&mut input)? {
        let cpu_until = cpu_secs_used() + request.cpu_secs;
        // The soft limit sends SIGXCPU, which shows the host why the process ended; the hard limit stays as it is.
        lower_limit(Resource::Cpu, cpu_until.min(cpu_secs_max(limits)), u64::MAX)?;
        let mut wasm = Vec::with_capacity(usize::try_from(request.bytes).unwrap_or(0));
        input.by_ref().take(request.bytes).read_to_end(&mut wasm)?;
        // Handing a function to another thread takes nearly as long as compiling a small one.
        let engine = match wasm.len() {
            ..SMALL_BYTES => &one_thread,
            _ => &all_threads,
        };
        let (kind, bytes) = match precompile(engine, &wasm) {
            Ok(code) => (Kind::Code, code),
            Err(why) => (Kind::Refused, why.into_bytes()),
        };
        // Half of the address space is enough for most modules. If it is not, the host retries with another compiler.
        let available = limits.memory_bytes_max.saturating_sub(address_space_before);
        let grown = address_space_bytes(statm.as_ref()).saturating_sub(address_space_before);
        let is_last =
            cpu_secs_used() + request.cpu_secs > cpu_secs_max(limits) || grown > available / 2;
        Reply {
            kind,
            is_last,
            confinement,
            bytes: bytes.len() as u64,
        }
        .write(&mut out)?;
        out.write_all(&bytes)?;
        out.flush()?;
        if is_last {
            break;
        }
    }
    Ok(())
}

fn cpu_secs_max(limits: CompilerLimits) -> u64 {
    limits.cpu_max.as_secs().max(1)
}

/// CPU time used so far, in whole seconds, rounded down.
fn cpu_secs_used() -> u64 {
    let used = clock_gettime(ClockId::ProcessCPUTime);
    u64::try_from(used.tv_sec).unwrap_or(0)
}

/// The address space in use; 0 if the system does not report it (no /proc).
fn address_space_bytes(statm: Option<&File>) -> usize {
    let mut text = [0; 20];
    let read = statm.and_then(|statm| statm.read_at(&mut text, 0).ok());
    let text = String::from_utf8_lossy(&text[..read.unwrap_or(0)]);
    let pages = text.split(' ').next().and_then(|pages| pages.parse().ok());
    pages.unwrap_or(0_usize) * rustix::param::page_size()
}

/// Limits this process. Returns how well it is confined, and the file that reports its address space.
fn limit(host: u32, limits: CompilerLimits) -> io::Result<(Confinement, Option<File>)> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // The host may have died before the line above; then no signal would be sent.
    let host = i32::try_from(host).ok().and_then(Pid::from_raw);
    if getppid() != host {
        return Err(io::Error::other("its host has ended"));
    }
    // If the machine's memory is exhausted, this process should be killed rather than the host. Not all systems allow
    // this.
    let _ = fs::write("/proc/self/oom_score_adj", "1000");
    let statm = File::open("/proc/self/statm").ok();
    let confinement = confine()?;
    // Crashes are expected here, and core dumps would be useless.
    lower_limit(Resource::Core, 0, 0)?;
    lower_limit(
        Resource::As,
        limits.memory_bytes_max as u64,
        limits.memory_bytes_max as u64,
    )?;
    // Starts the threads for large modules, inside the confinement; after this, no thread can be started.
    rayon::ThreadPoolBuilder::new()
        .build_global()
        .map_err(io::Error::other)?;
    close()?;
    let cpu_secs = cpu_secs_max(limits);
    lower_limit(Resource::Cpu, cpu_secs, cpu_secs + 1)?;
    Ok((confinement, statm))
}
