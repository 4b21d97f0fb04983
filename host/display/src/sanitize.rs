//! Makes untrusted text (from guests, modules, payloads, files, databases) safe to show in a terminal, in a host's
//! log and in a stored error.
//!
//! Terminals interpret control characters as commands, and a line break inside a message fakes a second log line.
//! Bidirectional marks can make text read as something else. Such characters are escaped, as `\u{1b}`. The escaped text
//! contains none of them, so escaping it again changes nothing.

/// True for control characters, and for marks that change the text direction or break a line.
pub fn is_unsafe(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{61c}'
                | '\u{200e}'
                | '\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2066}'..='\u{2069}'
        )
}

/// The text on one line: line breaks and tabs become spaces, and anything beyond `bytes_max` is cut.
pub fn printable(text: &str, bytes_max: usize) -> String {
    escape_and_cut(text, bytes_max, |character| match character {
        '\n' | '\r' | '\t' => Some(' '),
        other => (!is_unsafe(other)).then_some(other),
    })
}

/// The text with its line breaks and tabs, for multi-line fields; anything beyond `bytes_max` is cut.
pub fn paragraphs(text: &str, bytes_max: usize) -> String {
    escape_and_cut(text, bytes_max, |character| match character {
        '\n' | '\t' => Some(character),
        other => (!is_unsafe(other)).then_some(other),
    })
}

/// The text on one line, uncut: the caller has limited its length.
pub fn line(text: &str) -> String {
    printable(text, usize::MAX)
}

/// The text with its line breaks and tabs, uncut.
pub fn lines(text: &str) -> String {
    paragraphs(text, usize::MAX)
}

/// The name of a file; line breaks are escaped too.
pub fn name(text: &str) -> String {
    escape_and_cut(text, usize::MAX, |character| {
        (!is_unsafe(character)).then_some(character)
    })
}

/// The same JSON with unsafe characters as JSON escapes. A carriage return between two values becomes a space.
pub fn json(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\n' | '\t' => clean.push(character),
            '\r' => clean.push(' '),
            // All of them are in the Basic Multilingual Plane.
            _ if is_unsafe(character) => clean += &format!("\\u{:04x}", u32::from(character)),
            _ => clean.push(character),
        }
    }
    clean
}

/// Escapes the characters for which `keep` returns `None`.
fn escape_and_cut(text: &str, bytes_max: usize, keep: impl Fn(char) -> Option<char>) -> String {
    let mut clean = String::with_capacity(text.len().min(bytes_max));
    for character in text.chars() {
        if clean.len() >= bytes_max {
            clean.push('…');
            break;
        }
        match keep(character) {
            Some(kept) => clean.push(kept),
            None => clean.extend(character.escape_unicode()),
        }
    }
    clean
}

#[cfg(test)]
mod tests;
