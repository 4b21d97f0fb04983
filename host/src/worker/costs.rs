//! What the jobs of a lane cost, for fair queues that charge CPU time.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::job::LaneId;

/// The share of the newest attempt in the average of a lane.
const NEWEST: f64 = 0.125;
/// The number of attempts in the average of all lanes. If it followed single attempts, those that a key had just run
/// would make its next ones cheaper or dearer.
const ALL: f64 = 1000.0;
/// The least and the most that a job may cost, compared with the average.
const COSTS: std::ops::RangeInclusive<f64> = 0.01..=100.0;

/// The average CPU time of the last attempts of each lane, microseconds.
#[derive(Debug, Default)]
pub(super) struct Costs {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    lanes: HashMap<LaneId, f64>,
    all: f64,
    /// How many attempts the average of all is of, up to `ALL`.
    attempts: f64,
}

impl Costs {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an attempt that has ended.
    pub(super) fn record(&self, lane: LaneId, cpu: Duration) {
        let us = cpu.as_secs_f64() * 1e6;
        let mut inner = self.lock();
        inner.attempts = (inner.attempts + 1.0).min(ALL);
        inner.all += (us - inner.all) / inner.attempts;
        let average = inner.lanes.entry(lane).or_insert(us);
        *average += (us - *average) * NEWEST;
    }

    /// What the next job of a lane costs, in average jobs: 1 if nothing is known.
    pub(super) fn of(&self, lane: LaneId) -> f64 {
        let inner = self.lock();
        match inner.lanes.get(&lane) {
            Some(average) if inner.all > 0.0 => {
                (average / inner.all).clamp(*COSTS.start(), *COSTS.end())
            }
            _ => 1.0,
        }
    }

    /// Forgets the lanes that this refuses.
    pub(super) fn retain(&self, keep: impl Fn(LaneId) -> bool) {
        self.lock().lanes.retain(|lane, _| keep(*lane));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_costs_what_the_last_ones_of_its_lane_took_compared_with_all() {
        let costs = Costs::default();
        let (cheap, dear, new) = (LaneId(1), LaneId(2), LaneId(3));
        assert!((costs.of(cheap) - 1.0).abs() < 1e-9);
        for _ in 0..500 {
            costs.record(cheap, Duration::from_micros(500));
            costs.record(dear, Duration::from_micros(1500));
        }
        assert!((costs.of(cheap) - 0.5).abs() < 0.01);
        assert!((costs.of(dear) - 1.5).abs() < 0.01);
        assert!((costs.of(new) - 1.0).abs() < 1e-9);
        // It follows a change, and stays within its bounds.
        for _ in 0..50 {
            costs.record(dear, Duration::ZERO);
        }
        assert!((costs.of(dear) - 0.01).abs() < 1e-9);
        costs.retain(|lane| lane == cheap);
        assert!((costs.of(dear) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn the_attempts_of_one_lane_do_not_change_what_others_cost() {
        let costs = Costs::default();
        let (cheap, dear) = (LaneId(1), LaneId(2));
        for _ in 0..500 {
            costs.record(cheap, Duration::from_micros(500));
            costs.record(dear, Duration::from_micros(1500));
        }
        let before = costs.of(cheap);
        for _ in 0..20 {
            costs.record(dear, Duration::from_micros(1500));
        }
        let change = costs.of(cheap) / before;
        assert!((0.98..1.0).contains(&change), "{change}");
    }
}
