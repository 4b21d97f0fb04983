//! The host's side: starts a compiler, waits for it, and says what became of it.

use std::fs::File;
use std::io::{self, Read, Seek as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, available_parallelism};
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use wasmtime::{Engine, Precompiled};

use super::child::{EXIT_REFUSED, EXIT_UNABLE};
use super::{CompilerLimits, PANICKED};
use crate::sandbox::load::Refused;

/// A compiler that waits instead of computing, or has to share its cores with guests, may take so many times its
/// processor time.
const WALL_PER_CPU: u32 = 10;

/// Threads of one compiler. More would each reserve address space, of which it has little.
const THREADS_MAX: usize = 4;

/// Machine code of one module, with its lines: eight times the largest file that is taken by default. A Python guest makes 150 MiB.
const CODE_BYTES_MAX: u64 = 512 << 20;

/// What is kept of what a compiler says on standard error: a message of wasmtime, or of a panic.
const SAID_BYTES_MAX: u64 = 4 << 10;

/// What Rust says when it cannot get memory.
const OUT_OF_MEMORY: &str = "memory allocation of";

/// How a panic ends a program of Rust.
const EXIT_PANICKED: u8 = 101;

/// Has a child compile. Blocks. The child dies with the thread that calls this, and so with the host.
pub(super) fn compile(
    program: &Path,
    limits: CompilerLimits,
    wasm: &[u8],
) -> Result<Vec<u8>, Refused> {
    let ended = run(program, limits, wasm).map_err(|error| {
        unable(format!(
            "the compiler {} does not start: {error}",
            program.display()
        ))
    })?;
    ended.code(limits)
}

/// What a compiler leaves behind.
struct Ended {
    status: ExitStatus,
    hung: bool,
    /// None where there was too much of it.
    code: io::Result<Option<Vec<u8>>>,
    said: String,
}

fn run(program: &Path, limits: CompilerLimits, wasm: &[u8]) -> io::Result<Ended> {
    let threads = available_parallelism()
        .map_or(1, usize::from)
        .min(THREADS_MAX);
    let mut child = Command::new(program)
        .arg0("rouse")
        .arg("compile-module")
        .args(["--host", &std::process::id().to_string()])
        .args(["--cpu-secs", &limits.cpu_max.as_secs().max(1).to_string()])
        .args(["--memory-bytes", &limits.memory_bytes_max.to_string()])
        // What reads hostile bytes sees no password of the host.
        .env_clear()
        .env("RAYON_NUM_THREADS", threads.to_string())
        .current_dir("/")
        // Ctrl-C at the terminal is for the host, which finishes what it has begun.
        .process_group(0)
        .stdin(in_memory(wasm)?)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| io::Error::other("no valid process id"))?;
    // A process file descriptor names this child, also when the number is somebody else's.
    let handle = pidfd_open(pid, PidfdFlags::empty()).inspect_err(|_| end(&mut child))?;

    let stdout = child.stdout.take().expect("it is piped, above");
    let stderr = child.stderr.take().expect("it is piped, above");
    thread::scope(|scope| {
        let (done, watched) = mpsc::channel::<()>();
        let watchdog = scope.spawn(move || watch(&handle, &watched, limits.cpu_max * WALL_PER_CPU));
        let listener = scope.spawn(move || said(stderr));
        let code = at_most(stdout, code_bytes_max(limits));
        if !matches!(code, Ok(Some(_))) {
            end(&mut child);
        }
        let status = child.wait()?;
        drop(done);
        Ok(Ended {
            status,
            hung: watchdog.join().unwrap_or(false),
            code,
            said: listener.join().unwrap_or_default(),
        })
    })
}

/// The file as the child's standard input. A pipe would have to be fed, and breaks when the child dies.
fn in_memory(wasm: &[u8]) -> io::Result<Stdio> {
    let mut file = File::from(memfd_create("rouse-module", MemfdFlags::CLOEXEC)?);
    file.write_all(wasm)?;
    file.rewind()?;
    Ok(file.into())
}

