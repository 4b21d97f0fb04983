//! From WebAssembly to machine code, in this process.

use std::borrow::Cow;

use wasi_preview1_component_adapter_provider::{
    WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME, WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER,
};
use wasmparser::{Parser, Payload};
use wasmtime::Engine;
use wit_component::ComponentEncoder;

use crate::sandbox::module::lines::{self, Lines};
use crate::sandbox::module::refused::is_component;

/// Wasmtime copies function names into each frame of each backtrace, without a limit of its own. A mangled C++ name can
/// be a few kilobytes long.
const NAME_BYTES_MAX: usize = 64 << 10;

/// Compiles in this process.
pub(in crate::sandbox::module) fn precompile(
    engine: &Engine,
    wasm: &[u8],
) -> Result<Vec<u8>, String> {
    let component = match is_component(wasm) {
        true => Cow::Borrowed(wasm),
        false => {
            let component = wrap(wasm)
                .map_err(|error| format!("it cannot be wrapped in a component: {error:#}"))?;
            Cow::Owned(component)
        }
    };
    if let Some(bytes) = lines::longest_name(&component).filter(|bytes| *bytes > NAME_BYTES_MAX) {
        return Err(format!(
            "one of its functions has a name of {bytes} bytes; at most {NAME_BYTES_MAX} are allowed"
        ));
    }
    let code = engine
        .precompile_component(&component)
        .map_err(|error| format!("it cannot be compiled: {error:#}"))?;
    Ok(join(code, &Lines::read(&component)))
}

/// Joins machine code, lines, and the size of the lines.
fn join(mut code: Vec<u8>, lines: &Lines) -> Vec<u8> {
    let lines = postcard::to_stdvec(lines).expect("numbers and strings can always be written");
    code.extend_from_slice(&lines);
    code.extend_from_slice(&(lines.len() as u64).to_le_bytes());
    code
}

/// Splits the output of [`precompile`] into machine code and lines. `None` if it is something else.
pub(in crate::sandbox::module) fn parts(compiled: &[u8]) -> Option<(&[u8], Lines)> {
    let (rest, bytes) = compiled.split_last_chunk()?;
    let bytes = usize::try_from(u64::from_le_bytes(*bytes)).ok()?;
    let (code, lines) = rest.split_at_checked(rest.len().checked_sub(bytes)?)?;
    Some((code, postcard::from_bytes(lines).ok()?))
}

/// Wraps a core module of wasm32-wasip1 in a component.
fn wrap(module: &[u8]) -> anyhow::Result<Vec<u8>> {
    let encoder = ComponentEncoder::default().module(module)?;
    // Reading the adapter takes 1.1 ms, a sixth of the time of a small module. A module that imports nothing from it
    // does not need it.
    let mut encoder = match imports_wasip1(module) {
        false => encoder,
        true => encoder.adapter(
            WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME,
            WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER,
        )?,
    };
    encoder.encode()
}

/// Also true if the module cannot be read: the encoder reports why.
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
