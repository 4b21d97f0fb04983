//! Why an attempt did not succeed, for people.

use serde_json::Value;

use super::text::plain;

/// The error as lines, each with two spaces before it and a line break behind.
pub(super) fn lines(error: &Value) -> String {
    let mut text = String::new();
    for key in ["kind", "guest_kind", "message", "location", "details"] {
        if let Some(value) = error.get(key) {
            text.push_str(&format!("  {key}: {}\n", cell(value)));
        }
    }
    for frame in error["backtrace"].as_array().into_iter().flatten() {
        text.push_str(&format!("    {}\n", cell(frame)));
    }
    text
}

/// A value in one cell: text as it is, everything else as JSON.
pub(super) fn cell(value: &Value) -> String {
    match value {
        Value::String(text) => plain(text),
        other => plain(&other.to_string()),
    }
}
