//! The contract of `sdk/wit` as Rust types, generated.

wasmtime::component::bindgen!({
    path: "../sdk/wit",
    world: "module",
    imports: {
        "rouse:handler/state": async | trappable,
        "rouse:handler/steps": async | trappable,
        "rouse:handler/parents": async | trappable,
        "rouse:handler/waits": async | trappable,
        "rouse:handler/sql": async | trappable,
        default: trappable,
    },
    exports: { default: async },
    with: {
        "wasi:io/poll": wasmtime_wasi::p2::bindings::io::poll,
        "rouse:handler/context.abort-signal": super::attempt::abort::AbortHandle,
    },
});
