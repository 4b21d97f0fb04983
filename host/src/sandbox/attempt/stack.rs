//! A guest's call stack, with names and source lines.

use wasmtime::{FrameInfo, WasmBacktrace};

use crate::sandbox::module::lines::{Lines, demangled};

/// A function on the stack, or one that was inlined into such a function.
#[derive(Debug)]
pub(in crate::sandbox) struct StackFrame {
    /// Its name, or its number if it has none.
    pub(in crate::sandbox) function: String,
    /// Its source file, if the module has line tables.
    pub(in crate::sandbox) file: Option<String>,
    pub(in crate::sandbox) line: Option<u32>,
    pub(in crate::sandbox) column: Option<u32>,
}

/// The functions on the stack, innermost first.
pub(in crate::sandbox) fn stack_frames(
    backtrace: &WasmBacktrace,
    lines: &Lines,
) -> Vec<StackFrame> {
    let mut all = Vec::new();
    for frame in backtrace.frames() {
        let before = all.len();
        // There are several lines if the compiler inlined calls.
        let lines = frame.module_offset().map(|offset| lines.at(offset));
        all.extend(lines.into_iter().flatten().map(|line| {
            StackFrame {
                function: line
                    .function
                    .map_or_else(|| function(frame), ToOwned::to_owned),
                file: line.file.map(ToOwned::to_owned),
                line: line.line,
                column: line.column,
            }
        }));
        if all.len() == before {
            all.push(StackFrame {
                function: function(frame),
                file: None,
                line: None,
                column: None,
            });
        }
    }
    all
}

/// The name of the frame's function from the module's name section, or its number.
fn function(frame: &FrameInfo) -> String {
    match frame.func_name() {
        Some(name) => demangled(name),
        None => format!("function {}", frame.func_index()),
    }
}
