//! Samples of the work that the fleet did in the last hour.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rouse_display::pages::Sample;
use tokio::time;
use tokio_util::sync::CancellationToken;

use crate::store::{EndedCounts, Store};

/// The time between two samples.
const EVERY: Duration = Duration::from_secs(5);
/// The number of samples that are kept: those of an hour.
const KEPT: usize = 720;
/// Workers report failures every 30 s, so their rate is an average over this many samples.
const FAILURES_OVER: usize = 12;

/// The counts of the last hour, the oldest first.
#[derive(Default)]
pub(super) struct Samples(Mutex<VecDeque<EndedCounts>>);

impl Samples {
    fn push(&self, counts: EndedCounts) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back(counts);
    }

    /// The rates.
    pub(super) fn rates(&self) -> Vec<Sample> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let rates = (1..kept.len()).map(|at| {
            let (now, before) = (&kept[at], &kept[at - 1]);
            let long_before = &kept[at.saturating_sub(FAILURES_OVER)];
            Sample {
                at: now.at,
                ended_per_s: rate(now.ended - before.ended, now.at - before.at),
                failed_per_s: rate(now.failed - long_before.failed, now.at - long_before.at),
            }
        });
        rates.collect()
    }
}

/// A count can shrink: partitions are dropped, workers end.
fn rate(more: i64, secs: f64) -> f64 {
    more.max(0) as f64 / secs.max(0.001)
}

/// Takes samples until `stopping` is cancelled. Samples that cannot be read are left out.
pub(super) async fn sample_forever(
    store: Store,
    samples: Arc<Samples>,
    stopping: CancellationToken,
) {
    let mut every = time::interval(EVERY);
    every.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
    let sampling = async {
        loop {
            every.tick().await;
            if let Ok(Some(counts)) = store.ended_counts().await {
                samples.push(counts);
            }
        }
    };
    stopping.run_until_cancelled(sampling).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_differences_and_never_negative() {
        let samples = Samples::default();
        for (at, ended, failed) in [(0.0, 100, 10), (5.0, 150, 10), (10.0, 20, 30)] {
            samples.push(EndedCounts { at, ended, failed });
        }
        let rates = samples.rates();
        assert_eq!((rates[0].ended_per_s, rates[0].failed_per_s), (10.0, 0.0));
        assert_eq!((rates[1].ended_per_s, rates[1].failed_per_s), (0.0, 2.0));
    }
}
