//! The clocks that guests see: coarse unless the operator grants fine ones.
//!
//! All guests share one process, and so its caches and branch predictors. One guest affects the timing of another by
//! nanoseconds to microseconds. Browsers without a process for each site have the same problem, and limit their clocks
//! to 1 ms (Firefox, Safari). Limiting the clocks has no cost for handlers: the host's own clock measures waits, and
//! its timer is not finer. It makes timing attacks expensive, not impossible.

use std::sync::LazyLock;
use std::time::{Duration, Instant, SystemTime};

use wasmtime_wasi::{HostMonotonicClock, HostWallClock};

const COARSE: Duration = Duration::from_millis(1);

/// The start value of the monotonic clock: runtimes interpret 0 as a broken clock, and Go's runtime then ends the
/// program.
const STARTS_AT: Duration = Duration::from_secs(1);

/// When the clock of all guests started. A clock for each attempt would go backwards in a reused instance.
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Starts the guests' monotonic clock, when the first sandbox of the process starts.
pub(in crate::sandbox) fn start() {
    LazyLock::force(&START);
}

/// The database's clock, which decides when waits end: a time that was read from it, and when it was read.
#[derive(Debug, Clone, Copy)]
pub struct DatabaseClock {
    /// The time of the database.
    pub at: SystemTime,
    /// When it was read.
    pub read: Instant,
}

impl DatabaseClock {
    /// The host's clock, where there is no database.
    pub fn from_host() -> Self {
        Self {
            at: SystemTime::now(),
            read: Instant::now(),
        }
    }

    /// The time of the database. It may be behind, but is never ahead: the response took some time, and time during
    /// which the machine is suspended is not added.
    pub fn now(self) -> SystemTime {
        self.at + self.read.elapsed()
    }
}

/// A clock that rounds down to whole steps.
#[derive(Clone, Copy)]
pub(in crate::sandbox) struct Clock {
    step: Duration,
}

impl Clock {
    pub(in crate::sandbox) fn new(fine: bool) -> Self {
        let step = match fine {
            true => Duration::from_nanos(1),
            false => COARSE,
        };
        Self { step }
    }

    /// Rounds down, because a clock that runs ahead would end waits early.
    fn round(self, time: Duration) -> Duration {
        let over = time.as_nanos() % self.step.as_nanos();
        time - Duration::from_nanos(u64::try_from(over).unwrap_or(0))
    }
}

impl HostWallClock for Clock {
    fn resolution(&self) -> Duration {
        self.step
    }

    fn now(&self) -> Duration {
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        self.round(since_1970.unwrap_or_default())
    }
}

impl HostMonotonicClock for Clock {
    fn resolution(&self) -> u64 {
        nanoseconds(self.step)
    }

    fn now(&self) -> u64 {
        nanoseconds(self.round(STARTS_AT + START.elapsed()))
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_coarse_clock_rounds_down_to_milliseconds() {
        let clock = Clock::new(false);
        for (time, shown) in [
            (0, 0),
            (999_999, 0),
            (1_000_000, 1_000_000),
            (7_123_456, 7_000_000),
        ] {
            let shown = Duration::from_nanos(shown);
            assert_eq!(clock.round(Duration::from_nanos(time)), shown);
        }
        let time = Duration::from_nanos(7_123_456);
        assert_eq!(Clock::new(true).round(time), time);
    }
}
