//! Schedules that this host could not fire, and backfills that it could not continue. They are tried again after a
//! growing wait. Until then they are left out, so that they do not delay others.
//!
//! A schedule is identified by its revision: once it has changed, for instance because another host has fired it, it is
//! no longer left out. A backfill is identified by its id.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Why a schedule could not be fired, or a backfill could not be continued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cause {
    /// Another host was faster, or another transaction has locked it or what its jobs need.
    Busy,
    /// An error, which may be permanent.
    Failed,
}

impl Cause {
    /// The first wait, and the longest.
    fn waits(self) -> (Duration, Duration) {
        match self {
            Self::Busy => (Duration::from_millis(20), Duration::from_secs(1)),
            Self::Failed => (Duration::from_secs(1), Duration::from_secs(60)),
        }
    }
}

/// The schedules or the backfills that are tried later, by revision or id.
#[derive(Debug, Default)]
pub(super) struct Postponed(HashMap<i64, Postponement>);

#[derive(Debug, Clone, Copy)]
struct Postponement {
    until: Instant,
    wait: Duration,
}

impl Postponed {
    /// Those whose wait has not ended.
    pub(super) fn waiting(&self, now: Instant) -> Vec<i64> {
        let waiting = self.0.iter().filter(|(_, one)| one.until > now);
        waiting.map(|(key, _)| *key).collect()
    }

    /// The time until the next one is tried again; `None` if there is none.
    pub(super) fn next_in(&self, now: Instant) -> Option<Duration> {
        let waits = self.0.values().map(|one| one.until);
        waits.min().map(|at| at.saturating_duration_since(now))
    }

    /// Notes which of them a round could not fire or continue. `listed_at`: the time for which the round requested
    /// [`waiting`](Self::waiting).
    pub(super) fn note(&mut self, failed: &[(i64, Cause)], listed_at: Instant, now: Instant) {
        let mut next = HashMap::new();
        for (key, cause) in failed {
            let (first, longest) = cause.waits();
            let last = self.0.get(key);
            let wait = last.map_or(first, |last| (last.wait * 2).clamp(first, longest));
            let until = now + wait;
            next.insert(*key, Postponement { until, wait });
        }
        // The round has tried the others, or they have changed.
        self.0.retain(|_, one| one.until > listed_at);
        self.0.extend(next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_wait_grows_with_each_round_that_cannot_fire_a_schedule() {
        for (cause, expected) in [
            (Cause::Busy, [20, 40, 80, 160, 320, 640, 1000, 1000]),
            (
                Cause::Failed,
                [1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000],
            ),
        ] {
            let mut now = Instant::now();
            let mut postponed = Postponed::default();
            for wait in expected {
                postponed.note(&[(1, cause)], now, now);
                assert_eq!(postponed.next_in(now), Some(wait * MS));
                assert_eq!(postponed.waiting(now + (wait - 1) * MS), [1]);
                now += wait * MS;
                assert!(postponed.waiting(now).is_empty(), "it is tried again");
            }
        }
    }

    #[test]
    fn schedules_that_were_fired_are_forgotten_and_others_wait_as_before() {
        let start = Instant::now();
        let mut postponed = Postponed::default();
        postponed.note(&[(1, Cause::Busy), (2, Cause::Failed)], start, start);
        // The first one is tried again, and fired. The second one is not listed yet.
        let later = start + 500 * MS;
        postponed.note(&[(3, Cause::Busy)], later, later);
        let mut waiting = postponed.waiting(later);
        waiting.sort_unstable();
        assert_eq!(waiting, [2, 3]);
        assert_eq!(postponed.next_in(later), Some(20 * MS));
    }
}
