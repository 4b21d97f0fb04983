//! From the bytes of a file to a module that can run.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use sha2::{Digest as _, Sha256};
use wasi_preview1_component_adapter_provider::{
    WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME, WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER,
};
use wasmtime::Engine;
use wasmtime::component::Component;
use wit_component::ComponentEncoder;

use super::bindings::ModulePre;
use super::state::AttemptState;
use super::{Manifest, Sandbox, describe};

/// How a WebAssembly file begins: the magic number, then what kind it is.
const MODULE_HEADER: &[u8] = b"\0asm\x01\0\0\0";
const COMPONENT_HEADER: &[u8] = b"\0asm\x0d\0\x01\0";

/// The interface that makes a component a module of Rouse.
const HANDLERS_INTERFACE: &str = "rouse:handler/handlers@0.1.0";

/// The sha256 of a file.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

/// A file that can run: compiled, linked, asked for its manifest.
pub struct Module {
    /// The file's name in the handlers folder.
    pub file: String,
    /// The sha256 of the file.
    pub digest: Digest,
    /// What it says of its handlers.
    pub manifest: Manifest,
    pub(super) pre: ModulePre<AttemptState>,
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Module")
            .field("file", &self.file)
            .field("digest", &self.digest)
            .finish_non_exhaustive()
    }
}

impl Module {
    /// The same module under another file name.
    pub(super) fn renamed(&self, file: &str) -> Self {
        Self {
            file: file.to_owned(),
            digest: self.digest,
            manifest: self.manifest.clone(),
            pre: self.pre.clone(),
        }
    }
}

/// Compiles, links and describes. Takes from milliseconds to seconds; call it where blocking is
/// allowed, outside of async code.
///
/// # Errors
/// A sentence that begins with "it …" for whoever put the file there.
pub(super) fn load(sandbox: &Arc<Sandbox>, file: &str, bytes: &[u8]) -> Result<Module, String> {
    let component = component_bytes(bytes)?;
    // A fault in the compiler must not end the thread that watches the folder.
    let compiled = catch_unwind(AssertUnwindSafe(|| {
        Component::from_binary(&sandbox.engine, &component)
    }));
    let component = match compiled {
        Ok(Ok(component)) => component,
        Ok(Err(error)) => return Err(format!("it cannot be compiled: {error:#}")),
        Err(_) => return Err("it made the compiler panic; this is a fault of wasmtime".into()),
    };
    if component
        .get_export_index(None, HANDLERS_INTERFACE)
        .is_none()
    {
        return Err(format!(
            "it does not export {HANDLERS_INTERFACE}; build it with rouse-sdk (`rouse new` shows how)"
        ));
    }
    let pre = sandbox
        .linker
        .instantiate_pre(&component)
        .map_err(|error| format!("it needs something that this host does not offer: {error:#}"))?;
    let pre = ModulePre::new(pre)
        .map_err(|error| format!("it exports something else as {HANDLERS_INTERFACE}: {error:#}"))?;

    let described = describe::describe(sandbox, pre.clone())?;
    let manifest =
        Manifest::parse(&described).map_err(|why| format!("its manifest (describe) {why}"))?;
    Ok(Module {
        file: file.to_owned(),
        digest: Digest::of(bytes),
        manifest,
        pre,
    })
}

/// The file as a component: as it is, or built around a core module of wasm32-wasip1.
fn component_bytes(bytes: &[u8]) -> Result<Vec<u8>, String> {
    if bytes.is_empty() {
        return Err("it is empty; has it been written completely?".into());
    }
    if Engine::detect_precompiled(bytes).is_some() || bytes.starts_with(b"\x7fELF") {
        return Err(
            "it is compiled code, which cannot be trusted; put the .wasm there that it was made of"
                .into(),
        );
    }
    if bytes.starts_with(COMPONENT_HEADER) {
        return Ok(bytes.to_vec());
    }
    if bytes.starts_with(MODULE_HEADER) {
        return encode(bytes).map_err(|error| format!("it cannot be made a component: {error:#}"));
    }
    if bytes.starts_with(b"\0asm") {
        return Err(
            "it is cut off, or of a version of WebAssembly that this host does not know".into(),
        );
    }
    Err("it is no WebAssembly; build with --target wasm32-wasip2".into())
}

fn encode(bytes: &[u8]) -> anyhow::Result<Vec<u8>> {
    ComponentEncoder::default()
        .module(bytes)?
        .adapter(
            WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME,
            WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER,
        )?
        .encode()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_webassembly_is_named_for_what_it_is() {
        for (bytes, word) in [
            (&b""[..], "empty"),
            (b"hello", "no WebAssembly"),
            (b"(module)", "no WebAssembly"),
            (b"\x7fELF\x02\x01\x01", "compiled code"),
            (b"\0asm", "cut off"),
            (b"\0asm\x02\0\0\0", "cut off"),
        ] {
            let why = component_bytes(bytes).expect_err("must be refused");
            assert!(why.contains(word), "{bytes:?}: {why}");
        }
    }

    #[test]
    fn a_digest_is_written_as_sha256sum_writes_it() {
        assert_eq!(
            Digest::of(b"").to_string(),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        );
    }
}
