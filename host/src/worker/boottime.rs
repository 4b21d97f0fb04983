//! The clock for trust: it goes on while the machine sleeps.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// A moment on CLOCK_BOOTTIME. `std::time::Instant` stands still while the machine is suspended,
/// and a lease does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BootTime(Duration);

impl BootTime {
    pub(super) fn now() -> Self {
        let now = clock_gettime(ClockId::Boottime);
        Self(Duration::new(
            u64::try_from(now.tv_sec).unwrap_or(0),
            u32::try_from(now.tv_nsec).unwrap_or(0),
        ))
    }

    /// How long after an earlier moment this is.
    pub(super) fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    pub(super) fn plus(self, later: Duration) -> Self {
        Self(self.0.saturating_add(later))
    }
}
