//! Names of handlers, and patterns of names.

use std::cmp::Reverse;
use std::collections::BTreeMap;

/// True when the pattern is this handler's name, or one of a family that it belongs to: `image.*`
/// is every handler whose name starts with `image.`, and `*` is every handler.
pub fn pattern_covers(pattern: &str, handler: &str) -> bool {
    match pattern.strip_suffix('*') {
        // `image.*` is for `image.thumbnail`, not for `image.` and not for `imagery.x`.
        Some(prefix) if prefix.is_empty() || prefix.ends_with('.') => {
            handler.len() > prefix.len() && handler.starts_with(prefix)
        }
        Some(_) | None => pattern == handler,
    }
}

/// What stands for this handler, from the narrowest of the patterns to the widest: its own name before a pattern, the
/// longer pattern before the shorter. For a pattern instead of a name: what stands for every handler of it.
pub fn narrowest_first<'a, T>(
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

/// What stands for this handler under the narrowest of the patterns.
pub fn narrowest<'a, T>(patterns: &'a BTreeMap<String, T>, handler: &str) -> Option<&'a T> {
    let (_, value) = narrowest_first(patterns, handler).into_iter().next()?;
    Some(value)
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
    fn the_name_stands_before_its_patterns_and_the_longer_pattern_before_the_shorter() {
        let patterns = ["*", "a.*", "a.b", "a.b.*", "a.b.c", "z"];
        let patterns = patterns.map(|pattern| (pattern.to_owned(), ()));
        let order = |handler: &str| -> Vec<String> {
            let patterns = BTreeMap::from(patterns.clone());
            let fitting = narrowest_first(&patterns, handler);
            fitting.iter().map(|(name, ())| name.to_string()).collect()
        };
        assert_eq!(order("a.b.c"), ["a.b.c", "a.b.*", "a.*", "*"]);
        assert_eq!(order("a.b"), ["a.b", "a.*", "*"]);
        assert_eq!(order("a.b.*"), ["a.b.*", "a.*", "*"]);
        assert_eq!(order("other"), ["*"]);
    }

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
