//! Tells what was done from outside (SPEC row Q10): it goes through no host, and each of it is told by one.

use super::reach::warn_unless_unreachable;
use super::{Shared, events};

/// In one statement.
const MOST: usize = 1000;
/// Of such statements at a time: what is left waits for the next heartbeat.
const STATEMENTS_MAX: usize = 10;

pub(super) async fn tell(shared: &Shared) {
    // Who would not write it down leaves it to others, and only has what is old forgotten.
    if !events::outside_is_heard() {
        let _ = shared.store.tell(0).await;
        return;
    }
    for _ in 0..STATEMENTS_MAX {
        let done = match shared.store.tell(MOST).await {
            Ok(done) => done,
            Err(error) => {
                warn_unless_unreachable!(
                    error,
                    "cannot read what was done from outside; trying again with the next heartbeat"
                );
                return;
            }
        };
        for one in &done {
            events::outside(&shared.settings.worker_id, one);
        }
        if done.len() < MOST {
            return;
        }
    }
}
