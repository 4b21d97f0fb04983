//! The time of the next attempt: backoff, and times that a handler sets.

use std::time::{Duration, SystemTime};

/// The next attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NextAttempt {
    /// The earliest time.
    pub at: RetryAt,
    /// Its memory limit, in bytes. `None` means the same as before.
    pub memory_bytes: Option<u64>,
}

/// The time at which a job is tried again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetryAt {
    /// This long after the settlement.
    After(Duration),
    /// At this time, by the database's clock.
    Time(SystemTime),
}

impl From<Duration> for NextAttempt {
    fn from(delay: Duration) -> Self {
        Self {
            at: RetryAt::After(delay),
            memory_bytes: None,
        }
    }
}

/// Exponential backoff: `initial × multiplier^(attempt − 1)` with jitter, at most `max`. Each handler declares its own
/// in its manifest; the operator may override it.
#[derive(Debug, Clone, PartialEq)]
pub struct RetryPolicy {
    /// The maximum number of attempts, including the first. Those that were lost, suspended or given back do not count.
    pub max_attempts: u32,
    /// The wait after the first failed attempt.
    pub initial: Duration,
    /// The factor by which each further wait is longer than the one before it.
    pub multiplier: f64,
    /// The longest wait, including jitter.
    pub max: Duration,
    /// The random share of the wait, 0 to 1: 0.2 gives 80 % to 120 % of it. Near the cap the wait is shortened so that
    /// the longest is `max`: jitter spreads waits at the cap, too.
    pub jitter: f64,
}

impl Default for RetryPolicy {
    /// 10 s, doubled up to 3 hours, ±20 %, 20 attempts: 25 hours and 20 minutes from the first to the last, ±20 %.
    fn default() -> Self {
        Self {
            max_attempts: 20,
            initial: Duration::from_secs(10),
            multiplier: 2.0,
            max: Duration::from_secs(3 * 3600),
            jitter: 0.2,
        }
    }
}

impl RetryPolicy {
    /// The wait after this many failed attempts (1 after the first). `random` is uniform in `0.0..1.0`.
    pub fn delay(&self, failed: u32, random: f64) -> Duration {
        let exponent = i32::try_from(failed.saturating_sub(1)).unwrap_or(i32::MAX);
        let wanted = self.initial.as_secs_f64() * self.multiplier.powi(exponent);
        let max = self.max.as_secs_f64();
        // `min` also turns the infinity of a huge exponent into the cap.
        let capped = wanted.min(max / (1.0 + self.jitter));
        let jittered = capped * (1.0 + self.jitter * (2.0 * random - 1.0));
        Duration::try_from_secs_f64(jittered).map_or(self.max, |wait| wait.min(self.max))
    }
}
