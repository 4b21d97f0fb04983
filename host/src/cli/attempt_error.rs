//! The error of an attempt, in human-readable form.

use serde_json::Value;

use super::text::{plain, strings};

/// The error as lines, each indented by two spaces and ending in a line break.
pub(super) fn lines(error: &Value) -> String {
    let mut text = String::new();
    for key in ["kind", "guest_kind", "message", "location"] {
        if let Some(value) = error.get(key) {
            text += &format!("  {key}: {}\n", cell(value));
        }
    }
    let (details, stack) = without_stack(&error["details"]);
    if !details.is_null() {
        text += &format!("  details: {}\n", cell(&details));
    }
    text += &block("stack", stack.iter().flat_map(|stack| stack.lines()));
    text += &block("stderr", strings(&error["stderr"]));
    text + &block("backtrace", strings(&error["backtrace"]))
}

/// Lines below a title; empty if there are no lines.
fn block<'a>(title: &str, lines: impl Iterator<Item = &'a str>) -> String {
    let lines: String = lines.map(|line| format!("    {}\n", plain(line))).collect();
    match lines.is_empty() {
        true => lines,
        false => format!("  {title}:\n{lines}"),
    }
}

/// The details without a stack, which JavaScript and Python write as text with line breaks.
fn without_stack(details: &Value) -> (Value, Option<String>) {
    let mut rest = details.clone();
    match rest
        .as_object_mut()
        .map(|fields| (fields.remove("stack"), fields.len()))
    {
        Some((Some(Value::String(stack)), 0)) => (Value::Null, Some(stack)),
        Some((Some(Value::String(stack)), _)) => (rest, Some(stack)),
        Some(_) | None => (details.clone(), None),
    }
}

/// A value in one cell: text as it is, everything else as JSON.
pub(super) fn cell(value: &Value) -> String {
    match value {
        Value::String(text) => plain(text),
        other => plain(&other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_stack_and_standard_error_are_printed_as_lines() {
        let error = json!({
            "kind": "guest_error", "guest_kind": "TypeError", "message": "no such field",
            "details": {"stack": "run@app.js:3:7\n\u{1b}[2J\n", "at": 7},
            "stderr": ["Traceback", "  File \"app.py\""], "backtrace": ["abort", "run"],
        });
        let all = "  kind: guest_error\n  guest_kind: TypeError\n  message: no such field\n  details: {\"at\":7}\n  stack:\n    run@app.js:3:7\n    \\u{1b}[2J\n  stderr:\n    Traceback\n      File \"app.py\"\n  backtrace:\n    abort\n    run\n";
        assert_eq!(lines(&error), all);
    }

    #[test]
    fn details_without_a_textual_stack_are_unchanged() {
        for (details, shown) in [
            (json!({"stack": [1]}), "  details: {\"stack\":[1]}\n"),
            (json!({"stack": "a\nb"}), "  stack:\n    a\n    b\n"),
            (json!("plain"), "  details: plain\n"),
            (json!(null), ""),
        ] {
            assert_eq!(lines(&json!({ "details": details })), shown);
        }
    }
}
