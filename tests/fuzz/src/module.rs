//! Modules made of nothing: the contract's imports and exports, and random code between them.

use std::convert::Infallible;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use rand::RngCore as _;
use rand::rngs::StdRng;
use rouse::job::{AbortReason, Attempt, JobId, RunEnd};
use rouse::sandbox::{AbortHandle, Catalog, JobInput, Sandbox, Settings};
use tokio::runtime::Runtime;
use tokio::time::timeout;
use wasm_encoder::reencode::{self, Reencode};
use wasm_encoder::{CodeSection, Function, Module};
use wasm_smith::Config;
use wasm_smith::arbitrary::Unstructured;
use wit_component::{StringEncoding, dummy_module, embed_component_metadata};
use wit_parser::{LiftLowerAbi, ManglingAndAbi, Resolve};

/// What the code of one module is made of.
const RANDOM_BYTES: usize = 8 << 10;

/// An attempt that computes on is stopped then.
const RUNS_FOR: Duration = Duration::from_millis(100);

/// From then on.
const STOPS_WITHIN: Duration = Duration::from_secs(20);

const MANIFEST: &str = r#"{"handlers":[{"name":"fuzz","output_schema":{"type":"object"}}]}"#;

/// A host's sandbox.
pub(crate) struct Host {
    runtime: Runtime,
    sandbox: Arc<Sandbox>,
}

impl Host {
    pub(crate) fn start(rouse: &Path) -> Result<Self> {
        let settings = Settings {
            attempts_max: 2,
            compiler: Some(rouse.to_owned()),
            ..Settings::default()
        };
        Ok(Self {
            runtime: Runtime::new().context("start a runtime")?,
            sandbox: Sandbox::start(settings)?,
        })
    }

    /// Loads the module as a host does, and runs one attempt of each of its handlers. Says how the last one ended.
    pub(crate) fn tried(&self, module: &[u8]) -> Result<&'static str> {
        let folder = tempfile::tempdir().context("make a folder")?;
        fs::write(folder.path().join("case.wasm"), module).context("write the module")?;
        self.runtime.block_on(async {
            let catalog = Catalog::open(self.sandbox.clone(), folder.path()).await?;
            let handlers = catalog.current();
            let mut end = "refused";
            for name in handlers.names() {
                end = self
                    .attempt(&handlers.get(name).context("it is listed")?.clone())
                    .await;
            }
            Ok(end)
        })
    }

    async fn attempt(&self, handler: &Arc<rouse::sandbox::Handler>) -> &'static str {
        let job = JobInput {
            id: JobId(7),
            queue: "default".into(),
            tenant: None,
            source: None,
            attempt: Attempt(1),
            max_attempts: 1,
            requested_at_ms: 0,
            payload: b"{}".into(),
            memory_bytes: None,
        };
        let abort = AbortHandle::new();
        let run = self.sandbox.run(handler, job, abort.clone(), None);
        let mut running = self.sandbox.guests().spawn(run);
        let run = match timeout(RUNS_FOR, &mut running).await {
            Ok(run) => run,
            Err(_) => {
                abort.abort(AbortReason::TimedOut, Duration::ZERO);
                let stopped = timeout(STOPS_WITHIN, running).await;
                stopped.expect("an attempt is stopped")
            }
        };
        word(&run.expect("an attempt does not panic").end)
    }
}

fn word(end: &RunEnd) -> &'static str {
    match end {
        RunEnd::Returned(_) => "returned",
        RunEnd::Failed(_) => "failed",
        RunEnd::Panicked { .. } => "panicked",
        RunEnd::Trapped { .. } => "trapped",
        RunEnd::StackOverflow { .. } => "stack overflow",
        RunEnd::Denied { .. } => "denied",
        RunEnd::OutOfMemory { .. } => "out of memory",
        RunEnd::OutOfCpu { .. } => "out of cpu",
        RunEnd::OutputTooLarge { .. } => "output too large",
        RunEnd::PayloadRefused(_) => "payload refused",
        RunEnd::ResultRefused(_) => "result refused",
        RunEnd::Aborted(_) => "stopped",
        RunEnd::Unrunnable(_) => "unrunnable",
    }
}

/// A core module as for wasm32-wasip1. All but its `describe` and its allocator is random, else none would get as far as to run.
pub(crate) fn made(random: &mut StdRng) -> Result<Vec<u8>> {
    let mut resolve = Resolve::default();
    let wit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../sdk/wit");
    let (package, _) = resolve.push_dir(&wit).context("read the contract")?;
    let world = resolve.select_world(&[package], Some("module"))?;
    let shape = dummy_module(&resolve, world, ManglingAndAbi::Legacy(LiftLowerAbi::Sync));

    let mut bytes = vec![0; RANDOM_BYTES];
    random.fill_bytes(&mut bytes);
    let config = Config {
        available_imports: Some(shape.clone()),
        exports: Some(shape),
        max_memories: 1,
        memory64_enabled: false,
        shared_everything_threads_enabled: false,
        threads_enabled: false,
        gc_enabled: false,
        exceptions_enabled: false,
        ..Config::default()
    };
    let made = wasm_smith::Module::new(config, &mut Unstructured::new(&bytes))
        .context("make a module")?
        .to_bytes();

    let mut module = Module::new();
    let mut patched = Patched::of(&made)?;
    patched.parse_core_module(&mut module, wasm_encoder::wasmparser::Parser::new(0), &made)?;
    let mut module = module.finish();
    embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8)?;
    Ok(module)
}

/// Copies a module, with other bodies for two of its functions.
#[derive(Default)]
struct Patched {
    /// Which bodies, counted without imports.
    describe: Option<u32>,
    allocate: Option<u32>,
    next: u32,
}

impl Patched {
    fn of(module: &[u8]) -> Result<Self> {
        use wasm_encoder::wasmparser::{Parser, Payload, TypeRef};
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
                            name if name.ends_with("#describe") => patched.describe = body,
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
        body: wasm_encoder::wasmparser::FunctionBody<'_>,
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

/// Writes the manifest to memory, and says where it is.
fn describe() -> Function {
    let mut function = Function::new([]);
    let mut code = function.instructions();
    code.i32_const(16).memory_grow(0).drop();
    let mut store = |at: usize, word: i64| {
        let place = wasm_encoder::MemArg {
            offset: at as u64,
            align: 0,
            memory_index: 0,
        };
        code.i32_const(0).i64_const(word).i64_store(place);
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

/// Everything has the same place.
fn allocate() -> Function {
    let mut function = Function::new([]);
    let mut code = function.instructions();
    code.i32_const(16).memory_grow(0).drop();
    code.i32_const(2048).end();
    function
}
