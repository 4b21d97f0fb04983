//! Names of handlers, and patterns of names.

use std::collections::BTreeMap;

/// True when the pattern is this handler's name, or one of a family that it belongs to: `image.*`
/// is every handler whose name begins with `image.`, and `*` is every handler.
pub fn pattern_covers(pattern: &str, handler: &str) -> bool {
    match pattern.strip_suffix('*') {
        // `image.*` is for `image.thumbnail`, not for `image.` and not for `imagery.x`.
        Some(prefix) if prefix.is_empty() || prefix.ends_with('.') => {
            handler.len() > prefix.len() && handler.starts_with(prefix)
        }
        Some(_) | None => pattern == handler,
    }
}

/// What stands for this handler under the most specific of the patterns: its own name before a
/// pattern, the longer pattern before the shorter.
pub fn most_specific<'a, T>(patterns: &'a BTreeMap<String, T>, handler: &str) -> Option<&'a T> {
    patterns
        .iter()
        .filter(|(pattern, _)| pattern_covers(pattern, handler))
        .max_by_key(|(pattern, _)| (!pattern.ends_with('*'), pattern.len()))
        .map(|(_, value)| value)
}

/// True for a handler's name, and for a pattern of names.
pub fn is_pattern(text: &str) -> bool {
    let words = match text.strip_suffix('*') {
        Some("") => return true,
        Some(prefix) => match prefix.strip_suffix('.') {
            Some(words) => words,
            None => return false,
        },
        None => text,
    };
    words.split('.').all(|word| {
        let first = word.bytes().next();
        first.is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
            && word
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'_')
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_families_are_patterns_and_nothing_else_is() {
        for good in ["*", "image.*", "a.b.*", "email.send", "x", "test.read-file"] {
            assert!(is_pattern(good), "{good}");
        }
        for bad in [
            "",
            "ima*",
            ".*",
            "a..b",
            "*.send",
            "Email.send",
            "a.*.b",
            "a b",
        ] {
            assert!(!is_pattern(bad), "{bad}");
        }
    }
}
