//! Compiles the bytes of a file to machine code and the lines of its source.
//!
//! This is where an untrusted file can do the most damage: a few kilobytes can cost a compiler minutes or gigabytes,
//! and parsers of hostile bytes can fail in unforeseen ways. So a host compiles in a child process ([`child`]) that
//! limits itself before it reads a byte. The host survives any failure of the child. Programs that use this crate as a
//! library have no such child unless they name an installed `rouse`; otherwise they compile in their own process.

mod child;
mod confinement;
mod host;
pub(super) mod precompile;
mod wire;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

pub use self::child::compile_stdin;
use self::host::{Child, Compiled, PANICKED, not_compiled};
use self::precompile::precompile;
use super::loads::Loads;
use super::refused::NotLoaded;
use crate::sandbox::Sandbox;

/// The CPU time after which other modules go ahead of this one: a Rust guest takes a second or two.
const FIRST_TRY_CPU: Duration = Duration::from_secs(5);

/// The number of the try of a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::sandbox) enum Try {
    /// The first: it may take [`FIRST_TRY_CPU`], in a compiler that may already have compiled other modules.
    First,
    /// The second, after the first took too long: it gets a compiler of its own, and all of the allowed time.
    Second,
}

/// Compiles one module after another. It belongs to one thread, and its process dies with that thread.
pub(in crate::sandbox) struct Compiler {
    sandbox: Arc<Sandbox>,
    loads: Arc<Loads>,
    child: Option<Child>,
}

impl Compiler {
    pub(in crate::sandbox) fn new(sandbox: Arc<Sandbox>, loads: Arc<Loads>) -> Self {
        Self {
            sandbox,
            loads,
            child: None,
        }
    }

    /// Compiles a module; [`parts`](precompile::parts) splits the result.
    ///
    /// A process compiles many modules, because starting one costs more CPU time than a small module does. In it, each
    /// module has the CPU time of a first try, and at least half of the address space. So that no module is refused
    /// because of earlier ones, a module that ends such a process is tried again in a process of its own, with the full
    /// limits.
    ///
    /// # Errors
    /// [`NotLoaded::Retry`] after the first try only.
    pub(in crate::sandbox) fn compile(
        &mut self,
        wasm: &[u8],
        which: Try,
    ) -> Result<Vec<u8>, NotLoaded> {
        self.loads.compiled();
        let settings = &self.sandbox.settings;
        let Some(program) = &settings.compiler else {
            // A panic in the compiler must not end the thread that loads modules.
            return match catch_unwind(AssertUnwindSafe(|| precompile(&self.sandbox.engine, wasm))) {
                Ok(compiled) => compiled.map_err(NotLoaded::Contents),
                Err(_) => Err(NotLoaded::Contents(PANICKED.into())),
            };
        };
        let limits = settings.compiler_limits();
        let cpu_max = match which {
            Try::First => limits.cpu_max.min(FIRST_TRY_CPU),
            Try::Second => limits.cpu_max,
        };
        let used = self.child.take().filter(|_| which == Try::First);
        let is_used = used.is_some();
        let mut child = match used {
            Some(child) => child,
            None => {
                self.loads.started_compiler();
                Child::start(program, limits).map_err(|error| {
                    not_compiled(format!(
                        "the compiler {} could not be started: {error}",
                        program.display()
                    ))
                })?
            }
        };
        let compiled = child
            .compile(wasm, cpu_max)
            .map_err(|error| not_compiled(format!("the compiler cannot be watched: {error}")))?;
        let (result, is_last) = match compiled {
            Compiled::Replied {
                code,
                is_last,
                confinement,
            } => {
                self.sandbox
                    .confinement_logged
                    .call_once(|| confinement.log());
                (code.map_err(NotLoaded::Contents), is_last)
            }
            Compiled::Ended(ended) => {
                let had_full_limits = which == Try::Second
                    || !(is_used || ended.was_too_slow() && cpu_max < limits.cpu_max);
                let result = match had_full_limits {
                    true => ended.why(limits),
                    false => NotLoaded::Retry,
                };
                (Err(result), true)
            }
        };
        // A second try leaves no time for other modules.
        self.child = (!is_last && which == Try::First).then_some(child);
        result
    }
}
