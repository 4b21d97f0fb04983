//! Generated modules: the contract's imports and exports around random code.

use std::convert::Infallible;
use std::path::Path;

use anyhow::{Context as _, Result};
use arbitrary::Unstructured;
use rand::RngCore as _;
use rand::rngs::StdRng;
use wasm_encoder::reencode::{self, Reencode};
use wasm_encoder::{CodeSection, Function, MemArg, Module};
use wasm_smith::Config;
use wasmparser::{FunctionBody, Parser, Payload, TypeRef};
use wit_component::{StringEncoding, dummy_module, embed_component_metadata};
use wit_parser::{LiftLowerAbi, ManglingAndAbi, Resolve};

/// The number of random bytes that are used for the code of one module.
const RANDOM_BYTES: usize = 8 << 10;

const MANIFEST: &str = r#"{"handlers":[{"name":"fuzz","output_schema":{"type":"object"}}]}"#;

/// A core module as for wasm32-wasip1. Everything except its `describe` and its allocator is random: if these were also
/// random, no module could run.
pub(crate) fn generate(random: &mut StdRng) -> Result<Vec<u8>> {
    let mut resolve = Resolve::default();
    let wit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../sdk/wit");
    let (package, _) = resolve.push_dir(&wit).context("read the contract")?;
    let world = resolve.select_world(&[package], Some("module"))?;
    let shape = dummy_module(&resolve, world, ManglingAndAbi::Legacy(LiftLowerAbi::Sync));

    let config = Config {
        available_imports: Some(shape.clone()),
        exports: Some(shape),
        max_memories: 1,
        memory64_enabled: false,
        shared_everything_threads_enabled: false,
        threads_enabled: false,
        gc_enabled: false,
        // Without garbage collection, no useful external reference exists.
        reference_types_enabled: false,
        exceptions_enabled: false,
        ..Config::default()
    };
    let mut bytes = vec![0; RANDOM_BYTES];
    // Not all random bytes make a module.
    let made = loop {
        random.fill_bytes(&mut bytes);
        if let Ok(made) = wasm_smith::Module::new(config.clone(), &mut Unstructured::new(&bytes)) {
            break made.to_bytes();
        }
    };

    let mut module = Module::new();
    let mut patched = Patched::of(&made)?;
    patched.parse_core_module(&mut module, Parser::new(0), &made)?;
    let mut module = module.finish();
    embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8)?;
    Ok(module)
}

/// Copies a module, with different bodies for two of its functions.
#[derive(Default)]
struct Patched {
    /// The indices of the bodies, without counting imports.
    describe: Option<u32>,
    allocate: Option<u32>,
    next: u32,
}

impl Patched {
    fn of(module: &[u8]) -> Result<Self> {
        let mut patched = Self::default();
        let mut imported = 0;
        for payload in Parser::new(0).parse_all(module) {
            match payload? {
                Payload::ImportSection(imports) => {
                    for import in imports.into_imports() {
                        imported += u32::from(matches!(import?.ty, TypeRef::Func(_)));
                    }
                }
                Payload::ExportSection(exports) => {
                    for export in exports {
                        let export = export?;
                        let body = export.index.checked_sub(imported);
                        match export.name {
                            "cabi_realloc" => patched.allocate = body,
                            "rouse:handler/handlers@0.1.0#describe" => patched.describe = body,
                            _ => {}
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(patched)
    }
}

impl Reencode for Patched {
    type Error = Infallible;

    fn parse_function_body(
        &mut self,
        code: &mut CodeSection,
        body: FunctionBody<'_>,
    ) -> Result<(), reencode::Error> {
        let number = Some(self.next);
        self.next += 1;
        if number == self.describe {
            code.function(&describe());
        } else if number == self.allocate {
            code.function(&allocate());
        } else {
            reencode::utils::parse_function_body(self, code, body)?;
        }
        Ok(())
    }
}

/// Writes the manifest to memory and returns its location.
fn describe() -> Function {
    let mut function = Function::new([]);
    let mut code = function.instructions();
    code.i32_const(16).memory_grow(0).drop();
    let mut store = |at: usize, word: i64| {
        let address = MemArg {
            offset: at as u64,
            align: 0,
            memory_index: 0,
        };
        code.i32_const(0).i64_const(word).i64_store(address);
    };
    store(8, 1024 | (MANIFEST.len() as i64) << 32);
    for (number, chunk) in MANIFEST.as_bytes().chunks(8).enumerate() {
        let mut word = [b' '; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        store(1024 + 8 * number, i64::from_le_bytes(word));
    }
    code.i32_const(8).end();
    function
}

/// Returns the same address for everything.
fn allocate() -> Function {
    let mut function = Function::new([]);
    let mut code = function.instructions();
    code.i32_const(16).memory_grow(0).drop();
    code.i32_const(2048).end();
    function
}
