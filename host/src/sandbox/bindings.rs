//! The contract of `sdk/wit` as Rust types.

wasmtime::component::bindgen!({
    path: "../sdk/wit",
    world: "module",
    imports: { default: trappable },
    exports: { default: async },
    with: {
        "wasi:io/poll": wasmtime_wasi::p2::bindings::io::poll,
        "rouse:handler/context.abort-signal": super::capability::AbortSignal,
    },
});
