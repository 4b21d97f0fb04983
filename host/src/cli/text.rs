//! Text from guests and databases, made safe for a terminal.

/// Replaces control characters, terminal escapes among them, by `\u{..}`; line breaks stay.
pub(super) fn plain(text: &str) -> String {
    text.chars()
        .flat_map(|c| {
            let escape = c.is_control() && c != '\n' && c != '\t';
            let (kept, escaped) = if escape {
                (None, Some(c.escape_unicode()))
            } else {
                (Some(c), None)
            };
            kept.into_iter().chain(escaped.into_iter().flatten())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_escapes_become_visible_and_line_breaks_stay() {
        assert_eq!(plain("a\x1b[2Jb\nc\u{9b}"), "a\\u{1b}[2Jb\nc\\u{9b}");
    }
}
