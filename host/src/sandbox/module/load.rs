//! Turns the bytes of a file into a module that can run: compile, link, describe.

use std::sync::Arc;

use wasmtime::Engine;
use wasmtime::component::Component;

use super::code::code_config;
use super::compile::precompile::parts;
use super::compile::{Compiler, Try};
use super::describe;
use super::digest::Digest;
use super::lines::Lines;
use super::pin::PublicKey;
use super::ready::{CodeFrom, Module};
use super::refused::{NotLoaded, check_kind};
use crate::sandbox::Sandbox;
use crate::sandbox::bindings::ModulePre;

/// The interface that makes a component a Rouse module.
const HANDLERS_INTERFACE: &str = "rouse:handler/handlers@0.1.0";

/// Compiles, links and describes a module. Takes milliseconds to minutes, and blocks; call it outside async code.
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
    let (Loaded { component, lines }, code) = cached_or_compiled(sandbox, digest, compile)?;
    if component
        .get_export_index(None, HANDLERS_INTERFACE)
        .is_none()
    {
        let why = format!(
            "it does not export {HANDLERS_INTERFACE}; `rouse new` creates a crate that does, and `rouse wit` writes the contract for other languages"
        );
        return Err(why.into());
    }
    let pre = sandbox
        .linker
        .instantiate_pre(&component)
        .map_err(|error| {
            format!("it imports something that this host does not offer: {error:#}")
        })?;
    let pre = ModulePre::new(pre).map_err(|error| {
        format!("its export {HANDLERS_INTERFACE} does not match the contract: {error:#}")
    })?;

    let lines = Arc::new(lines);
    let described = describe::describe(sandbox, pre.clone(), lines.clone(), which)?;
    let manifest = describe::parsed(&described)?;
    Ok(Module {
        file: file.to_owned(),
        digest,
        manifest,
        code,
        signed_by,
        pre,
        lines,
        checks: sandbox.checks.share(),
    })
}

/// A compiled module, ready to be linked.
struct Loaded {
    component: Component,
    lines: Lines,
}

/// Why compiled code cannot be loaded.
enum Unfit {
    /// The module has more or larger parts than the pool allows: a sentence that starts with "it …".
    Module(String),
    /// The code is damaged, or was made by another version.
    Code(wasmtime::Error),
}

/// Loads the cached code of a module, or compiles it.
fn cached_or_compiled(
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
    // Cached even if the module is too large for the pool: the code is valid, and no later start has to compile it
    // again.
    if let Some(cache) = &sandbox.cache
        && !matches!(loaded, Err(Unfit::Code(_)))
    {
        cache.put(digest, &compiled);
    }
    match loaded {
        Ok(loaded) => Ok((loaded, CodeFrom::Compiler)),
        Err(Unfit::Module(why)) => Err(why.into()),
        Err(Unfit::Code(error)) => Err(NotLoaded::Transient(format!(
            "it could not be compiled: the compiler's version differs from that of this host: {error:#}"
        ))),
    }
}

fn deserialize(engine: &Engine, compiled: &[u8]) -> Result<Loaded, Unfit> {
    let (code, lines) = parts(compiled)
        .ok_or_else(|| Unfit::Code(wasmtime::Error::msg("its parts do not fit together")))?;
    match component(engine, code) {
        Ok(component) => Ok(Loaded { component, lines }),
        // If an engine without a pool accepts the code, the module does not fit into the pool.
        Err(error) => Err(
            match Engine::new(&code_config()).and_then(|no_pool| component(&no_pool, code)) {
                Ok(_) => Unfit::Module(pool_refusal(&error)),
                Err(_) => Unfit::Code(error),
            },
        ),
    }
}

#[expect(
    unsafe_code,
    reason = "machine code can do anything; only this function loads it"
)]
fn component(engine: &Engine, code: &[u8]) -> wasmtime::Result<Component> {
    // SAFETY: wasmtime made this code. It comes from the compiler of `compile`, which is this program, or from a
    // directory that only this user can write to (`cache`), where a digest over name and code shows that it is
    // complete and belongs to this module. Wasmtime itself checks version, settings and processor. Code that was
    // compiled elsewhere never gets here: `check_kind` refuses it in the handlers folder.
    unsafe { Component::deserialize(engine, code) }
}

/// The refusal of a module that does not fit into the pool: wasmtime's message, and the setting that would admit it, if
/// there is one.
fn pool_refusal(error: &wasmtime::Error) -> String {
    let message = error.root_cause().to_string();
    let settings = [
        ("core module instances", "module_core_instances_max"),
        ("linear memories", "module_memories_max"),
        ("memories count", "module_memories_max"),
        ("tables, which", "module_tables_max"),
        ("tables count", "module_tables_max"),
        ("memory has a minimum", "memory_mb of its handlers"),
    ];
    let setting = settings.iter().find(|(words, _)| message.contains(words));
    let hint = setting.map(|(_, setting)| {
        format!("; if you trust it, raise {setting} in rouse.toml and restart the host")
    });
    format!(
        "it exceeds what this host allows for one module: {message}{}",
        hint.unwrap_or_default()
    )
}
