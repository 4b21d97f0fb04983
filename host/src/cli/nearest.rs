//! Suggestions for unknown names.

use super::text::plain;

/// The most similar of these names; `None` if none is similar enough.
pub(super) fn nearest<'a>(
    wanted: &str,
    names: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    // One typo, and one more for every five letters.
    let typos_max = 1 + wanted.chars().count() / 5;
    let names = names
        .into_iter()
        .map(|name| (strsim::osa_distance(wanted, name), name));
    let (typos, name) = names.filter(|(typos, _)| *typos > 0).min()?;
    (typos <= typos_max).then_some(name)
}

/// The end of a message with a suggestion; empty if there is no suggestion.
pub(super) fn did_you_mean(nearest: Option<&str>) -> String {
    nearest.map_or_else(String::new, |name| {
        format!("; did you mean {}?", plain(name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_a_typo_or_two_is_suggested_and_another_word_is_not() {
        let names = ["mail.send", "mail.sent.log", "text.stats"];
        for (wanted, meant) in [
            ("mail.snd", Some("mail.send")),
            ("mial.send", Some("mail.send")),
            ("text.stat", Some("text.stats")),
            ("image.crop", None),
            ("x", None),
        ] {
            assert_eq!(nearest(wanted, names), meant, "{wanted}");
        }
        assert_eq!(did_you_mean(Some("mail.send")), "; did you mean mail.send?");
        assert_eq!(did_you_mean(None), "");
    }
}
