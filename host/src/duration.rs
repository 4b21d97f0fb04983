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
