//! Durations such as `90s` or `5m`.

use std::time::Duration;

use serde::{Deserialize as _, Deserializer};

/// Reads one.
pub(super) fn read<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Duration>, D::Error> {
    let text = String::deserialize(input)?;
    humantime::parse_duration(&text).map(Some).map_err(|error| {
        serde::de::Error::custom(format!(
            "{text:?} is no duration such as \"90s\" or \"5m\": {error}"
        ))
    })
}
