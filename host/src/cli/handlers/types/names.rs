//! Identifiers from untrusted names.

use std::collections::BTreeSet;

/// The maximum length of an identifier, in characters.
const LENGTH_MAX: usize = 80;

/// Names that are unique within one file, regardless of case.
#[derive(Debug, Default)]
pub(super) struct Names(BTreeSet<String>);

impl Names {
    /// This name, or this name with a number if it is taken.
    pub(super) fn take(&mut self, wanted: &str) -> String {
        let mut name = wanted.to_owned();
        let mut number = 2;
        while !self.0.insert(name.to_lowercase()) {
            name = format!("{wanted}{number}");
            number += 1;
        }
        name
    }
}

/// The words of a name: letters and digits of ASCII.
fn words(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut before = ' ';
    for character in name.chars() {
        if !character.is_ascii_alphanumeric() {
            words.push(String::new());
        } else {
            if character.is_ascii_uppercase() && before.is_ascii_lowercase() {
                words.push(String::new());
            }
            words.last_mut().expect("it is never empty").push(character);
        }
        before = character;
    }
    words.retain(|word| !word.is_empty());
    words
}

fn legal(name: String) -> String {
    let name: String = name.chars().take(LENGTH_MAX).collect();
    match name.chars().next() {
        None => "x".to_owned(),
        Some(first) if first.is_ascii_digit() => format!("x{name}"),
        Some(_) => name,
    }
}

/// `EmailSend` for `email.send`.
pub(super) fn upper_camel(name: &str) -> String {
    let words = words(name).into_iter().map(|word| {
        let (first, rest) = word.split_at(1);
        first.to_ascii_uppercase() + rest
    });
    match legal(words.collect()) {
        name if name == "x" => "X".to_owned(),
        name => name[..1].to_ascii_uppercase() + &name[1..],
    }
}

/// `emailSend` for `email.send`.
pub(super) fn lower_camel(name: &str) -> String {
    let name = upper_camel(name);
    name[..1].to_ascii_lowercase() + &name[1..]
}

/// `email_send` for `email.send`.
pub(super) fn snake(name: &str) -> String {
    legal(words(name).join("_").to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_name_becomes_an_identifier() {
        for (name, upper, lower, snaked) in [
            ("email.send", "EmailSend", "emailSend", "email_send"),
            ("a-b_c", "ABC", "aBC", "a_b_c"),
            ("sendToAll", "SendToAll", "sendToAll", "send_to_all"),
            ("2fa", "X2fa", "x2fa", "x2fa"),
            ("", "X", "x", "x"),
            ("é \u{202e}*/", "X", "x", "x"),
            ("'; DROP", "DROP", "dROP", "drop"),
        ] {
            assert_eq!(upper_camel(name), upper, "{name}");
            assert_eq!(lower_camel(name), lower, "{name}");
            assert_eq!(snake(name), snaked, "{name}");
        }
        assert_eq!(upper_camel(&"a".repeat(500)).len(), LENGTH_MAX);
    }

    #[test]
    fn a_name_that_is_taken_gets_a_number() {
        let mut names = Names::default();
        let taken = ["A", "a", "B", "A"].map(|name| names.take(name));
        assert_eq!(taken, ["A", "a2", "B", "A3"]);
    }
}
