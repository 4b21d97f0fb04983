//! Durations and ages, formatted for people.

use std::time::{Duration, UNIX_EPOCH};

use serde_json::Value;

use super::screen::Screen;
use super::text::plain;

/// A duration in whole seconds, for instance `1m 5s`.
pub(super) fn seconds(secs: f64) -> String {
    let whole = Duration::try_from_secs_f64(secs.max(0.0).floor()).unwrap_or_default();
    humantime::format_duration(whole).to_string()
}

/// A short duration, for instance `12 ms`, `1.5 s` or `3 min`.
pub(super) fn took(secs: f64) -> String {
    match secs {
        ..1.0 => format!("{:.0} ms", secs.max(0.0) * 1e3),
        ..10.0 => format!("{secs:.1} s"),
        _ => short(secs),
    }
}

/// A duration in the largest suitable unit, for instance `8 s` or `3 h`.
fn short(secs: f64) -> String {
    match secs {
        ..120.0 => format!("{:.0} s", secs.max(0.0)),
        ..7_200.0 => format!("{:.0} min", secs / 60.0),
        ..172_800.0 => format!("{:.0} h", secs / 3_600.0),
        _ => format!("{:.0} days", secs / 86_400.0),
    }
}

/// A time relative to now: `3 s ago` or `in 8 s`.
pub(super) fn relative(at: f64, now: f64) -> String {
    match now - at {
        ago if ago < 0.0 => format!("in {}", short((at - now).ceil())),
        ..1.0 => "just now".to_owned(),
        ago => format!("{} ago", short(ago.floor())),
    }
}

/// A time of the database in a list: relative on a terminal, exact on a pipe.
pub(super) fn listed(time: &Value, now: f64, screen: Screen) -> String {
    let text = time.as_str().unwrap_or_default();
    match epoch(text).filter(|_| screen.is_terminal()) {
        Some(at) => relative(at, now),
        None => plain(text),
    }
}

/// A single time of the database: exact, and on a terminal relative too.
pub(super) fn shown(time: &str, now: f64, screen: Screen) -> String {
    match epoch(time).filter(|_| screen.is_terminal()) {
        Some(at) => format!("{} ({})", plain(time), relative(at, now)),
        None => plain(time),
    }
}

/// The name of a column of [`waited`].
pub(super) fn waits(screen: Screen) -> &'static str {
    match screen.is_terminal() {
        true => "oldest waits",
        false => "oldest waits since",
    }
}

/// How long something has waited, on a terminal; on a pipe, since when.
pub(super) fn waited(secs: f64, now: f64, screen: Screen) -> String {
    match screen.is_terminal() {
        true => seconds(secs),
        false => {
            let since = Duration::try_from_secs_f64(now - secs).unwrap_or_default();
            humantime::format_rfc3339_micros(UNIX_EPOCH + since).to_string()
        }
    }
}

/// Seconds since 1970 of a time as Postgres writes it into JSON (ISO 8601 with an offset); `None` for other texts, such
/// as `infinity`.
pub(super) fn epoch(time: &str) -> Option<f64> {
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

#[cfg(test)]
mod tests {
    use super::*;

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
            (600.0, "10 min"),
        ] {
            assert_eq!(took(secs), text);
        }
    }

    #[test]
    fn a_pipe_gets_exact_times_and_a_terminal_relative_ones() {
        let time = "1970-01-01T00:01:00+00:00";
        let screen = |columns| Screen {
            columns,
            colours: false,
        };
        assert_eq!(listed(&time.into(), 120.0, screen(None)), time);
        assert_eq!(listed(&time.into(), 120.0, screen(Some(80))), "60 s ago");
        assert_eq!(shown(time, 120.0, screen(None)), time);
        assert_eq!(
            shown(time, 120.0, screen(Some(80))),
            format!("{time} (60 s ago)")
        );
        assert_eq!(waited(60.0, 120.0, screen(Some(80))), "1m");
        assert_eq!(
            waited(60.0, 120.0, screen(None)),
            "1970-01-01T00:01:00.000000Z"
        );
        assert_eq!(listed(&Value::Null, 120.0, screen(Some(80))), "");
        assert_eq!(shown("infinity", 120.0, screen(Some(80))), "infinity");
    }
}
