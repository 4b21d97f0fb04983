//! Modules with many parts: other toolchains split a module into more parts than Rust's does.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use rouse::job::RunEnd;
use rouse::sandbox::{AbortHandle, Limits, ModuleParts, Sandbox, Settings};
use wit_component::ComponentEncoder;

use crate::compiling::compiler_that;
use crate::sandbox_guest::{Handlers, guest, job, manifest};
use crate::support::{attempt, rouse_binary, scratch};

/// A component around a core module has this many core instances: its own code, and two small ones that connect it to
/// the host.
const INSTANCES_OF_ITS_OWN: u32 = 3;

/// A component that echoes, with this many parts.
fn component_with(parts: ModuleParts) -> Vec<u8> {
    // Any guest in Rust has one of each: its memory, and the table that connects it to the host.
    let memories = "(memory 1)".repeat(parts.memories as usize - 1);
    let tables = "(table 10 funcref)".repeat(parts.tables as usize - 1);
    let module = guest(
        &manifest("test.parts", "1"),
        // These parts come after the guest's own: the host reads the first memory. The last function has no body.
        &format!(
            "(call $return_ok (local.get $payload) (local.get $payload_len))) {memories} {tables} (func"
        ),
    );
    let component = ComponentEncoder::default()
        .module(&module)
        .and_then(|mut encoder| encoder.encode());
    with_empty_instances(
        component.expect("a component"),
        parts.core_instances - INSTANCES_OF_ITS_OWN,
    )
}

/// The component with an empty module and this many core instances of it.
fn with_empty_instances(mut component: Vec<u8>, count: u32) -> Vec<u8> {
    const CORE_MODULE: u8 = 1;
    const CORE_INSTANCE: u8 = 2;
    let (count, module) = (u8::try_from(count).unwrap(), core_modules(&component));
    assert!(count < 0x40 && module < 0x40, "numbers of one byte");
    component.extend([CORE_MODULE, 8]);
    component.extend(b"\0asm\x01\0\0\0");
    component.extend([CORE_INSTANCE, 1 + 3 * count, count]);
    for _ in 0..count {
        // Instantiate this module without arguments.
        component.extend([0, module, 0]);
    }
    component
}

/// The number of core modules in a component.
fn core_modules(component: &[u8]) -> u8 {
    let (mut at, mut modules) = (8, 0);
    while at < component.len() {
        modules += u8::from(component[at] == 1);
        at += 1;
        let (mut bytes, mut shift) = (0, 0);
        loop {
            bytes |= usize::from(component[at] & 0x7f) << shift;
            shift += 7;
            at += 1;
            if component[at - 1] < 0x80 {
                break;
            }
        }
        at += bytes;
    }
    modules
}

fn settings() -> Settings {
    Settings {
        attempts_max: 2,
        limits: Limits {
            memory_bytes: 2 << 20,
            ..Limits::default()
        },
        compiler: Some(rouse_binary()),
        ..Settings::default()
    }
}

async fn load(settings: Settings, module: &[u8]) -> (Arc<Sandbox>, Handlers) {
    let sandbox = Sandbox::start(settings).expect("a sandbox");
    let handlers = Handlers::on(sandbox.clone(), &[("parts.wasm", module)]).await;
    (sandbox, handlers)
}

async fn assert_runs(settings: Settings, module: &[u8]) {
    let (sandbox, handlers) = load(settings, module).await;
    let handler = handlers.handler("test.parts");
    // Twice as many as can run concurrently, so each place in the pool is used again.
    for _ in 0..2 {
        let attempts = [0; 2].map(|_| attempt(&sandbox, &handler, job("[7]"), AbortHandle::new()));
        for attempt in attempts {
            assert_eq!(attempt.await.end, RunEnd::Returned(b"[7]".into()));
        }
    }
}

#[tokio::test]
async fn a_module_of_20_instances_4_memories_and_8_tables_runs_in_each_slot() {
    let parts = ModuleParts::default();
    assert_eq!(
        (parts.core_instances, parts.memories, parts.tables),
        (20, 4, 8)
    );
    assert_runs(settings(), &component_with(parts)).await;
}

#[tokio::test]
async fn a_module_with_too_many_parts_is_refused_permanently_unless_the_setting_is_raised() {
    let defaults = ModuleParts::default();
    for (parts, words, setting) in [
        (
            ModuleParts {
                core_instances: 21,
                ..defaults
            },
            "21 core module instances",
            "module_core_instances_max",
        ),
        (
            ModuleParts {
                memories: 5,
                ..defaults
            },
            "memories count of 5",
            "module_memories_max",
        ),
        (
            ModuleParts {
                tables: 10,
                ..defaults
            },
            "tables count of 9",
            "module_tables_max",
        ),
        (
            ModuleParts {
                tables: 9,
                ..defaults
            },
            "9 tables",
            "module_tables_max",
        ),
    ] {
        let module = component_with(parts);
        let (_, handlers) = load(settings(), &module).await;
        let why = handlers.refusal("parts.wasm");
        assert!(
            why.starts_with("it exceeds what this host allows for one module: ")
                && why.contains(words)
                && why.contains(setting)
                && !why.contains("tried again"),
            "{why}"
        );
        let raised = Settings {
            module_parts: parts,
            ..settings()
        };
        assert_runs(raised, &module).await;
    }
}

fn compilations(counted: &Path) -> usize {
    fs::read_to_string(counted).map_or(0, |text| text.lines().count())
}

#[tokio::test]
async fn a_module_too_large_for_the_pool_is_compiled_only_once() {
    let scratch = scratch("parts");
    let counted = scratch.join("counted");
    let counting = || Settings {
        compiler: Some(compiler_that(&format!(
            "echo one >> {}\nexec {} \"$@\"",
            counted.display(),
            rouse_binary().display()
        ))),
        cache_dir: Some(scratch.join("code")),
        ..settings()
    };
    let module = component_with(ModuleParts {
        memories: 5,
        ..ModuleParts::default()
    });
    for _ in 0..2 {
        let (_, handlers) = load(counting(), &module).await;
        assert!(handlers.refusal("parts.wasm").contains("memories"));
        assert_eq!(compilations(&counted), 1);
    }
    let raised = Settings {
        module_parts: ModuleParts {
            memories: 5,
            ..ModuleParts::default()
        },
        ..counting()
    };
    assert_runs(raised, &module).await;
    assert_eq!(compilations(&counted), 1, "the cached code serves");
}
