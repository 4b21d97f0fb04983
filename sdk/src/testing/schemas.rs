//! Checks payloads and results against the schemas of their handler, as the host does.

use rouse_schema::{PatternBytes, Schema};
use serde_json::Value;
use serde_json::value::to_raw_value;

use super::json;
use crate::{Error, Handler, Result};

/// The payload of a job that was enqueued without one.
const NO_PAYLOAD: &[u8] = b"{}";

/// Refuses a payload before the handler is called.
pub(super) fn check_payload<H: Handler>(payload: &[u8]) -> Result<()> {
    let schema = read::<H>("input_schema", H::input_schema());
    let Err(why) = schema.check(payload) else {
        return Ok(());
    };
    // A handler without a payload declares `null`.
    if payload.trim_ascii() == NO_PAYLOAD && schema.check(b"null").is_ok() {
        return Ok(());
    }
    Err(Error::permanent(format_args!("payload {why}")).kind("invalid_payload"))
}

/// Reads the result of a handler. The host retries an attempt whose result does not match the schema, or cannot be
/// stored.
pub(super) fn read_result<H: Handler>(result: &[u8]) -> Result<Value> {
    let refuse = |why: String| Error::retryable(why).kind("invalid_result");
    let schema = read::<H>("output_schema", H::output_schema());
    let checked = schema.check(result);
    checked.map_err(|why| refuse(format!("result {why}")))?;
    let result =
        serde_json::from_slice(result).expect("a handler's result was written by serde_json");
    json::check("result", &result).map_err(refuse)?;
    Ok(result)
}

/// # Panics
/// If the host would refuse the schema, and with it the module.
fn read<H: Handler>(field: &str, schema: schemars::Schema) -> Schema {
    let written = to_raw_value(&schema).expect("a schema is JSON");
    let read = Schema::parse(&written, &mut PatternBytes::for_module(), shorten);
    read.unwrap_or_else(|why| {
        let name = H::DEFINITION.name;
        panic!(
            "a host refuses the module, because the {field} of the handler {name} is invalid: {why}"
        )
    })
}

fn shorten(text: &str, bytes_max: usize) -> String {
    let mut chars = text.char_indices();
    match chars.find(|(at, character)| at + character.len_utf8() > bytes_max) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
