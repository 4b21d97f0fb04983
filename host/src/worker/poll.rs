//! Decides the wait before the next look.

use std::time::Duration;

/// A worker that receives no notifications looks at the shortest interval for this long after it last found jobs.
const RECENT: Duration = Duration::from_secs(1);

/// Waits that double from `min` up to `max`, and start over when a look finds jobs. Jitter prevents hosts that became
/// idle at the same time from looking at the same moments.
#[derive(Debug)]
pub(super) struct Poll {
    min: Duration,
    max: Duration,
    next: Duration,
    /// The sum of all waits since jobs were last found.
    waited: Duration,
}

impl Poll {
    pub(super) fn new(min: Duration, max: Duration) -> Self {
        let min = min.min(max);
        Self {
            min,
            max,
            next: min,
            waited: Duration::ZERO,
        }
    }

    /// Makes the next wait the shortest again, after a look that found jobs.
    pub(super) fn reset(&mut self) {
        self.next = self.min;
        self.waited = Duration::ZERO;
    }

    /// The wait after a look that found nothing: three quarters of the current step to the whole step, and never more
    /// than `max`. `random` is uniform in `0.0..1.0`.
    pub(super) fn wait(&mut self, notified: bool, random: f64) -> Duration {
        let step = self.next;
        self.waited += step;
        if notified || self.waited >= RECENT {
            self.next = (step * 2).min(self.max);
        }
        step.mul_f64(0.75 + 0.25 * random)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn waits_double_up_to_the_maximum_and_a_find_resets_them() {
        let mut poll = Poll::new(ms(5), ms(30));
        let waits: Vec<_> = (0..5).map(|_| poll.wait(true, 1.0)).collect();
        assert_eq!(waits, [ms(5), ms(10), ms(20), ms(30), ms(30)]);
        poll.reset();
        assert_eq!(poll.wait(true, 1.0), ms(5));
    }

    #[test]
    fn without_notifications_the_waits_stay_short_for_a_second_after_a_find() {
        let mut poll = Poll::new(ms(10), ms(2_000));
        for _ in 0..100 {
            assert_eq!(poll.wait(false, 1.0), ms(10));
        }
        assert_eq!(poll.wait(false, 1.0), ms(20));
        poll.reset();
        assert_eq!(poll.wait(false, 1.0), ms(10));
    }

    #[test]
    fn jitter_only_shortens_waits() {
        let mut poll = Poll::new(ms(100), ms(100));
        assert_eq!(poll.wait(true, 0.0), ms(75));
        assert_eq!(poll.wait(true, 0.5), Duration::from_micros(87_500));
    }
}
