//! Guests for the tests of the sandbox, written in WebAssembly text, so they need no separate build.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rouse::job::{Attempt, JobId};
use rouse::sandbox::{
    AbortHandle, Catalog, Grant, Grants, Handler, HandlerSet, Instances, JobInput, Limits, Mode,
    ModuleBinding, RunReport, Sandbox, Settings,
};
use tempfile::TempDir;
use tokio::time::timeout;
use wit_component::{StringEncoding, embed_component_metadata};
use wit_parser::Resolve;

pub(crate) use crate::support::worker::TIMEOUT;
use crate::support::{attempt, rouse_binary};

/// The maximum memory of one attempt in these tests.
pub(crate) const MEMORY_BYTES_MAX: usize = 32 << 20;
/// The maximum size of a result in these tests.
pub(crate) const RESULT_BYTES_MAX: usize = 1 << 20;

/// One sandbox for the whole test binary: each sandbox reserves address space.
pub(crate) fn sandbox() -> Arc<Sandbox> {
    static SANDBOX: OnceLock<Arc<Sandbox>> = OnceLock::new();
    let sandbox = SANDBOX.get_or_init(|| {
        let dir = granted_dir();
        let grant = |handler: &str, mode| Grant {
            handler: handler.into(),
            dir: dir.into(),
            at: "/data".into(),
            mode,
            quota: None,
        };
        let settings = Settings {
            attempts_max: 16,
            limits: Limits {
                memory_bytes: MEMORY_BYTES_MAX,
                result_bytes: RESULT_BYTES_MAX,
                ..Limits::default()
            },
            grants: Grants(vec![
                grant("test.read-file", Mode::Read),
                grant("test.write-file", Mode::ReadWrite),
                grant("test.files", Mode::ReadWrite),
                grant("test.frozen", Mode::ReadWrite),
                Grant {
                    handler: "test.lost".into(),
                    dir: dir.join("nowhere"),
                    at: "/data".into(),
                    mode: Mode::Read,
                    quota: None,
                },
            ]),
            instances: [("test.reuse.*".into(), Instances::Reuse)].into(),
            compiler: Some(rouse_binary()),
            ..Settings::default()
        };
        Sandbox::start(settings).expect("a sandbox")
    });
    sandbox.clone()
}

/// Settings of a sandbox for two small guests.
pub(crate) fn small_settings() -> Settings {
    Settings {
        attempts_max: 2,
        limits: Limits {
            memory_bytes: 1 << 20,
            ..Limits::default()
        },
        compiler: Some(rouse_binary()),
        ..Settings::default()
    }
}

/// The directory that some handlers are granted as `/data`; it contains `greeting.txt` and a link that leads out of it.
pub(crate) fn granted_dir() -> &'static Path {
    static DIR: OnceLock<TempDir> = OnceLock::new();
    DIR.get_or_init(|| {
        let dir = TempDir::new().expect("a directory");
        std::fs::write(dir.path().join("greeting.txt"), "hello").expect("a file");
        std::os::unix::fs::symlink("/etc", dir.path().join("out")).expect("a link");
        dir
    })
    .path()
}

/// A core module that describes itself with this manifest and whose `run` has this body. In the body, `$payload` and
/// `$payload_len` are the payload, and `$return_ok` and `$return_error` make a result from bytes in memory.
pub(crate) fn guest(manifest: &str, run: &str) -> Vec<u8> {
    guest_of_wasip1("", manifest, run)
}

/// A core module with bodies for `describe` and `run`, and this text at address 4096.
pub(crate) fn guest_that(describe: &str, text: &str, run: &str) -> Vec<u8> {
    assemble("", describe, text, run)
}

/// A guest that calls WASI itself, as modules of wasm32-wasip1 do.
pub(crate) fn guest_of_wasip1(imports: &str, manifest: &str, run: &str) -> Vec<u8> {
    let describe = format!(
        "(call $text (i32.const 4096) (i32.const {}))",
        manifest.len()
    );
    assemble(imports, &describe, manifest, run)
}

/// A core module of all these parts.
pub(crate) fn assemble(imports: &str, describe: &str, text: &str, run: &str) -> Vec<u8> {
    assemble_for("", imports, describe, text, run)
}

