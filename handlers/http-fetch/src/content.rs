//! The fetched content, in a form that a result can hold.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

/// The largest power of ten that a host accepts in a result: Postgres writes numbers out in full.
const EXPONENT_MAX: u32 = 400;
/// The maximum number of digits in a row: Postgres stores 16,383 after the decimal point, including those that an
/// exponent adds.
const DIGITS_MAX: usize = 15_900;

/// The fetched content, as is or encoded.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Content {
    /// If the server declares JSON and it is valid: as the server wrote it.
    Json(#[schemars(with = "Value")] Box<RawValue>),
    /// If it is valid UTF-8.
    Text(String),
    /// Any other bytes.
    Base64(String),
}

impl Content {
    /// The form for these bytes.
    pub(crate) fn from_bytes(bytes: Vec<u8>, content_type: Option<&str>) -> Self {
        let text = match String::from_utf8(bytes) {
            // Postgres cannot store NUL.
            Ok(text) if !text.contains('\0') => text,
            Ok(text) => return Self::Base64(STANDARD.encode(text)),
            Err(error) => return Self::Base64(STANDARD.encode(error.into_bytes())),
        };
        // In JSON, NUL is written as an escape, which Postgres cannot store either.
        let may_be_json = content_type.is_some_and(declares_json) && !text.contains("\\u0000");
        if !may_be_json || !is_storable_json(&text) {
            return Self::Text(text);
        }
        // White space around the value (such as a final line feed) is not part of it.
        match serde_json::from_str(&text) {
            Ok(value) => Self::Json(value),
            Err(_) => Self::Text(text),
        }
    }
}

/// Parsed as a value, not just validated, so that nesting is limited and escapes are decoded.
fn is_storable_json(text: &str) -> bool {
    serde_json::from_str::<Value>(text).is_ok() && !has_huge_number(text)
}

/// True if a number of this JSON has more digits or a larger exponent than a result may have.
fn has_huge_number(json: &str) -> bool {
    // Without escapes, every other quotation mark ends a string.
    let plain = json.replace("\\\\", "").replace("\\\"", "");
    let mut outside = plain.split('"').step_by(2);
    outside.any(|between| {
        let mut digits = between.split(|c: char| !c.is_ascii_digit());
        let mut exponents = between.split(['e', 'E']).skip(1);
        digits.any(|digits| digits.len() > DIGITS_MAX) || exponents.any(is_huge_exponent)
    })
}

/// `text` starts after an `e`.
fn is_huge_exponent(text: &str) -> bool {
    let text = text.trim_start_matches(['+', '-']);
    let end = text.find(|c: char| !c.is_ascii_digit());
    let digits = &text[..end.unwrap_or(text.len())];
    // The last letters of `true` and `false` are not followed by digits.
    !digits.is_empty()
        && digits
            .parse()
            .map_or(true, |exponent: u32| exponent > EXPONENT_MAX)
}

/// True for `application/json`, `application/problem+json` and the like.
fn declares_json(content_type: &str) -> bool {
    let kind = content_type.split(';').next().unwrap_or_default().trim();
    let kind = kind.to_ascii_lowercase();
    kind == "application/json" || kind == "text/json" || kind.ends_with("+json")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content_from(bytes: &[u8], content_type: &str) -> String {
        written(&Content::from_bytes(bytes.to_vec(), Some(content_type)))
    }

    fn written(content: &Content) -> String {
        serde_json::to_string(content).unwrap()
    }

    fn text(text: &str) -> String {
        written(&Content::Text(text.to_owned()))
    }

    #[test]
    fn declared_and_valid_json_is_returned_as_json() {
        for kind in [
            "application/json",
            "Application/JSON; charset=utf-8",
            "application/hal+json",
        ] {
            assert_eq!(
                content_from(b"{\"a\": 1}\n", kind),
                r#"{"json":{"a": 1}}"#,
                "{kind}"
            );
        }
        assert_eq!(content_from(b"{a: 1}", "application/json"), text("{a: 1}"));
        assert_eq!(content_from(b"[1]", "text/plain"), text("[1]"));
        assert_eq!(
            written(&Content::from_bytes(b"[1]".to_vec(), None)),
            text("[1]")
        );
    }

    #[test]
    fn json_keeps_every_digit() {
        for json in [
            r#"{"id":123456789012345678901234567890,"at":0.10000000000000000000001}"#,
            r#"[18446744073709551616, 1.0, 1E+300, true, "e999\"e999", "\\"]"#,
        ] {
            let expected = format!("{{\"json\":{json}}}");
            assert_eq!(content_from(json.as_bytes(), "application/json"), expected);
        }
    }

    #[test]
    fn json_that_a_result_cannot_hold_is_returned_as_text() {
        let deep = "[".repeat(200) + &"]".repeat(200);
        for json in [
            r#""\u0000""#,
            r#""\ud800""#,
            "[1e-401]",
            r#"{"\\": 0E99999999999}"#,
            &deep,
            &format!("[0.{}]", "1".repeat(16_000)),
        ] {
            assert_eq!(
                content_from(json.as_bytes(), "application/json"),
                text(json)
            );
        }
    }

    #[test]
    fn bytes_that_postgres_cannot_store_as_text_are_returned_as_base64() {
        let encoded = |text: &str| written(&Content::Base64(text.to_owned()));
        assert_eq!(content_from(b"\xff\xfe", "text/plain"), encoded("//4="));
        assert_eq!(content_from(b"a\0", "application/json"), encoded("YQA="));
    }
}
