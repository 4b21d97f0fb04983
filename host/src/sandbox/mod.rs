//! The only room that speaks wasmtime.
