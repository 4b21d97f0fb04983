//! The clock that limits how long a lease is trusted. It also runs while the machine is suspended.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// A moment on CLOCK_BOOTTIME. `std::time::Instant` stops while the machine is suspended; a lease does not.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootTime(Duration);

impl BootTime {
    /// Now.
    pub fn now() -> Self {
        let now = clock_gettime(ClockId::Boottime);
        Self(Duration::new(
            u64::try_from(now.tv_sec).unwrap_or(0),
            u32::try_from(now.tv_nsec).unwrap_or(0),
        ))
    }

    /// The time since an earlier moment.
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// The moment this much later.
    pub fn plus(self, later: Duration) -> Self {
        Self(self.0.saturating_add(later))
    }

    pub(in crate::sandbox) fn as_nanos(self) -> u64 {
        u64::try_from(self.0.as_nanos()).unwrap_or(u64::MAX)
    }
}
