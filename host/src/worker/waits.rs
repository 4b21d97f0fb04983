//! Histograms of how long jobs waited before this worker claimed them, by queue.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

use metrics::{Histogram, histogram};

use crate::job::Attempt;
use crate::store::ClaimedJob;

/// The maximum number of queues with histograms of their own. Producers choose the names; all further queues share one
/// pair.
const QUEUES_MAX: usize = 1_000;
/// The label of the shared pair. It is not a valid queue name.
const OTHERS: &str = "(other)";

/// The histograms of each queue, looked up once.
#[derive(Default)]
pub(super) struct WaitHistograms(RwLock<HashMap<String, QueueHistograms>>);

#[derive(Clone)]
struct QueueHistograms {
    /// The time from when a job became ready to its claim.
    wait_seconds: Histogram,
    /// The time from when a scheduled job was enqueued to when it became ready.
    scheduled_delay_seconds: Histogram,
}

impl WaitHistograms {
    /// Records the waits of a job of this queue whose attempt starts. An adopted job is left out: it has waited for the
    /// end of a lease.
    pub(super) fn record(&self, job: &ClaimedJob, queue: &str) {
        let Some(ready_at) = job.ready_at else {
            return;
        };
        let histograms = self.for_queue(queue);
        // The database's clock may have been set back between the two times.
        let waited = job.claimed_at.duration_since(ready_at);
        histograms.wait_seconds.record(waited.unwrap_or_default());
        if job.attempt == Attempt(1)
            && let Ok(delay) = ready_at.duration_since(job.requested_at)
            && !delay.is_zero()
        {
            histograms.scheduled_delay_seconds.record(delay);
        }
    }

    fn for_queue(&self, queue: &str) -> QueueHistograms {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let queue = match known.contains_key(queue) || known.len() < QUEUES_MAX {
            true => queue,
            false => OTHERS,
        };
        if let Some(histograms) = known.get(queue) {
            return histograms.clone();
        }
        drop(known);
        let histograms = QueueHistograms {
            wait_seconds: histogram!("rouse_wait_seconds", "queue" => queue.to_owned()),
            scheduled_delay_seconds: histogram!("rouse_scheduled_delay_seconds", "queue" => queue.to_owned()),
        };
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        known.entry(queue.to_owned()).or_insert(histograms).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_beyond_the_maximum_share_one_pair_of_histograms() {
        let histograms = WaitHistograms::default();
        for n in 0..QUEUES_MAX + 10 {
            histograms.for_queue(&format!("q{n}"));
        }
        let known = histograms.0.read().unwrap();
        assert_eq!(known.len(), QUEUES_MAX + 1);
        assert!(known.contains_key("q999") && !known.contains_key("q1000"));
        assert!(known.contains_key(OTHERS));
    }
}
