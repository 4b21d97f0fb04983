//! What was fetched, in the form in which a result can hold it.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

/// The largest power of ten that a host takes in a result: Postgres writes numbers out in full.
const EXPONENT_MAX: u32 = 400;
/// The most digits in a row: Postgres keeps 16,383 behind the point, those that an exponent adds included.
const DIGITS_MAX: usize = 15_900;

/// What was fetched, as it is or encoded.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Content {
    /// Where the server says that it is JSON, and it is: as the server wrote it.
    Json(#[schemars(with = "Value")] Box<RawValue>),
    /// Where it is UTF-8.
    Text(String),
    /// Any other bytes.
    Base64(String),
}

impl Content {
    /// The form that these bytes have.
    pub(crate) fn of(bytes: Vec<u8>, content_type: Option<&str>) -> Self {
        let text = match String::from_utf8(bytes) {
            // Postgres stores no NUL.
            Ok(text) if !text.contains('\0') => text,
            Ok(text) => return Self::Base64(STANDARD.encode(text)),
            Err(error) => return Self::Base64(STANDARD.encode(error.into_bytes())),
        };
        // The same, where it is written as an escape.
        let may_be_json = content_type.is_some_and(says_json) && !text.contains("\\u0000");
        if !may_be_json || !is_storable_json(&text) {
            return Self::Text(text);
        }
        // What is around it (a line feed at the end) is no part of it.
        match serde_json::from_str(&text) {
            Ok(value) => Self::Json(value),
            Err(_) => Self::Text(text),
        }
    }
}

/// Read as a value, and not only looked through: nesting has an end, and escapes are characters.
fn is_storable_json(text: &str) -> bool {
    serde_json::from_str::<Value>(text).is_ok() && !has_huge_number(text)
}

/// True where a number of this JSON has more digits or a larger exponent than any result may have.
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

/// What starts behind an `e`.
fn is_huge_exponent(text: &str) -> bool {
    let text = text.trim_start_matches(['+', '-']);
    let end = text.find(|c: char| !c.is_ascii_digit());
    let digits = &text[..end.unwrap_or(text.len())];
    // Of `true` and `false` there are none.
    !digits.is_empty()
        && digits
            .parse()
            .map_or(true, |exponent: u32| exponent > EXPONENT_MAX)
}

/// True for `application/json`, `application/problem+json` and their like.
fn says_json(content_type: &str) -> bool {
    let kind = content_type.split(';').next().unwrap_or_default().trim();
    let kind = kind.to_ascii_lowercase();
    kind == "application/json" || kind == "text/json" || kind.ends_with("+json")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(bytes: &[u8], content_type: &str) -> String {
        written(&Content::of(bytes.to_vec(), Some(content_type)))
    }

    fn written(content: &Content) -> String {
        serde_json::to_string(content).unwrap()
    }

    fn text(text: &str) -> String {
        written(&Content::Text(text.to_owned()))
    }

    #[test]
    fn what_says_that_it_is_json_and_is_comes_as_json() {
        for kind in [
            "application/json",
            "Application/JSON; charset=utf-8",
            "application/hal+json",
        ] {
            assert_eq!(of(b"{\"a\": 1}\n", kind), r#"{"json":{"a": 1}}"#, "{kind}");
        }
        assert_eq!(of(b"{a: 1}", "application/json"), text("{a: 1}"));
        assert_eq!(of(b"[1]", "text/plain"), text("[1]"));
        assert_eq!(written(&Content::of(b"[1]".to_vec(), None)), text("[1]"));
    }

    #[test]
    fn json_comes_with_every_digit_as_the_server_wrote_it() {
        for json in [
            r#"{"id":123456789012345678901234567890,"at":0.10000000000000000000001}"#,
            r#"[18446744073709551616, 1.0, 1E+300, true, "e999\"e999", "\\"]"#,
        ] {
            let expected = format!("{{\"json\":{json}}}");
            assert_eq!(of(json.as_bytes(), "application/json"), expected);
        }
    }

    #[test]
    fn json_that_no_result_can_hold_comes_as_text() {
        let deep = "[".repeat(200) + &"]".repeat(200);
        for json in [
            r#""\u0000""#,
            r#""\ud800""#,
            "[1e-401]",
            r#"{"\\": 0E99999999999}"#,
            &deep,
            &format!("[0.{}]", "1".repeat(16_000)),
        ] {
            assert_eq!(of(json.as_bytes(), "application/json"), text(json));
        }
    }

    #[test]
    fn what_is_no_text_that_postgres_can_store_comes_as_base64() {
        let encoded = |text: &str| written(&Content::Base64(text.to_owned()));
        assert_eq!(of(b"\xff\xfe", "text/plain"), encoded("//4="));
        assert_eq!(of(b"a\0", "application/json"), encoded("YQA="));
    }
}