/// Like [`assemble`], in a world with these imports (WIT) in addition to the contract's.
pub(crate) fn assemble_for(
    world: &str,
    imports: &str,
    describe: &str,
    text: &str,
    run: &str,
) -> Vec<u8> {
    let escaped: String = text.bytes().map(|byte| format!("\\{byte:02x}")).collect();
    let wat = format!(
        r#"(module
        (import "rouse:handler/context@0.1.0" "log" (func $log (param i32 i32 i32)))
        (import "rouse:handler/context@0.1.0" "progress" (func $progress (param i32 i32 i32)))
        (import "rouse:handler/context@0.1.0" "panicked" (func $panicked (param i32 i32 i32 i32)))
        (import "rouse:handler/context@0.1.0" "abort" (func $abort (result i32)))
        (import "rouse:handler/context@0.1.0" "[method]abort-signal.subscribe"
            (func $subscribe (param i32) (result i32)))
        (import "wasi:io/poll@0.2.0" "[method]pollable.block" (func $block (param i32)))
        {imports}
        (memory (export "memory") 4)
        (global $heap (mut i32) (i32.const 131072))
        (data (i32.const 4096) "{escaped}")
        (func $allocate (export "cabi_realloc") (param i32 i32 i32) (param $bytes i32) (result i32)
            (local $at i32)
            (local.set $at (i32.and (i32.add (global.get $heap) (i32.const 15)) (i32.const -16)))
            (global.set $heap (i32.add (local.get $at) (local.get $bytes)))
            (block $roomy
                (br_if $roomy (i32.le_u (global.get $heap)
                    (i32.mul (memory.size) (i32.const 65536))))
                (br_if $roomy (i32.ne (i32.const -1) (memory.grow
                    (i32.add (i32.shr_u (local.get $bytes) (i32.const 16)) (i32.const 1)))))
                unreachable)
            (local.get $at))
        (func $text (param $at i32) (param $bytes i32) (result i32)
            (i32.store (i32.const 16) (local.get $at))
            (i32.store (i32.const 20) (local.get $bytes))
            (i32.const 16))
        (func $return_ok (param $at i32) (param $bytes i32) (result i32)
            (i32.store8 (i32.const 64) (i32.const 0))
            (i32.store (i32.const 72) (local.get $at))
            (i32.store (i32.const 76) (local.get $bytes))
            (i32.const 64))
        (func $return_error (param $at i32) (param $bytes i32) (param $permanent i32) (result i32)
            (i32.store8 (i32.const 64) (i32.const 1))
            (i32.store (i32.const 72) (local.get $at))
            (i32.store (i32.const 76) (local.get $bytes))
            (i32.store (i32.const 80) (local.get $at))
            (i32.store (i32.const 84) (local.get $bytes))
            (i32.store8 (i32.const 88) (i32.const 0))
            (i32.store8 (i32.const 100) (local.get $permanent))
            (i32.store8 (i32.const 104) (i32.const 1))
            (i64.store (i32.const 112) (i64.const 1500))
            (i32.const 64))
        (func $recurse
            (call $recurse)
            (call $recurse))
        (func $wait_for_abort
            (call $block (call $subscribe (call $abort))))
        (func (export "rouse:handler/handlers@0.1.0#describe") (result i32)
            {describe})
        (func $run (export "rouse:handler/handlers@0.1.0#run")
            (param $id i64) (param $handler i32) (param $handler_len i32)
            (param $queue i32) (param $queue_len i32)
            (param $has_tenant i32) (param $tenant i32) (param $tenant_len i32)
            (param $has_source i32) (param $source i32) (param $source_len i32)
            (param $attempt i32) (param $max_attempts i32) (param $requested_at i64)
            (param $payload i32) (param $payload_len i32) (result i32)
            {run}))"#
    );
    with_contract(&wat, world)
}

/// The core module of a text, with the contract and these imports (WIT) embedded.
fn with_contract(wat: &str, world: &str) -> Vec<u8> {
    let mut module = wat::parse_str(wat).expect("the guest is WebAssembly text");
    let mut resolve = Resolve::default();
    let wit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sdk/wit");
    resolve.push_dir(&wit).expect("the contract");
    let world = format!(
        "package test:guest; world guest {{ include rouse:handler/module@0.1.0; {world} }}"
    );
    let package = resolve.push_str("guest.wit", &world).expect("a world");
    let world = resolve
        .select_world(&[package], Some("guest"))
        .expect("the world");
    embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8)
        .expect("the contract fits into the guest");
    module
}

/// The manifest of a module with one handler.
pub(crate) fn manifest(handler: &str, version: &str) -> String {
    format!(r#"{{"handlers":[{{"name":"{handler}","version":"{version}"}}]}}"#)
}

/// A guest with one handler that returns its payload.
pub(crate) fn echo(handler: &str, version: &str) -> Vec<u8> {
    guest(
        &manifest(handler, version),
        "(call $return_ok (local.get $payload) (local.get $payload_len))",
    )
}

/// About the smallest possible module: one handler that returns nothing and imports nothing.
pub(crate) fn smallest(handler: &str) -> Vec<u8> {
    let manifest = manifest(handler, "1");
    let escaped = manifest.replace('"', "\\22");
    let wat = format!(
        r#"(module
        (memory (export "memory") 1)
        (data (i32.const 16) "\40\00\00\00\{:02x}\00\00\00")
        (data (i32.const 64) "{escaped}")
        (func (export "cabi_realloc") (param i32 i32 i32 i32) (result i32)
            (i32.const 4096))
        (func (export "rouse:handler/handlers@0.1.0#describe") (result i32)
            (i32.const 16))
        (func (export "rouse:handler/handlers@0.1.0#run")
            (param i64 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i64 i32 i32) (result i32)
            (i32.const 128)))"#,
        manifest.len()
    );
    with_contract(&wat, "")
}

