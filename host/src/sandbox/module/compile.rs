//! From the bytes of a file to machine code, and to the lines of its source.
//!
//! This is where a stranger's file can do most harm: a few kilobytes can ask a compiler for minutes or for gigabytes,
//! and what parses hostile bytes may fail in ways that nobody has thought of. So a host has a child process do it
//! ([`child`]), which limits itself before it reads a byte, and the host bears whatever becomes of that. Programs that
//! use this crate as a library have no such child, unless they name a `rouse` that is installed; they compile in their own process.

mod child;
mod fence;
mod host;
pub(super) mod precompile;
mod wire;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

pub use self::child::compile_stdin;
use self::host::{Child, Compiled, PANICKED, unable};
use self::precompile::precompile;
use super::loads::Loads;
use super::refused::NotLoaded;
use crate::sandbox::Sandbox;

/// How long a compiler may take for a module before the others go ahead of it: a Rust guest takes a second or two.
const FIRST_TRY_CPU: Duration = Duration::from_secs(5);

/// How often a module was tried before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::sandbox) enum Try {
    /// Never: it may take [`FIRST_TRY_CPU`], in a compiler that has compiled others before.
    First,
    /// It has ended its compiler: now it has one of its own, and all the time that is allowed.
    Second,
}

/// What compiles, one module after the other; for one thread, with which its process dies.
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

    /// What becomes of a module: [`parts`](precompile::parts) takes it apart.
    ///
    /// A process serves many modules, as a new one costs more CPU time than a small module does. Its limits are set anew for
    /// each of them, and what it has left of them is at least half. So that nobody pays for what was compiled before, a module
    /// that ends such a process is tried again in one of its own, with all that is allowed.
    ///
    /// # Errors
    /// [`NotLoaded::Again`] with the first try only.
    pub(in crate::sandbox) fn compile(
        &mut self,
        wasm: &[u8],
        which: Try,
    ) -> Result<Vec<u8>, NotLoaded> {
        self.loads.compiled();
        let settings = &self.sandbox.settings;
        let Some(program) = &settings.compiler else {
            // A fault in the compiler must not end the thread that loads modules.
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
                    unable(format!(
                        "the compiler {} does not start: {error}",
                        program.display()
                    ))
                })?
            }
        };
        let compiled = child
            .compile(wasm, cpu_max)
            .map_err(|error| unable(format!("the compiler cannot be waited for: {error}")))?;
        let (result, is_last) = match compiled {
            Compiled::Answered {
                code,
                is_last,
                fence,
            } => {
                self.sandbox.fence_logged.call_once(|| fence.log());
                (code.map_err(NotLoaded::Contents), is_last)
            }
            Compiled::Ended(ended) => {
                let had_all = which == Try::Second
                    || !(is_used || ended.was_too_slow() && cpu_max < limits.cpu_max);
                let result = match had_all {
                    true => ended.why(limits),
                    false => NotLoaded::Again,
                };
                (Err(result), true)
            }
        };
        // What has had all the time that is allowed leaves none.
        self.child = (!is_last && which == Try::First).then_some(child);
        result
    }
}
