//! Text of strangers (guests, modules, payloads, files, databases), made harmless for whoever reads it: in a terminal, in a host's log, in an
//! error that is kept.
//!
//! Terminals take control characters for commands, and a line break in the middle of a message makes a second line of it that nobody
//! wrote. Marks turn the direction of writing, so that a text is read as another one. Such characters are shown, as `\u{1b}`; what was
//! shown once has none of them, and stays as it is.

/// True for control characters, and for marks that turn the direction of writing or break a line.
pub(crate) fn is_harmful(character: char) -> bool {
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

/// The text in one line: its line breaks and tabs become spaces, and what is longer than `bytes_max` is cut.
pub(crate) fn printable(text: &str, bytes_max: usize) -> String {
    shown(text, bytes_max, |character| match character {
        '\n' | '\r' | '\t' => Some(' '),
        other => (!is_harmful(other)).then_some(other),
    })
}

/// The text with its line breaks and tabs, where more than one line is looked for; what is longer than `bytes_max` is cut.
pub(crate) fn paragraphs(text: &str, bytes_max: usize) -> String {
    shown(text, bytes_max, |character| match character {
        '\n' | '\t' => Some(character),
        other => (!is_harmful(other)).then_some(other),
    })
}

/// The text in one line, whole: whoever made it has cut it.
pub(crate) fn line(text: &str) -> String {
    printable(text, usize::MAX)
}

/// The text with its line breaks and tabs, whole.
pub(crate) fn lines(text: &str) -> String {
    paragraphs(text, usize::MAX)
}

/// The name of a file, in which line breaks are shown too.
pub(crate) fn name(text: &str) -> String {
    shown(text, usize::MAX, |character| {
        (!is_harmful(character)).then_some(character)
    })
}

/// The same JSON, with such characters as JSON itself escapes them. A carriage return between two values becomes a space.
pub(crate) fn json(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\n' | '\t' => clean.push(character),
            '\r' => clean.push(' '),
            // All of them are in the first 65,536.
            _ if is_harmful(character) => clean += &format!("\\u{:04x}", u32::from(character)),
            _ => clean.push(character),
        }
    }
    clean
}

/// Shows the characters of which nothing is kept.
fn shown(text: &str, bytes_max: usize, keep: impl Fn(char) -> Option<char>) -> String {
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
