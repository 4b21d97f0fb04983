//! What stands on a guest's stack, in words.

use wasmtime::WasmBacktrace;

/// A function that is being called, or that the compiler has put into one that is.
#[derive(Debug)]
pub(super) struct Called {
    /// Its name, or its number where it has none.
    pub(super) function: String,
    /// Its source, where the module has its line tables.
    pub(super) file: Option<String>,
    pub(super) line: Option<u32>,
    pub(super) column: Option<u32>,
}

/// All of them, innermost first.
pub(super) fn called(backtrace: &WasmBacktrace) -> Vec<Called> {
    let mut all = Vec::new();
    for frame in backtrace.frames() {
        let function = |name: Option<&str>| match name.or(frame.func_name()) {
            Some(name) => format!("{:#}", rustc_demangle::demangle(name)),
            None => format!("function {}", frame.func_index()),
        };
        if frame.symbols().is_empty() {
            all.push(Called {
                function: function(None),
                file: None,
                line: None,
                column: None,
            });
        }
        // More than one where the compiler has inlined calls.
        all.extend(frame.symbols().iter().map(|symbol| Called {
            function: function(symbol.name()),
            file: symbol.file().map(str::to_owned),
            line: symbol.line(),
            column: symbol.column(),
        }));
    }
    all
}
