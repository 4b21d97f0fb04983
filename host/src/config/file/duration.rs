//! Durations such as `90s` or `5m`.

use std::fmt;
use std::time::Duration;

use serde::Deserializer;
use serde::de::{Error, Visitor};

/// Reads one.
pub(super) fn read<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Duration>, D::Error> {
    input.deserialize_str(Written).map(Some)
}

struct Written;

impl Visitor<'_> for Written {
    type Value = Duration;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a duration with its unit, in quotes, such as \"90s\" or \"5m\"")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Duration, E> {
        humantime::parse_duration(text).map_err(|error| {
            E::custom(format!(
                "{text:?} is no duration such as \"90s\" or \"5m\": {error}"
            ))
        })
    }
}
