//! JSON that the host refuses, because Postgres cannot store it.

use serde_json::Value;

/// Refuses NUL characters, with the reason of the host. `what` names the JSON.
pub(super) fn check(what: &str, json: &Value) -> Result<(), String> {
    match has_nul(json) {
        true => Err(format!(
            "the {what} has a NUL character (\\u0000), which Postgres cannot store in jsonb"
        )),
        false => Ok(()),
    }
}

fn has_nul(json: &Value) -> bool {
    match json {
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
        Value::String(text) => text.contains('\0'),
        Value::Array(items) => items.iter().any(has_nul),
        Value::Object(fields) => fields
            .iter()
            .any(|(key, value)| key.contains('\0') || has_nul(value)),
    }
}
