//! The engine settings that machine code depends on, in a host and in its compiler process.

use std::num::NonZeroUsize;

use wasmtime::{Config, WasmBacktraceDetails, WasmFeatures};

use crate::sandbox::attempt::limits::WASM_STACK_BYTES_MAX;

/// The maximum number of frames of a backtrace that are kept; the panic machinery takes the first ten.
pub(in crate::sandbox) const BACKTRACE_FRAMES_MAX: usize = 48;

/// The settings that machine code depends on: the same in a host and in the process that compiles for it.
pub(in crate::sandbox) fn code_config() -> Config {
    let mut config = Config::new();
    config
        .epoch_interruption(true)
        .consume_fuel(false)
        .max_wasm_stack(WASM_STACK_BYTES_MAX)
        // The compiler process reads the lines, once (`lines`).
        .wasm_backtrace_details(WasmBacktraceDetails::Disable)
        .wasm_backtrace_max_frames(NonZeroUsize::new(BACKTRACE_FRAMES_MAX))
        .concurrency_support(false)
        .wasm_component_model(true)
        .wasm_memory64(false);
    for feature in [
        WasmFeatures::THREADS,
        WasmFeatures::GC,
        WasmFeatures::EXCEPTIONS,
        WasmFeatures::STACK_SWITCHING,
    ] {
        config.wasm_features(feature, false);
    }
    config
}
