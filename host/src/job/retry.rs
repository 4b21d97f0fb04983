//! When to try again.

use std::time::{Duration, SystemTime};

/// The next attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Again {
    /// When, at the earliest.
    pub at: RetryAt,
    /// What it may use instead of what this one could, bytes; none: the same.
    pub memory_bytes: Option<u64>,
}

/// When a job is tried again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetryAt {
    /// So long after the settlement.
    After(Duration),
    /// Then, by the database's clock.
    Time(SystemTime),
}

impl From<Duration> for Again {
    fn from(delay: Duration) -> Self {
        Self {
            at: RetryAt::After(delay),
            memory_bytes: None,
        }
    }
}

/// Exponential backoff: `initial × multiplier^(attempt − 1)`, capped at `max`, with jitter
///, which stays below the cap. Each handler declares its own in its manifest; the operator may override it.
#[derive(Debug, Clone, PartialEq)]
pub struct RetryPolicy {
    /// Attempts in all, the first included. Lost attempts do not count.
    pub max_attempts: u32,
    /// The wait after the first failed attempt.
    pub initial: Duration,
    /// By how much each further wait is longer.
    pub multiplier: f64,
    /// The longest wait, with jitter.
    pub max: Duration,
    /// Share of the wait that is random, 0 to 1: 0.2 gives 80 % to 120 % of it. Near the cap the wait is made so much shorter that
    /// the longest is `max`: waits at the cap are spread too.
    pub jitter: f64,
}

impl Default for RetryPolicy {
    /// 10 s × 2 up to 5 minutes, ±20 %, 5 attempts in all.
    fn default() -> Self {
        Self {
            max_attempts: 5,
            initial: Duration::from_secs(10),
            multiplier: 2.0,
            max: Duration::from_secs(300),
            jitter: 0.2,
        }
    }
}

impl RetryPolicy {
    /// The wait after the `failed`-th failed attempt (1 for the first). `random` is uniform in
    /// `0.0..1.0`.
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
