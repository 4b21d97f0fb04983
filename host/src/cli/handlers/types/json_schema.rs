//! The schemas themselves, as the modules wrote them.

use std::fmt::Write as _;

use serde_json::Value;

use super::model::HandlerTypes;

/// Writes each schema as its own text, on one line: its numbers may exceed what a `Value` can hold.
pub(super) fn write(handlers: &[HandlerTypes]) -> String {
    let mut out = "{\n".to_owned();
    for (index, types) in handlers.iter().enumerate() {
        let [payload, result] = &types.schemas;
        let name = Value::from(types.handler.as_str());
        let comma = if index + 1 < handlers.len() { "," } else { "" };
        let _ = writeln!(
            out,
            "  {name}: {{\n    \"payload\": {payload},\n    \"result\": {result}\n  }}{comma}"
        );
    }
    out.push_str("}\n");
    out
}
