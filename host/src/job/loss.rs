//! Decides what happens to a job whose worker is dead or has stopped.

use std::time::Duration;

/// The wait after the second crash. Each further crash doubles it.
const WAIT_FIRST: Duration = Duration::from_secs(10);
/// The longest wait.
const WAIT_MAX: Duration = Duration::from_secs(60 * 60);

/// A job fails for its crashes only after the worker of its last attempt has sent nothing for this long since the lease
/// ended: a host that was frozen, or that has to reconnect after an outage, reports within this time that it has not
/// crashed.
pub const SILENT_FOR: Duration = Duration::from_secs(10);

/// What happens to a job that was lost with its worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterLoss {
    /// Another worker claims it at once.
    Claim,
    /// It goes back to `queued` and is due after this time.
    Wait(Duration),
    /// It fails: the job probably kills its workers.
    Fail,
}

/// Decides what happens to a job that was lost with its worker.
///
/// `crashes`: how many of its lost attempts crashed their worker, including the latest. A loss that the worker survived
/// (an outage of the server, a freeze) is not a crash. `crashes_max`: the number of crashes at which the job fails.
///
/// | Crashes | What happens to the job |
/// |---|---|
/// | `crashes_max` or more | it fails |
/// | none or one | it is claimed at once |
/// | two, three, four … | it waits 10 s, 20 s, 40 s … up to an hour |
pub fn after_loss(crashes: u32, crashes_max: u32) -> AfterLoss {
    if crashes >= crashes_max {
        return AfterLoss::Fail;
    }
    match crashes {
        0 | 1 => AfterLoss::Claim,
        _ => {
            let doubled = 1_u32.checked_shl(crashes - 2).unwrap_or(u32::MAX);
            AfterLoss::Wait(WAIT_FIRST.saturating_mul(doubled).min(WAIT_MAX))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_waits_twice_as_long_after_each_crash_and_not_at_all_after_the_first() {
        let wait = |secs| AfterLoss::Wait(Duration::from_secs(secs));
        assert_eq!(after_loss(0, 1000), AfterLoss::Claim);
        assert_eq!(after_loss(1, 1000), AfterLoss::Claim);
        assert_eq!(after_loss(2, 1000), wait(10));
        assert_eq!(after_loss(3, 1000), wait(20));
        assert_eq!(after_loss(4, 1000), wait(40));
        assert_eq!(after_loss(10, 1000), wait(2560));
        assert_eq!(after_loss(11, 1000), wait(3600));
        assert_eq!(after_loss(999, 1000), wait(3600));
    }

    #[test]
    fn a_job_fails_with_the_last_crash_that_it_may_have_and_not_before() {
        for crashes_max in 1..20 {
            assert_eq!(after_loss(crashes_max, crashes_max), AfterLoss::Fail);
            assert_eq!(after_loss(crashes_max + 1, crashes_max), AfterLoss::Fail);
            assert_ne!(after_loss(crashes_max - 1, crashes_max), AfterLoss::Fail);
        }
    }
}
