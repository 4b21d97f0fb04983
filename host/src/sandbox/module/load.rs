//! From the bytes of a file to a module that can run.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use ring::digest::{SHA256, digest};
use wasmtime::Engine;
use wasmtime::component::Component;

use super::compile::{Compiler, Try, parts};
use super::describe;
use super::lines::Lines;
use crate::sandbox::attempt::state::AttemptState;
use crate::sandbox::bindings::ModulePre;
use crate::sandbox::engine::code_config;
use crate::sandbox::{Manifest, Origin, PublicKey, Sandbox};

/// How a WebAssembly file starts: the magic number, then what kind it is.
const MODULE_HEADER: &[u8] = b"\0asm\x01\0\0\0";
const COMPONENT_HEADER: &[u8] = b"\0asm\x0d\0\x01\0";

/// The interface that makes a component a module of Rouse.
const HANDLERS_INTERFACE: &str = "rouse:handler/handlers@0.1.0";

/// The sha256 of a file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The digest of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        let mut own = [0; 32];
        own.copy_from_slice(digest(&SHA256, bytes).as_ref());
        Self(own)
    }

    /// The SHA-256 of the nonce followed by the bytes: only who has the bytes can compute it for a new nonce.
    pub fn proof(nonce: &str, bytes: &[u8]) -> Self {
        Self::of(&[nonce.as_bytes(), bytes].concat())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Reads what `Display` writes.
impl FromStr for Digest {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let value = |digit: u8| char::from(digit).to_digit(16);
        let byte = |pair: &[u8]| match *pair {
            [high, low] => u8::try_from(value(high)? * 16 + value(low)?).ok(),
            _ => None,
        };
        let bytes: Option<Vec<u8>> = text.as_bytes().chunks(2).map(byte).collect();
        let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
        bytes
            .map(Self)
            .ok_or_else(|| format!("{text:?} is no sha256: 64 hexadecimal digits"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

/// Where the machine code of a module is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CodeFrom {
    /// It was compiled just now.
    Compiler,
    /// It was compiled before, and kept.
    Cache,
}

impl CodeFrom {
    /// For the log.
    pub(in crate::sandbox) fn as_str(self) -> &'static str {
        match self {
            Self::Compiler => "compiled",
            Self::Cache => "cached",
        }
    }
}

/// Why there is no module; a sentence that starts with "it …" for whoever put the file there.
#[derive(Debug)]
pub(in crate::sandbox) enum NotLoaded {
    /// Because of what the file contains: the same contents are refused whenever they come.
    Contents(String),
    /// Because of the machine, at this moment.
    Circumstances(String),
    /// It has ended its compiler, and is to be tried once more, behind all others.
    Again,
}

impl From<String> for NotLoaded {
    fn from(why: String) -> Self {
        Self::Contents(why)
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
    /// Where its machine code is from.
    pub code: CodeFrom,
    /// The keys that count on this host by which the file was signed.
    pub(in crate::sandbox) signed_by: Vec<PublicKey>,
    pub(in crate::sandbox) pre: ModulePre<AttemptState>,
    pub(in crate::sandbox) lines: Arc<Lines>,
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
    /// What of its manifest this host does not know, as a sentence that starts with "its manifest …"; none: it knows all of it.
    pub fn ignores(&self) -> Option<String> {
        let unknown = &self.manifest.unknown;
        let keys = unknown.join(", ");
        (!unknown.is_empty()).then(|| {
            format!("its manifest has keys that this host does not know, and ignores: {keys}")
        })
    }

    /// What tells it from others.
    pub fn origin(&self) -> Origin<'_> {
        Origin {
            file: &self.file,
            digest: self.digest,
            signed_by: &self.signed_by,
        }
    }

    /// The same module, from another file, with this file's signatures.
    pub(in crate::sandbox) fn renamed(&self, file: &str, signed_by: Vec<PublicKey>) -> Self {
        Self {
            file: file.to_owned(),
            signed_by,
            digest: self.digest,
            manifest: self.manifest.clone(),
            code: self.code,
            pre: self.pre.clone(),
            lines: self.lines.clone(),
        }
    }
}

/// Compiles, links and describes. Takes from milliseconds to minutes; call it where blocking is
/// allowed, outside of async code.
pub(in crate::sandbox) fn load(
    sandbox: &Arc<Sandbox>,
    compiler: &mut Compiler,
    which: Try,
    (file, signed_by): (&str, Vec<PublicKey>),
    digest: Digest,
    bytes: &[u8],
) -> Result<Module, NotLoaded> {
    check_kind(bytes)?;
    let compile = || compiler.compile(bytes, which);
    let (Loaded { component, lines }, code) = loaded(sandbox, digest, compile)?;
    if component
        .get_export_index(None, HANDLERS_INTERFACE)
        .is_none()
    {
        let why = format!(
            "it does not export {HANDLERS_INTERFACE}; `rouse new` writes a crate that does, `rouse wit` the contract for other languages"
        );
        return Err(why.into());
    }
    let pre = sandbox
        .linker
        .instantiate_pre(&component)
        .map_err(|error| format!("it needs something that this host does not offer: {error:#}"))?;
    let pre = ModulePre::new(pre)
        .map_err(|error| format!("it exports something else as {HANDLERS_INTERFACE}: {error:#}"))?;

    let lines = Arc::new(lines);
    let described = describe::describe(sandbox, pre.clone(), lines.clone())?;
    let manifest =
        Manifest::parse(&described).map_err(|why| format!("its manifest (describe) {why}"))?;
    Ok(Module {
        file: file.to_owned(),
        digest,
        manifest,
        code,
        signed_by,
        pre,
        lines,
    })
}

/// What the compiler has made of a module, ready to be linked.
struct Loaded {
    component: Component,
    lines: Lines,
}

/// Why code of the compiler is not taken in.
enum Unfit {
    /// The module is of more parts, or of larger ones, than the pool has room for: a sentence that starts with "it …".
    Module(String),
    /// It is damaged, or not of this host's version.
    Code(wasmtime::Error),
}

/// What was kept of a module, or else what the compiler makes of it.
fn loaded(
    sandbox: &Sandbox,
    digest: Digest,
    compile: impl FnOnce() -> Result<Vec<u8>, NotLoaded>,
) -> Result<(Loaded, CodeFrom), NotLoaded> {
    if let Some(cache) = &sandbox.cache
        && let Some(compiled) = cache.get(digest)
    {
        match deserialize(&sandbox.engine, &compiled) {
            Ok(loaded) => return Ok((loaded, CodeFrom::Cache)),
            Err(Unfit::Module(why)) => return Err(why.into()),
            Err(Unfit::Code(error)) => cache.remove(digest, &format!("{error:#}")),
        }
    }
    let compiled = compile()?;
    let loaded = deserialize(&sandbox.engine, &compiled);
    // Kept also where the module is too large for the pool: its code is good, and no later start compiles it again.
    if let Some(cache) = &sandbox.cache
        && !matches!(loaded, Err(Unfit::Code(_)))
    {
        cache.put(digest, &compiled);
    }
    match loaded {
        Ok(loaded) => Ok((loaded, CodeFrom::Compiler)),
        Err(Unfit::Module(why)) => Err(why.into()),
        Err(Unfit::Code(error)) => Err(NotLoaded::Circumstances(format!(
            "it could not be compiled: the compiler is not of this host's version: {error:#}"
        ))),
    }
}

fn deserialize(engine: &Engine, compiled: &[u8]) -> Result<Loaded, Unfit> {
    let (code, lines) = parts(compiled)
        .ok_or_else(|| Unfit::Code(wasmtime::Error::msg("its parts do not fit together")))?;
    match component(engine, code) {
        Ok(component) => Ok(Loaded { component, lines }),
        // What an engine takes that has no pool, the pool has no room for.
        Err(error) => Err(
            match Engine::new(&code_config()).and_then(|no_pool| component(&no_pool, code)) {
                Ok(_) => Unfit::Module(too_much(&error)),
                Err(_) => Unfit::Code(error),
            },
        ),
    }
}

#[expect(
    unsafe_code,
    reason = "machine code can do anything; the one place where any is taken in"
)]
fn component(engine: &Engine, code: &[u8]) -> wasmtime::Result<Component> {
    // SAFETY: wasmtime has made this code, for nobody else: it comes from the compiler of `compile`, which is this
    // program, or from a directory that only this user can write to (`cache`), where a digest over name and code says that
    // it is whole and that of this module. Version, settings and processor are checked by wasmtime itself. Nothing that somebody else
    // has compiled comes here: `check_kind` refuses it in the handlers folder.
    unsafe { Component::deserialize(engine, code) }
}

