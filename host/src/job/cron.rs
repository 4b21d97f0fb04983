//! The due times of a schedule: a cron expression, evaluated in a time zone.
//!
//! Expressions are parsed and searched by the crate croner. Time zones come from the crate jiff, with the rules that
//! are compiled into the program, so that all hosts of a release agree. What happens in the hour that daylight saving
//! time skips or repeats is decided here: see [`DueTimes::next_after`].

use croner::Cron;
use croner::parser::{CronParser, Seconds, Year};
use jiff::civil::DateTime;
use jiff::tz::{AmbiguousOffset, TimeZone};
use jiff::{SignedDuration, Timestamp, Unit, Zoned};

/// The maximum length of an expression, in characters, as in the database.
pub(crate) const CHARS_MAX: usize = 200;

/// A description of a cron expression in English; empty if the expression cannot be parsed.
pub fn describe(expression: &str) -> String {
    let parser = CronParser::builder()
        .seconds(Seconds::Optional)
        .year(Year::Disallowed)
        .build();
    let cron = parser.parse(expression);
    cron.map(|cron| cron.describe()).unwrap_or_default()
}

/// The due times of a schedule.
#[derive(Debug, Clone)]
pub struct DueTimes {
    cron: Cron,
    zone: TimeZone,
    /// True if the hour, the minute and the second are lists of numbers: the schedule has fixed times of day.
    has_fixed_times: bool,
}

impl DueTimes {
    /// Reads an expression of five fields (minute, hour, day of the month, month, day of the week), or of six with
    /// seconds first, in the time zone with this IANA name.
    ///
    /// # Errors
    /// A sentence that describes the problem.
    pub fn parse(expression: &str, time_zone: &str) -> Result<Self, String> {
        let fields: Vec<&str> = expression.split_ascii_whitespace().collect();
        let is_known = |c: char| c.is_ascii_alphanumeric() || "*/,?#- \t".contains(c);
        if expression.len() > CHARS_MAX || !expression.chars().all(is_known) {
            return Err(format!(
                "a cron expression has at most {CHARS_MAX} letters, digits and * / , ? # -"
            ));
        }
        if !(5..=6).contains(&fields.len()) {
            return Err(format!(
                "the cron expression has {} fields; expected five (minute, hour, day of the month, month, day of the week), or six with seconds first",
                fields.len()
            ));
        }
        let parser = CronParser::builder()
            .seconds(Seconds::Optional)
            .year(Year::Disallowed)
            .build();
        let cron = parser
            .parse(&fields.join(" "))
            .map_err(|why| format!("the cron expression is invalid: {why}"))?;
        let zone = TimeZone::get(time_zone)
            .map_err(|_| format!("the time zone {time_zone:?} is unknown to this host; use a name such as Europe/Berlin or UTC"))?;
        let times_of_day = &fields[..fields.len() - 3];
        Ok(Self {
            cron,
            zone,
            has_fixed_times: times_of_day
                .iter()
                .all(|field| field.chars().all(|c| c.is_ascii_digit() || c == ',')),
        })
    }

    /// The first due time after this time; `None` if there is none.
    ///
    /// A change of the clock affects two kinds of schedules differently. If second, minute and hour are numbers or
    /// lists of numbers (`30 2 * * *`, `0 2,14 * * *`), the schedule has fixed times of day, and each has one due time
    /// a day: times that are skipped are due at the moment at which the clock goes forward, and times that are repeated
    /// are due only the first time. Any other schedule (`*/15 * * * *`, `0 1-5 * * *`) follows elapsed time: skipped
    /// times are not due, and repeated times are due both times.
    pub fn next_after(&self, after: Timestamp) -> Option<Timestamp> {
        // Due times are whole seconds.
        let after = after
            .round(
                jiff::TimestampRound::new()
                    .smallest(Unit::Second)
                    .mode(jiff::RoundMode::Floor),
            )
            .ok()?;
        if !self.has_fixed_times {
            return self
                .search(&after.to_zoned(self.zone.clone()))
                .filter(|next| *next > after);
        }
        // Local times are searched as if they were UTC, which has no daylight saving time: none is skipped or repeated.
        let mut date = self.zone.to_datetime(after);
        loop {
            let found = self.search(&date.to_zoned(TimeZone::UTC).ok()?)?;
            date = TimeZone::UTC.to_datetime(found);
            let at = self.due_at(date)?;
            if at > after {
                return Some(at);
            }
        }
    }

    fn search(&self, after: &Zoned) -> Option<Timestamp> {
        let next = self.cron.find_next_occurrence(after, false).ok()?;
        Some(next.timestamp())
    }

