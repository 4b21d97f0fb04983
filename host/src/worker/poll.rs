//! How long to wait before the next look.

use std::time::Duration;

/// A worker that is not notified looks at the shortest interval for this long after its last find.
const RECENT: Duration = Duration::from_secs(1);

/// Doubles from `min` up to `max`; a find starts over. Jitter keeps hosts that went idle
/// together from looking together.
#[derive(Debug)]
pub(super) struct Poll {
    min: Duration,
    max: Duration,
    next: Duration,
    /// How long it has waited since the last find.
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

    /// Something was found: the next wait is the shortest again.
    pub(super) fn reset(&mut self) {
        self.next = self.min;
        self.waited = Duration::ZERO;
    }

    /// The wait after a look that found nothing. `random` is uniform in `0.0..1.0`; the wait is
    /// between three quarters of the step and the step, and never over the ceiling.
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
    fn waits_double_up_to_the_ceiling_and_start_over_after_a_find() {
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
    fn jitter_only_shortens() {
        let mut poll = Poll::new(ms(100), ms(100));
        assert_eq!(poll.wait(true, 0.0), ms(75));
        assert_eq!(poll.wait(true, 0.5), Duration::from_micros(87_500));
    }
}
