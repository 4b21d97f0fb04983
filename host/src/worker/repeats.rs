//! Decides which of the warnings that repeat for as long as a problem lasts are logged.

use std::time::{Duration, Instant};

/// The wait after the first warning. Each further one doubles it.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// The longest wait.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// The warnings about one problem. The first one is logged, then one after 1, 2, 4 … 60 s.
#[derive(Debug, Default)]
pub(super) struct Repeats {
    /// The time of the last one that was logged, and the wait after it.
    last: Option<(Instant, Duration)>,
}

impl Repeats {
    /// True if a warning at this time is logged.
    pub(super) fn is_logged(&mut self, now: Instant) -> bool {
        let wait = match self.last {
            None => FIRST_WAIT,
            Some((at, wait)) if now.saturating_duration_since(at) >= wait => {
                (wait * 2).min(LONGEST_WAIT)
            }
            Some(_) => return false,
        };
        self.last = Some((now, wait));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_waits_between_warnings_grow_up_to_a_minute() {
        let started_at = Instant::now();
        let mut repeats = Repeats::default();
        let times = (0..1000).map(|n| Duration::from_millis(200) * n);
        let logged = times.filter(|after| repeats.is_logged(started_at + *after));
        let logged: Vec<u64> = logged.map(|after| after.as_secs()).collect();
        assert_eq!(logged, [0, 1, 3, 7, 15, 31, 63, 123, 183]);
    }
}
