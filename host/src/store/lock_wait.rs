//! How long a change waits for what other transactions have locked.

use std::time::{Duration, Instant};

/// The maximum time for which a change waits: a bulk change for all locked jobs together, any other change for each
/// lock that it needs.
const WAIT_MAX: Duration = Duration::from_secs(3);

/// The time for which a change still waits for locks. A change to one item waits a few seconds. A bulk change does not
/// wait at first, so that a locked job does not delay the others. Once it has tried all jobs, it waits a few seconds
/// for the locked ones.
#[derive(Debug, Clone, Copy, Default)]
pub struct LockWait {
    /// `None`: it does not wait yet.
    until: Option<Instant>,
}

impl LockWait {
    /// Waits from now on.
    pub fn start() -> Self {
        Self {
            until: Some(Instant::now() + WAIT_MAX),
        }
    }

    pub(super) fn is_started(self) -> bool {
        self.until.is_some()
    }

    /// True once it has waited for as long as it may.
    pub(super) fn is_over(self) -> bool {
        self.is_started() && self.left().is_zero()
    }

    /// One that is over.
    #[cfg(test)]
    pub(super) fn over() -> Self {
        Self {
            until: Some(Instant::now()),
        }
    }

    pub(super) fn left(self) -> Duration {
        self.until.map_or(Duration::ZERO, |until| {
            until.saturating_duration_since(Instant::now())
        })
    }

    /// The `lock_timeout` of the next statement. 0 would wait indefinitely.
    pub(super) fn lock_timeout(self) -> String {
        format!("{}ms", self.left().as_millis().max(1))
    }
}

/// The argument `p_lock_wait_ms` of functions for workers.
pub(super) fn lock_wait_ms(wait: Duration) -> i32 {
    i32::try_from(wait.as_millis()).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_waits_only_once_it_has_started_to() {
        let wait = LockWait::default();
        assert!(!wait.is_started());
        assert_eq!(wait.lock_timeout(), "1ms");
        let before = Instant::now();
        let wait = LockWait::start();
        assert!(wait.is_started());
        assert!(wait.until >= Some(before + WAIT_MAX) && wait.left() <= WAIT_MAX);
        let wait = LockWait::over();
        assert!(wait.is_over());
        assert_eq!(wait.lock_timeout(), "1ms");
    }
}