/// A handler that always returns this text.
pub(crate) fn returns(handler: &str, text: &str) -> Vec<u8> {
    let manifest = manifest(handler, "1");
    guest_that(
        &format!(
            "(call $text (i32.const 4096) (i32.const {}))",
            manifest.len()
        ),
        &format!("{manifest}{text}"),
        &format!(
            "(call $return_ok (i32.const {}) (i32.const {}))",
            4096 + manifest.len(),
            text.len()
        ),
    )
}

/// A handlers folder with its catalog.
pub(crate) struct Handlers {
    pub(crate) dir: TempDir,
    pub(crate) catalog: Catalog,
}

impl Handlers {
    /// A folder with these files in it.
    pub(crate) async fn with(files: &[(&str, &[u8])]) -> Self {
        Self::on(sandbox(), files).await
    }

    /// Like [`Handlers::with`], on another sandbox.
    pub(crate) async fn on(sandbox: Arc<Sandbox>, files: &[(&str, &[u8])]) -> Self {
        let dir = TempDir::new().expect("a directory");
        for (name, bytes) in files {
            std::fs::write(dir.path().join(name), bytes).expect("a file");
        }
        let catalog = Catalog::open(sandbox, dir.path()).await.expect("a catalog");
        Self { dir, catalog }
    }

    /// Like [`Handlers::with`], following the folder.
    pub(crate) async fn watched(files: &[(&str, &[u8])]) -> Self {
        let handlers = Self::with(files).await;
        handlers.catalog.watch();
        handlers
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.path(name), bytes).expect("write a file");
    }

    pub(crate) fn handler(&self, name: &str) -> Arc<Handler> {
        let set = self.catalog.current();
        let handler = set.get(name);
        handler
            .unwrap_or_else(|| panic!("{name} is not served; refused: {:?}", set.refused))
            .clone()
    }

    /// The reason why this file is refused.
    pub(crate) fn refusal(&self, file: &str) -> String {
        refusal(&self.catalog.current(), file).expect("the file is refused")
    }

    /// Waits until the catalog satisfies this condition.
    pub(crate) async fn until(&self, condition: &str, is: impl Fn(&HandlerSet) -> bool) {
        let mut changed = self.catalog.changed();
        let reached = timeout(TIMEOUT, async {
            while !is(&self.catalog.current()) {
                changed.changed().await.expect("the catalog is open");
            }
        });
        if reached.await.is_err() {
            panic!(
                "not reached: {condition}; now: {:?}",
                self.catalog.current()
            );
        }
    }
}

pub(crate) fn refusal(set: &HandlerSet, file: &str) -> Option<String> {
    let refused = set.refused.iter().find(|refused| refused.file == file)?;
    Some(refused.why.clone())
}

pub(crate) fn version(set: &HandlerSet, handler: &str) -> Option<String> {
    Some(set.get(handler)?.manifest.version.clone())
}

/// Binds handlers of this name or pattern to this file.
pub(crate) fn bound(handler: &str, file: &str) -> BTreeMap<String, Vec<ModuleBinding>> {
    [(handler.to_owned(), vec![ModuleBinding::File(file.into())])].into()
}

/// A job with this payload.
pub(crate) fn job(payload: &str) -> JobInput {
    JobInput {
        id: JobId(7),
        queue: "default".into(),
        tenant: None,
        source: None,
        attempt: Attempt(1),
        max_attempts: 5,
        requested_at_ms: 0,
        payload: payload.into(),
        payload_checked: None,
        memory_bytes: None,
        clock: rouse::sandbox::DatabaseClock::from_host(),
        trace: rouse::traces::AttemptTrace::default(),
    }
}

/// Runs a guest whose `run` has this body, without aborting it.
pub(crate) async fn run(body: &str) -> RunReport {
    run_with(body, AbortHandle::new()).await
}

pub(crate) async fn run_with(body: &str, abort: AbortHandle) -> RunReport {
    let handlers = Handlers::with(&[("guest.wasm", &guest(&manifest("test.it", "1"), body))]).await;
    let running = attempt(&sandbox(), &handlers.handler("test.it"), job("{}"), abort);
    timeout(TIMEOUT, running).await.expect("the run ends")
}
