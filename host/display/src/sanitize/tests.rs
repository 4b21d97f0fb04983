use super::*;

/// Characters of every kind: escape, delete, the one-character form of `ESC [`, bidirectional controls, the line and
/// paragraph separators, NUL.
const UNSAFE: &str =
    "\u{1b}\u{7f}\u{9b}\u{61c}\u{200e}\u{200f}\u{2028}\u{2029}\u{202a}\u{202e}\u{2066}\u{2069}\0";

#[test]
fn escape_terminal_control_characters() {
    assert_eq!(printable("a\u{1b}[31mred\0", 99), "a\\u{1b}[31mred\\u{0}");
    for character in UNSAFE.chars() {
        let shown = character.escape_unicode().to_string();
        assert_eq!(printable(&character.to_string(), 99), shown);
        assert_eq!(paragraphs(&character.to_string(), 99), shown);
    }
    for safe in ["ümlaut 🦀", "שלום", "zero\u{200d}width"] {
        assert_eq!(printable(safe, 99), safe);
    }
}

#[test]
fn printable_joins_lines_and_paragraphs_keeps_them() {
    assert_eq!(printable("one\r\ntwo\tthree", 99), "one  two three");
    assert_eq!(paragraphs("one\r\ntwo\tthree", 99), "one\\u{d}\ntwo\tthree");
    assert_eq!(line("one\r\ntwo\tthree"), "one  two three");
    assert_eq!(lines("one\r\ntwo\tthree"), "one\\u{d}\ntwo\tthree");
}

#[test]
fn escape_line_breaks_in_file_names() {
    assert_eq!(name("a\nb\tc.wasm"), "a\\u{a}b\\u{9}c.wasm");
    assert_eq!(name("a b.wasm"), "a b.wasm");
}

#[test]
fn escaping_is_idempotent() {
    let once = paragraphs(UNSAFE, 999);
    assert_eq!(paragraphs(&once, 999), once);
    assert_eq!(printable(&once, 999), once);
}

#[test]
fn cut_long_text_at_a_character_boundary() {
    assert_eq!(printable("abcdef", 3), "abc…");
    assert_eq!(printable("abc", 3), "abc");
    assert_eq!(paragraphs("üüü", 3), "üü…");
}

#[test]
fn escaped_json_parses_to_the_same_value() {
    let value = serde_json::json!({ UNSAFE: [UNSAFE, "ümlaut\n"], "n": 1 });
    let written = value.to_string();
    assert!(written.contains('\u{202e}') && written.contains('\u{9b}'));
    let clean = json(&written);
    assert!(!clean.contains(is_unsafe), "{clean}");
    assert!(clean.contains("\\u202e") && clean.contains("\\u009b") && clean.contains("ümlaut"));
    assert_eq!(
        serde_json::from_str::<serde_json::Value>(&clean).expect("JSON"),
        value
    );
    assert_eq!(json("[1,\r\n\t2]"), "[1, \n\t2]");
}
