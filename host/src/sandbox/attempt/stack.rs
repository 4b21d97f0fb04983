//! What stands on a guest's stack, in words.

use wasmtime::{FrameInfo, WasmBacktrace};

use crate::sandbox::module::lines::{Lines, demangled};

/// A function that is being called, or that the compiler has put into one that is.
#[derive(Debug)]
pub(in crate::sandbox) struct Called {
    /// Its name, or its number where it has none.
    pub(in crate::sandbox) function: String,
    /// Its source, where the module has its line tables.
    pub(in crate::sandbox) file: Option<String>,
    pub(in crate::sandbox) line: Option<u32>,
    pub(in crate::sandbox) column: Option<u32>,
}

/// All of them, innermost first.
pub(in crate::sandbox) fn called(backtrace: &WasmBacktrace, lines: &Lines) -> Vec<Called> {
    let mut all = Vec::new();
    for frame in backtrace.frames() {
        let known = all.len();
        // More than one where the compiler has inlined calls.
        let lines = frame.module_offset().map(|offset| lines.at(offset));
        all.extend(lines.into_iter().flatten().map(|line| {
            Called {
                function: line
                    .function
                    .map_or_else(|| function(frame), ToOwned::to_owned),
                file: line.file.map(ToOwned::to_owned),
                line: line.line,
                column: line.column,
            }
        }));
        if all.len() == known {
            all.push(Called {
                function: function(frame),
                file: None,
                line: None,
                column: None,
            });
        }
    }
    all
}

/// Its name as the module's own list of names has it.
fn function(frame: &FrameInfo) -> String {
    match frame.func_name() {
        Some(name) => demangled(name),
        None => format!("function {}", frame.func_index()),
    }
}
