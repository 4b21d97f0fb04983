//! Checks JSON from a handler before it is sent to Postgres.

use std::iter;

use serde_json::value::RawValue;

use super::JsonText;

/// The largest power of ten in a result. `jsonb` stores numbers exactly and prints them without an exponent: the few
/// bytes of `1e131071` become 128 KiB each time they are read.
const EXPONENT_MAX: u32 = 400;

/// Many JSON parsers accept 128 levels; the details of an error are at the second level.
const DEPTH_MAX: usize = 120;

/// Returns these bytes as JSON, if `jsonb` can hold it. `what` names the JSON in the error. Postgres refuses `\u0000`
/// in text; without this check, one such result would make it refuse a whole batch of settlements.
///
/// # Errors
/// The problem with it, as a human-readable message.
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
    let mut escapes = unstorable_escapes(&text);
    match escapes.next() {
        None => {}
        Some((_, Unstorable::Nul)) => {
            return Err(format!(
                "the {what} has a NUL character (\\u0000), which Postgres cannot store in jsonb"
            ));
        }
        Some((at, Unstorable::LoneSurrogate)) => {
            return Err(format!(
                "the {what} has a string that is not Unicode: half of a surrogate pair at byte {at}"
            ));
        }
    }
    drop(escapes);
    Ok(JsonText(text))
}

/// The text in a form that `jsonb` can hold and every reader can parse: escapes that `jsonb` cannot hold become the
/// replacement character. `None` if the text is not JSON, has a number that no reader can hold, or is nested too
/// deeply.
pub(super) fn storable_json(text: String) -> Option<JsonText> {
    let _: &RawValue = serde_json::from_str(&text).ok()?;
    if !is_readable(&text) {
        return None;
    }
    let replaced: Vec<usize> = unstorable_escapes(&text).map(|(at, _)| at).collect();
    let mut bytes = text.into_bytes();
    for at in replaced {
        bytes[at..at + ESCAPE].copy_from_slice(b"\\ufffd");
    }
    String::from_utf8(bytes).ok().map(JsonText)
}

/// The length of `\u0000`, in bytes.
const ESCAPE: usize = 6;

/// Characters that can be in a string only as escapes, and that Postgres refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unstorable {
    Nul,
    /// Half of a UTF-16 surrogate pair.
    LoneSurrogate,
}

/// The positions of such escapes in a JSON text. The text is not parsed into values, because these take up to 100 times
/// as much memory.
fn unstorable_escapes(text: &str) -> impl Iterator<Item = (usize, Unstorable)> {
    let bytes = text.as_bytes();
    let mut at = 0;
    iter::from_fn(move || {
        loop {
            // Only strings have backslashes.
            let escape = at + bytes[at..].iter().position(|byte| *byte == b'\\')?;
            let Some(unit) = utf16_unit(bytes, escape) else {
                at = escape + 2;
                continue;
            };
            at = escape + ESCAPE;
            match unit {
                0 => return Some((escape, Unstorable::Nul)),
                0xd800..=0xdbff if matches!(utf16_unit(bytes, at), Some(0xdc00..=0xdfff)) => {
                    at += ESCAPE;
                }
                0xd800..=0xdfff => return Some((escape, Unstorable::LoneSurrogate)),
                _ => {}
            }
        }
    })
}

/// The UTF-16 code unit, if there is an escape like `\u00e4` at this position.
fn utf16_unit(bytes: &[u8], at: usize) -> Option<u16> {
    let digits = bytes.get(at..at + ESCAPE)?.strip_prefix(b"\\u")?;
    u16::from_str_radix(str::from_utf8(digits).ok()?, 16).ok()
}

/// True if the arrays and objects of a JSON text are not nested too deeply, and its numbers are in the range of `f64`.
pub(crate) fn is_readable(text: &str) -> bool {
    let (mut depth, mut in_string, mut is_escaped) = (0_usize, false, false);
    let mut number = None;
    // A space ends a number at the end of the text.
    for (at, byte) in text.bytes().chain([b' ']).enumerate() {
        if !in_string && matches!(byte, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E') {
            // The `e` of `true` and `false` does not start one.
            if byte.is_ascii_digit() || byte == b'-' {
                number.get_or_insert(at);
            }
            continue;
        }
        if let Some(start) = number.take()
            && !text[start..at].parse::<f64>().is_ok_and(f64::is_finite)
        {
            return false;
        }
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            b'"' => in_string = !in_string,
            b'[' | b'{' if !in_string => {
                depth += 1;
                if depth > DEPTH_MAX {
                    return false;
                }
            }
            b']' | b'}' if !in_string => depth -= 1,
            _ => {}
        }
    }
    true
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_that_postgres_refuses_are_found_and_replaced() {
        for (text, replaced) in [
            (r#"["a\u0000b"]"#, r#"["a\ufffdb"]"#),
            (r#"{"\u0000": "\ud800"}"#, r#"{"\ufffd": "\ufffd"}"#),
            (r#""\ud83d\ud83d\ude00""#, r#""\ufffd\ud83d\ude00""#),
            (r#""\udE00\uD83D""#, r#""\ufffd\ufffd""#),
        ] {
            let refused = json_from("result", text.into()).unwrap_err();
            assert!(refused.contains("Postgres") || refused.contains("surrogate"));
            assert_eq!(storable_json(text.into()).unwrap().0, replaced);
            let parsed: Result<serde_json::Value, _> = serde_json::from_str(replaced);
            assert!(parsed.is_ok(), "{replaced}");
        }
        for text in [r#""\\u0000""#, r#""\u00e4\n\ud83d\ude00\\""#, "[1]"] {
            assert_eq!(json_from("result", text.into()).unwrap().0, text);
            assert_eq!(storable_json(text.into()).unwrap().0, text);
        }
    }

    #[test]
    fn details_that_no_reader_can_parse_are_left_out() {
        let deep = |levels| "[".repeat(levels) + "\"]\\\"[\"" + &"]".repeat(levels);
        assert!(storable_json(deep(DEPTH_MAX)).is_some());
        assert!(storable_json(deep(DEPTH_MAX + 1)).is_none());
        for number in ["1e131071", "-1e350", &"9".repeat(400)] {
            assert!(storable_json(number.into()).is_none(), "{number}");
            assert!(storable_json(format!("[true, {number}]")).is_none());
        }
        let fine = r#"{"a": [1e308, -2.5E+3, 0, false], "1e999": "e1e999"}"#;
        assert_eq!(storable_json(fine.into()).unwrap().0, fine);
        assert!(storable_json("[".into()).is_none());
    }
}
