//! The process that compiles: modules on its standard input, one after the other, what was made of each on its standard
//! output.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::process::ExitCode;

use rustix::process::{Pid, Resource, Signal, getppid, set_parent_process_death_signal};
use rustix::time::{ClockId, clock_gettime};
use wasmtime::Engine;

use super::fence::{Fence, at_most, close, fence};
use super::precompile::precompile;
use super::wire::{EXIT_UNABLE, Kind, Reply, Request};
use crate::sandbox::CompilerLimits;
use crate::sandbox::module::code::code_config;

/// A module with fewer bytes is compiled on one thread, within some tens of milliseconds.
const SMALL_BYTES: usize = 32 << 10;

/// What `rouse compile-module` does, for the host with this process id. Call it before anything else is done in the
/// process: it starts with limiting itself, for good.
pub fn compile_stdin(host: u32, limits: CompilerLimits) -> ExitCode {
    let said = match limit(host, limits) {
        Ok(fence) => match compile(limits, fence) {
            Ok(()) => return ExitCode::SUCCESS,
            Err(error) => error.to_string(),
        },
        Err(error) => format!("the compiler cannot limit itself: {error}"),
    };
    eprintln!("{said}");
    ExitCode::from(EXIT_UNABLE)
}

/// Compiles what comes, until nothing comes any more or the limits are nearly used up.
fn compile(limits: CompilerLimits, (fence, statm): (Fence, Option<File>)) -> io::Result<()> {
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
        // The first limit sends SIGXCPU, which tells the host why it ended; the second one stays where it is.
        at_most(Resource::Cpu, cpu_until.min(cpu_secs_max(limits)), u64::MAX)?;
        let mut wasm = Vec::with_capacity(usize::try_from(request.bytes).unwrap_or(0));
        input.by_ref().take(request.bytes).read_to_end(&mut wasm)?;
        // To hand a function to another thread takes nearly as long as to compile a small one.
        let engine = match wasm.len() {
            ..SMALL_BYTES => &one_thread,
            _ => &all_threads,
        };
        let (kind, bytes) = match precompile(engine, &wasm) {
            Ok(code) => (Kind::Code, code),
            Err(why) => (Kind::Refused, why.into_bytes()),
        };
        // Half of the address space is enough for most. Where it is not, the host has another compiler try it again.
        let room = limits.memory_bytes_max.saturating_sub(address_space_before);
        let grown = address_space_bytes(statm.as_ref()).saturating_sub(address_space_before);
        let is_last = cpu_secs_used() + request.cpu_secs > cpu_secs_max(limits) || grown > room / 2;
        Reply {
            kind,
            is_last,
            fence,
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

/// Whole seconds, the one that has started not among them.
fn cpu_secs_used() -> u64 {
    let used = clock_gettime(ClockId::ProcessCPUTime);
    u64::try_from(used.tv_sec).unwrap_or(0)
}

/// None of it where the system does not say (no /proc).
fn address_space_bytes(statm: Option<&File>) -> usize {
    let mut text = [0; 20];
    let read = statm.and_then(|statm| statm.read_at(&mut text, 0).ok());
    let text = String::from_utf8_lossy(&text[..read.unwrap_or(0)]);
    let pages = text.split(' ').next().and_then(|pages| pages.parse().ok());
    pages.unwrap_or(0_usize) * rustix::param::page_size()
}

/// Returns what else it is kept from, and what says how much address space it has.
fn limit(host: u32, limits: CompilerLimits) -> io::Result<(Fence, Option<File>)> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // It may have died before the line above; then no signal would come.
    let host = i32::try_from(host).ok().and_then(Pid::from_raw);
    if getppid() != host {
        return Err(io::Error::other("its host is gone"));
    }
    // Where the machine has no memory left, this process has to go, and not the host. Not everywhere can that be said.
    let _ = fs::write("/proc/self/oom_score_adj", "1000");
    let statm = File::open("/proc/self/statm").ok();
    let fence = fence()?;
    // A crash is expected here, and its memory is of no use.
    at_most(Resource::Core, 0, 0)?;
    at_most(
        Resource::As,
        limits.memory_bytes_max as u64,
        limits.memory_bytes_max as u64,
    )?;
    // Threads of large modules, within the fence; later there are no more.
    rayon::ThreadPoolBuilder::new()
        .build_global()
        .map_err(io::Error::other)?;
    close()?;
    let cpu_secs = cpu_secs_max(limits);
    at_most(Resource::Cpu, cpu_secs, cpu_secs + 1)?;
    Ok((fence, statm))
}