/// Kills the child when it is not done in time, and says so.
fn watch(child: &OwnedFd, done: &mpsc::Receiver<()>, wall_max: Duration) -> bool {
    match done.recv_timeout(wall_max) {
        Ok(()) | Err(RecvTimeoutError::Disconnected) => false,
        Err(RecvTimeoutError::Timeout) => {
            // It may have ended in this moment.
            let _ = pidfd_send_signal(child, Signal::KILL);
            true
        }
    }
}

fn end(child: &mut Child) {
    // It may have ended already; it is waited for in any case.
    let _ = child.kill();
}

/// Code was in the compiler's memory, so it is no larger than that.
fn code_bytes_max(limits: CompilerLimits) -> u64 {
    CODE_BYTES_MAX.min(limits.memory_bytes_max as u64)
}

fn at_most(mut from: impl Read, bytes_max: u64) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    from.by_ref().take(bytes_max + 1).read_to_end(&mut bytes)?;
    Ok((bytes.len() as u64 <= bytes_max).then_some(bytes))
}

/// The beginning of what it says; the rest is read and forgotten, so that it never waits for a reader.
fn said(mut from: impl Read) -> String {
    let mut bytes = Vec::new();
    // What cannot be read is not said.
    let _ = from.by_ref().take(SAID_BYTES_MAX).read_to_end(&mut bytes);
    let _ = io::copy(&mut from, &mut io::sink());
    String::from_utf8_lossy(&bytes).trim().to_string()
}

fn unable(why: String) -> Refused {
    Refused::Circumstances(format!("it could not be compiled: {why}"))
}

impl Ended {
    fn code(self, limits: CompilerLimits) -> Result<Vec<u8>, Refused> {
        let said = match self.said.is_empty() {
            true => String::new(),
            false => format!(": {}", self.said),
        };
        if self.hung {
            let secs = (limits.cpu_max * WALL_PER_CPU).as_secs();
            return Err(unable(format!("the compiler was not done after {secs} s")));
        }
        let code = match self.code {
            Ok(Some(code)) => code,
            Ok(None) => {
                return Err(Refused::Contents(format!(
                    "it makes more than {} MiB of machine code",
                    code_bytes_max(limits) >> 20
                )));
            }
            Err(error) => return Err(unable(format!("its code cannot be read: {error}"))),
        };
        let ended_by = |signal: libc::c_int| self.status.signal() == Some(signal);
        if ended_by(libc::SIGXCPU) {
            return Err(Refused::Contents(format!(
                "it needs more than {} s of processor time to compile; if it is to be trusted, raise compile_cpu in rouse.toml",
                limits.cpu_max.as_secs()
            )));
        }
        if ended_by(libc::SIGABRT) && said.contains(OUT_OF_MEMORY) {
            return Err(Refused::Contents(format!(
                "it needs more than {} MiB of memory to compile; if it is to be trusted, raise compile_memory_mb in rouse.toml",
                limits.memory_bytes_max >> 20
            )));
        }
        let crashes = [
            libc::SIGABRT,
            libc::SIGSEGV,
            libc::SIGBUS,
            libc::SIGILL,
            libc::SIGFPE,
        ];
        if crashes.into_iter().any(ended_by) {
            return Err(Refused::Contents(format!(
                "it made the compiler crash ({}); this is a fault of wasmtime{said}",
                self.status
            )));
        }
        match self.status.code().map(u8::try_from) {
            Some(Ok(0)) if Engine::detect_precompiled(&code) == Some(Precompiled::Component) => {
                Ok(code)
            }
            Some(Ok(0)) => Err(unable(
                "the compiler wrote something that is no code".into(),
            )),
            Some(Ok(EXIT_REFUSED)) => Err(Refused::Contents(self.said)),
            Some(Ok(EXIT_UNABLE)) => Err(unable(self.said)),
            Some(Ok(EXIT_PANICKED)) => Err(Refused::Contents(format!("{PANICKED}{said}"))),
            Some(_) | None => Err(unable(format!(
                "the compiler ended with {}{said}",
                self.status
            ))),
        }
    }
}
