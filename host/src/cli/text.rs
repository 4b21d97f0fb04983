//! Text from guests and databases, made safe for a terminal.

use std::fmt;

use serde_json::Value;

use crate::harmless;

/// Replaces control characters, terminal escapes among them, by `\u{..}`; line breaks stay.
pub(super) fn plain(text: &str) -> String {
    harmless::lines(text)
}

/// JSON as every command prints it: the same, with nothing in it that a terminal would obey.
pub(super) fn as_json(json: impl fmt::Display) -> String {
    harmless::json(&json.to_string())
}

/// The texts of a JSON list, as they are.
pub(super) fn texts(list: &Value) -> impl Iterator<Item = &str> {
    let values = list.as_array().into_iter().flatten();
    values.filter_map(Value::as_str)
}

/// The texts of a JSON list, one behind the other.
pub(super) fn words(list: &Value) -> String {
    plain(&texts(list).collect::<Vec<_>>().join(", "))
}

/// As much of a SHA-256 as tells two files apart.
pub(super) fn digest(sha256: &Value) -> String {
    let digits = sha256.as_str().unwrap_or_default();
    plain(&digits.chars().take(12).collect::<String>())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lists_and_digests_are_shown_as_far_as_they_are_such() {
        assert_eq!(words(&json!(["a\x1b", 1, "b"])), "a\\u{1b}, b");
        assert_eq!(words(&json!(null)), "");
        assert_eq!(digest(&json!("0123456789abcdef")), "0123456789ab");
        assert_eq!(digest(&json!("01")), "01");
    }

    #[test]
    fn json_is_the_same_without_anything_that_a_terminal_would_obey() {
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