/// Of a module that the pool has no room for: what wasmtime says, and the setting that makes room, where there is one.
fn too_much(error: &wasmtime::Error) -> String {
    let what = error.root_cause().to_string();
    let settings = [
        ("core module instances", "module_core_instances_max"),
        ("linear memories", "module_memories_max"),
        ("memories count", "module_memories_max"),
        ("tables, which", "module_tables_max"),
        ("tables count", "module_tables_max"),
        ("memory has a minimum", "memory_mb of its handlers"),
    ];
    let setting = settings.iter().find(|(words, _)| what.contains(words));
    let hint = setting.map(|(_, setting)| {
        format!("; if it is to be trusted, raise {setting} in rouse.toml and restart the host")
    });
    format!(
        "it asks for more than a host has for one module: {what}{}",
        hint.unwrap_or_default()
    )
}

/// Refuses what cannot be compiled at its first bytes.
fn check_kind(bytes: &[u8]) -> Result<(), String> {
    if bytes.is_empty() {
        return Err("it is empty; has it been written completely?".into());
    }
    // All compiled code of wasmtime is ELF.
    if bytes.starts_with(b"\x7fELF") {
        return Err(
            "it is compiled code, which cannot be trusted; put the .wasm there that it was made of"
                .into(),
        );
    }
    if is_component(bytes) || bytes.starts_with(MODULE_HEADER) {
        return Ok(());
    }
    if bytes.starts_with(b"\0asm") {
        return Err(
            "it is cut off, or of a version of WebAssembly that this host does not know".into(),
        );
    }
    Err(
        "it is not WebAssembly; a handler module is a component, or a core module of wasm32-wasip1"
            .into(),
    )
}

/// A component as it is; else it is a core module of wasm32-wasip1.
pub(in crate::sandbox) fn is_component(bytes: &[u8]) -> bool {
    bytes.starts_with(COMPONENT_HEADER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_webassembly_is_named_for_what_it_is() {
        for (bytes, word) in [
            (&b""[..], "empty"),
            (b"hello", "not WebAssembly"),
            (b"(module)", "not WebAssembly"),
            (b"\x7fELF\x02\x01\x01", "compiled code"),
            (b"\0asm", "cut off"),
            (b"\0asm\x02\0\0\0", "cut off"),
        ] {
            let why = check_kind(bytes).expect_err("must be refused");
            assert!(why.contains(word), "{bytes:?}: {why}");
        }
    }

    #[test]
    fn a_digest_is_written_and_read_as_sha256sum_writes_it() {
        let written = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::of(b"").to_string(), written);
        assert_eq!(written.parse(), Ok(Digest::of(b"")));
        for broken in [
            "",
            &written[1..],
            &written[2..],
            &format!("{written}00"),
            &written.replace('e', "+"),
        ] {
            assert!(
                broken
                    .parse::<Digest>()
                    .unwrap_err()
                    .contains("is no sha256")
            );
        }
    }
}
