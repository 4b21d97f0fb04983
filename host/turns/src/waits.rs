//! How long a claim may wait for a slot.

use std::time::Duration;

/// A claim that has not started within this time is given back, so that other workers can claim the job.
pub const START_TIMEOUT: Duration = Duration::from_secs(1);

/// The maximum time from sending a claim to the start of a job whose rate is limited. `response`: the time that the
/// response to the last such claim took. If the database needs longer for each claim, later starts are permitted, or
/// else each claim would use up starts of the rate, and no job would start.
pub fn throttled_within(response: Duration) -> Duration {
    START_TIMEOUT.max(response * 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throttled_claims_start_although_each_response_takes_longer_than_a_second() {
        assert_eq!(throttled_within(Duration::ZERO), START_TIMEOUT);
        assert_eq!(
            throttled_within(START_TIMEOUT * 3 / 2),
            START_TIMEOUT * 3,
            "the next response may take somewhat longer"
        );
    }
}