    /// The time at which a fixed time of day is due.
    fn due_at(&self, date: DateTime) -> Option<Timestamp> {
        let found = self.zone.to_ambiguous_timestamp(date);
        match found.offset() {
            AmbiguousOffset::Unambiguous { offset }
            | AmbiguousOffset::Fold { before: offset, .. } => offset.to_timestamp(date).ok(),
            AmbiguousOffset::Gap { after, .. } => {
                let before_the_gap = after.to_timestamp(date).ok()?;
                let change = self.zone.following(before_the_gap).next()?;
                Some(change.timestamp())
            }
        }
    }

    /// The due times after one time and up to another, in order.
    pub fn between(&self, after: Timestamp, until: Timestamp) -> impl Iterator<Item = Timestamp> {
        std::iter::successors(Some(after), |at| self.next_after(*at))
            .skip(1)
            .take_while(move |at| *at <= until)
    }

    /// The last due time after one time and up to another. Looks back from the end in spans that double, so that the
    /// whole range is searched only if there is none.
    pub fn last_between(&self, after: Timestamp, until: Timestamp) -> Option<Timestamp> {
        let mut span = SignedDuration::from_mins(1);
        loop {
            let start = until.checked_sub(span).unwrap_or(Timestamp::MIN).max(after);
            if let Some(last) = self.between(start, until).last() {
                return Some(last);
            }
            if start == after {
                return None;
            }
            span = span.saturating_mul(2);
        }
    }

    /// The next due times after this time, at most `count`.
    pub fn upcoming(&self, after: Timestamp, count: usize) -> Vec<Timestamp> {
        self.between(after, Timestamp::MAX).take(count).collect()
    }

