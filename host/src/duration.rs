//! Parses durations such as `90s` or `2h`: on the command line, in `rouse.toml` and in the grants of a job.

use std::fmt;
use std::time::Duration;

use serde::Deserializer;
use serde::de::{Error, Visitor};

/// Parses a duration.
///
/// # Errors
/// The problem, as a sentence without its subject, with an example.
fn parse(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|error| format!("is not a duration such as 90s or 2h: {error}"))
}

/// A duration for people, in days and smaller units. (humantime also writes months, of 30.44 days each.)
pub(crate) fn shown(time: Duration) -> String {
    let days = time.as_secs() / 86_400;
    let rest = time - Duration::from_secs(days * 86_400);
    let rest = humantime::format_duration(rest).to_string();
    let unit = if days == 1 { "day" } else { "days" };
    match (days, rest.as_str()) {
        (0, rest) => rest.to_owned(),
        (_, "0s") => format!("{days}{unit}"),
        (_, rest) => format!("{days}{unit} {rest}"),
    }
}

/// Parses an argument for clap, which names the argument and its value before this error.
pub(crate) fn argument(text: &str) -> Result<Duration, String> {
    parse(text).map_err(|why| format!("it {why}"))
}

/// Like [`argument`], but refuses zero.
pub(crate) fn argument_above_zero(text: &str) -> Result<Duration, String> {
    match argument(text)? {
        Duration::ZERO => Err("it must be longer than 0s, for instance 90s".into()),
        time => Ok(time),
    }
}

/// Deserializes a field that may be left out.
pub(crate) fn optional<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Duration>, D::Error> {
    read(input).map(Some)
}

/// Deserializes a duration.
pub(crate) fn read<'de, D: Deserializer<'de>>(input: D) -> Result<Duration, D::Error> {
    input.deserialize_str(Text)
}

struct Text;

impl Visitor<'_> for Text {
    type Value = Duration;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a duration with its unit, in quotes, such as \"90s\" or \"5m\"")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Duration, E> {
        parse(text).map_err(|why| E::custom(format!("{text:?} {why}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_shown_in_days_and_smaller_units() {
        let shown = |secs| shown(Duration::from_secs(secs));
        assert_eq!(shown(0), "0s");
        assert_eq!(shown(90), "1m 30s");
        assert_eq!(shown(86_400), "1day");
        assert_eq!(shown(31 * 86_400), "31days");
        assert_eq!(shown(400 * 86_400 + 3_600), "400days 1h");
        assert_eq!(shown(86_401), "1day 1s");
    }
}
