//! The host's side: starts a compiler process, sends it modules, and reports the outcome.

use std::io::{self, ErrorKind, Read, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{self, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle, available_parallelism};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use wasmtime::{Engine, Precompiled};

use super::confinement::Confinement;
use super::wire::{EXIT_UNABLE, Kind, Reply, Request};
use crate::sandbox::CompilerLimits;
use crate::sandbox::module::refused::NotLoaded;

/// The maximum wall time of a compiler, as a multiple of its CPU time: it may wait, or share its cores with guests.
const WALL_PER_CPU: u32 = 10;

/// The maximum number of threads of one compiler. Each takes address space, which is limited.
const THREADS_MAX: usize = 4;

/// For the allocator of glibc (others ignore it): memory that one module needed is kept for the next, instead of
/// being returned to the kernel and faulted in again page by page.
const ALLOCATOR: (&str, &str) = (
    "GLIBC_TUNABLES",
    "glibc.malloc.trim_threshold=268435456:glibc.malloc.mmap_threshold=33554432",
);

/// The maximum size of one module's machine code and lines: eight times the default maximum size of a module file. A
/// Python guest results in 150 MiB.
const CODE_BYTES_MAX: u64 = 512 << 20;

/// The part of a compiler's standard error that is kept: a message of wasmtime or of a panic.
const STDERR_BYTES_MAX: u64 = 4 << 10;

/// Rust's message when an allocation fails.
const OUT_OF_MEMORY: &str = "memory allocation of";

pub(super) const PANICKED: &str = "it made the compiler panic; this is a bug in wasmtime";

/// The exit status of a Rust program that panicked.
const EXIT_PANICKED: u8 = 101;

/// A running compiler. It dies with the thread that started it, and so with the host.
pub(super) struct Child {
    process: process::Child,
    /// Identifies this child even after its process id was reused.
    handle: OwnedFd,
    input: ChildStdin,
    output: ChildStdout,
    stderr: Option<JoinHandle<String>>,
    limits: CompilerLimits,
}

/// The outcome for one module.
pub(super) enum Compiled {
    /// It was compiled, or refused with this reason. `is_last`: this compiler does not take any more modules.
    Replied {
        code: Result<Vec<u8>, String>,
        is_last: bool,
        confinement: Confinement,
    },
    /// The compiler process has ended.
    Ended(Ended),
}

/// The end of a compiler process.
pub(super) struct Ended {
    status: ExitStatus,
    /// The time after which it was killed, if it was.
    hung: Option<Duration>,
    last_read: LastRead,
    stderr: String,
}

/// The reason why reading from a compiler stopped.
enum LastRead {
    Nothing,
    Unreadable(io::Error),
    Garbage,
    TooMuch,
}

impl Child {
    /// Starts a compiler.
    ///
    /// # Errors
    /// When it does not start.
    pub(super) fn start(program: &Path, limits: CompilerLimits) -> io::Result<Self> {
        let threads = available_parallelism()
            .map_or(1, usize::from)
            .min(THREADS_MAX);
        let mut process = Command::new(program)
            .arg0("rouse")
            .arg("compile-module")
            .args(["--host", &process::id().to_string()])
            .args(["--cpu-secs", &limits.cpu_max.as_secs().max(1).to_string()])
            .args(["--memory-bytes", &limits.memory_bytes_max.to_string()])
            // A process that reads hostile bytes must not see the host's passwords.
            .env_clear()
            .env("RAYON_NUM_THREADS", threads.to_string())
            .env(ALLOCATOR.0, ALLOCATOR.1)
            .current_dir("/")
            // Ctrl-C at the terminal is for the host, which finishes running work.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let pid = i32::try_from(process.id()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| io::Error::other("no valid process id"))?;
        let stderr = process.stderr.take().expect("it is piped, above");
        let watched = pidfd_open(pid, PidfdFlags::empty())
            .map_err(io::Error::from)
            .and_then(|handle| {
                let reader = thread::Builder::new().spawn(move || read_stderr(stderr))?;
                Ok((handle, reader))
            });
        let (handle, reader) = watched.inspect_err(|_| {
            // It may have ended already.
            let _ = process.kill();
            let _ = process.wait();
        })?;
        Ok(Self {
            handle,
            input: process.stdin.take().expect("it is piped, above"),
            output: process.stdout.take().expect("it is piped, above"),
            process,
            stderr: Some(reader),
            limits,
        })
    }

    /// Compiles a module within this CPU time. Blocks.
    ///
    /// # Errors
    /// When the compiler cannot be waited for, or no thread can be started.
    pub(super) fn compile(&mut self, wasm: &[u8], cpu_max: Duration) -> io::Result<Compiled> {
        let wall_max = cpu_max * WALL_PER_CPU;
        let handle = self.handle.try_clone()?;
        let (done, watched) = mpsc::channel::<()>();
        thread::scope(|scope| {
            let watchdog = thread::Builder::new()
                .spawn_scoped(scope, move || watch(&handle, &watched, wall_max))?;
            let last_read = match self.request(wasm, cpu_max) {
                Ok(compiled) => return Ok(compiled),
                Err(last_read) => last_read,
            };
            // If it wrote nothing, it has ended or the watchdog will end it, and its status gives the reason.
            if !matches!(last_read, LastRead::Nothing) {
                // It may have ended already.
                let _ = self.process.kill();
            }
            let status = self.process.wait()?;
            drop(done);
            let hung = watchdog.join().unwrap_or(false);
            let stderr = self.stderr.take().and_then(|stderr| stderr.join().ok());
            Ok(Compiled::Ended(Ended {
                status,
                hung: hung.then_some(wall_max),
                last_read,
                stderr: stderr.unwrap_or_default(),
            }))
        })
    }

    fn request(&mut self, wasm: &[u8], cpu_max: Duration) -> Result<Compiled, LastRead> {
        let request = Request {
            bytes: wasm.len() as u64,
            cpu_secs: cpu_max.as_secs().max(1),
        };
        // If it does not read everything, it has ended or is about to end, and its status gives the reason.
        let _ = request
            .write(&mut self.input)
            .and_then(|()| self.input.write_all(wasm));
        let reply = Reply::read(&mut self.output).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => LastRead::Nothing,
            ErrorKind::InvalidData => LastRead::Garbage,
            _ => LastRead::Unreadable(error),
        })?;
        if reply.bytes > code_bytes_max(self.limits) {
            return Err(LastRead::TooMuch);
        }
        let bytes_expected = usize::try_from(reply.bytes).unwrap_or(usize::MAX);
        let mut bytes = Vec::with_capacity(bytes_expected);
        let read = (&mut self.output)
            .take(reply.bytes)
            .read_to_end(&mut bytes)
            .map_err(LastRead::Unreadable)?;
        if read < bytes_expected {
            return Err(LastRead::Nothing);
        }
        let code = match reply.kind {
            Kind::Code => match Engine::detect_precompiled(&bytes) {
                Some(Precompiled::Component) => Ok(bytes),
                Some(Precompiled::Module) | None => return Err(LastRead::Garbage),
            },
            Kind::Refused => Err(String::from_utf8_lossy(&bytes).into_owned()),
        };
        Ok(Compiled::Replied {
            code,
            is_last: reply.is_last,
            confinement: reply.confinement,
        })
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // It is waiting for the next module, or has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Kills the child if it does not finish in time. Returns whether it was killed.
fn watch(child: &OwnedFd, done: &mpsc::Receiver<()>, wall_max: Duration) -> bool {
    match done.recv_timeout(wall_max) {
        Ok(()) | Err(RecvTimeoutError::Disconnected) => false,
        Err(RecvTimeoutError::Timeout) => {
            // It may just have ended.
            let _ = pidfd_send_signal(child, Signal::KILL);
            true
        }
    }
}

/// Code was in the compiler's memory, so it cannot be larger than that.
fn code_bytes_max(limits: CompilerLimits) -> u64 {
    CODE_BYTES_MAX.min(limits.memory_bytes_max as u64)
}

/// Reads the start of the compiler's standard error; the rest is read and discarded, so that it never blocks on a full
/// pipe.
fn read_stderr(mut from: impl Read) -> String {
    let mut bytes = Vec::new();
    // A read error only truncates the text.
    let _ = from.by_ref().take(STDERR_BYTES_MAX).read_to_end(&mut bytes);
    let _ = io::copy(&mut from, &mut io::sink());
    String::from_utf8_lossy(&bytes).trim().to_string()
}

pub(super) fn not_compiled(why: String) -> NotLoaded {
    NotLoaded::Transient(format!("it could not be compiled: {why}"))
}

impl Ended {
    /// True if it ended because the module exceeded its time.
    pub(super) fn was_too_slow(&self) -> bool {
        self.hung.is_some() || self.status.signal() == Some(libc::SIGXCPU)
    }

    /// Why there is no machine code.
    pub(super) fn why(self, limits: CompilerLimits) -> NotLoaded {
        let stderr = match self.stderr.is_empty() {
            true => String::new(),
            false => format!(": {}", self.stderr),
        };
        if let Some(after) = self.hung {
            return not_compiled(format!(
                "the compiler did not finish within {} s",
                after.as_secs()
            ));
        }
        match self.last_read {
            LastRead::Nothing => {}
            LastRead::TooMuch => {
                return NotLoaded::Contents(format!(
                    "it compiles to more than {} MiB of machine code",
                    code_bytes_max(limits) >> 20
                ));
            }
            LastRead::Garbage => {
                return not_compiled("the compiler wrote output that is not code".into());
            }
            LastRead::Unreadable(error) => {
                return not_compiled(format!(
                    "the output of the compiler cannot be read: {error}"
                ));
            }
        }
        let ended_by = |signal: libc::c_int| self.status.signal() == Some(signal);
        if ended_by(libc::SIGXCPU) {
            return NotLoaded::Contents(format!(
                "it needs more than {} s of CPU time to compile; if you trust it, raise compile_cpu in rouse.toml",
                limits.cpu_max.as_secs()
            ));
        }
        if ended_by(libc::SIGABRT) && stderr.contains(OUT_OF_MEMORY) {
            return NotLoaded::Contents(format!(
                "it needs more than {} MiB of memory to compile; if you trust it, raise compile_memory_mb in rouse.toml",
                limits.memory_bytes_max >> 20
            ));
        }
        let crashes = [
            libc::SIGABRT,
            libc::SIGSEGV,
            libc::SIGBUS,
            libc::SIGILL,
            libc::SIGFPE,
        ];
        if crashes.into_iter().any(ended_by) {
            return NotLoaded::Contents(format!(
                "it made the compiler crash ({}); this is a bug in wasmtime{stderr}",
                self.status
            ));
        }
        match self.status.code().map(u8::try_from) {
            Some(Ok(EXIT_UNABLE)) => not_compiled(self.stderr),
            Some(Ok(EXIT_PANICKED)) => NotLoaded::Contents(format!("{PANICKED}{stderr}")),
            Some(_) | None => {
                not_compiled(format!("the compiler ended with {}{stderr}", self.status))
            }
        }
    }
}
