//! Shared by `cargo xtask`, the benchmarks and chaos: building, starting processes, reading results.

pub mod workspace;

pub mod guests;
mod wasm_toolchain;

pub mod database;
pub mod host_process;

pub mod percentiles;
