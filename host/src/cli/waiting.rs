//! `--wait`: polls until a job or chain has ended, and chooses the exit code.

use std::time::Duration;

use tokio::time::Instant;

/// The minimum and maximum pause between two polls.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The job or chain failed or timed out.
const EXIT_UNSUCCESSFUL: u8 = 4;
/// It had not ended in time.
const EXIT_TIMEOUT: u8 = 5;
/// It was cancelled.
const EXIT_CANCELLED: u8 = 7;

/// A wait with a timeout.
pub(super) struct Waiting {
    since: Instant,
    timeout: Duration,
}

impl Waiting {
    pub(super) fn start(timeout: Duration) -> Self {
        let since = Instant::now();
        Self { since, timeout }
    }

    /// Pauses before the next poll. False if the timeout has expired.
    pub(super) async fn pause(&self) -> bool {
        let Some(pause) = pause_after(self.since.elapsed(), self.timeout) else {
            return false;
        };
        tokio::time::sleep(pause).await;
        true
    }
}

/// A tenth of the time waited so far, 10 ms to 1 s, within the timeout; `None` if it has expired.
fn pause_after(waited: Duration, timeout: Duration) -> Option<Duration> {
    let left = timeout.checked_sub(waited).filter(|left| !left.is_zero())?;
    Some((waited / 10).clamp(PAUSE_MIN, PAUSE_MAX).min(left))
}

/// True for the state of a job that has not ended.
pub(super) fn is_live(state: &str) -> bool {
    matches!(state, "queued" | "running")
}

/// The exit code after a wait for something that is in this state now.
pub(super) fn exit_code(state: &str) -> u8 {
    match state {
        "succeeded" => 0,
        "cancelled" => EXIT_CANCELLED,
        state if is_live(state) => EXIT_TIMEOUT,
        // failed or timed_out.
        _ => EXIT_UNSUCCESSFUL,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_end_has_its_exit_code() {
        let codes = [
            "succeeded",
            "failed",
            "timed_out",
            "running",
            "queued",
            "cancelled",
        ];
        assert_eq!(codes.map(exit_code), [0, 4, 4, 5, 5, 7]);
    }

    #[test]
    fn pauses_grow_with_the_time_waited_and_end_with_the_timeout() {
        let pause = |waited, timeout| {
            let pause = pause_after(
                Duration::from_millis(waited),
                Duration::from_millis(timeout),
            );
            pause.map(|pause| pause.as_millis())
        };
        assert_eq!(pause(0, 60_000), Some(10));
        assert_eq!(pause(2_000, 60_000), Some(200));
        assert_eq!(pause(30_000, 60_000), Some(1_000));
        assert_eq!(pause(59_900, 60_000), Some(100));
        assert_eq!(pause(60_000, 60_000), None);
        assert_eq!(pause(0, 0), None);
    }
}
