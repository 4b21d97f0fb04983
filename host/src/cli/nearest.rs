//! The name that is probably meant where there is none such.

use super::text::plain;

/// The one of these names that is nearest to what was written; none: none of them is near.
pub(super) fn nearest<'a>(
    wanted: &str,
    names: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    // One slip, and one more for every five letters.
    let slips_max = 1 + wanted.chars().count() / 5;
    let names = names
        .into_iter()
        .map(|name| (strsim::osa_distance(wanted, name), name));
    let (slips, name) = names.filter(|(slips, _)| *slips > 0).min()?;
    (slips <= slips_max).then_some(name)
}

/// What stands behind a message, where there is such a name.
pub(super) fn did_you_mean(nearest: Option<&str>) -> String {
    nearest.map_or_else(String::new, |name| {
        format!("; did you mean {}?", plain(name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_or_two_are_near_and_another_word_is_not() {
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