    /// A time as the clocks of the schedule's time zone show it.
    pub fn local(&self, at: Timestamp) -> Zoned {
        at.to_zoned(self.zone.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Timestamp {
        text.parse().expect(text)
    }

    /// The next due times in Berlin, with their offsets.
    fn berlin(expression: &str, after: &str, count: usize) -> Vec<String> {
        shown("Europe/Berlin", expression, after, count)
    }

    fn shown(zone: &str, expression: &str, after: &str, count: usize) -> Vec<String> {
        let due = DueTimes::parse(expression, zone).expect(expression);
        let found = due.upcoming(at(after), count);
        found
            .into_iter()
            .map(|at| due.local(at).strftime("%d %H:%M:%S %:z").to_string())
            .collect()
    }

    #[test]
    fn an_expression_is_read_in_its_time_zone_and_may_have_seconds() {
        assert_eq!(
            berlin("0 3 * * *", "2026-01-01T00:00:00Z", 2),
            ["01 03:00:00 +01:00", "02 03:00:00 +01:00"]
        );
        assert_eq!(
            shown("UTC", "*/20 59 23 31 12 *", "2026-01-01T00:00:00.5Z", 4),
            [
                "31 23:59:00 +00:00",
                "31 23:59:20 +00:00",
                "31 23:59:40 +00:00",
                "31 23:59:00 +00:00"
            ]
        );
        assert_eq!(
            shown("Asia/Kolkata", "0 9 * * MON-FRI", "2026-01-02T05:00:00Z", 1),
            ["05 09:00:00 +05:30"]
        );
        // If both days are restricted, either one suffices.
        assert_eq!(
            shown("UTC", "0 0 13 * 5", "2026-01-01T00:00:00Z", 4),
            [
                "02 00:00:00 +00:00",
                "09 00:00:00 +00:00",
                "13 00:00:00 +00:00",
                "16 00:00:00 +00:00"
            ]
        );
        assert_eq!(
            shown("UTC", "0 0 L * *", "2026-02-01T00:00:00Z", 1),
            ["28 00:00:00 +00:00"]
        );
    }

    #[test]
    fn a_due_time_is_after_the_given_one_to_the_microsecond() {
        let due = DueTimes::parse("0 3 * * *", "UTC").unwrap();
        let three = at("2026-01-01T03:00:00Z");
        for (after, next) in [
            ("2026-01-01T02:59:59.999999Z", three),
            ("2026-01-01T03:00:00Z", at("2026-01-02T03:00:00Z")),
            ("2026-01-01T03:00:00.000001Z", at("2026-01-02T03:00:00Z")),
        ] {
            assert_eq!(due.next_after(at(after)), Some(next), "{after}");
        }
    }

    // In Berlin, the clock goes from 2:00 to 3:00 on 29 March 2026, and from 3:00 to 2:00 on 25 October 2026.

    #[test]
    fn a_fixed_time_that_is_skipped_is_due_when_the_clock_goes_forward() {
        let saturday = "2026-03-28T12:00:00Z";
        assert_eq!(
            berlin("30 2 * * *", saturday, 2),
            ["29 03:00:00 +02:00", "30 02:30:00 +02:00"]
        );
        // Several that are skipped are due once, as is one that is due at that moment anyway.
        assert_eq!(
            berlin("0,30 2,3 * * *", saturday, 3),
            [
                "29 03:00:00 +02:00",
                "29 03:30:00 +02:00",
                "30 02:00:00 +02:00"
            ]
        );
        assert_eq!(
            berlin("30 2,14 * * *", saturday, 3),
            [
                "28 14:30:00 +01:00",
                "29 03:00:00 +02:00",
                "29 14:30:00 +02:00"
            ]
        );
        // Due only on the day of the change.
        assert_eq!(berlin("30 2 30 3 *", saturday, 1), ["30 02:30:00 +02:00"]);
    }

    #[test]
    fn a_fixed_time_that_is_repeated_is_due_the_first_time_only() {
        let saturday = "2026-10-24T12:00:00Z";
        assert_eq!(
            berlin("30 2 * * *", saturday, 2),
            ["25 02:30:00 +02:00", "26 02:30:00 +01:00"]
        );
        assert_eq!(
            berlin("0 2,3 * * *", saturday, 3),
            [
                "25 02:00:00 +02:00",
                "25 03:00:00 +01:00",
                "26 02:00:00 +01:00"
            ]
        );
        // From within the second pass.
        assert_eq!(
            berlin("30 2 * * *", "2026-10-25T01:10:00Z", 1),
            ["26 02:30:00 +01:00"]
        );
    }

    #[test]
    fn other_schedules_follow_elapsed_time() {
        assert_eq!(
            berlin("*/30 * * * *", "2026-03-29T00:15:00Z", 3),
            [
                "29 01:30:00 +01:00",
                "29 03:00:00 +02:00",
                "29 03:30:00 +02:00"
            ]
        );
        assert_eq!(
            berlin("*/30 2 * * *", "2026-03-28T12:00:00Z", 1),
            ["30 02:00:00 +02:00"]
        );
        assert_eq!(
            berlin("*/30 * * * *", "2026-10-25T00:15:00Z", 4),
            [
                "25 02:30:00 +02:00",
                "25 02:00:00 +01:00",
                "25 02:30:00 +01:00",
                "25 03:00:00 +01:00"
            ]
        );
        assert_eq!(
            berlin("0 1-3 * * *", "2026-10-24T22:00:00Z", 5),
            [
                "25 01:00:00 +02:00",
                "25 02:00:00 +02:00",
                "25 02:00:00 +01:00",
                "25 03:00:00 +01:00",
                "26 01:00:00 +01:00"
            ]
        );
    }

    #[test]
    fn other_changes_of_the_clock_follow_the_same_rules() {
        // Half an hour, in the southern summer.
        assert_eq!(
            shown(
                "Australia/Lord_Howe",
                "15 2 * * *",
                "2026-10-03T12:00:00Z",
                1
            ),
            ["04 02:30:00 +11:00"]
        );
        // A whole day: Samoa had no 30 December 2011.
        assert_eq!(
            shown("Pacific/Apia", "0 9 * * *", "2011-12-29T22:00:00Z", 2),
            ["31 00:00:00 +14:00", "31 09:00:00 +14:00"]
        );
        // At midnight.
        assert_eq!(
            shown("America/Santiago", "0 0 * * *", "2026-09-05T12:00:00Z", 2),
            ["06 01:00:00 -03:00", "07 00:00:00 -03:00"]
        );
    }

    #[test]
    fn the_last_due_time_of_a_span_is_found_from_its_end() {
        let due = DueTimes::parse("0 3 * * *", "UTC").unwrap();
        let (start, end) = (at("2000-01-01T00:00:00Z"), at("2026-01-05T02:00:00Z"));
        assert_eq!(
            due.last_between(start, end),
            Some(at("2026-01-04T03:00:00Z"))
        );
        assert_eq!(due.last_between(at("2026-01-04T03:00:00Z"), end), None);
        assert_eq!(due.last_between(end, start), None);
    }

    #[test]
    fn a_schedule_that_is_never_due_has_no_next_due_time() {
        let due = DueTimes::parse("0 0 30 2 *", "UTC").unwrap();
        assert_eq!(due.next_after(at("2026-01-01T00:00:00Z")), None);
        let due = DueTimes::parse("0 0 30 2 *", "Europe/Berlin").unwrap();
        assert_eq!(due.upcoming(at("2026-01-01T00:00:00Z"), 5), []);
    }

    #[test]
    fn an_invalid_expression_or_zone_is_named() {
        for (expression, zone, why) in [
            ("0 3 * *", "UTC", "has 4 fields"),
            ("0 0 3 * * * 2026", "UTC", "has 7 fields"),
            ("", "UTC", "has 0 fields"),
            ("@daily", "UTC", "letters, digits"),
            ("0 25 * * *", "UTC", "the cron expression is invalid"),
            ("0 3 * * FOO", "UTC", "the cron expression is invalid"),
            (
                "0 3 * * *",
                "Europe/Atlantis",
                "the time zone \"Europe/Atlantis\" is unknown",
            ),
        ] {
            let error = DueTimes::parse(expression, zone).unwrap_err();
            assert!(error.contains(why), "{expression}: {error}");
        }
    }
}
