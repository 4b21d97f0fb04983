//! From the bytes of a file to machine code.
//!
//! This is where a stranger's file can do most harm: a few kilobytes can ask a compiler for minutes or for gigabytes,
//! and what parses hostile bytes may fail in ways that nobody has thought of. So a host has a child process do it
//! ([`child`]), which limits itself before it reads a byte, and the host bears whatever becomes of that. Programs that
//! use this crate as a library have no such child, unless they name a `rouse` that is installed; they compile in their own process.

mod child;
mod host;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use wasi_preview1_component_adapter_provider::{
    WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME, WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER,
};
use wasmtime::Engine;
use wit_component::ComponentEncoder;

pub use self::child::compile_stdin;
use super::Sandbox;
use super::load::{Refused, is_component};

/// What a compiler may use.
#[derive(Debug, Clone, Copy)]
pub struct CompilerLimits {
    /// Processor time of all its threads together; whole seconds, at least one.
    pub cpu_max: Duration,
    /// Its address space, bytes.
    pub memory_bytes_max: usize,
}

/// The machine code of a module, as wasmtime reads it.
pub(super) fn compile(sandbox: &Sandbox, wasm: &[u8]) -> Result<Vec<u8>, Refused> {
    let settings = &sandbox.settings;
    if let Some(program) = &settings.compiler {
        return host::compile(program, settings.compiler_limits(), wasm);
    }
    // A fault in the compiler must not end the thread that loads modules.
    match catch_unwind(AssertUnwindSafe(|| machine_code(&sandbox.engine, wasm))) {
        Ok(code) => code.map_err(Refused::Contents),
        Err(_) => Err(Refused::Contents(PANICKED.into())),
    }
}

const PANICKED: &str = "it made the compiler panic; this is a fault of wasmtime";

/// Compiles, in this process.
fn machine_code(engine: &Engine, wasm: &[u8]) -> Result<Vec<u8>, String> {
    let code = match is_component(wasm) {
        true => engine.precompile_component(wasm),
        false => {
            let component = around(wasm)
                .map_err(|error| format!("it cannot be made a component: {error:#}"))?;
            engine.precompile_component(&component)
        }
    };
    code.map_err(|error| format!("it cannot be compiled: {error:#}"))
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
