//! Human-readable times and durations.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The last second of the year 9999, in seconds since 1970.
const FORMATTED_MAX_S: f64 = 253_402_300_799.0;

/// A short duration, for instance `12 ms`, `1.5 s` or `3 min`.
pub fn took(secs: f64) -> String {
    match secs {
        ..1.0 => format!("{:.0} ms", secs.max(0.0) * 1e3),
        ..10.0 => format!("{secs:.1} s"),
        _ => short(secs),
    }
}

/// A duration in the largest suitable unit, for instance `8 s`, `1.5 h` or `3 days`. `rouse._duration` writes the same.
pub fn short(secs: f64) -> String {
    // The bounds are those of the rounded numbers: 119.9 s are 2 min, not 120 s.
    match secs {
        ..119.5 => format!("{:.0} s", secs.max(0.0)),
        ..5_370.0 => format!("{:.0} min", secs / 60.0),
        ..35_820.0 => format!("{} h", (secs / 360.0).round() / 10.0),
        ..171_000.0 => format!("{:.0} h", secs / 3_600.0),
        _ => format!("{:.0} days", secs / 86_400.0),
    }
}

/// A time relative to now: `3 s ago` or `in 8 s`.
pub fn relative(at: f64, now: f64) -> String {
    match now - at {
        ago if ago < 0.0 => format!("in {}", short((at - now).ceil())),
        ..1.0 => "just now".to_owned(),
        ago => format!("{} ago", short(ago.floor())),
    }
}

/// Seconds since 1970 of a time as Postgres writes it into JSON (ISO 8601 with an offset); `None` for other strings,
/// such as `infinity`.
pub fn epoch(time: &str) -> Option<f64> {
    let (date, clock) = time.split_once('T')?;
    let zone = clock.find(['+', '-', 'Z'])?;
    let (clock, zone) = clock.split_at(zone);
    let at = humantime::parse_rfc3339_weak(&format!("{date}T{clock}Z")).ok()?;
    let sign = if zone.starts_with('-') { -1.0 } else { 1.0 };
    let mut offset = 0.0;
    for (part, unit) in zone
        .trim_start_matches(['+', '-', 'Z'])
        .split(':')
        .zip([3600.0, 60.0, 1.0])
    {
        if !part.is_empty() {
            offset += part.parse::<f64>().ok()? * unit;
        }
    }
    let since = at.duration_since(UNIX_EPOCH).ok()?;
    Some(since.as_secs_f64() - sign * offset)
}

/// The time as Postgres parses it, in UTC.
pub fn rfc3339(at: f64) -> String {
    humantime::format_rfc3339_micros(system_time(at)).to_string()
}

/// The time in UTC to the millisecond, for instance `2026-11-28 15:36:21.500 UTC`.
pub fn exact(at: f64) -> String {
    let text = humantime::format_rfc3339_millis(system_time(at)).to_string();
    text.replace('T', " ").replace('Z', " UTC")
}

/// The nearest time that humantime can format, which has a year of four digits. The last microsecond of the year 9999,
/// which some producers use for "never", is in the year 10000 once it is rounded to a float.
fn system_time(at: f64) -> SystemTime {
    let since = Duration::try_from_secs_f64(at.clamp(0.0, FORMATTED_MAX_S));
    UNIX_EPOCH + since.unwrap_or_default()
}

/// A human-readable duration, in days and smaller units. (humantime also writes months, of 30.44 days each.)
pub fn in_days(time: Duration) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_shown_in_days_and_smaller_units() {
        let shown = |secs| in_days(Duration::from_secs(secs));
        assert_eq!(shown(0), "0s");
        assert_eq!(shown(90), "1m 30s");
        assert_eq!(shown(86_400), "1day");
        assert_eq!(shown(31 * 86_400), "31days");
        assert_eq!(shown(400 * 86_400 + 3_600), "400days 1h");
        assert_eq!(shown(86_401), "1day 1s");
    }

    #[test]
    fn times_of_the_database_are_parsed_with_their_offsets() {
        let utc = epoch("2026-11-22T20:10:49.5+00:00").unwrap();
        assert_eq!(utc, 1_795_378_249.5);
        for same in [
            "2026-11-23T01:40:49.5+05:30",
            "2026-11-22T15:10:49.5-05",
            "2026-11-22T20:10:49.5Z",
        ] {
            assert_eq!(epoch(same), Some(utc), "{same}");
        }
        for none in [
            "infinity",
            "",
            "2026-11-22",
            "0044-03-15T12:00:00+00:00 BC",
            "now",
        ] {
            assert_eq!(epoch(none), None, "{none}");
        }
        assert_eq!(exact(utc), "2026-11-22 20:10:49.500 UTC");
    }

    #[test]
    fn the_end_of_the_year_9999_is_formatted() {
        let never = epoch("9999-12-31T23:59:59.999999+00:00").unwrap();
        let west = epoch("9999-12-31T23:59:59-05:00").unwrap();
        for at in [never, west, f64::MAX] {
            assert_eq!(exact(at), "9999-12-31 23:59:59.000 UTC");
            assert_eq!(rfc3339(at), "9999-12-31T23:59:59.000000Z");
        }
        for at in [-1.0, f64::NAN] {
            assert_eq!(exact(at), "1970-01-01 00:00:00.000 UTC");
        }
    }

    #[test]
    fn relative_times_are_in_the_past_or_in_the_future() {
        for (at, text) in [
            (1000.0, "just now"),
            (999.5, "just now"),
            (997.0, "3 s ago"),
            (900.0, "100 s ago"),
            (100.0, "15 min ago"),
            (1007.5, "in 8 s"),
            (1000.0 + 7_200.0, "in 2 h"),
            (1000.0 + 864_000.0, "in 10 days"),
        ] {
            assert_eq!(relative(at, 1000.0), text, "{at}");
        }
    }

    #[test]
    fn long_durations_have_larger_units() {
        for (secs, text) in [
            (0.0, "0 ms"),
            (0.0123, "12 ms"),
            (1.54, "1.5 s"),
            (42.4, "42 s"),
            (119.4, "119 s"),
            (119.9, "2 min"),
            (600.0, "10 min"),
            (5_340.0, "89 min"),
            (5_400.0, "1.5 h"),
            (7_140.0, "2 h"),
            (12_600.0, "3.5 h"),
            (34_560.0, "9.6 h"),
            (35_999.0, "10 h"),
            (170_000.0, "47 h"),
            (172_799.0, "2 days"),
        ] {
            assert_eq!(took(secs), text);
        }
    }
}
