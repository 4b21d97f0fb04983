//! What `cargo xtask`, the benchmarks and chaos build, start and read.

pub mod workspace;

pub mod guests;
mod wasm_toolchain;

pub mod database;
pub mod host_process;

pub mod percentiles;
