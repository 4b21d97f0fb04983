//! Parses durations such as `"30s"`.

use std::ops::RangeInclusive;

use syn::LitStr;

const UNITS: [(&str, u64); 5] = [
    ("ms", 1),
    ("s", 1000),
    ("m", 60 * 1000),
    ("h", 60 * 60 * 1000),
    ("d", 24 * 60 * 60 * 1000),
];

/// Reads `"500ms"`, `"30s"`, `"5m"`, `"1h"` or `"7d"` as milliseconds within this range.
pub(crate) fn milliseconds(text: &LitStr, range_ms: RangeInclusive<u64>) -> syn::Result<u64> {
    parse(&text.value(), range_ms).map_err(|why| syn::Error::new(text.span(), why))
}

fn parse(text: &str, range_ms: RangeInclusive<u64>) -> Result<u64, String> {
    let unit_at = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let unit = UNITS.into_iter().find(|(name, _)| *name == unit);
    let (false, Some((_, unit_ms))) = (number.is_empty(), unit) else {
        return Err(format!(
            "`{text}` is not a duration: write a whole number and a unit (ms, s, m, h, d), \
             for instance \"30s\""
        ));
    };
    number
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(unit_ms))
        .filter(|ms| range_ms.contains(ms))
        .ok_or_else(|| {
            let (min, max) = (written(*range_ms.start()), written(*range_ms.end()));
            format!("`{text}` is out of range: expected {min} to {max}")
        })
}

/// Writes a duration in the largest unit of which it is a multiple.
fn written(ms: u64) -> String {
    let mut units = UNITS.into_iter().rev();
    let unit = units.find(|(_, unit_ms)| ms.is_multiple_of(*unit_ms));
    let (unit, unit_ms) = unit.unwrap_or(UNITS[0]);
    format!("{}{unit}", ms / unit_ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    const YEAR_MS: u64 = 365 * 24 * 60 * 60 * 1000;

    #[test]
    fn a_duration_is_a_whole_number_with_a_unit() {
        assert_eq!(parse("500ms", 1..=YEAR_MS), Ok(500));
        assert_eq!(parse("30s", 1..=YEAR_MS), Ok(30_000));
        assert_eq!(parse("5m", 1..=YEAR_MS), Ok(300_000));
        assert_eq!(parse("1h", 1..=YEAR_MS), Ok(3_600_000));
        assert_eq!(parse("365d", 1..=YEAR_MS), Ok(31_536_000_000));
    }

    #[test]
    fn anything_else_is_refused_with_an_example() {
        for text in ["", "30", "s", "1.5s", "-1s", "30 s", "30S", "5min", "ms5"] {
            let why = parse(text, 1..=YEAR_MS).unwrap_err();
            assert!(why.contains("for instance \"30s\""), "{text}: {why}");
        }
    }

    #[test]
    fn zero_or_more_than_the_maximum_is_refused_with_the_range() {
        for text in [
            "0s",
            "366d",
            "99999999999999999999s",
            "18446744073709551615h",
        ] {
            let why = parse(text, 1..=YEAR_MS).unwrap_err();
            let expected = format!("`{text}` is out of range: expected 1ms to 365d");
            assert_eq!(why, expected);
        }
        for (max_ms, shown) in [(600_000, "10m"), (90_000, "90s"), (1, "1ms")] {
            let why = parse("1d", 1..=max_ms).unwrap_err();
            assert!(why.ends_with(&format!("1ms to {shown}")), "{why}");
        }
        let why = parse("1s", 2000..=YEAR_MS).unwrap_err();
        assert!(why.ends_with("expected 2s to 365d"), "{why}");
    }
}
