//! Handler names, and patterns that cover several of them.

use std::cmp::Reverse;
use std::collections::BTreeMap;

/// True if the pattern is this handler's name or covers it: `image.*` covers every handler whose name starts with
/// `image.`, and `*` covers every handler.
pub fn pattern_covers(pattern: &str, handler: &str) -> bool {
    match pattern.strip_suffix('*') {
        // `image.*` covers `image.thumbnail`, but neither `image.` nor `imagery.x`.
        Some(prefix) if prefix.is_empty() || prefix.ends_with('.') => {
            handler.len() > prefix.len() && handler.starts_with(prefix)
        }
        Some(_) | None => pattern == handler,
    }
}

/// The entries that apply to this handler, most specific first: its exact name before a pattern, a longer pattern
/// before a shorter one. Given a pattern instead of a name, returns the entries that apply to every handler that the
/// pattern covers.
pub fn most_specific_first<'a, T>(
    patterns: &'a BTreeMap<String, T>,
    handler: &str,
) -> Vec<(&'a str, &'a T)> {
    let mut fitting: Vec<(&str, &T)> = patterns
        .iter()
        .filter(|(pattern, _)| pattern_covers(pattern, handler))
        .map(|(pattern, value)| (pattern.as_str(), value))
        .collect();
    fitting.sort_by_key(|(pattern, _)| Reverse((!pattern.ends_with('*'), pattern.len())));
    fitting
}

/// The most specific entry that applies to this handler.
pub fn most_specific<'a, T>(patterns: &'a BTreeMap<String, T>, handler: &str) -> Option<&'a T> {
    let (_, value) = most_specific_first(patterns, handler).into_iter().next()?;
    Some(value)
}

/// True for a handler's name and for a pattern of names.
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
    fn the_exact_name_precedes_patterns_and_a_longer_pattern_precedes_a_shorter_one() {
        let patterns = ["*", "a.*", "a.b", "a.b.*", "a.b.c", "z"];
        let patterns = patterns.map(|pattern| (pattern.to_owned(), ()));
        let order = |handler: &str| -> Vec<String> {
            let patterns = BTreeMap::from(patterns.clone());
            let fitting = most_specific_first(&patterns, handler);
            fitting.iter().map(|(name, ())| name.to_string()).collect()
        };
        assert_eq!(order("a.b.c"), ["a.b.c", "a.b.*", "a.*", "*"]);
        assert_eq!(order("a.b"), ["a.b", "a.*", "*"]);
        assert_eq!(order("a.b.*"), ["a.b.*", "a.*", "*"]);
        assert_eq!(order("other"), ["*"]);
    }

    #[test]
    fn only_names_and_trailing_wildcards_are_patterns() {
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
