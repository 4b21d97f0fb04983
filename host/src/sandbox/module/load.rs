//! From the bytes of a file to a module that can run.

use std::sync::Arc;

use wasmtime::Engine;
use wasmtime::component::Component;

use super::code::code_config;
use super::compile::precompile::parts;
use super::compile::{Compiler, Try};
use super::describe;
use super::digest::Digest;
use super::lines::Lines;
use super::manifest::Manifest;
use super::pin::PublicKey;
use super::ready::{CodeFrom, Module};
use super::refused::{NotLoaded, check_kind};
use crate::sandbox::Sandbox;
use crate::sandbox::bindings::ModulePre;

/// The interface that makes a component a module of Rouse.
const HANDLERS_INTERFACE: &str = "rouse:handler/handlers@0.1.0";

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
