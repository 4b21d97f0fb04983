//! Text from guests and databases, made safe for a terminal.

use std::fmt;

use serde_json::Value;

use crate::sanitize;

/// Replaces control characters, including terminal escapes, with `\u{..}`; line breaks stay.
pub(super) fn plain(text: &str) -> String {
    sanitize::lines(text)
}

/// The line about an error.
pub(super) fn error_line(error: impl fmt::Display) -> String {
    format!("rouse: {}", without_prefix(&error.to_string()))
}

/// The text of an error without the prefix `rouse: `, which messages of the database may have.
pub(super) fn without_prefix(error: &str) -> &str {
    error.strip_prefix("rouse: ").unwrap_or(error)
}

/// JSON as every command prints it, with all characters escaped that a terminal would interpret.
pub(super) fn as_json(json: impl fmt::Display) -> String {
    sanitize::json(&json.to_string())
}

/// The strings of a JSON array.
pub(super) fn strings(list: &Value) -> impl Iterator<Item = &str> {
    let values = list.as_array().into_iter().flatten();
    values.filter_map(Value::as_str)
}

/// The strings of a JSON array, joined by commas.
pub(super) fn words(list: &Value) -> String {
    plain(&strings(list).collect::<Vec<_>>().join(", "))
}

/// The first digits of a SHA-256, enough to tell files apart.
pub(super) fn digest(sha256: &Value) -> String {
    let digits = sha256.as_str().unwrap_or_default();
    plain(&digits.chars().take(12).collect::<String>())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lists_and_digests_show_their_strings() {
        assert_eq!(words(&json!(["a\x1b", 1, "b"])), "a\\u{1b}, b");
        assert_eq!(words(&json!(null)), "");
        assert_eq!(digest(&json!("0123456789abcdef")), "0123456789ab");
        assert_eq!(digest(&json!("01")), "01");
    }

    #[test]
    fn the_line_about_an_error_has_one_prefix() {
        assert_eq!(error_line("no database"), "rouse: no database");
        assert_eq!(
            error_line("rouse: job 1 is running"),
            "rouse: job 1 is running"
        );
        assert_eq!(error_line("rouse.retry: no"), "rouse: rouse.retry: no");
    }

    #[test]
    fn json_is_the_same_without_characters_that_a_terminal_interprets() {
        let value = json!({"a\u{9b}": "b\u{202e}\u{7f}", "raw": 1});
        let printed = as_json(&value);
        assert_eq!(printed, r#"{"a\u009b":"b\u202e\u007f","raw":1}"#);
        assert_eq!(serde_json::from_str::<Value>(&printed).unwrap(), value);
    }

    #[test]
    fn terminal_escapes_become_visible_and_line_breaks_stay() {
        assert_eq!(plain("a\x1b[2Jb\nc\u{9b}"), "a\\u{1b}[2Jb\nc\\u{9b}");
        assert_eq!(plain("ab\u{202e}cd"), "ab\\u{202e}cd");
    }
}
