//! How long jobs have waited for this worker, by queue.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

use metrics::{Histogram, histogram};

use super::middleware::AttemptInfo;
use crate::job::Attempt;

/// Producers choose the names of queues: those that come later are counted together.
const QUEUES_MAX: usize = 1_000;
/// No queue has this name.
const OTHERS: &str = "(other)";

/// The histograms of each queue, looked up once.
#[derive(Default)]
pub(super) struct Waits(RwLock<HashMap<String, QueueWaits>>);

#[derive(Clone)]
struct QueueWaits {
    /// From the moment in which a job became ready to its claim.
    wait_seconds: Histogram,
    /// From the enqueue of a scheduled job to that moment.
    scheduled_delay_seconds: Histogram,
}

impl Waits {
    /// Takes in an attempt that starts. One that was taken over from a worker that is gone has waited for the end of a lease, and
    /// is left out.
    pub(super) fn record(&self, attempt: &AttemptInfo<'_>) {
        let Some(ready_at) = attempt.ready_at else {
            return;
        };
        let of = self.of(attempt.queue);
        // Times of the database's clock, which may have been set back.
        let waited = attempt.claimed_at.duration_since(ready_at);
        of.wait_seconds.record(waited.unwrap_or_default());
        if attempt.attempt == Attempt(1)
            && let Ok(delay) = ready_at.duration_since(attempt.requested_at)
            && !delay.is_zero()
        {
            of.scheduled_delay_seconds.record(delay);
        }
    }

    fn of(&self, queue: &str) -> QueueWaits {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let queue = match known.contains_key(queue) || known.len() < QUEUES_MAX {
            true => queue,
            false => OTHERS,
        };
        if let Some(of) = known.get(queue) {
            return of.clone();
        }
        drop(known);
        let of = QueueWaits {
            wait_seconds: histogram!("rouse_wait_seconds", "queue" => queue.to_owned()),
            scheduled_delay_seconds: histogram!("rouse_scheduled_delay_seconds", "queue" => queue.to_owned()),
        };
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        known.entry(queue.to_owned()).or_insert(of).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_beyond_the_most_are_counted_together() {
        let waits = Waits::default();
        for n in 0..QUEUES_MAX + 10 {
            waits.of(&format!("q{n}"));
        }
        let known = waits.0.read().unwrap();
        assert_eq!(known.len(), QUEUES_MAX + 1);
        assert!(known.contains_key("q999") && !known.contains_key("q1000"));
        assert!(known.contains_key(OTHERS));
    }
}
