//! Checks JSON from a handler before it is sent to Postgres.

use serde_json::Value;
use serde_json::value::RawValue;

use super::JsonText;

/// The largest power of ten in a result. `jsonb` stores numbers exactly and prints them without an exponent: the few
/// bytes of `1e131071` become 128 KiB each time they are read.
const EXPONENT_MAX: u32 = 400;

/// JSON that `jsonb` can hold; `what` it is, for the error. Postgres refuses `\u0000` in text; without this check, one
/// such result would make it refuse a whole batch of settlements.
///
/// # Errors
/// The problem with it, as a message for people.
pub(crate) fn json_from(what: &str, bytes: Vec<u8>) -> Result<JsonText, String> {
    let text =
        String::from_utf8(bytes).map_err(|error| format!("the {what} is not UTF-8: {error}"))?;
    let _: &RawValue =
        serde_json::from_str(&text).map_err(|error| format!("the {what} is not JSON: {error}"))?;
    if let Some(exponent) = huge_exponent(&text) {
        return Err(format!(
            "the {what} has a number with the exponent {exponent}, which Postgres would write out in full; the maximum is {EXPONENT_MAX}"
        ));
    }
    // Only an escape can put a NUL or a lone surrogate into a string. Results without escapes, the usual case, are not
    // parsed further.
    if text.contains("\\u") {
        let value: Value = serde_json::from_str(&text)
            .map_err(|error| format!("the {what} has a string that is not Unicode: {error}"))?;
        if has_nul(&value) {
            return Err(format!(
                "the {what} has a NUL character (\\u0000), which Postgres cannot store in jsonb"
            ));
        }
    }
    Ok(JsonText(text))
}

/// The first exponent in this JSON text that exceeds the limit.
fn huge_exponent(text: &str) -> Option<&str> {
    let bytes = text.as_bytes();
    let (mut at, mut in_string) = (0, false);
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'\\' if in_string => at += 1,
            b'"' => in_string = !in_string,
            // Outside strings, an e after a digit is part of a number.
            b'e' | b'E' if !in_string && at > 0 && bytes[at - 1].is_ascii_digit() => {
                let rest = text[at + 1..].trim_start_matches(['+', '-']);
                let end = rest.find(|c: char| !c.is_ascii_digit());
                let digits = &rest[..end.unwrap_or(rest.len())];
                if digits
                    .parse::<u32>()
                    .map_or(true, |exponent| exponent > EXPONENT_MAX)
                {
                    return Some(digits);
                }
            }
            _ => {}
        }
        at += 1;
    }
    None
}

fn has_nul(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
        Value::String(text) => text.contains('\0'),
        Value::Array(items) => items.iter().any(has_nul),
        Value::Object(map) => map
            .iter()
            .any(|(key, item)| key.contains('\0') || has_nul(item)),
    }
}
