//! Parses durations such as `"30s"`.

use syn::LitStr;

/// A year: longer than any useful wait, and within the range of every clock.
const MAX_MS: u64 = 365 * 24 * 60 * 60 * 1000;

/// Reads `"500ms"`, `"30s"`, `"5m"`, `"1h"` or `"7d"` as milliseconds.
pub(crate) fn milliseconds(text: &LitStr) -> syn::Result<u64> {
    parse(&text.value()).map_err(|why| syn::Error::new(text.span(), why))
}

fn parse(text: &str) -> Result<u64, String> {
    let unit_at = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let unit_ms = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60 * 1000,
        "h" => 60 * 60 * 1000,
        "d" => 24 * 60 * 60 * 1000,
        _ => 0,
    };
    if number.is_empty() || unit_ms == 0 {
        return Err(format!(
            "`{text}` is not a duration: write a whole number and a unit (ms, s, m, h, d), \
             for instance \"30s\""
        ));
    }
    let ms = number
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(unit_ms))
        .filter(|ms| *ms <= MAX_MS)
        .ok_or_else(|| format!("`{text}` is longer than 365 days"))?;
    if ms == 0 {
        return Err(format!("`{text}` is zero: it must be positive"));
    }
    Ok(ms)
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn a_duration_is_a_whole_number_with_a_unit() {
        assert_eq!(parse("500ms"), Ok(500));
        assert_eq!(parse("30s"), Ok(30_000));
        assert_eq!(parse("5m"), Ok(300_000));
        assert_eq!(parse("1h"), Ok(3_600_000));
        assert_eq!(parse("365d"), Ok(31_536_000_000));
    }

    #[test]
    fn anything_else_is_refused_with_an_example() {
        for text in ["", "30", "s", "1.5s", "-1s", "30 s", "30S", "5min", "ms5"] {
            let why = parse(text).unwrap_err();
            assert!(why.contains("for instance \"30s\""), "{text}: {why}");
        }
    }

    #[test]
    fn zero_or_more_than_a_year_is_refused() {
        assert!(parse("0s").unwrap_err().contains("zero"));
        for text in ["366d", "99999999999999999999s", "18446744073709551615h"] {
            assert!(parse(text).unwrap_err().contains("365 days"), "{text}");
        }
    }
}
