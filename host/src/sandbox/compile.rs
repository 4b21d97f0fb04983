//! From the bytes of a file to machine code, and to the lines of its source.
//!
//! This is where a stranger's file can do most harm: a few kilobytes can ask a compiler for minutes or for gigabytes,
//! and what parses hostile bytes may fail in ways that nobody has thought of. So a host has a child process do it
//! ([`child`]), which limits itself before it reads a byte, and the host bears whatever becomes of that. Programs that
//! use this crate as a library have no such child, unless they name a `rouse` that is installed; they compile in their own process.

mod child;
mod host;

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use wasi_preview1_component_adapter_provider::{
    WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME, WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER,
};
use wasmtime::Engine;
use wit_component::ComponentEncoder;

pub use self::child::compile_stdin;
use super::Sandbox;
use super::lines::{self, Lines};
use super::load::{Refused, is_component};

/// What a compiler may use.
#[derive(Debug, Clone, Copy)]
pub struct CompilerLimits {
    /// Processor time of all its threads together; whole seconds, at least one.
    pub cpu_max: Duration,
    /// Its address space, bytes.
    pub memory_bytes_max: usize,
}

/// What the compiler makes of a module: [`parts`] takes it apart.
pub(super) fn compile(sandbox: &Sandbox, wasm: &[u8]) -> Result<Vec<u8>, Refused> {
    let settings = &sandbox.settings;
    if let Some(program) = &settings.compiler {
        return host::compile(program, settings.compiler_limits(), wasm);
    }
    // A fault in the compiler must not end the thread that loads modules.
    match catch_unwind(AssertUnwindSafe(|| compiled(&sandbox.engine, wasm))) {
        Ok(compiled) => compiled.map_err(Refused::Contents),
        Err(_) => Err(Refused::Contents(PANICKED.into())),
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

/// The machine code, as wasmtime reads it, and the lines. None where that is not what [`compile`] has made.
pub(super) fn parts(compiled: &[u8]) -> Option<(&[u8], Lines)> {
    let (rest, bytes) = compiled.split_last_chunk()?;
    let bytes = usize::try_from(u64::from_le_bytes(*bytes)).ok()?;
    let (code, lines) = rest.split_at_checked(rest.len().checked_sub(bytes)?)?;
    Some((code, postcard::from_bytes(lines).ok()?))
}

/// A component around a core module of wasm32-wasip1.
fn around(module: &[u8]) -> anyhow::Result<Vec<u8>> {
    ComponentEncoder::default()
        .module(module)?
        .adapter(
            WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME,
            WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER,
        )?
        .encode()
}
