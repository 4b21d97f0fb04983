//! From the bytes of a file to machine code, and to the lines of its source.
//!
//! This is where a stranger's file can do most harm: a few kilobytes can ask a compiler for minutes or for gigabytes,
//! and what parses hostile bytes may fail in ways that nobody has thought of. So a host has a child process do it
//! ([`child`]), which limits itself before it reads a byte, and the host bears whatever becomes of that. Programs that
//! use this crate as a library have no such child, unless they name a `rouse` that is installed; they compile in their own process.

mod child;
mod fence;
mod host;
mod wire;

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use wasi_preview1_component_adapter_provider::{
    WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME, WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER,
};
use wasmparser::{Parser, Payload};
use wasmtime::Engine;
use wit_component::ComponentEncoder;

pub use self::child::compile_stdin;
use self::host::{Child, Compiled, unable};
use super::lines::{self, Lines};
use super::load::{NotLoaded, is_component};
use super::loads::Loads;
use crate::sandbox::Sandbox;

/// What a compiler may use.
#[derive(Debug, Clone, Copy)]
pub struct CompilerLimits {
    /// CPU time of all its threads together; whole seconds, at least one.
    pub cpu_max: Duration,
    /// Its address space, bytes.
    pub memory_bytes_max: usize,
}

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

    /// What becomes of a module: [`parts`] takes it apart.
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
            return match catch_unwind(AssertUnwindSafe(|| compiled(&self.sandbox.engine, wasm))) {
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

const PANICKED: &str = "it made the compiler panic; this is a fault of wasmtime";

/// Wasmtime copies the names of functions for each frame of each backtrace, without a limit of its own. A mangled name of C++
/// may have some kilobytes.
const NAME_BYTES_MAX: usize = 64 << 10;

/// Compiles, in this process.
fn compiled(engine: &Engine, wasm: &[u8]) -> Result<Vec<u8>, String> {
    let component = match is_component(wasm) {
        true => Cow::Borrowed(wasm),
        false => {
            let component = around(wasm)
                .map_err(|error| format!("it cannot be made a component: {error:#}"))?;
            Cow::Owned(component)
        }
    };
    if let Some(bytes) = lines::longest_name(&component).filter(|bytes| *bytes > NAME_BYTES_MAX) {
        return Err(format!(
            "one of its functions has a name of {bytes} bytes; {NAME_BYTES_MAX} are allowed"
        ));
    }
    let code = engine
        .precompile_component(&component)
        .map_err(|error| format!("it cannot be compiled: {error:#}"))?;
    Ok(together(code, &Lines::read(&component)))
}

/// Machine code, lines, and how many bytes the lines are.
fn together(mut code: Vec<u8>, lines: &Lines) -> Vec<u8> {
    let lines = postcard::to_stdvec(lines).expect("numbers and strings can always be written");
    code.extend_from_slice(&lines);
    code.extend_from_slice(&(lines.len() as u64).to_le_bytes());
    code
}

/// The machine code, as wasmtime reads it, and the lines. None where that is not what [`Compiler::compile`] has made.
pub(in crate::sandbox) fn parts(compiled: &[u8]) -> Option<(&[u8], Lines)> {
    let (rest, bytes) = compiled.split_last_chunk()?;
    let bytes = usize::try_from(u64::from_le_bytes(*bytes)).ok()?;
    let (code, lines) = rest.split_at_checked(rest.len().checked_sub(bytes)?)?;
    Some((code, postcard::from_bytes(lines).ok()?))
}

/// A component around a core module of wasm32-wasip1.
fn around(module: &[u8]) -> anyhow::Result<Vec<u8>> {
    let encoder = ComponentEncoder::default().module(module)?;
    // Reading the adapter takes 1.1 ms, a sixth of what a small module takes. One that imports nothing of it gets nothing of it.
    let mut encoder = match imports_wasip1(module) {
        false => encoder,
        true => encoder.adapter(
            WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME,
            WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER,
        )?,
    };
    encoder.encode()
}

/// True where it cannot be read, too: the encoder says why.
fn imports_wasip1(module: &[u8]) -> bool {
    for payload in Parser::new(0).parse_all(module) {
        match payload {
            Ok(Payload::ImportSection(imports)) => {
                return imports.into_imports().any(|import| {
                    import.map_or(true, |import| {
                        import.module == WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME
                    })
                });
            }
            Ok(_) => {}
            Err(_) => return true,
        }
    }
    false
}
