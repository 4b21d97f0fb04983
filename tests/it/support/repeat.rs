//! Upper bounds of durations, on a machine that runs other tests at the same time.

use std::time::{Duration, Instant};

use super::worker::TIMEOUT;

/// Repeats an action until it takes less than this time. Any single one may be delayed by other tests or by a pause of
/// the machine; one that cannot be so quick fails the test.
pub(crate) async fn until_quicker_than(limit: Duration, mut action: impl AsyncFnMut()) {
    let until = Instant::now() + TIMEOUT;
    loop {
        let started = Instant::now();
        action().await;
        let took = started.elapsed();
        if took < limit {
            return;
        }
        assert!(Instant::now() < until, "it took {took:?}, as before");
    }
}
