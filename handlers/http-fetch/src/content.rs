//! What was fetched, in the form in which a result can hold it.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

/// What was fetched, as it is or encoded.
#[derive(Debug, PartialEq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Content {
    /// Where the server says that it is JSON, and it is.
    Json(Value),
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
        let is_json = content_type.is_some_and(says_json) && !text.contains("\\u0000");
        match is_json.then(|| serde_json::from_str(&text)) {
            Some(Ok(value)) => Self::Json(value),
            Some(Err(_)) | None => Self::Text(text),
        }
    }
}

/// True for `application/json`, `application/problem+json` and their like.
fn says_json(content_type: &str) -> bool {
    let kind = content_type.split(';').next().unwrap_or_default().trim();
    let kind = kind.to_ascii_lowercase();
    kind == "application/json" || kind == "text/json" || kind.ends_with("+json")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(bytes: &[u8], content_type: &str) -> Content {
        Content::of(bytes.to_vec(), Some(content_type))
    }

    #[test]
    fn what_says_that_it_is_json_and_is_comes_as_json() {
        let value = Content::Json(json!({"a": 1}));
        for kind in [
            "application/json",
            "Application/JSON; charset=utf-8",
            "application/hal+json",
        ] {
            assert_eq!(of(b"{\"a\": 1}", kind), value, "{kind}");
        }
        let text = |text: &str| Content::Text(text.to_owned());
        assert_eq!(of(b"{a: 1}", "application/json"), text("{a: 1}"));
        assert_eq!(of(b"[1]", "text/plain"), text("[1]"));
        assert_eq!(Content::of(b"[1]".to_vec(), None), text("[1]"));
        assert_eq!(of(br#""\u0000""#, "application/json"), text(r#""\u0000""#));
    }

    #[test]
    fn what_is_no_text_that_postgres_can_store_comes_as_base64() {
        let encoded = |text: &str| Content::Base64(text.to_owned());
        assert_eq!(of(b"\xff\xfe", "text/plain"), encoded("//4="));
        assert_eq!(of(b"a\0", "application/json"), encoded("YQA="));
    }
}
